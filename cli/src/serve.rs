//! `kvbm serve`, and `--serve` of other commands: metrics, the state and the live page over HTTP.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use clap::Args;
use kvbm::{Manager, Options};
use kvbm_policies::BLOCK_TOKENS;
use kvbm_settings::{Loader, Settings};
use serde::Serialize;

use crate::GlobalOptions;
use crate::engine;
use crate::output::{self, CommandFailure};
use crate::stop::{self, StopSignal};

/// The port if none is named.
const PORT: &str = "6880";

/// Opens the tiers that the settings name and shows what they hold, until it is interrupted. Of a
/// disk tier or a bucket that is kept, that is what `replay --keep` with the same settings left
/// there; an engine shows its own with `DYN_KVBM_METRICS=true`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address, or port of the loopback interface [default: that of the settings, 127.0.0.1:6880]
    #[arg(value_name = "ADDR", value_parser = parse_address)]
    address: Option<SocketAddr>,
}

/// For commands that can be watched.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WatchedCommand {
    /// Serve metrics, the state and a live page at this address, or at this port of the loopback
    /// interface
    #[arg(
        long,
        value_name = "ADDR",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = PORT,
        value_parser = parse_address
    )]
    serve: Option<SocketAddr>,
}

impl WatchedCommand {
    pub(crate) fn apply(self, loader: Loader) -> Loader {
        self.serve.into_iter().fold(loader, serve_at)
    }

    pub(crate) const fn is_on(self) -> bool {
        self.serve.is_some()
    }
}

/// Where it can be looked at.
#[derive(Debug, Serialize)]
struct ServedManager {
    url: String,
}

pub(crate) fn run(args: &ServeArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let settings = global.load(|loader| {
        let loader = loader.set("metrics.enabled", |s| s.metrics.enabled = true);
        args.address.into_iter().fold(loader, serve_at)
    })?;
    let runtime = stop::runtime()?;
    let stop = StopSignal::on_signals(&runtime)?;
    let manager = runtime.block_on(stop.or(open(settings.settings)))??;
    let url = manager.admin().serving_at().map(url).unwrap_or_default();
    if global.json {
        output::print_json(&ServedManager { url })?;
    } else {
        output::print(&url)?;
    }
    runtime.block_on(stop.asked());
    let closing = manager.close(CLOSE);
    if closing.is_complete() {
        return Ok(());
    }
    Err(CommandFailure::unexpected(format!("{} copies did not end", closing.copies_left)))
}

/// The most time that copies under way may take to end.
const CLOSE: Duration = Duration::from_secs(10);

async fn open(settings: Settings) -> kvbm::Result<Manager> {
    let fingerprint = Some(engine::fingerprint(&settings));
    let options =
        Options { block_tokens: u64::from(BLOCK_TOKENS), fingerprint, ..Options::default() };
    Manager::open(settings, options).await
}

/// Says where a command can be watched, if it can.
pub(crate) fn tell(manager: &Manager) {
    if let Some(address) = manager.admin().serving_at() {
        output::tell(&format!("live page at {}", url(address)));
    }
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}/")
}

fn serve_at(loader: Loader, address: SocketAddr) -> Loader {
    loader
        .set("metrics.enabled", |s| s.metrics.enabled = true)
        .set("metrics.host", move |s| s.metrics.host = address.ip())
        .set("metrics.port", move |s| s.metrics.port = address.port())
}

/// `ADDRESS:PORT`, or `PORT` alone for loopback.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix(':').unwrap_or(text).parse().ok();
    let loopback = port.map(|port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    loopback.or_else(|| text.parse().ok()).ok_or_else(|| {
        "valid: a port, or an IP address and a port such as 127.0.0.1:6880".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_means_loopback() {
        for text in ["6880", ":6880", "127.0.0.1:6880"] {
            assert_eq!(parse_address(text).unwrap().to_string(), "127.0.0.1:6880");
        }
        assert_eq!(parse_address("[::1]:1").unwrap().to_string(), "[::1]:1");
        for text in ["", "localhost", "70000", "1.2.3.4"] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }
}
