//! Attaching a device to the vDPA bus and taking it off, by generic netlink
//! (`include/uapi/linux/vdpa.h`).
//!
//! The kernel does all of it while the message is sent, and asks the server of the device in between,
//! so this must not run on the thread that answers.

use std::os::fd::OwnedFd;

use gaur_block::Errno;
use rustix::io::retry_on_intr;
use rustix::net::netlink::GENERIC;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

use crate::error::errno_of;

/// The family of generic netlink that knows all others, and its one command used here.
const GENL_CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

const DEVICE_NEW: u8 = 3;
const DEVICE_DEL: u8 = 4;
const MANAGER_NAME: u16 = 2;
const DEVICE_NAME: u16 = 4;

const HEADER_BYTES: usize = 16;
const GENL_HEADER_BYTES: usize = 4;

/// Puts the device `name` on the bus; drivers take it in then.
pub(super) fn attach(name: &str) -> Result<(), Errno> {
    let socket = socket()?;
    let family = vdpa_family(&socket)?;
    let attributes = [(DEVICE_NAME, name), (MANAGER_NAME, "vduse")];
    ask(&socket, &request(family, DEVICE_NEW, &attributes)).map(drop)
}

/// Takes the device `name` off the bus.
pub(super) fn detach(name: &str) -> Result<(), Errno> {
    let socket = socket()?;
    let family = vdpa_family(&socket)?;
    ask(
        &socket,
        &request(family, DEVICE_DEL, &[(DEVICE_NAME, name)]),
    )
    .map(drop)
}

fn vdpa_family(socket: &OwnedFd) -> Result<u16, Errno> {
    let reply = ask(
        socket,
        &request(GENL_CONTROLLER, GET_FAMILY, &[(FAMILY_NAME, "vdpa")]),
    )?;
    let mut left = reply.get(GENL_HEADER_BYTES..).unwrap_or(&[]);
    while let Some((head, _)) = left.split_first_chunk::<4>() {
        let [len_low, len_high, kind_low, kind_high] = *head;
        let len = usize::from(u16::from_ne_bytes([len_low, len_high]));
        let kind = u16::from_ne_bytes([kind_low, kind_high]);
        let value = left.get(4..len).ok_or(Errno::EIO)?;
        if let (FAMILY_ID, [low, high]) = (kind, value) {
            return Ok(u16::from_ne_bytes([*low, *high]));
        }
        left = left.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Err(Errno::EIO)
}

fn socket() -> Result<OwnedFd, Errno> {
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    socket_with(family, kind, SocketFlags::CLOEXEC, Some(GENERIC)).map_err(errno_of)
}

/// A message that is to be acknowledged, with strings as attributes.
fn request(family: u16, command: u8, attributes: &[(u16, &str)]) -> Vec<u8> {
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    let mut bytes = vec![0; HEADER_BYTES];
    bytes.extend_from_slice(&[command, 1, 0, 0]);
    for (kind, text) in attributes {
        let len = 4 + text.len() + 1;
        bytes.extend_from_slice(&(len as u16).to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    let len = bytes.len() as u32;
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..6].copy_from_slice(&family.to_ne_bytes());
    bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
    bytes[8..12].copy_from_slice(&1_u32.to_ne_bytes());
    bytes
}

/// Sends a message and takes in what comes back up to the acknowledgement: the content of the last
/// message before it.
fn ask(socket: &OwnedFd, message: &[u8]) -> Result<Vec<u8>, Errno> {
    send(socket, message, SendFlags::empty()).map_err(errno_of)?;
    let mut content = Vec::new();
    let mut buffer = vec![0_u8; 16 << 10];
    loop {
        let received = retry_on_intr(|| recv(socket, &mut buffer[..], RecvFlags::empty()));
        let (count, _) = received.map_err(errno_of)?;
        let mut left = &buffer[..count];
        while let Some((head, _)) = left.split_first_chunk::<HEADER_BYTES>() {
            let [l0, l1, l2, l3, k0, k1, ..] = *head;
            let len = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
            let body = left.get(HEADER_BYTES..len).ok_or(Errno::EIO)?;
            if i32::from(u16::from_ne_bytes([k0, k1])) == libc::NLMSG_ERROR {
                let code = body.first_chunk::<4>().ok_or(Errno::EIO)?;
                return match i32::from_ne_bytes(*code) {
                    0 => Ok(content),
                    code => Err(Errno::from_raw(code.wrapping_neg())),
                };
            }
            content = body.to_vec();
            left = left.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        }
    }
}
