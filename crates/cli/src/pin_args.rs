//! `--pin` and what goes with it.

use crate::pin::{Pin, Wish};

/// What a server is told about its memory and its threads.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct PinArgs {
    /// Keep the server's memory from being taken away; an error where that is not allowed (the default
    /// with block devices of this machine, as far as it is allowed)
    #[arg(long, overrides_with = "no_pin")]
    pin: bool,
    /// Leave that out
    #[arg(long)]
    no_pin: bool,
    /// Schedule its threads before all ordinary ones, and pin it: for a device that is swapped to
    #[arg(long, conflicts_with = "no_pin")]
    realtime: bool,
}

impl PinArgs {
    /// What this process makes of them.
    pub fn pin(self) -> Pin {
        Pin::new(self.wish(), self.realtime)
    }

    fn wish(self) -> Wish {
        match (self.pin || self.realtime, self.no_pin) {
            (true, _) => Wish::Always,
            (false, true) => Wish::Never,
            (false, false) => Wish::WhereNeeded,
        }
    }

    /// The same for the command line of another server.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        let words = [
            ("--pin", self.pin),
            ("--no-pin", self.no_pin),
            ("--realtime", self.realtime),
        ];
        words
            .into_iter()
            .filter_map(|(word, said)| said.then_some(word))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        pin: PinArgs,
    }

    fn parse(words: &[&str]) -> PinArgs {
        let line = ["gaur"].iter().chain(words);
        Line::try_parse_from(line).unwrap().pin
    }

    #[test]
    fn another_server_is_told_the_same() {
        let lines: [(&[&str], Wish, bool); 6] = [
            (&[], Wish::WhereNeeded, false),
            (&["--pin"], Wish::Always, false),
            (&["--no-pin"], Wish::Never, false),
            (&["--realtime"], Wish::Always, true),
            (&["--pin", "--no-pin"], Wish::Never, false),
            (&["--no-pin", "--pin"], Wish::Always, false),
        ];
        for (words, wish, realtime) in lines {
            let said = parse(words);
            assert_eq!((said.wish(), said.realtime), (wish, realtime), "{words:?}");
            let passed: Vec<_> = said.words().collect();
            let heard = parse(&passed);
            assert_eq!(
                (heard.wish(), heard.realtime),
                (wish, realtime),
                "{passed:?}"
            );
        }
    }

    #[test]
    fn threads_that_come_first_are_not_left_unpinned() {
        let line = ["gaur", "--realtime", "--no-pin"];
        assert!(Line::try_parse_from(line).is_err());
    }
}
