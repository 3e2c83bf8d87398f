//! What a client says and hears before the first request.

use crate::violation::Violation;
use crate::wire::{
    Fields, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, PAYLOAD_MAX_BYTES, STRING_MAX_BYTES,
    info, opt, rep,
};

/// First eight bytes after the greeting of a server of the time before options.
const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;

/// Length of the header of a reply to an option in bytes.
pub const REPLY_HEADER_LEN: usize = 20;

/// Longest reply to an option that is read: a number and two longest strings.
const REPLY_BYTES_MAX: u32 = 2 * STRING_MAX_BYTES as u32 + 64;

/// Most replies to one option. Servers send a handful.
pub const REPLIES_MAX: usize = 256;

/// The handshake flags of a greeting.
pub fn greeting(bytes: &[u8]) -> Result<u32, Violation> {
    let mut fields = Fields(bytes);
    match fields.u64() {
        Some(GREETING_MAGIC) => {}
        other => return Err(Violation::Greeting(other.unwrap_or_default())),
    }
    match fields.u64() {
        Some(OPTION_MAGIC) => Ok(u32::from(fields.u16().unwrap_or_default())),
        Some(OLDSTYLE_MAGIC) => Err(Violation::Oldstyle),
        other => Err(Violation::Greeting(other.unwrap_or_default())),
    }
}

/// An option as bytes.
pub fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(16 + data.len());
    bytes.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn push_string(data: &mut Vec<u8>, text: &str) {
    data.extend_from_slice(&(text.len() as u32).to_be_bytes());
    data.extend_from_slice(text.as_bytes());
}

/// The option that chooses an export, and asks about its blocks.
pub fn go(export: &str) -> Vec<u8> {
    let mut data = Vec::new();
    push_string(&mut data, export);
    data.extend_from_slice(&1_u16.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    option(opt::GO, &data)
}

/// The option that chooses a metadata context of an export.
pub fn set_meta_context(export: &str, context: &str) -> Vec<u8> {
    let mut data = Vec::new();
    push_string(&mut data, export);
    data.extend_from_slice(&1_u32.to_be_bytes());
    push_string(&mut data, context);
    option(opt::SET_META_CONTEXT, &data)
}

/// The header of a reply to the option `asked`: its type and how many bytes follow.
pub fn reply_header(bytes: &[u8], asked: u32) -> Result<(u32, usize), Violation> {
    let mut fields = Fields(bytes);
    let magic = fields.u64().unwrap_or_default();
    if magic != OPTION_REPLY_MAGIC {
        return Err(Violation::OptionReplyMagic(magic));
    }
    let option = fields.u32().unwrap_or_default();
    if option != asked {
        return Err(Violation::OptionUnasked(option));
    }
    let kind = fields.u32().unwrap_or_default();
    match fields.u32().unwrap_or_default() {
        len @ 0..=REPLY_BYTES_MAX => Ok((kind, len as usize)),
        len => Err(Violation::OptionReplyLength(len)),
    }
}

/// What a server says of the export that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Offsets and lengths are multiples of this; `None` when the server did not say.
    pub minimum_block: Option<u32>,
    /// Longest payload in bytes.
    pub maximum_payload: u32,
}

impl Chosen {
    /// Of a size and flags, before anything is known of blocks.
    pub fn new(size_bytes: u64, flags: u16) -> Chosen {
        Chosen {
            size_bytes,
            flags,
            minimum_block: None,
            maximum_payload: PAYLOAD_MAX_BYTES,
        }
    }

    /// Whether a transmission flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Adds an item of information, a reply to `GO`.
    pub fn add(&mut self, item: &[u8]) -> Result<(), Violation> {
        let mut fields = Fields(item);
        let bad = Violation::OptionReply(opt::GO);
        match fields.u16().ok_or(bad.clone())? {
            info::EXPORT => {
                self.size_bytes = fields.u64().ok_or(bad.clone())?;
                self.flags = fields.u16().ok_or(bad)?;
            }
            info::BLOCK_SIZE => {
                let mut next = || fields.u32().ok_or(bad.clone());
                let (minimum, preferred, maximum) = (next()?, next()?, next()?);
                // The smallest block is at most 64 KiB, says the protocol; and a payload holds one.
                let fits = minimum.is_power_of_two()
                    && minimum <= 64 << 10
                    && maximum >= minimum
                    && preferred >= minimum;
                if !fits {
                    return Err(Violation::BlockSizes(minimum, preferred, maximum));
                }
                self.minimum_block = Some(minimum);
                let longest = maximum.min(PAYLOAD_MAX_BYTES);
                self.maximum_payload = longest - longest % minimum;
            }
            _ => {}
        }
        Ok(())
    }

    /// Looks at all of it together.
    pub fn check(self) -> Result<Chosen, Violation> {
        if self.size_bytes > i64::MAX as u64 {
            return Err(Violation::Size(self.size_bytes));
        }
        match self.minimum_block {
            Some(block) if !self.size_bytes.is_multiple_of(u64::from(block)) => {
                Err(Violation::SizeOfBlocks(self.size_bytes, block))
            }
            _ => Ok(self),
        }
    }
}

/// The number of the context in a reply to [`set_meta_context`].
pub fn context_id(data: &[u8], context: &str) -> Result<u32, Violation> {
    let mut fields = Fields(data);
    let id = fields.u32();
    match id.filter(|_| fields.0 == context.as_bytes()) {
        Some(id) => Ok(id),
        None => Err(Violation::OptionReply(opt::SET_META_CONTEXT)),
    }
}

/// Why an option was refused, in words.
pub fn refusal(kind: u32, message: &[u8]) -> String {
    let what = match kind {
        rep::ERR_UNKNOWN => "it has no export of that name",
        rep::ERR_UNSUP => "it does not know an option",
        rep::ERR_POLICY => "it does not allow that",
        rep::ERR_TLS_REQD => "it wants TLS, which nbds: asks for",
        rep::ERR_SHUTDOWN => "it is about to end",
        _ => "it refuses the export",
    };
    let message = String::from_utf8_lossy(&message[..message.len().min(STRING_MAX_BYTES)]);
    let message: String = message.chars().filter(|one| !one.is_control()).collect();
    match message.trim() {
        "" => format!("the server says that {what}"),
        message => format!("the server says that {what}: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::export_flag;

    #[test]
    fn greetings_of_others_are_told_apart() {
        let of = |first: u64, second: u64| {
            let bytes = [&first.to_be_bytes()[..], &second.to_be_bytes(), &[0, 3]].concat();
            greeting(&bytes)
        };
        assert_eq!(of(GREETING_MAGIC, OPTION_MAGIC), Ok(3));
        assert_eq!(of(GREETING_MAGIC, OLDSTYLE_MAGIC), Err(Violation::Oldstyle));
        assert_eq!(of(1, OPTION_MAGIC), Err(Violation::Greeting(1)));
        assert_eq!(greeting(b"SSH-2.0"), Err(Violation::Greeting(0)));
    }

    #[test]
    fn replies_are_checked_before_they_are_read() {
        let header = |magic: u64, option: u32, len: u32| {
            let fields = [option.to_be_bytes(), 1_u32.to_be_bytes(), len.to_be_bytes()];
            let bytes = [&magic.to_be_bytes()[..], &fields.concat()].concat();
            reply_header(&bytes, opt::GO)
        };
        assert_eq!(header(OPTION_REPLY_MAGIC, opt::GO, 12), Ok((1, 12)));
        assert_eq!(header(7, opt::GO, 0), Err(Violation::OptionReplyMagic(7)));
        let unasked = header(OPTION_REPLY_MAGIC, opt::LIST, 0);
        assert_eq!(unasked, Err(Violation::OptionUnasked(opt::LIST)));
        let long = header(OPTION_REPLY_MAGIC, opt::GO, u32::MAX);
        assert_eq!(long, Err(Violation::OptionReplyLength(u32::MAX)));
    }

    #[test]
    fn sizes_and_blocks_of_an_export_have_bounds() {
        let item = |fields: &[u32]| {
            let fields = fields.iter().flat_map(|field| field.to_be_bytes());
            let mut item = info::BLOCK_SIZE.to_be_bytes().to_vec();
            item.extend(fields);
            let mut chosen = Chosen::new(1 << 20, export_flag::HAS_FLAGS);
            chosen.add(&item)?;
            chosen.check()
        };
        let chosen = item(&[4096, 4096, u32::MAX]).unwrap();
        assert_eq!(chosen.minimum_block, Some(4096));
        assert_eq!(chosen.maximum_payload, PAYLOAD_MAX_BYTES);
        assert_eq!(item(&[512, 512, 65_000]).unwrap().maximum_payload, 64_512);
        for bad in [
            [0, 1, 1],
            [3, 4096, 4096],
            [1 << 17, 1 << 17, 1 << 20],
            [4096, 4096, 512],
        ] {
            assert!(
                matches!(item(&bad), Err(Violation::BlockSizes(..))),
                "{bad:?}"
            );
        }
        assert!(item(&[1]).is_err());
        let odd = Chosen {
            minimum_block: Some(512),
            ..Chosen::new(1000, 0)
        };
        assert_eq!(odd.check(), Err(Violation::SizeOfBlocks(1000, 512)));
        assert_eq!(
            Chosen::new(u64::MAX, 0).check(),
            Err(Violation::Size(u64::MAX))
        );
    }

    #[test]
    fn messages_of_a_server_are_one_line() {
        let text = refusal(rep::ERR_UNKNOWN, b"no\nsuch\x1b[31m");
        assert_eq!(
            text,
            "the server says that it has no export of that name: nosuch[31m"
        );
        assert!(refusal(rep::ERR_TLS_REQD, b"").contains("TLS"));
    }
}
