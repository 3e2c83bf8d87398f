//! The formats that this crate reads, by name.

/// A format that this crate reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Format {
    /// VirtualBox.
    Vdi,
    /// Virtual PC and Hyper-V.
    Vhd,
    /// Hyper-V.
    Vhdx,
    /// VMware.
    Vmdk,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 4] = [Format::Vdi, Format::Vhd, Format::Vhdx, Format::Vmdk];

    /// Its name on QEMU's command lines and in the headers of overlays.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Vdi => "vdi",
            Format::Vhd => "vpc",
            Format::Vhdx => "vhdx",
            Format::Vmdk => "vmdk",
        }
    }

    /// As people write it.
    pub const fn shown(self) -> &'static str {
        match self {
            Format::Vdi => "VDI",
            Format::Vhd => "VHD",
            Format::Vhdx => "VHDX",
            Format::Vmdk => "VMDK",
        }
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|format| format.name() == name)
    }
}
