//! The words of a command: flags as of `getopt`, and operands.

/// What was said, sorted.
#[derive(Debug, Default)]
pub struct Words {
    flags: Vec<(char, Option<String>)>,
    /// What is not a flag, in order.
    pub operands: Vec<String>,
}

impl Words {
    /// Sorts `words` by the flags that are `known`: letters, with a colon behind those that take a value. A flag may stand
    /// anywhere; what follows `--` are operands. The error is what getopt says.
    pub fn sort(words: &[&str], known: &str) -> Result<Words, String> {
        let mut sorted = Words::default();
        let mut words = words.iter().copied();
        while let Some(word) = words.next() {
            let Some(letters) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
                sorted.operands.push(word.to_owned());
                continue;
            };
            if letters == "-" {
                sorted.operands.extend(words.by_ref().map(str::to_owned));
                break;
            }
            let mut rest = letters.chars();
            while let Some(letter) = rest.next() {
                let at = known.find(letter).filter(|_| letter != ':');
                let at = at.ok_or_else(|| format!("invalid option -- '{letter}'"))?;
                if !known[at + letter.len_utf8()..].starts_with(':') {
                    sorted.flags.push((letter, None));
                    continue;
                }
                let attached = std::mem::replace(&mut rest, "".chars());
                let value = match attached.as_str() {
                    "" => words.next(),
                    attached => Some(attached),
                };
                let value =
                    value.ok_or_else(|| format!("option requires an argument -- '{letter}'"))?;
                sorted.flags.push((letter, Some(value.to_owned())));
            }
        }
        Ok(sorted)
    }

    /// Whether a flag is there.
    pub fn has(&self, flag: char) -> bool {
        self.flags.iter().any(|(letter, _)| *letter == flag)
    }

    /// The value of a flag; that of the last counts.
    pub fn value(&self, flag: char) -> Option<&str> {
        let mut flags = self.flags.iter().rev();
        flags.find(|(letter, _)| *letter == flag)?.1.as_deref()
    }

    /// All values of a flag.
    pub fn values(&self, flag: char) -> impl Iterator<Item = &str> {
        let flags = self.flags.iter();
        flags
            .filter(move |(letter, _)| *letter == flag)
            .filter_map(|(_, value)| value.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_may_be_joined_and_stand_anywhere() {
        let words = Words::sort(&["-qP", "7", "0", "-s5", "1k", "--", "-l"], "l:P:qs:").unwrap();
        assert!(words.has('q') && !words.has('l'));
        assert_eq!(words.value('P'), Some("7"));
        assert_eq!(words.value('s'), Some("5"));
        assert_eq!(words.operands, ["0", "1k", "-l"]);
    }

    #[test]
    fn unknown_flags_and_missing_values_are_told() {
        let wrong = |words: &[&str]| Words::sort(words, "P:q").unwrap_err();
        assert_eq!(wrong(&["-5"]), "invalid option -- '5'");
        assert_eq!(wrong(&["-:"]), "invalid option -- ':'");
        assert_eq!(wrong(&["-qP"]), "option requires an argument -- 'P'");
    }
}
