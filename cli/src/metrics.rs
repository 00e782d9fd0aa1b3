//! `/metrics` for Prometheus, while a command runs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing};
use prometheus::{Registry, TextEncoder};
use tokio::net::TcpListener;
use tokio::runtime::{Handle, Runtime};

use crate::failure::Failure;

/// An address that is ours: what reads it waits until it is [served](Self::serve).
#[derive(Debug)]
pub(crate) struct Endpoint(TcpListener);

impl Endpoint {
    /// Takes the address.
    pub(crate) fn bind(runtime: &Runtime, address: SocketAddr) -> Result<Self, Failure> {
        runtime.block_on(TcpListener::bind(address)).map(Self).map_err(|error| {
            Failure::unusable(format!(
                "cannot serve metrics at {address}: {error}; choose another address with --metrics (metrics.host \
                 and metrics.port, DYN_KVBM_METRICS_HOST and DYN_KVBM_METRICS_PORT)"
            ))
        })
    }

    /// Serves `registry` until the runtime ends.
    pub(crate) fn serve(self, runtime: &Handle, registry: Registry) {
        if let Ok(address) = self.0.local_addr() {
            tracing::info!("metrics at http://{address}/metrics");
        }
        let app = Router::new().route("/metrics", routing::get(move || async move { exposition(&registry) }));
        runtime.spawn(async move {
            if let Err(error) = axum::serve(self.0, app).await {
                tracing::warn!(%error, "the metrics endpoint ended");
            }
        });
    }
}

fn exposition(registry: &Registry) -> Response {
    match TextEncoder::new().encode_to_string(&registry.gather()) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// `ADDRESS:PORT`, or `PORT` alone for loopback.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix(':').unwrap_or(text).parse().ok();
    let loopback = port.map(|port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    loopback
        .or_else(|| text.parse().ok())
        .ok_or_else(|| "valid: a port, or an IP address and a port such as 127.0.0.1:6880".to_owned())
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
