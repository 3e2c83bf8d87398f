//! Keys of encrypted images: who opens a chain has a passphrase for each layer that wants one.

use std::collections::BTreeMap;
use std::sync::Arc;

use gaur_luks::Passphrase;

/// Passphrases by name, and which layer is opened with which. They are zeroed when the last copy goes.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    named: BTreeMap<String, Arc<Passphrase>>,
    /// Names by depth in the chain, the top being 0.
    layers: BTreeMap<usize, String>,
    others: Option<Arc<Passphrase>>,
}

impl Keys {
    /// Adds a passphrase; `false` if there is one of this name.
    pub fn add(&mut self, name: impl Into<String>, passphrase: Passphrase) -> bool {
        let before = self.named.len();
        self.named
            .entry(name.into())
            .or_insert_with(|| Arc::new(passphrase));
        self.named.len() > before
    }

    /// The passphrase of this name.
    pub fn named(&self, name: &str) -> Option<&Passphrase> {
        self.named.get(name).map(|passphrase| &**passphrase)
    }

    /// The layer at this depth (the top is 0) is opened with the passphrase of this name; `false` if there is
    /// none.
    pub fn assign(&mut self, depth: usize, name: &str) -> bool {
        self.layers.insert(depth, name.to_owned());
        self.named.contains_key(name)
    }

    /// Layers without a passphrase of their own are opened with this one.
    pub fn for_others(&mut self, passphrase: Passphrase) {
        self.others = Some(Arc::new(passphrase));
    }

    /// The passphrase for a layer.
    pub fn of_layer(&self, depth: usize) -> Option<&Passphrase> {
        match self.layers.get(&depth) {
            Some(name) => self.named(name),
            None => self.others.as_deref(),
        }
    }

    /// The keys of the chain that begins with the layer at `depth`.
    pub fn below(&self, depth: usize) -> Keys {
        let below = |(at, name): (&usize, &String)| Some((at.checked_sub(depth)?, name.clone()));
        Keys {
            named: self.named.clone(),
            layers: self.layers.iter().filter_map(below).collect(),
            others: self.others.clone(),
        }
    }

    /// The keys of a chain that has this one below `more` new layers.
    pub fn above(&self, more: usize) -> Keys {
        let above = |(at, name): (&usize, &String)| Some((at.checked_add(more)?, name.clone()));
        Keys {
            named: self.named.clone(),
            layers: self.layers.iter().filter_map(above).collect(),
            others: self.others.clone(),
        }
    }

    /// Whether the layers below the top are opened with the same passphrases.
    pub(crate) fn same_below_top(&self, other: &Keys) -> bool {
        let same = |one: Option<&Passphrase>, other: Option<&Passphrase>| {
            one.map(Passphrase::as_bytes) == other.map(Passphrase::as_bytes)
        };
        let depths = self.layers.keys().chain(other.layers.keys());
        same(self.others.as_deref(), other.others.as_deref())
            && depths
                .filter(|depth| **depth > 0)
                .all(|depth| same(self.of_layer(*depth), other.of_layer(*depth)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_its_own_key_or_that_of_the_others_and_none_is_shown() {
        let of = |text: &str| Passphrase::new(text.as_bytes().to_vec());
        let mut keys = Keys::default();
        assert!(keys.add("a", of("hidden")));
        assert!(!keys.add("a", of("again")));
        assert!(keys.assign(1, "a"));
        assert!(!keys.assign(2, "b"));
        keys.for_others(of("rest"));
        let found = |depth| keys.of_layer(depth).map(|key| key.as_bytes().to_vec());
        assert_eq!(found(0), Some(b"rest".to_vec()));
        assert_eq!(found(1), Some(b"hidden".to_vec()));
        assert_eq!(found(2), None);
        let below = keys.below(1);
        let found = |depth| below.of_layer(depth).map(|key| key.as_bytes().to_vec());
        assert_eq!(found(0), Some(b"hidden".to_vec()));
        assert_eq!(found(1), None);
        assert_eq!(found(2), Some(b"rest".to_vec()));
        let above = below.above(1);
        let found = |depth| above.of_layer(depth).map(|key| key.as_bytes().to_vec());
        assert_eq!(found(0), Some(b"rest".to_vec()));
        assert_eq!(found(1), Some(b"hidden".to_vec()));
        assert_eq!(found(2), None);
        assert!(!format!("{keys:?}").contains("hidden"));
    }
}
