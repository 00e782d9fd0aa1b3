//! What peers show of themselves, to people.

use std::time::Duration;

use kvbm_settings::Settings;
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::discovery::PeerSource;
use super::greeting::{PeerProofs, look};
use super::proofs_of;
use super::protocol::{BrokenLink, Member};
use super::stream::connect;
use crate::error::Result;
use crate::names::fingerprint::Fingerprint;

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
    /// What its blocks depend on besides tokens.
    pub fingerprint: Fingerprint,
}

impl From<Member> for PeerOffer {
    fn from(Member { name, incarnation, block_bytes, fingerprint, .. }: Member) -> Self {
        Self { name, incarnation, block_bytes, fingerprint }
    }
}

/// Asks all peers that the settings list who they are. It needs a runtime with time and I/O.
///
/// # Errors
/// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): the settings name no list that can be.
/// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable): a secret or a certificate cannot be
/// read.
pub async fn look_at_peers(settings: &Settings) -> Result<Vec<PeerReport>> {
    let proofs = proofs_of(&settings.peers)?;
    let watch = PeerSource::of(&settings.peers)?.watch(&Handle::current())?;
    let mut peers = watch.peers();
    if peers.borrow().is_empty() {
        // It stays empty then.
        let _ = timeout(MAX_LIST, peers.changed()).await;
    }
    let listed: Vec<_> = peers
        .borrow()
        .iter()
        .map(|(name, address)| (name.to_owned(), address.to_owned()))
        .collect();
    let asked = listed.into_iter().map(|(name, address)| report(name, address, &proofs));
    Ok(futures::future::join_all(asked).await)
}

async fn report(name: String, address: String, proofs: &PeerProofs) -> PeerReport {
    let asked = async {
        let mut stream = connect(&address, proofs).await?;
        look(&mut stream, proofs.secret.as_ref()).await
    };
    match timeout(MAX_ANSWER, asked).await.unwrap_or(Err(BrokenLink::Late)) {
        Ok(member) => PeerReport { name, address, offer: Some(member.into()), problem: None },
        Err(why) => PeerReport { name, address, offer: None, problem: Some(why.to_string()) },
    }
}
