//! The commands: their names, and how many words each takes.

use crate::size::parse_size;

/// What happens after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The next one.
    Go {
        /// Whether it did what it should.
        worked: bool,
    },
    /// Nothing.
    Quit,
}

/// What a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// No image.
    Nothing,
    /// An open image.
    Image,
    /// One that may be changed.
    Writable,
}

/// A command.
#[derive(Debug)]
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// Its short name, or an empty string.
    pub alias: &'static str,
    /// Flags, as `getopt` takes them.
    pub flags: &'static str,
    /// Least and most words behind the name; `None` is any number.
    pub words: (usize, Option<usize>),
    /// What it needs.
    pub needs: Needs,
    /// Its words.
    pub synopsis: &'static str,
    /// What it does.
    pub about: &'static str,
}

/// All commands, by name.
pub const COMMANDS: [Command; 22] = [
    command(
        "abort",
        "",
        "",
        (0, Some(0)),
        Needs::Nothing,
        "",
        "dies as by a crash, without closing the image",
    ),
    command(
        "aio_flush",
        "",
        "",
        (0, Some(0)),
        Needs::Image,
        "",
        "waits for all requests in the background",
    ),
    command(
        "aio_read",
        "",
        "CiP:qrv",
        (2, None),
        Needs::Image,
        "[-Ciqrv] [-P pattern] off len [len..]",
        "begins to read in the background",
    ),
    command(
        "aio_write",
        "",
        "CfiP:qruz",
        (2, None),
        Needs::Writable,
        "[-Cfiqruz] [-P pattern] off len [len..]",
        "begins to write in the background",
    ),
    command(
        "alloc",
        "",
        "",
        (1, Some(2)),
        Needs::Image,
        "offset [count]",
        "counts the bytes that the image itself has",
    ),
    command(
        "close",
        "c",
        "",
        (0, Some(0)),
        Needs::Image,
        "",
        "closes the image",
    ),
    command(
        "discard",
        "d",
        "Cq",
        (2, None),
        Needs::Writable,
        "[-Cq] off len",
        "gives up a range of the disk",
    ),
    command(
        "flush",
        "f",
        "",
        (0, Some(0)),
        Needs::Image,
        "",
        "makes everything durable",
    ),
    command(
        "help",
        "?",
        "",
        (0, Some(1)),
        Needs::Nothing,
        "[command]",
        "lists the commands, or tells of one",
    ),
    command(
        "info",
        "i",
        "",
        (0, Some(0)),
        Needs::Image,
        "",
        "shows what the image is",
    ),
    command(
        "length",
        "l",
        "",
        (0, Some(0)),
        Needs::Image,
        "",
        "shows the size of the disk",
    ),
    command(
        "map",
        "",
        "",
        (0, Some(1)),
        Needs::Image,
        "",
        "lists the ranges that the image itself has",
    ),
    command(
        "open",
        "o",
        "snCro:ki:t:d:U",
        (1, None),
        Needs::Nothing,
        "[-rsCnkU] [-t cache] [-d discard] [-o options] [path]",
        "opens an image",
    ),
    command(
        "quit",
        "q",
        "",
        (0, Some(0)),
        Needs::Nothing,
        "",
        "ends the program",
    ),
    command(
        "read",
        "r",
        "bCl:pP:qrs:v",
        (2, None),
        Needs::Image,
        "[-abCqrv] [-P pattern [-s off] [-l len]] off len",
        "reads a range of the disk",
    ),
    command(
        "readv",
        "rv",
        "CP:qrv",
        (2, None),
        Needs::Image,
        "[-Cqrv] [-P pattern] off len [len..]",
        "reads a range of the disk into several buffers",
    ),
    command(
        "reopen",
        "",
        "c:o:rw",
        (0, None),
        Needs::Image,
        "[(-r|-w)] [-c cache] [-o options]",
        "opens the image anew, in another way",
    ),
    command(
        "sigraise",
        "",
        "",
        (1, Some(1)),
        Needs::Nothing,
        "signal",
        "sends this process a signal",
    ),
    command(
        "sleep",
        "",
        "",
        (1, Some(1)),
        Needs::Nothing,
        "milliseconds",
        "waits",
    ),
    command(
        "truncate",
        "t",
        "m:",
        (1, Some(3)),
        Needs::Writable,
        "[-m prealloc_mode] off",
        "changes the size of the disk",
    ),
    command(
        "write",
        "w",
        "bcCfnpP:qrs:uz",
        (2, None),
        Needs::Writable,
        "[-bcCfnqruz] [-P pattern | -s source_file] off len",
        "writes a range of the disk",
    ),
    command(
        "writev",
        "wv",
        "CfP:qr",
        (2, None),
        Needs::Writable,
        "[-Cfqr] [-P pattern] off len [len..]",
        "writes a range of the disk from several buffers",
    ),
];

const fn command(
    name: &'static str,
    alias: &'static str,
    flags: &'static str,
    words: (usize, Option<usize>),
    needs: Needs,
    synopsis: &'static str,
    about: &'static str,
) -> Command {
    Command {
        name,
        alias,
        flags,
        words,
        needs,
        synopsis,
        about,
    }
}

impl Command {
    /// The command called so.
    pub fn find(name: &str) -> Option<&'static Command> {
        let mut commands = COMMANDS.iter();
        commands.find(|command| command.name == name || command.alias == name)
    }

    /// One line about it.
    pub fn line(&self) -> String {
        let Command {
            name,
            synopsis,
            about,
            ..
        } = self;
        match synopsis.is_empty() {
            true => format!("{name} -- {about}"),
            false => format!("{name} {synopsis} -- {about}"),
        }
    }

    /// Why so many words behind the name are wrong, if they are.
    pub fn miscounted(&self, count: usize) -> Option<String> {
        let (least, most) = self.words;
        if count >= least && most.is_none_or(|most| count <= most) {
            return None;
        }
        let expected = match most {
            None => format!("at least {least}"),
            Some(most) if most == least => format!("{least}"),
            Some(most) => format!("between {least} and {most}"),
        };
        let name = self.name;
        Some(format!(
            "bad argument count {count} to {name}, expected {expected} arguments"
        ))
    }
}

/// Reads an offset or a length.
pub fn number(text: &str) -> Result<u64, String> {
    let digits = text.bytes().any(|byte| byte.is_ascii_digit());
    parse_size(text).map_err(|error| match digits && error.contains("larger") {
        true => format!("Parsing error: argument too large -- {text}"),
        false => format!(
            "Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- {text}"
        ),
    })
}

/// Reads the byte of `-P`.
pub fn pattern(text: &str) -> Result<u8, String> {
    let value = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(digits) => u8::from_str_radix(digits, 16),
        None => text.parse(),
    };
    value.map_err(|_| format!("{text} is not a valid pattern byte"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_counts_are_told_as_qemu_does() {
        let told = |name: &str, count| Command::find(name).unwrap().miscounted(count);
        assert_eq!(told("r", 2), None);
        assert_eq!(
            told("read", 1).unwrap(),
            "bad argument count 1 to read, expected at least 2 arguments"
        );
        assert_eq!(
            told("alloc", 3).unwrap(),
            "bad argument count 3 to alloc, expected between 1 and 2 arguments"
        );
        assert_eq!(
            told("length", 1).unwrap(),
            "bad argument count 1 to length, expected 0 arguments"
        );
    }

    #[test]
    fn patterns_are_bytes_of_any_base() {
        assert_eq!(pattern("0xaB"), Ok(0xab));
        assert_eq!(pattern("10"), Ok(10));
        assert!(pattern("256").is_err() && pattern("0x100").is_err() && pattern("x").is_err());
    }
}
