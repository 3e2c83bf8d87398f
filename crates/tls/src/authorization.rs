//! Who may come in, by the names in clients' certificates: QEMU's `authz-simple` and `authz-list`.

/// What a rule says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Come in.
    Allow,
    /// Stay out.
    Deny,
}

/// How a rule is compared with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Letter by letter.
    Exact(String),
    /// `*` stands for any letters, `?` for one.
    Glob(String),
}

impl Pattern {
    fn matches(&self, name: &str) -> bool {
        match self {
            Pattern::Exact(text) => text == name,
            Pattern::Glob(pattern) => glob(pattern.as_bytes(), name.as_bytes()),
        }
    }
}

/// Names, and what becomes of who has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The names.
    pub pattern: Pattern,
    /// What becomes of them.
    pub decision: Decision,
}

/// Rules, of which the first that fits counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorization {
    /// The rules.
    pub rules: Vec<Rule>,
    /// Where none fits.
    pub otherwise: Decision,
}

impl Authorization {
    /// Lets those in who have one of these names.
    pub fn names(names: impl IntoIterator<Item = String>) -> Authorization {
        let rule = |name| Rule {
            pattern: Pattern::Exact(name),
            decision: Decision::Allow,
        };
        Authorization {
            rules: names.into_iter().map(rule).collect(),
            otherwise: Decision::Deny,
        }
    }

    /// Whether who is called so may come in.
    pub fn allows(&self, name: &str) -> bool {
        let rule = self.rules.iter().find(|rule| rule.pattern.matches(name));
        rule.map_or(self.otherwise, |rule| rule.decision) == Decision::Allow
    }
}

/// Compares with a pattern; goes back to the last `*` at most, so the time is bounded by the product of the lengths.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(letter) if *letter == b'?' || *letter == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                None => return false,
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    (p, n) = (at + 1, from + 1);
                }
            },
        }
    }
    pattern[p..].iter().all(|letter| *letter == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_rule_that_fits_counts() {
        let rule = |pattern, decision| Rule { pattern, decision };
        let list = Authorization {
            rules: vec![
                rule(Pattern::Exact("CN=fred".to_owned()), Decision::Deny),
                rule(Pattern::Glob("CN=*,O=us".to_owned()), Decision::Allow),
                rule(Pattern::Glob("CN=fre?".to_owned()), Decision::Allow),
            ],
            otherwise: Decision::Deny,
        };
        let allowed = ["CN=bob,O=us", "CN=,O=us", "CN=free"];
        let denied = [
            "CN=fred",
            "CN=bob,O=them",
            "",
            "CN=bob,O=us,C=x",
            "CN=freed",
        ];
        for name in allowed {
            assert!(list.allows(name), "{name}");
        }
        for name in denied {
            assert!(!list.allows(name), "{name}");
        }
        let names = Authorization::names(["a".to_owned()]);
        assert!(names.allows("a") && !names.allows("*") && !names.allows(""));
    }
}
