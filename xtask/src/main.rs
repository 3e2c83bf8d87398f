//! The project's own tasks. `cargo xtask` lists them.
//!
//! Every task is a module with one entry, `run`, that takes the arguments after the task's name
//! and says whether it went well. Output for people goes to standard output, what went wrong to
//! standard error.

#![forbid(unsafe_code)]

mod ci;
mod model;
mod sim;
mod soak;
mod tidy;
mod vm;
mod workspace;

use std::process::ExitCode;

/// What a task's entry looks like: arguments in, an error of one or more lines out.
type Task = fn(&[String]) -> Result<(), String>;

/// Name, entry and one line of help.
const TASKS: &[(&str, Task, &str)] = &[
    (
        "tidy",
        tidy::run,
        "check the rules of the house that no compiler checks",
    ),
    (
        "ci",
        ci::run,
        "run every check and test, as continuous integration does",
    ),
    ("sim", sim::run, "run seeds of the crash simulator: --help"),
    (
        "model",
        model::run,
        "run the models of what threads share: --help",
    ),
    (
        "soak",
        soak::run,
        "run the long forms of the interop tests: [--minutes N]",
    ),
    (
        "vm",
        vm::run,
        "run commands and tests in a guest kernel with ublk, nbd and VDUSE: --help",
    ),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = arguments.split_first() else {
        print_tasks();
        return ExitCode::from(2);
    };
    let Some((_, task, _)) = TASKS.iter().find(|(known, _, _)| known == name) else {
        eprintln!("xtask: no task called '{name}'");
        print_tasks();
        return ExitCode::from(2);
    };
    match task(rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask {name}: {message}");
            ExitCode::FAILURE
        }
    }
}

fn print_tasks() {
    println!("usage: cargo xtask <task> [arguments]");
    for (name, _, help) in TASKS {
        println!("  {name:<8} {help}");
    }
}
