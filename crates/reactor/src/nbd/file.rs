//! What [`gaur_block::File`] asks for, as requests to a server.

use gaur_block::{Errno, Extent, Source, Target};
use gaur_nbd::wire::{STATE_ZERO, cmd, cmd_flag, export_flag};
use gaur_nbd::{Headers, REQUEST_BYTES_MAX};

use super::slots::{Ask, Blocks, Outcome, Slots};
use super::{NbdExport, OwnLink};
use crate::memory::Buffer;
use crate::whole::{Pieces, Range};

/// An export as one thread sees it.
#[derive(Clone, Copy)]
pub(crate) struct Via<'a> {
    pub(super) export: &'a NbdExport,
    pub(super) own: Option<&'a OwnLink>,
}

impl Via<'_> {
    /// Runs a request by the thread's own connection while there is one, else by the shared one. What was
    /// lost with the own one is asked for again there.
    async fn run(&self, request: impl AsyncFn(&Slots) -> Outcome) -> Outcome {
        if let Some(own) = self.own
            && let Some(slots) = own.slots()
        {
            let outcome = request(slots).await;
            if outcome.is_ok() || own.slots().is_some() {
                return outcome;
            }
        }
        request(&self.export.link.slots).await
    }

    /// Memory registered with a ring is none that a connection can fill.
    pub(crate) async fn read_at(&self, offset: u64, target: Target<'_>) -> Result<(), Errno> {
        let Target::Memory(memory) = target else {
            return Err(Errno::EOPNOTSUPP);
        };
        let there = self.export.len().saturating_sub(offset);
        let there = usize::try_from(there).map_or(memory.len(), |there| there.min(memory.len()));
        let (mut rest, beyond) = memory.split_at(there);
        beyond.fill_zeros();
        let mut at = offset;
        while !rest.is_empty() {
            let (now, later) =
                rest.split_at(rest.len().min(self.export.limits.max_transfer as usize));
            let ask = Ask {
                kind: cmd::READ,
                flags: 0,
                offset_bytes: at,
                len_bytes: now.len() as u64,
            };
            self.run(async |slots| slots.read(ask, now).await).await?;
            at += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    pub(crate) async fn write_at(&self, offset: u64, source: Source<'_>) -> Result<(), Errno> {
        let Source::Memory(mut rest) = source else {
            return Err(Errno::EOPNOTSUPP);
        };
        self.check_change(offset, rest.len() as u64)?;
        let mut at = offset;
        while !rest.is_empty() {
            let (now, later) =
                rest.split_at(rest.len().min(self.export.limits.max_transfer as usize));
            let ask = Ask {
                kind: cmd::WRITE,
                flags: 0,
                offset_bytes: at,
                len_bytes: now.len() as u64,
            };
            self.run(async |slots| slots.write(ask, now).await).await?;
            at += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    pub(crate) async fn write_zeroes_at(
        &self,
        offset: u64,
        len: u64,
        may_unmap: bool,
    ) -> Result<(), Errno> {
        let len = len.min(self.export.len().saturating_sub(offset));
        self.check_change(offset, len)?;
        if !self.export.has(export_flag::SEND_WRITE_ZEROES) {
            return Err(Errno::EOPNOTSUPP);
        }
        let flags = if may_unmap { 0 } else { cmd_flag::NO_HOLE };
        let pieces = Pieces::of(offset, len, self.export.limits.request_alignment);
        self.change(cmd::WRITE_ZEROES, flags, pieces.middle).await?;
        for edge in [pieces.head, pieces.tail] {
            if edge.len > 0 {
                self.zero_edge(edge).await?;
            }
        }
        Ok(())
    }

    /// Zeroes part of a block: it is read, changed and written, so no other request may write to it
    /// meanwhile; the engine sends whole blocks.
    async fn zero_edge(&self, edge: Range) -> Result<(), Errno> {
        let block = u64::from(self.export.limits.request_alignment);
        let start = edge.offset - edge.offset % block;
        let mut memory = Buffer::from_system(block as usize);
        self.read_at(start, Target::memory(&mut memory)).await?;
        let skip = (edge.offset - start) as usize;
        memory[skip..skip + edge.len as usize].fill(0);
        self.write_at(start, Source::memory(&memory)).await
    }

    /// What is not a whole block is left alone.
    pub(crate) async fn discard_at(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let len = len.min(self.export.len().saturating_sub(offset));
        self.check_change(offset, len)?;
        if !self.export.has(export_flag::SEND_TRIM) {
            return Err(Errno::EOPNOTSUPP);
        }
        let pieces = Pieces::of(offset, len, self.export.limits.request_alignment);
        self.change(cmd::TRIM, 0, pieces.middle).await
    }

    /// A server that cannot flush has nothing to flush.
    pub(crate) async fn flush(&self) -> Result<(), Errno> {
        if !self.export.has(export_flag::SEND_FLUSH) {
            return Ok(());
        }
        self.ask(cmd::FLUSH, 0, Range::default()).await.map(drop)
    }

    pub(crate) async fn extent_at(&self, offset: u64) -> Result<Extent, Errno> {
        let unknown = Extent {
            len: self.rest(offset)?,
            data: true,
        };
        // Another context than that of allocation says nothing of holes.
        let link = &self.export.link;
        if link.session.context.is_none() || link.remote.context.is_some() {
            return Ok(unknown);
        }
        let blocks = self.blocks_at(offset).await?;
        Ok(blocks.map_or(unknown, |blocks| Extent {
            len: blocks.len_bytes,
            data: blocks.state & STATE_ZERO == 0,
        }))
    }

    /// The run of blocks at `offset` as the chosen context says, whichever it is: its length and its flags.
    pub(crate) async fn context_at(&self, offset: u64) -> Result<(u64, u32), Errno> {
        self.rest(offset)?;
        let blocks = self.blocks_at(offset).await?.ok_or(Errno::EIO)?;
        Ok((blocks.len_bytes, blocks.state))
    }

    /// How far it is to the end, which lies behind `offset`.
    fn rest(&self, offset: u64) -> Result<u64, Errno> {
        let rest = self.export.len().checked_sub(offset);
        rest.filter(|rest| *rest > 0).ok_or(Errno::EINVAL)
    }

    async fn blocks_at(&self, offset: u64) -> Result<Option<Blocks>, Errno> {
        // A block says the same throughout, and a server is asked about whole ones.
        let block = u64::from(self.export.limits.request_alignment);
        let skip = offset % block;
        // Changes stay short, so that a server which is silent for long is none that works.
        let most = match self.export.link.session.headers {
            Headers::Extended => u64::MAX,
            _ => REQUEST_BYTES_MAX,
        };
        let range = Range {
            offset: offset - skip,
            len: (self.rest(offset)? + skip).min(most),
        };
        // A server that may tell of more looks at all of the range.
        let only = cmd_flag::REQ_ONE;
        let blocks = self.ask(cmd::BLOCK_STATUS, only, range).await?;
        Ok(blocks
            .filter(|blocks| blocks.len_bytes > skip)
            .map(|blocks| Blocks {
                len_bytes: blocks.len_bytes - skip,
                ..blocks
            }))
    }

    fn check_change(&self, offset: u64, len: u64) -> Result<(), Errno> {
        if self.export.limits.read_only {
            return Err(Errno::EROFS);
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.export.len() => Ok(()),
            _ => Err(Errno::ENOSPC),
        }
    }

    /// A change of a range, in as many requests as it takes.
    async fn change(&self, kind: u16, flags: u16, range: Range) -> Result<(), Errno> {
        let (mut at, end) = (range.offset, range.offset + range.len);
        while at < end {
            let len = (end - at).min(REQUEST_BYTES_MAX);
            self.ask(kind, flags, Range { offset: at, len }).await?;
            at += len;
        }
        Ok(())
    }

    async fn ask(&self, kind: u16, flags: u16, range: Range) -> Outcome {
        let ask = Ask {
            kind,
            flags,
            offset_bytes: range.offset,
            len_bytes: range.len,
        };
        self.run(async |slots| slots.ask(ask).await).await
    }
}
