//! What a server did that ends its connection.

/// A break of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The greeting is of something else.
    #[error("this is no NBD server: it greets with {0:#018x}")]
    Greeting(u64),
    /// A server of the time before options.
    #[error("the server speaks the oldstyle protocol, which has no export names, contexts or TLS")]
    Oldstyle,
    /// A reply to an option does not start with its magic number.
    #[error("bad magic {0:#018x} of a reply to an option")]
    OptionReplyMagic(u64),
    /// A reply to an option that was not sent.
    #[error("a reply to option {0}, which was not sent")]
    OptionUnasked(u32),
    /// A reply to an option that is longer than any.
    #[error("a reply of {0} bytes to an option")]
    OptionReplyLength(u32),
    /// A reply to an option makes no sense.
    #[error("the reply to option {0} makes no sense")]
    OptionReply(u32),
    /// Replies without end.
    #[error("replies to option {0} without end")]
    OptionReplies(u32),
    /// The export's size is beyond what a file can have.
    #[error("an export of {0} bytes")]
    Size(u64),
    /// The sizes of blocks are no powers of two, or contradict each other.
    #[error("block sizes of {0}, {1} and {2} bytes")]
    BlockSizes(u32, u32, u32),
    /// The size is no multiple of the smallest block.
    #[error("an export of {0} bytes, in blocks of {1}")]
    SizeOfBlocks(u64, u32),
    /// A reply does not start with a magic number of replies.
    #[error("bad magic {0:#010x} of a reply")]
    ReplyMagic(u32),
    /// A reply to a request that is not in flight.
    #[error("a reply to a request that was not sent")]
    Unasked,
    /// A chunk that no reply to this request has.
    #[error("a chunk of type {0:#x} in the reply to request type {1}")]
    ChunkType(u16, u16),
    /// A chunk of an impossible length.
    #[error("a chunk of type {0:#x} with {1} bytes")]
    ChunkLength(u16, u32),
    /// Data of outside of what was asked for, or twice.
    #[error("data at {0}, which was not asked for")]
    DataRange(u64),
    /// A reply that ends before all was said.
    #[error("the reply to request type {0} ends too early")]
    Incomplete(u16),
    /// An error without a number.
    #[error("an error of number 0")]
    NoError,
    /// Extents of a context that was not chosen, or without length.
    #[error("a block status that makes no sense")]
    BlockStatus,
}
