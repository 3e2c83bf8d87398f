//! What the caches of an image have in common: entries of some bytes each, found by a key, and second chance (CLOCK)
//! to choose which go.

use std::hash::Hash;

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

#[derive(Debug)]
pub(crate) struct Clock<K, V> {
    entries: Vec<Entry<K, V>>,
    /// Where in `entries` each is.
    index: HashMap<K, usize, FxBuildHasher>,
    bytes: u64,
    /// Where the search for an entry to replace goes on.
    hand: usize,
}

#[derive(Debug)]
struct Entry<K, V> {
    key: K,
    value: V,
    bytes: u64,
    /// Read since the hand passed.
    used: bool,
    /// Read or added since the last [`Clock::clean`].
    recent: bool,
}

impl<K, V> Default for Clock<K, V> {
    fn default() -> Clock<K, V> {
        Clock {
            entries: Vec::new(),
            index: HashMap::default(),
            bytes: 0,
            hand: 0,
        }
    }
}

impl<K: Copy + Eq + Hash, V> Clock<K, V> {
    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What the entries were said to take.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn contains(&self, key: K) -> bool {
        self.index.contains_key(&key)
    }

    /// The value of a key, which is in use.
    #[inline]
    pub(crate) fn get(&mut self, key: K) -> Option<&V> {
        let entry = self.entries.get_mut(*self.index.get(&key)?)?;
        (entry.used, entry.recent) = (true, true);
        Some(&entry.value)
    }

    /// Adds a value that takes so many bytes; its key is not there.
    pub(crate) fn insert(&mut self, key: K, value: V, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.index.insert(key, self.entries.len());
        self.entries.push(Entry {
            key,
            value,
            bytes,
            used: false,
            recent: true,
        });
    }

    /// Removes the first entry from the hand on that was not read since the hand passed it last.
    pub(crate) fn evict(&mut self) -> Option<V> {
        loop {
            if self.hand >= self.entries.len() {
                self.hand = 0;
            }
            match self.entries.get_mut(self.hand) {
                Some(entry) if entry.used => entry.used = false,
                _ => return self.remove(self.hand),
            }
            self.hand += 1;
        }
    }

    /// Removes the entries whose key `goes`.
    pub(crate) fn remove_if(&mut self, goes: impl Fn(K) -> bool) {
        let mut at = 0;
        while let Some(entry) = self.entries.get(at) {
            if goes(entry.key) {
                // What was the last is here now.
                self.remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Removes what was not read since the last call.
    pub(crate) fn clean(&mut self) {
        let mut at = 0;
        while let Some(entry) = self.entries.get_mut(at) {
            if std::mem::take(&mut entry.recent) {
                at += 1;
            } else {
                self.remove(at);
            }
        }
    }

    fn remove(&mut self, at: usize) -> Option<V> {
        if at >= self.entries.len() {
            return None;
        }
        let entry = self.entries.swap_remove(at);
        self.index.remove(&entry.key);
        self.bytes = self.bytes.saturating_sub(entry.bytes);
        if let Some(moved) = self.entries.get(at) {
            self.index.insert(moved.key, at);
        }
        Some(entry.value)
    }
}
