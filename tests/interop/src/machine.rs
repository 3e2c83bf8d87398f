//! A virtual machine of QEMU's that stands still: its memory is filled from a file, and its snapshots
//! are made and loaded through its monitor.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// Where the file is in the guest's memory.
pub const LOADED_AT: u64 = 1 << 20;

/// A machine that has never run.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    replies: BufReader<ChildStdout>,
}

impl Machine {
    /// Starts one with an image as its disk; `memory` is a file for its memory, `load` the name of a
    /// snapshot to load.
    #[track_caller]
    pub fn start(image: &str, memory: Option<&str>, load: Option<&str>) -> Machine {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg", "-machine", "pc", "-m", "32", "-S"]);
        command.args(["-nodefaults", "-display", "none", "-qmp", "stdio"]);
        command.args(["-drive", &format!("file={image},format=qcow2,if=virtio")]);
        if let Some(memory) = memory {
            let loader = format!("loader,file={memory},addr={LOADED_AT:#x},force-raw=on");
            command.args(["-device", &loader]);
        } else {
            // The same devices on both sides.
            command.args(["-device", "loader,addr=0x10,data=0,data-len=1"]);
        }
        if let Some(name) = load {
            command.args(["-loadvm", name]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .expect("qemu-system-x86_64 is there: scripts/setup installs what the tests need");
        let replies = child.stdout.take().expect("a pipe was asked for");
        let mut machine = Machine {
            child,
            replies: BufReader::new(replies),
        };
        let greeting = machine.line();
        assert!(greeting.get("QMP").is_some(), "{image}: {greeting}");
        machine.command(&json!({"execute": "qmp_capabilities"}));
        machine
    }

    #[track_caller]
    fn line(&mut self) -> Value {
        let mut line = String::new();
        let count = self.replies.read_line(&mut line);
        assert!(
            matches!(count, Ok(count) if count > 0),
            "the machine has ended"
        );
        serde_json::from_str(&line).expect("the monitor speaks JSON")
    }

    #[track_caller]
    fn command(&mut self, command: &Value) -> Value {
        let input = self.child.stdin.as_mut().expect("a pipe was asked for");
        writeln!(input, "{command}").expect("the monitor listens");
        loop {
            let reply = self.line();
            assert!(reply.get("error").is_none(), "{command}: {reply}");
            if let Some(value) = reply.get("return") {
                return value.clone();
            }
        }
    }

    /// A line of the human monitor that has nothing to say.
    #[track_caller]
    pub fn monitor(&mut self, line: &str) {
        let command = json!({
            "execute": "human-monitor-command",
            "arguments": {"command-line": line},
        });
        assert_eq!(self.command(&command), json!(""), "{line}");
    }

    /// Writes a piece of the guest's memory to a file.
    #[track_caller]
    pub fn memory_to(&mut self, at: u64, len: u64, path: &str) {
        self.command(&json!({
            "execute": "pmemsave",
            "arguments": {"val": at, "size": len, "filename": path},
        }));
    }

    /// Ends it. What it did has been answered; now and then it is gone before it was told to go.
    pub fn quit(mut self) {
        if let Some(input) = self.child.stdin.as_mut() {
            let _ = writeln!(input, "{}", json!({"execute": "quit"}));
        }
        // Until its output ends.
        let _ = std::io::copy(&mut self.replies, &mut std::io::sink());
        self.child.wait().expect("it can be waited for");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
