//! Option lists, `-o key=value,...`, of `create` and `convert`.

use std::ffi::OsString;

use crate::failure::Failure;
use crate::size::parse_size;

/// Options in the order given; a later one of the same name wins. A value is text unless a switch of the
/// command line stands for it, which may be a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OptionList(Vec<(String, OsString)>);

impl OptionList {
    /// Joins the lists of several `-o`. Items are separated by commas; a comma inside a value is
    /// written twice.
    pub fn parse(lists: &[String]) -> Result<OptionList, Failure> {
        let mut options = Vec::new();
        for item in lists.iter().flat_map(|list| split_items(list)) {
            let pair = item.split_once('=').filter(|(key, _)| !key.is_empty());
            let Some((key, value)) = pair.or_else(|| switch(&item)) else {
                let message = format!("option '{item}' is not of the form KEY=VALUE");
                return Err(Failure::new(message).hint("'-o help' lists the options"));
            };
            options.push((key.to_owned(), value.into()));
        }
        Ok(OptionList(options))
    }

    /// Whether a list asks for help (`-o help`, `-o ?`) instead of giving options.
    ///
    /// # Errors
    /// A list begins with a comma or ends with a single one: a value may have been meant that has a comma.
    pub fn asks_for_help(lists: &[String]) -> Result<bool, Failure> {
        for list in lists {
            let at_end = list.len().saturating_sub(list.trim_end_matches(',').len());
            if list.starts_with(',') || at_end % 2 == 1 {
                let message = format!("the option list '{list}' begins or ends with a comma");
                return Err(Failure::new(message).hint("a comma in a value is written twice"));
            }
        }
        let mut items = lists.iter().flat_map(|list| split_items(list));
        Ok(items.any(|item| item == "help" || item == "?"))
    }

    /// Takes the option called `key` out of the list.
    pub fn take(&mut self, key: &str) -> Option<String> {
        let value = self.take_path(key)?;
        Some(value.to_string_lossy().into_owned())
    }

    /// Takes an option that is a path.
    pub fn take_path(&mut self, key: &str) -> Option<OsString> {
        let value = self.0.iter().rev().find(|(name, _)| name == key);
        let value = value.map(|(_, value)| value.clone());
        self.0.retain(|(name, _)| name != key);
        value
    }

    /// Takes an option that is on or off.
    pub fn take_bool(&mut self, key: &str) -> Result<Option<bool>, Failure> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let wrong = || wrong_value(key, &value, "on, off");
        on_or_off(&value).map(Some).ok_or_else(wrong)
    }

    /// Takes an option that has one of a few values, and what that stands for. The error lists those that
    /// are `allowed`, or all names.
    pub fn take_choice<T: Copy>(
        &mut self,
        key: &str,
        values: &[(&'static str, T)],
        allowed: Option<&str>,
    ) -> Result<Option<(&'static str, T)>, Failure> {
        let Some(given) = self.take(key) else {
            return Ok(None);
        };
        let found = values.iter().find(|(name, _)| *name == given);
        found.copied().map(Some).ok_or_else(|| {
            let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
            let names = names.join(", ");
            wrong_value(key, &given, allowed.unwrap_or(&names))
        })
    }

    /// Takes an option that is a number of bytes.
    pub fn take_size(&mut self, key: &str) -> Result<Option<u64>, Failure> {
        let parse = |value: String| parse_size(&value);
        let size = self.take(key).map(parse).transpose();
        size.map_err(|error| Failure::new(format!("option '{key}': {error}")))
    }

    /// Whether an option is there.
    pub fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(name, _)| name == key)
    }

    /// The value of an option, which stays in the list.
    pub fn last(&self, key: &str) -> Option<String> {
        let value = self.0.iter().rev().find(|(name, _)| name == key);
        value.map(|(_, value)| value.to_string_lossy().into_owned())
    }

    /// Adds an option.
    pub fn add(&mut self, key: &str, value: &str) {
        self.0.push((key.to_owned(), value.into()));
    }

    /// Adds an option that a switch of the command line stands for; it must not be in the list.
    pub fn add_switch(
        &mut self,
        key: &str,
        value: impl Into<OsString>,
        switch: &str,
    ) -> Result<(), Failure> {
        if self.has(key) {
            let message = format!("'{switch}' and '-o {key}=' say the same thing twice");
            return Err(Failure::new(message));
        }
        self.0.push((key.to_owned(), value.into()));
        Ok(())
    }

    /// All options, in the order given.
    pub fn into_items(self) -> impl Iterator<Item = (String, String)> {
        let text = |value: OsString| value.to_string_lossy().into_owned();
        self.0
            .into_iter()
            .map(move |(key, value)| (key, text(value)))
    }

    /// The keys of the options that were not taken.
    pub fn rest(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(key, _)| key.as_str())
    }
}

/// Options that are on or off, of new images and of images that are opened.
const SWITCHES: [&str; 16] = [
    "auto-read-only",
    "cache.direct",
    "cache.no-flush",
    "data-file-raw",
    "data_file_raw",
    "discard-no-unref",
    "encryption",
    "extended_l2",
    "force-share",
    "lazy-refcounts",
    "lazy_refcounts",
    "nocow",
    "pass-discard-other",
    "pass-discard-request",
    "pass-discard-snapshot",
    "read-only",
];

/// The short form of an option that is on or off, its name alone: `lazy_refcounts`, `nolazy_refcounts`. libvirt makes
/// its images so.
fn switch(item: &str) -> Option<(&str, &'static str)> {
    if SWITCHES.contains(&item) {
        return Some((item, "on"));
    }
    let key = item.strip_prefix("no")?;
    SWITCHES.contains(&key).then_some((key, "off"))
}

/// What a word says of an option that is on or off.
pub fn on_or_off(word: &str) -> Option<bool> {
    match word {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// An option has a value it cannot have.
pub fn wrong_value(key: &str, value: &str, allowed: &str) -> Failure {
    Failure::new(format!(
        "option '{key}' cannot be '{value}' (possible values: {allowed})"
    ))
}

/// Splits at single commas; a double comma is one comma of the value.
fn split_items(list: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut letters = list.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            items.push(String::new());
        } else if let Some(item) = items.last_mut() {
            item.push(letter);
        }
    }
    items.retain(|item| !item.is_empty());
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &str) -> OptionList {
        OptionList::parse(&[list.to_owned()]).expect("a well formed list")
    }

    #[test]
    fn a_double_comma_is_a_comma_of_the_value() {
        let mut options = parse("backing_file=a,,b.qcow2,size=1G");
        assert_eq!(options.take("backing_file").as_deref(), Some("a,b.qcow2"));
        assert_eq!(options.take_size("size").expect("a size"), Some(1 << 30));
        assert_eq!(options.rest().count(), 0);
    }

    #[test]
    fn the_last_of_several_wins() {
        let mut options = parse("compat=v2,compat=v3");
        assert_eq!(options.take("compat").as_deref(), Some("v3"));
        assert_eq!(options.take("compat"), None);
    }

    #[test]
    fn name_of_a_switch_turns_it_on_and_with_no_before_it_off() {
        let mut options = parse("compat=1.1,lazy_refcounts,noextended_l2,nocow");
        for (key, expected) in [
            ("lazy_refcounts", true),
            ("extended_l2", false),
            ("nocow", true),
        ] {
            assert_eq!(
                options.take_bool(key).expect("a switch"),
                Some(expected),
                "{key}"
            );
        }
        assert!(OptionList::parse(&["noother".to_owned()]).is_err());
    }

    #[test]
    fn malformed_option_is_refused() {
        assert!(OptionList::parse(&["compat".to_owned()]).is_err());
        assert!(OptionList::parse(&["=v3".to_owned()]).is_err());
        let refused = parse("lazy_refcounts=maybe").take_bool("lazy_refcounts");
        let failure = refused.expect_err("neither on nor off");
        assert_eq!(
            failure.to_string(),
            "option 'lazy_refcounts' cannot be 'maybe' (possible values: on, off)"
        );
    }

    #[test]
    fn help_is_seen_in_any_list() {
        let asks = |list: &str| OptionList::asks_for_help(&[list.to_owned()]);
        for (list, expected) in [
            ("compat=v3,help", true),
            ("?", true),
            ("backing_file=a,,help", false),
        ] {
            assert!(asks(list).is_ok_and(|asked| asked == expected), "{list}");
        }
        for list in ["backing_file=a,", ",help", ",,", "a=b,,,"] {
            let failure = asks(list).expect_err(list).to_string();
            assert!(failure.contains("with a comma"), "{failure}");
        }
    }

    #[test]
    fn a_switch_and_its_option_together_are_refused() {
        let mut options = parse("backing_file=a");
        assert!(options.add_switch("backing_file", "b", "-b").is_err());
        assert!(options.add_switch("backing_fmt", "raw", "-F").is_ok());
    }
}
