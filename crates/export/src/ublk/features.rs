//! What the driver can do, and what a device was made with.

use core::fmt;

/// A set of the driver's features (`UBLK_F_*`): all of a kernel, or those of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u64);

macro_rules! features {
    ($($name:ident = $bit:literal, $text:literal, $doc:literal;)*) => {
        impl Features {
            $(#[doc = $doc] pub const $name: Features = Features(1 << $bit);)*

            /// Names of what is in the set, in the kernel's order, `"user-recovery"` for example.
            /// Bits that this program does not know have none.
            pub fn names(self) -> impl Iterator<Item = &'static str> {
                [$((Features::$name, $text)),*]
                    .into_iter()
                    .filter(move |(feature, _)| self.has(*feature))
                    .map(|(_, name)| name)
            }
        }
    };
}

features! {
    ZERO_COPY = 0, "zero-copy", "Buffers of requests can be registered with a ring by command.";
    COMPLETE_IN_TASK = 1, "complete-in-task", "Says only how the driver works inside.";
    NEED_GET_DATA = 2, "need-get-data", "Writes come without their data at first.";
    USER_RECOVERY = 3, "user-recovery", "A new server can take over; requests wait for it.";
    USER_RECOVERY_REISSUE = 4, "user-recovery-reissue",
        "Requests that were under way in the old server come again.";
    UNPRIVILEGED = 5, "unprivileged", "Made by a user without privileges.";
    IOCTL_ENCODE = 6, "ioctl-encode", "Commands have ioctl numbers.";
    USER_COPY = 7, "user-copy", "The server reads and writes requests' bytes itself.";
    ZONED = 8, "zoned", "Zones.";
    USER_RECOVERY_FAIL_IO = 9, "user-recovery-fail-io",
        "Requests fail while there is no server.";
    UPDATE_SIZE = 10, "update-size", "The size can change while it runs.";
    AUTO_BUF_REG = 11, "auto-buf-reg", "The driver registers requests' buffers with the ring.";
    QUIESCE = 12, "quiesce", "A server can be told to leave the device to the next one.";
    PER_IO_DAEMON = 13, "per-io-daemon", "Each tag can have a thread of its own.";
    BUF_REG_OFF_DAEMON = 14, "buf-reg-off-daemon", "Any thread can register buffers.";
    BATCH_IO = 15, "batch-io", "Many requests travel with one command.";
    INTEGRITY = 16, "integrity", "Requests can have integrity data.";
    SAFE_STOP = 17, "safe-stop", "A stop can be refused while the device is open.";
    NO_AUTO_PART_SCAN = 18, "no-auto-part-scan", "Partitions need not be looked for.";
    SHMEM_ZC = 19, "shmem-zc", "Memory can be shared with clients.";
    IO_DESC_SIZE = 20, "io-desc-size", "Descriptors can be longer.";
}

impl Features {
    /// From the kernel's bits, known or not.
    pub const fn from_bits(bits: u64) -> Features {
        Features(bits)
    }

    /// The kernel's bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether all of `other` is in the set.
    pub const fn has(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both together.
    #[must_use]
    pub const fn with(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    /// What is in both.
    #[must_use]
    pub const fn and(self, other: Features) -> Features {
        Features(self.0 & other.0)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in self.names().enumerate() {
            write!(out, "{}{name}", if at == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_in_the_kernels_order() {
        let set = Features::QUIESCE
            .with(Features::USER_RECOVERY)
            .with(Features::from_bits(1 << 60));
        assert_eq!(set.to_string(), "user-recovery quiesce");
        assert!(set.has(Features::QUIESCE));
        assert!(!set.has(Features::QUIESCE.with(Features::BATCH_IO)));
        assert_eq!(set.and(Features::QUIESCE), Features::QUIESCE);
    }
}
