//! A device whose writes obey a cache mode and whose discards may be left out, whatever the client
//! asks for; which may show the disk from an offset on, and keep a raw disk from being taken for an image.

use std::sync::Arc;

use gaur_block::{Device, DeviceLimits, Errno, Payload, Request, Source, Status};
use gaur_format::probe::{self, END_BYTES};

use crate::health::{Asked, Health};
use crate::image_spec::ImageSpec;
use crate::open::CacheMode;

/// What is done to the requests on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Every write is durable before it completes.
    pub writethrough: bool,
    /// Nothing is ever made durable while serving.
    pub ignore_flush: bool,
    /// Discards do nothing, and zeroing does not give space back.
    pub ignore_discard: bool,
    /// Of a disk that was found to be raw: its first sector is written as a whole only, and never so that it looks
    /// like the header of an image.
    pub guard_format: bool,
    /// The disk is shown from this byte on.
    pub offset_bytes: u64,
}

impl Policy {
    /// Of an image that is opened in this cache mode.
    pub fn of(cache: CacheMode, spec: &ImageSpec) -> Policy {
        Policy {
            writethrough: cache.writethrough(),
            ignore_flush: cache == CacheMode::Unsafe || spec.ignores_flushes(),
            ..Policy::default()
        }
    }

    /// The request, at its place on the disk.
    fn shifted(self, request: Request) -> Request {
        let shift = |offset_bytes: u64| offset_bytes + self.offset_bytes;
        match request {
            Request::Read { offset_bytes } => Request::Read {
                offset_bytes: shift(offset_bytes),
            },
            Request::Write { offset_bytes, fua } => Request::Write {
                offset_bytes: shift(offset_bytes),
                fua,
            },
            Request::WriteZeroes {
                offset_bytes,
                len_bytes,
                fua,
                may_unmap,
            } => Request::WriteZeroes {
                offset_bytes: shift(offset_bytes),
                len_bytes,
                fua,
                may_unmap,
            },
            Request::Discard {
                offset_bytes,
                len_bytes,
            } => Request::Discard {
                offset_bytes: shift(offset_bytes),
                len_bytes,
            },
            Request::Flush => Request::Flush,
        }
    }

    /// Whether a write may be done.
    fn allows(self, request: Request, payload: &Payload<'_>) -> bool {
        match (request, payload) {
            (Request::Write { offset_bytes, .. }, Payload::Write(source))
                if self.guard_format && offset_bytes < END_BYTES && !source.is_empty() =>
            {
                offset_bytes == 0 && looks_raw(*source)
            }
            _ => true,
        }
    }

    /// The request to pass on; `None` when it is done already.
    fn apply(self, request: Request) -> Option<Request> {
        let durable = |fua: bool| (fua || self.writethrough) && !self.ignore_flush;
        Some(match request {
            Request::Write { offset_bytes, fua } => Request::Write {
                offset_bytes,
                fua: durable(fua),
            },
            Request::WriteZeroes {
                offset_bytes,
                len_bytes,
                fua,
                may_unmap,
            } => Request::WriteZeroes {
                offset_bytes,
                len_bytes,
                fua: durable(fua),
                may_unmap: may_unmap && !self.ignore_discard,
            },
            Request::Discard { .. } if self.ignore_discard => return None,
            Request::Flush if self.ignore_flush => return None,
            other => other,
        })
    }
}

/// Whether the first sector of a disk may be this.
fn looks_raw(source: Source<'_>) -> bool {
    let mut sector = [0; END_BYTES as usize];
    if source.len() < sector.len() {
        return false;
    }
    let Source::Memory(head) = source.split_at(sector.len()).0 else {
        return false;
    };
    head.copy_to(&mut sector);
    probe::by_head(&sector).is_none()
}

/// A device under a policy.
pub struct CachedDevice<D> {
    device: D,
    policy: Policy,
    /// Who is told how requests end.
    health: Option<Arc<Health>>,
}

impl<D: Device> CachedDevice<D> {
    /// Puts `device` under `policy`, with `health` told how requests end.
    pub fn new(device: D, policy: Policy, health: Option<Arc<Health>>) -> CachedDevice<D> {
        CachedDevice {
            device,
            policy,
            health,
        }
    }
}

impl<D: Device> Device for CachedDevice<D> {
    fn size_bytes(&self) -> u64 {
        let size_bytes = self.device.size_bytes();
        size_bytes.saturating_sub(self.policy.offset_bytes)
    }

    fn limits(&self) -> DeviceLimits {
        self.device.limits()
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        let request = self.policy.shifted(request);
        let Some(request) = self.policy.apply(request) else {
            return Ok(());
        };
        if !self.policy.allows(request, &payload) {
            return Err(Errno::EPERM);
        }
        let len_bytes = payload.len() as u64;
        let outcome = self.device.submit(request, payload).await;
        if let Some(health) = &self.health {
            health.note(|| Asked::new(Some(&request), 0, len_bytes), &outcome);
        }
        outcome
    }

    async fn allocation_depth(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<(u64, u32), Errno> {
        let offset_bytes = offset_bytes + self.policy.offset_bytes;
        self.device.allocation_depth(offset_bytes, len_bytes).await
    }

    fn zeroes_fast(&self) -> bool {
        self.device.zeroes_fast()
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        let offset_bytes = offset_bytes + self.policy.offset_bytes;
        let outcome = self.device.status(offset_bytes, len_bytes).await;
        if let Some(health) = &self.health {
            health.note(|| Asked::new(None, offset_bytes, len_bytes), &outcome);
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Request = Request::Write {
        offset_bytes: 1,
        fua: false,
    };
    const DURABLE: Request = Request::Write {
        offset_bytes: 1,
        fua: true,
    };

    #[test]
    fn writeback_changes_nothing() {
        for request in [WRITE, DURABLE, Request::Flush] {
            assert_eq!(Policy::default().apply(request), Some(request));
        }
    }

    #[test]
    fn writethrough_makes_every_write_durable() {
        let policy = Policy {
            writethrough: true,
            ..Policy::default()
        };
        assert_eq!(policy.apply(WRITE), Some(DURABLE));
        assert_eq!(policy.apply(Request::Flush), Some(Request::Flush));
    }

    #[test]
    fn without_flushes_nothing_is_made_durable() {
        let policy = Policy {
            ignore_flush: true,
            ..Policy::default()
        };
        assert_eq!(policy.apply(DURABLE), Some(WRITE));
        assert_eq!(policy.apply(Request::Flush), None);
    }

    #[test]
    fn ignored_discards_keep_the_space_of_zeroed_ranges_too() {
        let policy = Policy {
            ignore_discard: true,
            ..Policy::default()
        };
        let discard = Request::Discard {
            offset_bytes: 0,
            len_bytes: 512,
        };
        assert_eq!(policy.apply(discard), None);
        let zeroes = |may_unmap| Request::WriteZeroes {
            offset_bytes: 0,
            len_bytes: 512,
            fua: false,
            may_unmap,
        };
        assert_eq!(policy.apply(zeroes(true)), Some(zeroes(false)));
    }

    /// A guest of a raw disk that was probed wrote a qcow2 header, and the next to probe it followed its backing file.
    #[test]
    fn first_sector_of_a_guarded_disk_never_looks_like_an_image() {
        let policy = Policy {
            guard_format: true,
            ..Policy::default()
        };
        let at = |offset_bytes, bytes: &[u8]| {
            let write = Request::Write {
                offset_bytes,
                fua: false,
            };
            let payload = Payload::Write(Source::memory(bytes));
            [policy, Policy::default()].map(|policy| policy.allows(write, &payload))
        };
        let mut header = [0; 1024];
        assert_eq!(at(0, &header), [true, true]);
        header[..4].copy_from_slice(b"QFI\xfb");
        assert_eq!(at(0, &header), [false, true]);
        assert_eq!(at(512, &header), [true, true]);
        // In two pieces it would be one, too.
        assert_eq!(at(0, b"QF"), [false, true]);
        assert_eq!(at(2, b"I\xfb"), [false, true]);
        assert_eq!(at(0, b""), [true, true]);
    }

    #[test]
    fn disk_begins_at_its_offset() {
        let policy = Policy {
            offset_bytes: 4096,
            ..Policy::default()
        };
        let shifted = policy.shifted(WRITE);
        let expected = Request::Write {
            offset_bytes: 4097,
            fua: false,
        };
        assert_eq!(shifted, expected);
        assert_eq!(policy.shifted(Request::Flush), Request::Flush);
    }
}
