//! The processes of a session: those that a user-mode kernel has started.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long killed processes may take to go.
const LIMIT: Duration = Duration::from_secs(10);

/// Kills the processes of a session until there is none but its leader, which is the caller's child.
///
/// # Errors
/// When one of them does not go.
pub fn kill(leader: u32) -> Result<(), String> {
    let start = Instant::now();
    loop {
        let members = members(leader);
        if members.is_empty() {
            return Ok(());
        }
        if start.elapsed() > LIMIT {
            return Err(format!("processes {members:?} do not end when killed"));
        }
        let mut kill = Command::new("sh");
        kill.args(["-c", "kill -s KILL \"$@\"", "sh"]);
        kill.args(members.iter().map(u32::to_string));
        // One that has just gone is no error.
        let _ = kill.stderr(Stdio::null()).status();
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The processes of a session but its leader. Zombies do not count.
fn members(leader: u32) -> Vec<u32> {
    let Ok(folders) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let process = |path: &Path| {
        let number: u32 = path.file_name()?.to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(path.join("stat")).ok()?;
        let (state, session) = state_and_session(&stat)?;
        (session == leader && number != leader && state != 'Z').then_some(number)
    };
    let paths = folders.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter_map(|path| process(&path)).collect()
}

/// Of a line of `/proc/PID/stat`. The name before them, in parentheses, can have anything in it.
fn state_and_session(stat: &str) -> Option<(char, u32)> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(2)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_processes_of_a_session_are_killed_and_no_other() {
        // The leader starts two that start others, and waits.
        let script = "(sleep 1000 & sleep 1000) & sleep 1000 & echo; wait";
        let mut leader = Command::new("setsid")
            .args(["sh", "-c", script])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while members(leader.id()).len() < 3 {
            assert!(start.elapsed() < LIMIT, "{:?}", members(leader.id()));
            std::thread::sleep(Duration::from_millis(10));
        }
        leader.kill().unwrap();
        kill(leader.id()).unwrap();
        assert_eq!(members(leader.id()), Vec::<u32>::new());
        leader.wait().unwrap();
    }

    #[test]
    fn a_name_with_parentheses_is_a_name() {
        let stat = "12 (a) b (c) S 1 12 9 0 -1";
        assert_eq!(state_and_session(stat), Some(('S', 9)));
        assert_eq!(state_and_session("12"), None);
    }
}
