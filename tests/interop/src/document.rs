//! Code blocks of the project's documents, and running those of shells.
//!
//! A block of the language `sh` is run as it stands, one of `console` command by command, and what it
//! shows must be what is printed. Before the block an HTML comment, which a reader does not see, may
//! say what has to be there (`<!-- setup: COMMANDS -->`) or why the block is left out
//! (`<!-- not run: REASON -->`).
//!
//! What a reader does between two commands is done here too: a server is waited for, and one that
//! takes no commands is ended before the next. `/run` and `/srv` are folders of the test's own.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::gaur::binary;
use crate::scratch::Scratch;
use crate::tool::Run;

/// Seconds that a block may take.
const TIME_LIMIT: &str = "120";

/// A code block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The document, and the line in which it starts.
    pub place: String,
    /// What stands behind the fence: `sh`, `console`, `rust`, `text`.
    pub language: String,
    /// Its lines.
    pub text: String,
    /// Commands that make what it needs.
    pub setup: String,
    /// Why it is not run.
    pub left_out: Option<String>,
}

/// The code blocks of a document in Markdown.
pub fn blocks(name: &str, document: &str) -> Vec<Block> {
    let mut found = Vec::new();
    // The last comment, while nothing but empty lines came after it.
    let mut comment = String::new();
    let mut lines = document.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if let Some(start) = line.strip_prefix("<!--") {
            comment = start.to_owned();
            while !comment.contains("-->") {
                let (_, more) = lines.next().expect("a comment has an end");
                comment.push('\n');
                comment.push_str(more);
            }
            comment.truncate(comment.find("-->").unwrap_or(0));
            continue;
        }
        let Some(language) = line.trim_start().strip_prefix("```") else {
            if !line.is_empty() {
                comment.clear();
            }
            continue;
        };
        let inside = lines.by_ref().map(|(_, line)| line);
        let inside: Vec<&str> = inside.take_while(|line| line.trim() != "```").collect();
        let said = std::mem::take(&mut comment);
        let after = |word: &str| Some(said.trim().strip_prefix(word)?.trim().to_owned());
        found.push(Block {
            place: format!("{name}:{}", number + 1),
            language: language.trim().to_owned(),
            text: inside.join("\n"),
            setup: after("setup:").unwrap_or_default(),
            left_out: after("not run:"),
        });
    }
    found
}

/// What stands before each script.
const PREAMBLE: &str = r#"
set -eu -o pipefail
servers=()
end_server() {
    kill -- "$1" 2>/dev/null || true
    for _ in $(seq 600); do kill -0 "$1" 2>/dev/null || return 0; sleep 0.05; done
    echo "the server does not end"; exit 1
}
gaur() {
    if [ "${1-}" != serve ]; then command gaur "$@"; return; fi
    command gaur serve --fork --pid-file pid "${@:2}"
    case " $* " in
        *" --control "*) servers+=("$(cat pid)") ;;
        *) end_server "$(cat pid)" ;;
    esac
}
cargo() {
    [ "$1 $2 $3" = "run --release --" ] || { echo "not known here: cargo $*"; exit 1; }
    gaur "${@:4}"
}
end_servers() { for server in "${servers[@]}"; do end_server "$server"; done; }
trap end_servers EXIT
"#;

/// Marks the start of a command's output.
const MARK: &str = "@@ command @@";

impl Block {
    /// Whether it is for a shell.
    pub fn is_shell(&self) -> bool {
        ["sh", "console"].contains(&self.language.as_str())
    }

    /// The commands, each with what it is to print; nothing is expected of a block of `sh`.
    fn commands(&self) -> Vec<(String, Vec<String>)> {
        if self.language == "sh" {
            return vec![(self.text.clone(), Vec::new())];
        }
        let mut commands: Vec<(String, Vec<String>)> = Vec::new();
        for line in self.text.lines() {
            match (line.strip_prefix("$ "), commands.last_mut()) {
                // A server goes to the background by itself here.
                (Some(command), _) => {
                    let command = command.strip_suffix(" &").unwrap_or(command);
                    commands.push((command.to_owned(), Vec::new()));
                }
                (None, Some((_, printed))) => printed.push(line.to_owned()),
                (None, None) => panic!("{}: it begins with no command", self.place),
            }
        }
        commands
    }

    /// Runs it in a folder of its own, and checks that it does well and prints what it says.
    #[track_caller]
    pub fn check(&self) {
        let scratch = Scratch::new("doc");
        let commands = self.commands();
        let mut script = format!("{PREAMBLE}\n{}\n", self.setup);
        for (command, _) in &commands {
            script.push_str(&format!("echo '{MARK}'\n{command}\n"));
        }
        let run = run_script(&scratch, &script);
        assert_eq!(run.code, 0, "{}: {run}", self.place);
        let outputs = run.stdout.split(MARK).skip(1);
        for ((command, expected), printed) in commands.iter().zip(outputs) {
            let root = scratch.folder().to_str().expect("text");
            let printed: Vec<String> = printed
                .trim()
                .lines()
                .map(|line| plain(root, line))
                .collect();
            let expected: Vec<String> = expected.iter().map(|line| plain(root, line)).collect();
            if self.language == "console" {
                assert_eq!(printed, expected, "{}: {command}", self.place);
            }
        }
    }
}

/// A line without what differs from run to run: numbers, columns, and where the test's folders are.
fn plain(root: &str, line: &str) -> String {
    let mut text = String::new();
    for word in line.replace(root, "").split_whitespace() {
        let mut number = false;
        for letter in word.chars() {
            if !(letter.is_ascii_digit() && number) {
                text.push(if letter.is_ascii_digit() { '0' } else { letter });
            }
            number = letter.is_ascii_digit();
        }
        text.push(' ');
    }
    text
}

fn run_script(scratch: &Scratch, script: &str) -> Run {
    let folder = |name: &str| {
        let path = scratch.path(name);
        std::fs::create_dir_all(&path).expect("scratch is writable");
        path
    };
    let (run, srv, bin) = (folder("run"), folder("srv"), folder("bin"));
    let runtime = folder("run/user/1000");
    std::os::unix::fs::symlink(binary(), Path::new(&bin).join("gaur")).expect("a link");
    let script = script
        .replace("/run/", &format!("{run}/"))
        .replace("/srv/", &format!("{srv}/"));
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("timeout")
        .args(["--kill-after=5", TIME_LIMIT, "bash", "-c", &script])
        .current_dir(&srv)
        .env("PATH", format!("{bin}:{path}"))
        .env("XDG_RUNTIME_DIR", runtime)
        .stdin(Stdio::null())
        .output()
        .expect("bash runs");
    Run {
        command: script,
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}
