//! A device whose writes obey a cache mode and whose discards may be left out, whatever the client
//! asks for.

use std::sync::Arc;

use gaur_block::{Device, DeviceLimits, Errno, Payload, Request, Status};

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
}

impl Policy {
    /// Of an image that is opened in this cache mode.
    pub fn of(cache: CacheMode, spec: &ImageSpec) -> Policy {
        Policy {
            writethrough: cache.writethrough(),
            ignore_flush: cache == CacheMode::Unsafe || spec.ignores_flushes(),
            ignore_discard: false,
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
        self.device.size_bytes()
    }

    fn limits(&self) -> DeviceLimits {
        self.device.limits()
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        let Some(request) = self.policy.apply(request) else {
            return Ok(());
        };
        let len_bytes = match &payload {
            Payload::None => 0,
            Payload::Read(target) => target.len() as u64,
            Payload::Write(source) => source.len() as u64,
        };
        let outcome = self.device.submit(request, payload).await;
        if let Some(health) = &self.health {
            health.note(|| Asked::new(Some(&request), 0, len_bytes), &outcome);
        }
        outcome
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
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
}
