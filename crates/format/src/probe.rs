//! Format probing: which image format a file has, by its first and last bytes.
//!
//! A qcow2 image, an image of another program, or the bytes of a disk as they are (raw). What another
//! program wrote must be told from a raw disk: copied as one, its tables would become the guest's data.
//! The formats are those that QEMU finds by content, and three whose mark it does not look for: LUKS
//! version 2, and what says at its end what it is (fixed VHD, DMG).
//!
//! A guess, and no more. The guest of a raw disk writes whatever it likes to both ends, so that a raw
//! disk can look like anything here, qcow2 included. A caller that knows the format names it, and
//! nothing is probed then. `docs/decisions/04-probed-raw-images.md` says what follows for writing.
//!
//! Sources: the specifications of VMDK (VMware, "Virtual Disk Format 1.1"), VHD (Microsoft, "Virtual
//! Hard Disk Image Format Specification" 1.0), VHDX (MS-VHDX) and LUKS ("On-Disk Format" 1.2.3, "LUKS2
//! On-Disk Format" 1.1), QEMU's `docs/interop/parallels.txt` and `docs/interop/qed_spec.rst`, and what
//! the tools of the others write.

use core::fmt;

use crate::bytes;
use crate::header::MAGIC;

/// Bytes at each end of a file that are looked at; shorter files are looked at whole.
pub const END_BYTES: u64 = 512;

/// What a file is as an image of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ImageFormat {
    /// The disk's bytes as they are.
    Raw,
    /// qcow2, any version from 2 on.
    Qcow2,
    /// The first version of qcow.
    Qcow,
    /// VMware: a sparse or stream-optimised file, or the text that describes the files of a disk.
    Vmdk,
    /// VirtualBox.
    Vdi,
    /// Virtual PC and Hyper-V, fixed, dynamic or differencing.
    Vhd,
    /// Hyper-V.
    Vhdx,
    /// QEMU's enhanced disk.
    Qed,
    /// Parallels, with or without its extension.
    Parallels,
    /// A LUKS container, version 1 or 2.
    Luks,
    /// Bochs, growing.
    Bochs,
    /// A compressed loop device's image.
    Cloop,
    /// Apple's universal disk image.
    Dmg,
}

/// Every format, its name on QEMU's command lines and in the headers of overlays, and as people write it.
const FORMATS: [(ImageFormat, &str, &str); 13] = [
    (ImageFormat::Raw, "raw", "raw"),
    (ImageFormat::Qcow2, "qcow2", "qcow2"),
    (ImageFormat::Qcow, "qcow", "qcow (version 1)"),
    (ImageFormat::Vmdk, "vmdk", "VMDK"),
    (ImageFormat::Vdi, "vdi", "VDI"),
    (ImageFormat::Vhd, "vpc", "VHD"),
    (ImageFormat::Vhdx, "vhdx", "VHDX"),
    (ImageFormat::Qed, "qed", "QED"),
    (ImageFormat::Parallels, "parallels", "Parallels"),
    (ImageFormat::Luks, "luks", "LUKS"),
    (ImageFormat::Bochs, "bochs", "Bochs"),
    (ImageFormat::Cloop, "cloop", "cloop"),
    (ImageFormat::Dmg, "dmg", "DMG"),
];

impl ImageFormat {
    fn names(self) -> (&'static str, &'static str) {
        let found = FORMATS.iter().find(|(format, ..)| *format == self);
        found.map_or(("", ""), |(_, name, shown)| (name, shown))
    }

    /// Its name on QEMU's command lines and in the headers of overlays.
    pub fn name(self) -> &'static str {
        self.names().0
    }

    /// Every format.
    pub fn all() -> impl Iterator<Item = ImageFormat> {
        FORMATS.iter().map(|(format, ..)| *format)
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<ImageFormat> {
        let found = FORMATS.iter().find(|(_, known, _)| *known == name);
        found.map(|(format, ..)| *format)
    }

    /// The format that files of this extension (without its dot, in lower case) are expected to have.
    pub fn by_extension(extension: &str) -> Option<ImageFormat> {
        match extension {
            "vhd" => Some(ImageFormat::Vhd),
            "hdd" => Some(ImageFormat::Parallels),
            "raw" | "luks" => None,
            name => ImageFormat::from_name(name),
        }
    }
}

/// As people write it.
impl fmt::Display for ImageFormat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.names().1)
    }
}

/// What a file looks like whose first [`END_BYTES`] bytes are these. It counts more than the end of the
/// file: that of a qcow2 image may be any cluster of its guest.
pub fn by_head(head: &[u8]) -> Option<ImageFormat> {
    if head.starts_with(&MAGIC) {
        return Some(match bytes::u32_at(head, 4) {
            Some(1) => ImageFormat::Qcow,
            _ => ImageFormat::Qcow2,
        });
    }
    if head.starts_with(b"KDMV") || head.starts_with(b"COWD") || is_vmdk_descriptor(head) {
        return Some(ImageFormat::Vmdk);
    }
    if bytes::u32_at(head, VDI_SIGNATURE_AT) == Some(VDI_SIGNATURE) {
        return Some(ImageFormat::Vdi);
    }
    let found = STARTS.iter().find(|(start, _)| head.starts_with(start));
    found.map(|(_, format)| *format)
}

/// What files of other formats begin with.
const STARTS: [(&[u8], ImageFormat); 8] = [
    (VHD_COOKIE, ImageFormat::Vhd),
    (b"vhdxfile", ImageFormat::Vhdx),
    (b"QED\0", ImageFormat::Qed),
    (b"WithoutFreeSpace", ImageFormat::Parallels),
    (b"WithouFreSpacExt", ImageFormat::Parallels),
    (b"LUKS\xba\xbe", ImageFormat::Luks),
    (b"Bochs Virtual HD Image\0", ImageFormat::Bochs),
    (
        b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0",
        ImageFormat::Cloop,
    ),
];

/// Where VirtualBox has its signature, behind a text of its choice.
const VDI_SIGNATURE_AT: usize = 64;
/// 0xbeda107f, little endian in the file.
const VDI_SIGNATURE: u32 = 0x7f10_dabe;

/// The first line of a descriptor as its specification has it.
const VMDK_TITLE: &[u8] = b"# disk descriptorfile";

/// Whether a text describes the files of a VMDK disk: it has the title of one, or says its version
/// before anything but comments.
fn is_vmdk_descriptor(head: &[u8]) -> bool {
    let mut lines = head
        .split_inclusive(|byte| *byte == b'\n')
        .map(<[u8]>::trim_ascii);
    let title = lines.clone().next().unwrap_or_default();
    if title.eq_ignore_ascii_case(VMDK_TITLE) {
        return true;
    }
    let statement = lines.find(|line| !line.is_empty() && !line.starts_with(b"#"));
    matches!(statement, Some(b"version=1" | b"version=2" | b"version=3"))
}

/// What a file looks like whose last [`END_BYTES`] bytes are these and whose first show nothing.
pub fn by_tail(tail: &[u8]) -> Option<ImageFormat> {
    let start = tail.len().checked_sub(TRAILER_BYTES)?;
    let trailer = tail.get(start..)?;
    if trailer.starts_with(VHD_COOKIE) && has_vhd_checksum(trailer) {
        return Some(ImageFormat::Vhd);
    }
    let is_dmg = trailer.starts_with(b"koly")
        && bytes::u32_at(trailer, DMG_VERSION_AT) == Some(DMG_VERSION)
        && bytes::u32_at(trailer, DMG_LENGTH_AT) == Some(TRAILER_BYTES as u32);
    is_dmg.then_some(ImageFormat::Dmg)
}

/// Length of the footer of VHD and of the trailer of DMG in bytes.
const TRAILER_BYTES: usize = 512;

/// A dynamic VHD begins with it, in a copy of its footer; a fixed one has the footer alone, behind the
/// disk. There the cookie alone is not enough, because any sector of a guest may come last.
const VHD_COOKIE: &[u8] = b"conectix";
const VHD_CHECKSUM_AT: usize = 64;

/// Whether the footer has the ones' complement of the sum of all its other bytes.
fn has_vhd_checksum(footer: &[u8]) -> bool {
    let sum = |part: Option<&[u8]>| -> u32 {
        // At most 512 bytes, so far from an overflow.
        let bytes = part.unwrap_or_default().iter();
        bytes.fold(0, |sum: u32, byte| sum.wrapping_add(u32::from(*byte)))
    };
    let before = sum(footer.get(..VHD_CHECKSUM_AT));
    let after = sum(footer.get(VHD_CHECKSUM_AT.saturating_add(4)..));
    bytes::u32_at(footer, VHD_CHECKSUM_AT) == Some(!before.wrapping_add(after))
}

/// Fields of the trailer of DMG.
const DMG_VERSION_AT: usize = 4;
const DMG_VERSION: u32 = 4;
const DMG_LENGTH_AT: usize = 8;

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    /// A file of `len` bytes with `parts` at their offsets.
    fn file(len: usize, parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (at, part) in parts {
            bytes::put(&mut bytes, *at, part);
        }
        bytes
    }

    fn probe_file(file: &[u8]) -> ImageFormat {
        let end = END_BYTES as usize;
        let head = &file[..file.len().min(end)];
        let tail = &file[file.len().saturating_sub(end)..];
        by_head(head).or(by_tail(tail)).unwrap_or(ImageFormat::Raw)
    }

    /// A VHD footer of a fixed disk, with its checksum.
    fn vhd_footer() -> Vec<u8> {
        let mut footer = file(512, &[(0, VHD_COOKIE), (8, &[0, 0, 0, 2, 0, 1, 0, 0])]);
        footer[60..64].copy_from_slice(&2_u32.to_be_bytes());
        let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
        footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
        footer
    }

    #[test]
    fn each_format_is_recognised_by_its_start() {
        for (start, format) in [
            (&b"QFI\xfb\0\0\0\x03"[..], ImageFormat::Qcow2),
            (b"QFI\xfb\0\0\0\x02", ImageFormat::Qcow2),
            (b"QFI\xfb\0\0\0\x01", ImageFormat::Qcow),
            (b"KDMV\x03\0\0\0", ImageFormat::Vmdk),
            (b"COWD\x01\0\0\0", ImageFormat::Vmdk),
            (b"conectix\0\0\0\x02", ImageFormat::Vhd),
            (b"vhdxfileQ\0E\0M\0U\0", ImageFormat::Vhdx),
            (b"QED\0\0\0\x01\0", ImageFormat::Qed),
            (b"WithoutFreeSpace\x02\0\0\0", ImageFormat::Parallels),
            (b"WithouFreSpacExt\x02\0\0\0", ImageFormat::Parallels),
            (b"LUKS\xba\xbe\0\x01aes", ImageFormat::Luks),
            (b"LUKS\xba\xbe\0\x02\0\0", ImageFormat::Luks),
            (b"Bochs Virtual HD Image\0", ImageFormat::Bochs),
            (
                b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n",
                ImageFormat::Cloop,
            ),
        ] {
            assert_eq!(probe_file(&file(4096, &[(0, start)])), format);
            // Shifted by a byte it is a disk like any other.
            assert_eq!(probe_file(&file(4096, &[(1, start)])), ImageFormat::Raw);
        }
        let vdi = [
            (0, &b"<<< Oracle VM VirtualBox Disk Image >>>\n"[..]),
            (64, &[0x7f, 0x10, 0xda, 0xbe]),
        ];
        assert_eq!(probe_file(&file(4096, &vdi)), ImageFormat::Vdi);
    }

    #[test]
    fn vmdk_descriptor_is_recognised_behind_comments() {
        for text in [
            "# Disk DescriptorFile\nversion=1\nCID=803e51ad\n",
            "# disk descriptorfile\r\nencoding=\"UTF-8\"\r\nversion=4\r\n",
            "version=1\n",
            "# made by hand\n\n   \nversion=3\r\nCID=1\n",
        ] {
            assert_eq!(probe_file(text.as_bytes()), ImageFormat::Vmdk, "{text:?}");
        }
        for text in [
            "version=4\n",
            "version=11\n",
            "x\nversion=1\n",
            "# version=1\n",
            "",
        ] {
            assert_eq!(probe_file(text.as_bytes()), ImageFormat::Raw, "{text:?}");
        }
    }

    /// A fixed VHD has its only mark behind the disk; QEMU takes it for a raw disk that is a sector longer.
    #[test]
    fn fixed_vhd_is_recognised_by_its_footer() {
        let footer = vhd_footer();
        let image = file(8192, &[(8192 - 512, &footer)]);
        assert_eq!(probe_file(&image), ImageFormat::Vhd);
        assert_eq!(probe_file(&footer), ImageFormat::Vhd);

        let mut other = image.clone();
        other[8192 - 1] ^= 1;
        assert_eq!(probe_file(&other), ImageFormat::Raw, "wrong checksum");
        other = image.clone();
        other.push(0);
        assert_eq!(probe_file(&other), ImageFormat::Raw, "not at the end");
        other = image;
        bytes::put(&mut other, 0, b"QFI\xfb\0\0\0\x03");
        assert_eq!(
            probe_file(&other),
            ImageFormat::Qcow2,
            "a cluster of its guest"
        );
    }

    #[test]
    fn dmg_is_recognised_by_its_trailer() {
        let trailer = b"koly\0\0\0\x04\0\0\x02\0";
        assert_eq!(probe_file(&file(1000, &[(488, trailer)])), ImageFormat::Dmg);
        assert_eq!(probe_file(&file(1000, &[(487, trailer)])), ImageFormat::Raw);
        let other = b"koly\0\0\0\x04\0\0\x03\0";
        assert_eq!(probe_file(&file(1000, &[(488, other)])), ImageFormat::Raw);
    }

    #[test]
    fn probing_short_files_does_not_panic() {
        let footer = vhd_footer();
        for start in [
            &b"QFI\xfb\0\0\0\x03"[..],
            b"conectix",
            b"# Disk DescriptorFile",
            &footer,
        ] {
            for len in 0..start.len() {
                let part = &start[..len];
                let _ = probe_file(part);
            }
        }
        assert_eq!(probe_file(b""), ImageFormat::Raw);
        assert_eq!(probe_file(b"QFI\xfb"), ImageFormat::Qcow2);
        assert_eq!(probe_file(b"QFI"), ImageFormat::Raw);
    }

    #[test]
    fn format_names_and_file_extensions() {
        for (extension, format) in [
            ("vmdk", ImageFormat::Vmdk),
            ("vhd", ImageFormat::Vhd),
            ("vpc", ImageFormat::Vhd),
            ("qcow2", ImageFormat::Qcow2),
            ("hdd", ImageFormat::Parallels),
        ] {
            assert_eq!(ImageFormat::by_extension(extension), Some(format));
        }
        for other in ["img", "raw", "iso", ""] {
            assert_eq!(ImageFormat::by_extension(other), None);
        }
    }
}
