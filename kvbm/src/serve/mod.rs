//! What a manager reports of itself, over HTTP: for Prometheus, for programs, and a page for
//! people.
//!
//! | module | holds |
//! |---|---|
//! | `router` | the endpoints |
//! | `access` | who may read: by which name and token, how many at a time, and for how long |
//!
//! A thread of its own answers one request after another: it never takes more than one core, and
//! locks for one tier at a time. The page is embedded, so that it works without a network.

mod access;
mod router;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;

use kvbm_settings::Settings;
use kvbm_tiers::clock;
use prometheus::Registry;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use self::access::{BearerToken, KnownHosts};
use self::router::PageView;
use crate::error::{Error, ErrorKind, Result};
use crate::observe::state::ObservedState;

pub use self::router::TIER_COLORS;

/// An address that is ours: connections wait until it is [served](Server::start).
#[derive(Debug)]
pub(crate) struct Listener {
    socket: TcpListener,
    address: SocketAddr,
    token: Option<BearerToken>,
    hosts: Option<KnownHosts>,
}

impl Listener {
    /// Takes the address, before tiers are opened, since that takes long. `None`: nothing is to be
    /// served.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the address is taken or not this machine's, or the token cannot
    /// be read.
    pub(crate) fn bind(settings: &Settings) -> Result<Option<Self>> {
        // The error names a wrong setting; else 0.0.0.0 without a token would be bound for a
        // moment.
        settings.validate().map_err(|error| Error::invalid(error.to_string()))?;
        let metrics = &settings.metrics;
        if !metrics.enabled {
            return Ok(None);
        }
        let (token, hosts) = (BearerToken::of(metrics)?, KnownHosts::of(metrics));
        let address = SocketAddr::new(metrics.host, metrics.port);
        let bound = TcpListener::bind(address).and_then(|socket| {
            socket.set_nonblocking(true)?;
            let address = socket.local_addr()?;
            Ok(Self { socket, address, token, hosts })
        });
        bound.map(Some).map_err(|error| {
            let message = format!(
                "cannot serve metrics at {address}; choose another address with metrics.host and metrics.port \
                 (DYN_KVBM_METRICS_HOST and DYN_KVBM_METRICS_PORT; 0 takes any free port)"
            );
            Error::caused(ErrorKind::Unavailable, message, error)
        })
    }
}

/// Answers requests until it is dropped, and finishes open answers within a second then.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves what is `observed`, and what `registry` counts.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the system refuses a thread.
    pub(crate) fn start(
        listener: Listener,
        observed: Arc<ObservedState>,
        registry: Registry,
    ) -> Result<Self> {
        let Listener { socket, address, token, hosts } = listener;
        let refused = |error| Error::caused(ErrorKind::Unavailable, "cannot serve metrics", error);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(refused)?;
        let socket =
            entered(&runtime, || tokio::net::TcpListener::from_std(socket)).map_err(refused)?;
        let app = router::router(PageView { observed, registry }, token, hosts);
        let (stop, stopped) = oneshot::channel();
        let serve = move || runtime.block_on(access::serve(socket, app, stopped));
        let thread = clock::spawn("kvbm-serve", serve).map_err(refused)?;
        tracing::info!("metrics at http://{address}/metrics, and a page at http://{address}/");
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }
}

fn entered<T>(runtime: &Runtime, work: impl FnOnce() -> T) -> T {
    let _entered = runtime.enter();
    work()
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
