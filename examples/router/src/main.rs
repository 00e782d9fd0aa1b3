//! The router as a program.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use kvbm_router::{RouterOptions, router};
use tokio::net::TcpListener;
use url::Url;

/// A router in front of engines that prefill and engines that decode
#[derive(Debug, Parser)]
struct Cli {
    /// Where it listens. It does not ask clients who they are: leave it on loopback, or behind what does
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// An engine that computes prompts for others; once for each
    #[arg(long, value_name = "URL")]
    prefill: Vec<Url>,
    /// An engine that answers; once for each
    #[arg(long, value_name = "URL", required = true)]
    decode: Vec<Url>,
    /// Requests at a time; one more is answered with 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_requests: usize,
    /// Seconds that a prefill worker may take before another one is asked
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    prefill_limit: u64,
    /// Seconds that an engine may say nothing before its answer is given up; of one that is not streamed, all of them
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    silence: u64,
    /// Milliseconds that a hand-over takes however short the prompt is
    #[arg(long, value_name = "MS", default_value_t = 10)]
    hand_over_ms: u32,
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let cli = Cli::parse();
    let options = RouterOptions {
        prefill: cli.prefill,
        decode: cli.decode,
        max_requests: cli.max_requests,
        prefill_limit: Duration::from_secs(cli.prefill_limit),
        silence: Duration::from_secs(cli.silence),
        hand_over: f64::from(cli.hand_over_ms) / 1e3,
    };
    match serve(cli.listen, &options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(listen = %cli.listen, "the router cannot serve: {error}");
            ExitCode::from(2)
        }
    }
}

async fn serve(
    listen: SocketAddr,
    options: &RouterOptions,
) -> Result<(), Box<dyn std::error::Error>> {
    let router = router(options)?;
    let listener = TcpListener::bind(listen).await?;
    tracing::info!(listen = %listener.local_addr()?, "serving");
    let stopped = async { _ = tokio::signal::ctrl_c().await };
    Ok(axum::serve(listener, router).with_graceful_shutdown(stopped).await?)
}
