//! A list of peers in etcd.
//!
//! | module | holds |
//! |---|---|
//! | `reader` | keeps the list: reads all of it, then follows what changes |
//! | `entries` | what keys say of peers |
//! | `announcer` | keeps this worker's entry, under a lease |
//! | `gateway` | asks etcd: its members in turn, as a user, within limits |
//! | `http` | sends a request by HTTP |
//! | `messages` | what is asked and answered |
//! | `retry` | the pauses between attempts, and what is said of them |
//!
//! A worker's key is `kvbm/<namespace>/peers/<name>`, and its value is `{"address": "host:port"}`.
//! A lease keeps it as long as the worker lives, and a time to live longer.
//!
//! etcd is asked through its JSON gateway, which etcd 3.4 and later have at `/v3`. The crate
//! `etcd-client` speaks gRPC, but building it takes `tonic` and an installed `protoc`, by which its
//! build script compiles the protocol (0.21 still does). The gateway takes no more than the HTTP
//! client that reads objects.
//!
//! Behind `https` the system's certificates count, and those of the CA that signs the workers'. An etcd
//! that asks for a certificate is shown the worker's.

mod announcer;
mod entries;
mod gateway;
mod http;
mod messages;
mod reader;
mod retry;
#[cfg(test)]
mod tests;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use self::announcer::Announcer;
use self::gateway::Gateway;
use self::http::Http;
use self::reader::Reader;
use super::EtcdSource;
use super::address::{MAX_NAME, PeerAddress, PeerList, is_name, quoted};
use crate::error::{Error, Result};

const TTL: RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_hours(1);

/// Keeps `list` as etcd says.
pub(super) fn watch(
    source: &EtcdSource,
    list: watch::Sender<Arc<PeerList>>,
) -> Result<impl Future<Output = ()> + Send + use<>> {
    let reader = Reader::new(gateway(source)?, prefix(&source.namespace)?, list);
    Ok(reader.run())
}

/// Announces `own` until the sender of `stopped` is gone, then takes that back.
pub(super) fn announce(
    source: &EtcdSource,
    own: &PeerAddress,
    stopped: oneshot::Receiver<()>,
) -> Result<impl Future<Output = ()> + Send + use<>> {
    let announcer = Announcer::new(gateway(source)?, &prefix(&source.namespace)?, own, source.ttl);
    Ok(announcer.run(stopped))
}

fn gateway(source: &EtcdSource) -> Result<Gateway<Http>> {
    if !TTL.contains(&source.ttl) {
        let message = format!("a peer's time to live in etcd is 2 s to 1 h, not {:?}", source.ttl);
        return Err(Error::invalid(message));
    }
    Gateway::new(source, Http::new(source.tls.as_ref())?)
}

/// What the keys of a namespace begin with. No namespace contains a `/`: else its keys could be
/// those of another.
fn prefix(namespace: &str) -> Result<String> {
    if !is_name(namespace, "") {
        let message = format!(
            "{} is no namespace of peers; one has 1 to {MAX_NAME} letters, digits, '-', '_' and '.'",
            quoted(namespace)
        );
        return Err(Error::invalid(message));
    }
    Ok(format!("kvbm/{namespace}/peers/"))
}
