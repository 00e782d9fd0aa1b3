//! The `kvbm` command.
//!
//! | module | holds |
//! |---|---|
//! | `replay`, `demo`, `plan`, `doctor`, `serve`, `top`, `why`, `peers`, `fsck`, `forget`, `bench` | the subcommands |
//! | [`kvbm_cli::measuring`] | what `bench` times, and how |
//! | `engine` | serves requests through a manager; what replay and demo share |
//! | `pattern` | contents of blocks, generated and checked |
//! | `pace` | requests at the times that a trace gives them |
//! | `serve` | metrics, state and the live page |
//! | `trace` | reads request traces; in the library |
//! | `scratch` | directories and prefixes that last as long as a command |
//! | `listen` | what is logged, and spans for tracers |
//! | `stop` | Ctrl-C |
//! | `output` | what users see: bars, tables and JSON, errors and exit codes |
//!
//! Here are the options that every command takes, and `kvbm config`.
//!
//! Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 a result
//! that must not be, 2 the input, the settings or the system need a change, 130 interrupted.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod bench;
mod demo;
mod doctor;
mod engine;
mod forget;
mod fsck;
mod listen;
mod output;
mod pace;
mod pattern;
mod peers;
mod plan;
mod replay;
mod scratch;
mod serve;
mod stop;
mod top;
mod why;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use kvbm_cli::trace;
use kvbm_settings::{Accepted, Loaded, Loader, Row, SettingsError};
use serde::Serialize;

use crate::output::CommandFailure;

/// A KV block manager for LLM inference: keeps the KV cache of past prompts in device, host, disk
/// and object tiers.
///
/// Settings come from --config or `DYN_KVBM_CONFIG` (TOML), `DYN_KVBM_*` variables and options,
/// each of which overrides the one before.
#[derive(Debug, Parser)]
#[command(name = "kvbm", version, max_term_width = 110)]
struct Cli {
    #[command(flatten)]
    global: GlobalOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show a generated chat moving through all four tiers: no arguments, no network, less than a
    /// minute
    Demo(demo::DemoArgs),
    /// Replay a request trace through real tiers and check every byte that comes back
    Replay(Box<replay::ReplayArgs>),
    /// Predict the hit rate of policies and capacities for a trace, without moving a byte
    Plan(plan::PlanArgs),
    /// Show the effective settings and where each came from
    Config,
    /// Check what this machine offers and what the settings would use
    Doctor(doctor::DoctorArgs),
    /// Serve metrics, the state and a live page of the tiers that the settings name
    Serve(serve::ServeArgs),
    /// Watch a running process in the terminal
    Top(top::TopArgs),
    /// Ask a running process what was found of a request, and why not more
    Why(why::WhyArgs),
    /// Ask the workers that the settings list what they have
    Peers,
    /// Check what processes left on disk, in memory or in a bucket
    Fsck(fsck::FsckArgs),
    /// Destroy the keys of a tenant, while no engine works
    Forget(forget::ForgetArgs),
    /// Measure
    #[command(subcommand)]
    Bench(bench::Bench),
}

impl Command {
    fn run(self, global: &GlobalOptions) -> Result<(), CommandFailure> {
        match self {
            Self::Demo(args) => demo::run(args, global),
            Self::Replay(args) => replay::run(*args, global),
            Self::Plan(args) => plan::run(&args, global),
            Self::Config => show_settings(global),
            Self::Doctor(args) => doctor::run(&args, global),
            Self::Serve(args) => serve::run(&args, global),
            Self::Top(args) => top::run(&args, global),
            Self::Why(args) => why::run(&args, global),
            Self::Peers => peers::run(global),
            Self::Fsck(args) => fsck::run(&args, global),
            Self::Forget(args) => forget::run(&args, global),
            Self::Bench(bench) => bench.run(global),
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = listen::start(&cli.global).and_then(|_sending| cli.command.run(&cli.global));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::tell(&format!("kvbm: {failure}"));
            failure.exit_code()
        }
    }
}

/// What every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct GlobalOptions {
    /// Settings file (TOML), instead of the one that `DYN_KVBM_CONFIG` names
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the result as one JSON object
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Log what happens to standard error; twice for more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl GlobalOptions {
    /// All sources of settings but the command's own options.
    pub(crate) fn loader(&self) -> Result<Loader, SettingsError> {
        let loader = Loader::from_process()?.nixl_plugins(kvbm::installed_nixl_plugins);
        Ok(match &self.config {
            Some(path) => loader.file(path),
            None => loader,
        })
    }

    /// The settings as `adapt` completes them. Says once what was given and has no effect yet.
    pub(crate) fn load(
        &self,
        adapt: impl FnOnce(Loader) -> Loader,
    ) -> Result<Loaded, SettingsError> {
        let loaded = adapt(self.loader()?).load()?;
        loaded.accepted.iter().for_each(|accepted| tracing::warn!("{accepted}"));
        Ok(loaded)
    }

    /// Prints a result: as JSON if that is wanted, else its `text`.
    pub(crate) fn show<T: Serialize>(
        &self,
        result: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), CommandFailure> {
        if self.json { output::print_json(result) } else { output::print(&text(result)) }
    }
}

/// Takes one of these by its name; help and errors list the names.
pub(crate) fn by_name<T: Copy + Send + Sync + 'static>(
    all: impl IntoIterator<Item = (&'static str, T)>,
) -> impl TypedValueParser<Value = T> {
    let all: Vec<_> = all.into_iter().collect();
    PossibleValuesParser::new(all.iter().map(|&(name, _)| name)).try_map(move |given| {
        let named = all.iter().find(|(name, _)| *name == given);
        named.map(|&(_, one)| one).ok_or("no such name")
    })
}

#[derive(Serialize)]
struct EffectiveSettings {
    settings: Vec<Row>,
    /// Recognised and checked, without effect yet.
    accepted: Vec<Accepted>,
}

fn show_settings(global: &GlobalOptions) -> Result<(), CommandFailure> {
    let loaded = global.loader()?.load()?;
    let effective = EffectiveSettings { settings: loaded.rows(), accepted: loaded.accepted };
    global.show(&effective, |effective| {
        let mut table = output::table(&["setting", "value", "from"], usize::MAX);
        for Row { key, value, origin } in &effective.settings {
            table.add_row([key, value, &origin.to_string()]);
        }
        let notes = effective.accepted.iter().map(|accepted| format!("note: {accepted}"));
        std::iter::once(table.trim_fmt()).chain(notes).collect::<Vec<_>>().join("\n")
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
