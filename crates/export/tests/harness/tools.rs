//! Waiting, running programs, and bytes to recognise.

use std::process::Command;
use std::time::Duration;

/// Waits until something holds, ten seconds at most.
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never happened: {what}");
}

/// Runs a program that must be there and must succeed; returns what it printed.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout")
        .arg("120")
        .arg(program)
        .args(arguments)
        .output()
        .expect("timeout (coreutils) is installed");
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

/// Bytes that tell where they belong.
pub fn pattern(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64)
        .map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8)
        .collect()
}
