//! The options that every command takes, and the settings that they lead to.

use std::path::PathBuf;

use clap::Args;
use kvbm_settings::{Loaded, Loader, SettingsError};

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
}
