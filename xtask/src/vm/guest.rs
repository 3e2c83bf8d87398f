//! A run of the guest: one command, from boot to power-off.
//!
//! The guest's consoles are descriptors of this program: standard output and standard error of the
//! command arrive on pipes of their own, the kernel's log goes to a file. The command's exit status
//! comes back in a file of the run's folder, which the guest shares.
//!
//! The guest has a time limit, and it is kept from outside: all processes that make up the guest are
//! killed, whatever runs in it, and no pipe that one of them holds keeps this program waiting.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gaur_artifacts::{Cache, failed, write};

use crate::vm::console::{Console, Output};
use crate::vm::run_folder::RunFolder;
use crate::vm::session;
use crate::workspace;

const BOOT: &str = include_str!("boot.sh");
const COMMAND: &str = include_str!("command.sh");

/// Hands the three descriptors on: the kernel's own messages go to where standard input was opened
/// for writing, and the guest ends with the process that started it.
const START: &str = r#"exec 3>&1 4>&2 1>&0 2>&0 </dev/null
exec setpriv --pdeathsig KILL -- "$@""#;

/// Exit code after the time limit.
pub const CODE_TIME: i32 = 124;
/// Exit code of a guest that did not come to an end of its own.
pub const CODE_DIED: i32 = 125;
/// How long the consoles may take to end after the guest's kernel.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// What to boot and how.
#[derive(Clone, Debug)]
pub struct Guest {
    /// The kernel.
    pub kernel: PathBuf,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Environment variables beside PATH and HOME.
    pub environment: Vec<(String, String)>,
    /// Folders that the guest may write to, at the same path.
    pub shares: Vec<PathBuf>,
    /// Folders that the command needs beside its own and the working folder, for the guest hides the
    /// machine's /tmp, /run, /dev and /scratch.
    pub seen: Vec<PathBuf>,
    /// Arguments of the kernel.
    pub kernel_arguments: Vec<String>,
    /// Longest time of the run.
    pub limit: Duration,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Processors.
    pub cpus: usize,
    /// Size of the disk at /scratch, in GiB; it takes what is written to it.
    pub scratch_gib: u64,
}

/// How a run ended.
#[derive(Debug)]
pub struct RunResult {
    /// The command's exit status, [`CODE_TIME`] or [`CODE_DIED`].
    pub code: i32,
    /// Standard output, if kept.
    pub stdout: String,
    /// Standard error, if kept.
    pub stderr: String,
    /// What the kernel said, from boot to the command's end or as far as it came.
    pub kernel_log: String,
}

impl Guest {
    /// A guest for this command, of a modest size.
    pub fn new(kernel: PathBuf, command: Vec<String>) -> Guest {
        Guest {
            kernel,
            command,
            environment: Vec::new(),
            shares: Vec::new(),
            seen: Vec::new(),
            kernel_arguments: Vec::new(),
            limit: Duration::from_secs(600),
            memory_mib: 2048,
            cpus: std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(8),
            scratch_gib: 16,
        }
    }

    /// Runs it to its end.
    pub fn run(&self, cache: &Cache, output: Output) -> Result<RunResult, String> {
        let folder = RunFolder::make(cache)?;
        self.write_files(&folder)?;
        let console = folder.path("console");
        let log = File::create(&console).map_err(|error| failed(&console, &error))?;
        let mut child = self.start(&folder, log)?;
        let stdout = child.stdout.take();
        let stdout = stdout.map(|pipe| Console::read(pipe, output, std::io::stdout()));
        let stderr = child.stderr.take();
        let stderr = stderr.map(|pipe| Console::read(pipe, output, std::io::stderr()));
        let in_time = self.wait(&mut child)?;
        let until = Instant::now() + LAST_WORDS;
        let said = |console: Option<Console>| console.map(|console| console.end(until));
        let [stdout, stderr] = [stdout, stderr].map(said).map(Option::unwrap_or_default);
        let read = |name: &str| {
            let bytes = std::fs::read(folder.path(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let status = read("status").trim().parse().ok();
        let kernel_log = match status {
            Some(_) => read("kernel.log"),
            None => read("console"),
        };
        Ok(RunResult {
            code: if in_time {
                status.unwrap_or(CODE_DIED)
            } else {
                CODE_TIME
            },
            stdout,
            stderr,
            kernel_log,
        })
    }

    fn write_files(&self, folder: &RunFolder) -> Result<(), String> {
        write(&folder.path("boot.sh"), BOOT)?;
        write(&folder.path("command.sh"), COMMAND)?;
        write(&folder.path("settings"), &self.settings(folder)?)?;
        let words: Vec<String> = self.command.iter().map(|word| quoted(word)).collect();
        let mut line = String::new();
        for (name, value) in &self.environment {
            line.push_str(&format!("export {name}={}\n", quoted(value)));
        }
        line.push_str(&format!("exec {}\n", words.join(" ")));
        write(&folder.path("run"), &line)?;
        let disk = folder.path("scratch");
        let file = File::create(&disk).map_err(|error| failed(&disk, &error))?;
        file.set_len(self.scratch_gib << 30)
            .map_err(|error| failed(&disk, &error))
    }

    /// What both scripts read: variables, and functions that do something with each folder of a kind.
    fn settings(&self, folder: &RunFolder) -> Result<String, String> {
        let variable = |name: &str, otherwise: &str| {
            let value = std::env::var(name).unwrap_or_else(|_| otherwise.into());
            format!("export {name}={}\n", quoted(&value))
        };
        let mut text = variable("PATH", "/usr/bin:/bin");
        text.push_str("PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin\n");
        text.push_str(&variable("HOME", "/"));
        let here =
            std::env::current_dir().map_err(|error| format!("no working folder: {error}"))?;
        text.push_str(&format!("folder={}\n", quoted(&path_text(&here)?)));
        let mut shares = vec![folder.folder().to_path_buf()];
        for share in &self.shares {
            shares.push(std::fs::canonicalize(share).map_err(|error| failed(share, &error))?);
        }
        let mut seen = self.seen.clone();
        seen.push(here);
        let program = self.command.first().map(Path::new);
        let program_folder = program.and_then(Path::parent);
        seen.extend(
            program_folder
                .filter(|folder| folder.is_absolute())
                .map(Path::to_path_buf),
        );
        for (name, mut folders) in [("each_shared", shares), ("each_seen", seen)] {
            // Those above come before those below.
            folders.sort();
            text.push_str(&format!("{name}() {{\n"));
            for folder in &folders {
                text.push_str(&format!("\"$1\" {}\n", quoted(&path_text(folder)?)));
            }
            text.push_str("}\n");
        }
        Ok(text)
    }

    /// Starts the kernel in the folder of the run. It gets no path in its arguments: spaces, commas and
    /// colons have a meaning there.
    fn start(&self, folder: &RunFolder, log: File) -> Result<Child, String> {
        let kernel = &self.kernel;
        let kernel = std::fs::canonicalize(kernel).map_err(|error| failed(kernel, &error))?;
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh"]).arg(kernel);
        command.arg(format!("mem={}M", self.memory_mib));
        command.arg(format!("ncpus={}", self.cpus));
        command.args([
            "seccomp=on",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            "panic=-1",
        ]);
        command.arg("ubda=scratch");
        command.args(["con=null", "con0=null,fd:1", "ssl=null"]);
        command.args(["ssl0=null,fd:3", "ssl1=null,fd:4"]);
        command.args(["uml_dir=./", "umid=guest"]);
        command.args(&self.kernel_arguments);
        command.args(["init=/bin/sh", "--", "-c"]);
        command.arg(first_command(&path_text(folder.folder())?));
        command.env("TMPDIR", self.memory_folder(folder));
        command
            .current_dir(folder.folder())
            .stdin(log)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", self.kernel.display()))
    }

    /// Where the guest's memory is a file: in memory if there is room, otherwise on disk.
    fn memory_folder(&self, folder: &RunFolder) -> PathBuf {
        let in_memory = Path::new("/dev/shm");
        let mut df = Command::new("df");
        df.args(["--output=avail", "-BM"]).arg(in_memory);
        let text = workspace::output(&mut df).unwrap_or_default();
        let free = text.lines().last().unwrap_or_default();
        match free.trim().trim_end_matches('M').parse::<u64>() {
            Ok(free) if free > self.memory_mib => in_memory.to_path_buf(),
            _ => folder.folder().to_path_buf(),
        }
    }

    /// Waits for the guest's end; false if it came to the time limit.
    fn wait(&self, child: &mut Child) -> Result<bool, String> {
        let start = Instant::now();
        let failed = |error: std::io::Error| format!("the guest cannot be waited for: {error}");
        loop {
            if child.try_wait().map_err(failed)?.is_some() {
                return Ok(true);
            }
            if start.elapsed() > self.limit {
                child.kill().map_err(failed)?;
                // The number is the session's until the child has been waited for.
                session::kill(child.id())?;
                child.wait().map_err(failed)?;
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The first process's command, as a word of the kernel's command line: runs boot.sh of a folder. The
/// kernel splits words at spaces but for those in double quotes, of which there can be no other.
fn first_command(folder: &str) -> String {
    let mut escaped = String::new();
    for byte in folder.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' => {
                escaped.push(byte.into());
            }
            _ => escaped.push_str(&format!("\\0{byte:03o}")),
        }
    }
    // Without IFS and globs a variable is one word, also without quotes.
    format!("\"set -f; IFS=; job=$(printf %b '{escaped}'); exec sh $job/boot.sh $job\"")
}

fn path_text(path: &Path) -> Result<String, String> {
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| format!("{}: not a UTF-8 name", path.display()))
}

/// A word for the shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_any_name_is_one_word_to_the_kernel_and_one_to_the_shell() {
        let folder = "/a b/it's \"$HOME\" `x` \\ * %s:,ü-";
        let word = first_command(folder);
        let inner = word.trim_matches('"');
        assert!(!inner.contains('"') && !inner.contains('\n'));
        let line = inner.replace("exec sh $job/boot.sh $job", "printf %s $job");
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), folder);
    }

    #[test]
    fn a_quoted_word_is_one_word_to_the_shell() {
        let word = "it's \"$HOME\" `x` \\ *\n";
        let line = format!("printf %s {}", quoted(word));
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), word);
    }
}
