//! What peers show of themselves, to people.

use std::time::Duration;

use kvbm_settings::Settings;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::greeting::{PeerSecret, look};
use super::protocol::{BrokenLink, Member};
use super::{secret_of, source};
use crate::error::Result;

/// A list that comes from elsewhere is there within this time, or taken for empty.
const MAX_LIST: Duration = Duration::from_secs(3);
/// A peer answers within this time, or is taken for away.
const MAX_ANSWER: Duration = Duration::from_secs(3);

/// A peer on the list.
#[derive(Debug, Serialize)]
pub struct PeerReport {
    /// Its name there.
    pub name: String,
    /// `host:port`.
    pub address: String,
    /// What it has; `None`: see `problem`.
    pub offer: Option<PeerOffer>,
    /// Why it cannot be read.
    pub problem: Option<String>,
}

/// What a peer has.
#[derive(Debug, Serialize)]
pub struct PeerOffer {
    /// Its own name.
    pub name: String,
    /// Random, and another after each start.
    pub incarnation: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Of its fingerprint.
    pub model: String,
    /// Of its fingerprint.
    pub weights: String,
    /// Of its fingerprint.
    pub dtype: String,
    /// Engine and version.
    pub engine: String,
    /// The short form of its fingerprint: peers with the same one can read each other.
    pub fingerprint: String,
}

impl PeerOffer {
    fn of(member: Member) -> Self {
        let fingerprint = member.fingerprint.to_string();
        let its = member.fingerprint;
        Self {
            name: member.name,
            incarnation: member.incarnation,
            block_bytes: member.block_bytes,
            block_tokens: its.block_tokens,
            model: its.model,
            weights: its.weights,
            dtype: its.dtype,
            engine: format!("{} {}", its.engine, its.engine_version),
            fingerprint,
        }
    }
}

/// Asks all peers that the settings list who they are. It needs a runtime with time and I/O.
///
/// # Errors
/// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): the settings name no list that can be.
/// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable): the secret cannot be read.
pub async fn look_at_peers(settings: &Settings) -> Result<Vec<PeerReport>> {
    let secret = secret_of(&settings.peers)?;
    let watch = source(&settings.peers).watch(&Handle::current())?;
    let mut peers = watch.peers();
    if peers.borrow().is_empty() {
        // It stays empty then.
        let _ = timeout(MAX_LIST, peers.changed()).await;
    }
    let listed: Vec<_> =
        peers.borrow().iter().map(|(name, address)| (name.to_owned(), address.to_owned())).collect();
    let asked = listed.into_iter().map(|(name, address)| report(name, address, secret.as_ref()));
    Ok(futures::future::join_all(asked).await)
}

async fn report(name: String, address: String, secret: Option<&PeerSecret>) -> PeerReport {
    let asked = async {
        let mut stream = TcpStream::connect(&address).await?;
        look(&mut stream, secret).await
    };
    match timeout(MAX_ANSWER, asked).await.unwrap_or(Err(BrokenLink::Late)) {
        Ok(member) => {
            PeerReport { name, address, offer: Some(PeerOffer::of(member)), problem: None }
        }
        Err(why) => PeerReport { name, address, offer: None, problem: Some(why.to_string()) },
    }
}
