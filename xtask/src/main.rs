//! The project's own tasks. `cargo xtask` lists them.
//!
//! Every task is a module with its `Arguments` and one entry, `run`, which says whether it went well.
//! Output for people goes to standard output, errors to standard error.

#![forbid(unsafe_code)]

mod ci;
mod deb;
mod iotests;
mod model;
mod packages;
mod sim;
mod soak;
mod tidy;
mod vm;
mod workspace;

use std::process::ExitCode;

use clap::Parser;

/// The project's own tasks
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Task {
    /// Check the rules of the house that no compiler checks
    Tidy,
    /// Run every check and test, as continuous integration does
    Ci,
    Sim(sim::Arguments),
    Model(model::Arguments),
    Iotests(iotests::Arguments),
    Deb(deb::Arguments),
    Soak(soak::Arguments),
    #[command(subcommand)]
    Vm(vm::Task),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Tidy => tidy::run(),
        Task::Ci => ci::run(),
        Task::Sim(arguments) => sim::run(&arguments),
        Task::Model(arguments) => model::run(&arguments),
        Task::Iotests(arguments) => iotests::run(&arguments),
        Task::Deb(arguments) => deb::run(&arguments),
        Task::Soak(arguments) => soak::run(&arguments),
        Task::Vm(task) => vm::run(task),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
