//! The content of options, checked in full before anything of it is used.

use super::wire::{Fields, STRING_MAX_BYTES};

/// Content of `INFO` and `GO`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) name: &'a [u8],
    items: &'a [u8],
}

impl<'a> Wanted<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Option<Wanted<'a>> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = usize::from(fields.u16()?);
        let items = fields.bytes(count * 2)?;
        (fields.0.is_empty() && name.len() <= STRING_MAX_BYTES).then_some(Wanted { name, items })
    }

    /// Whether an item was asked for.
    pub(super) fn asks(&self, item: u16) -> bool {
        self.items
            .chunks_exact(2)
            .any(|found| found == item.to_be_bytes())
    }
}

/// Content of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Clone, Copy, Debug)]
pub(super) struct MetaQuery<'a> {
    pub(super) name: &'a [u8],
    count: u32,
    queries: Fields<'a>,
}

impl<'a> MetaQuery<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Option<MetaQuery<'a>> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = fields.u32()?;
        let queries = fields;
        // A query takes at least four bytes, so hostile counts end at the end of the data.
        for _ in 0..count {
            if fields.string()?.len() > STRING_MAX_BYTES {
                return None;
            }
        }
        let valid = fields.0.is_empty() && name.len() <= STRING_MAX_BYTES;
        valid.then_some(MetaQuery {
            name,
            count,
            queries,
        })
    }

    /// Whether the context called `name` is among what was asked for. To list, no query at all means every
    /// context, and the beginning of a namespace every one in it; to set, only the full name counts.
    pub(super) fn selects(&self, name: &str, set: bool) -> bool {
        if self.count == 0 {
            return !set;
        }
        let is_it = |query: &[u8]| {
            let all = query.ends_with(b":") && name.as_bytes().starts_with(query);
            query == name.as_bytes() || (!set && all)
        };
        let mut fields = self.queries;
        (0..self.count).map_while(|_| fields.string()).any(is_it)
    }
}
