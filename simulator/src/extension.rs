//! Header extensions that images of the simulator have.

/// The header extension that leads to bitmaps.
pub const BITMAPS_EXTENSION: u32 = 0x2385_2875;

/// The header extension with the names of features.
pub const FEATURE_NAMES_EXTENSION: u32 = 0x6803_f857;

/// A header extension that no reader knows and every writer preserves.
pub const UNKNOWN_EXTENSION: u32 = 0x5155_4945;

/// The header extension that says how the image likes its space.
pub const ALLOCATION_EXTENSION: u32 = 0xb5c8_1f6d;

/// What it holds.
pub fn allocation_data(policy: u8) -> [u8; 8] {
    [1, policy, 0, 0, 0, 0, 0, 0]
}

/// Appends a header extension.
pub fn push_extension(header: &mut Vec<u8>, kind: u32, data: &[u8]) {
    header.extend(kind.to_be_bytes());
    header.extend((data.len() as u32).to_be_bytes());
    header.extend(data);
    header.resize(header.len().next_multiple_of(8), 0);
}
