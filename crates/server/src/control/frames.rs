//! How a machine's state goes over a control socket: in frames, each after its length in four bytes,
//! the most significant first. No length is the end, and the greatest one says that the sender gives up.

/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 4;

/// What a head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// So many bytes follow.
    Data(u32),
    /// That was all.
    End,
    /// The rest will not come.
    Abort,
}

impl Head {
    /// What the bytes of a head say.
    pub fn decode(bytes: [u8; HEAD_BYTES]) -> Head {
        match u32::from_be_bytes(bytes) {
            0 => Head::End,
            u32::MAX => Head::Abort,
            len => Head::Data(len),
        }
    }

    /// The bytes of a head.
    pub fn encode(self) -> [u8; HEAD_BYTES] {
        let value = match self {
            Head::End => 0,
            Head::Abort => u32::MAX,
            Head::Data(len) => len,
        };
        value.to_be_bytes()
    }

    /// The head of a frame of `len` bytes, of which there are some, but not 4 GiB.
    pub fn of(len: usize) -> Head {
        Head::Data(u32::try_from(len).unwrap_or(u32::MAX - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_read_back() {
        for head in [Head::End, Head::Abort, Head::Data(1), Head::of(1 << 20)] {
            assert_eq!(Head::decode(head.encode()), head);
        }
    }
}
