//! Stands in for the server if the crate is built without the feature `serve`.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use kvbm_settings::Settings;
use prometheus::Registry;

use crate::error::{Error, Result};
use crate::observe::state::ObservedState;

/// There is none.
pub(crate) struct Listener(Infallible);

/// There is none.
pub(crate) struct Server(Infallible);

impl Listener {
    /// A server that is asked for is an error.
    pub(crate) fn bind(settings: &Settings) -> Result<Option<Self>> {
        if !settings.metrics.enabled {
            return Ok(None);
        }
        let message = "metrics are to be served (metrics.enabled, DYN_KVBM_METRICS), which this program was built \
             without: build kvbm with its feature serve";
        Err(Error::unavailable(message))
    }
}

impl Server {
    #[expect(clippy::needless_pass_by_value, reason = "as the server takes them")]
    pub(crate) fn start(listener: Listener, _: Arc<ObservedState>, _: Registry) -> Result<Self> {
        match listener.0 {}
    }

    pub(crate) fn address(&self) -> SocketAddr {
        match self.0 {}
    }
}
