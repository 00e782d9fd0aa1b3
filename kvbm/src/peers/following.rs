//! Brings what a peer has of a chain, and what it comes to have meanwhile: a decode worker reads a
//! prompt while a prefill worker computes it.
//!
//! The reader leases as ever what the peer has, and brings it. Then it asks for the next block, and
//! the holder answers once that has landed there. So no worker writes into another's memory, and a
//! reader that is gone leaves nothing behind.

use std::time::Duration;

use kvbm_tiers::Tier;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::chain_names::ChainNames;
use super::link::Patience;
use super::reader::{OnPart, Pulled, Reader};
use crate::error::{Error, ErrorKind, Result};
use crate::names::hash::Chain;
use crate::table::RequestInfo;

/// The pause before a peer is asked again that answered at once, and had nothing to lease.
const PAUSE: Duration = Duration::from_millis(5);

/// What has come of a chain, and why the peer gave no further lease of it, if that is the end.
pub(super) struct Followed {
    pub(super) pulled: Pulled,
    refused: Option<Error>,
}

impl Reader {
    /// See [`Peers::follow`](super::Peers::follow).
    pub(super) async fn follow(
        &self,
        peer: &str,
        names: ChainNames,
        info: RequestInfo,
        patience: Duration,
        cancelled: &CancellationToken,
    ) -> Result<Pulled> {
        let followed = self.follow_in_parts(peer, names, info, patience, None, cancelled);
        let Followed { pulled, refused } = followed.await?;
        match refused {
            Some(error) if pulled.copied == 0 => Err(error),
            _ => Ok(pulled),
        }
    }

    /// The same, where that nothing came is no error.
    pub(super) async fn follow_in_parts(
        &self,
        peer: &str,
        names: ChainNames,
        mut info: RequestInfo,
        patience: Duration,
        mut on_part: OnPart<'_>,
        cancelled: &CancellationToken,
    ) -> Result<Followed> {
        let chain = &names.here;
        let (mut copied, mut refused, mut since) = (0, None, Instant::now());
        loop {
            // What it takes to reach the peer and to bring what lies here is no wait for blocks.
            let wait = Patience { left: patience.saturating_sub(since.elapsed()), whole: patience };
            let leasing = self.lease(peer.to_owned(), names.clone(), info, wait);
            let Some(leased) = cancelled.run_until_cancelled(leasing).await else { break };
            let came = match leased {
                Ok(lease) => {
                    (info.has_asked, refused) = (true, None);
                    let (leased, came) = (lease.blocks(), lease.only_there() > 0);
                    let each: OnPart<'_> = match &mut on_part {
                        Some(on_part) => Some(&mut **on_part),
                        None => None,
                    };
                    let pulled = self.pull(lease, each, cancelled).await?;
                    copied += pulled.copied;
                    let is_over = pulled.fault.is_some() || pulled.blocks < leased;
                    if is_over || pulled.blocks == chain.len() {
                        return Ok(Followed { pulled: Pulled { copied, ..pulled }, refused: None });
                    }
                    if let Some(on_part) = &mut on_part {
                        on_part(pulled.lease);
                    }
                    came
                }
                Err(error) => {
                    let is_full = error.kind() == ErrorKind::Full;
                    refused = Some(error);
                    if !is_full {
                        break;
                    }
                    false
                }
            };
            if came {
                since = Instant::now();
            } else if since.elapsed() >= patience || cancelled.is_cancelled() {
                break;
            } else {
                sleep(PAUSE).await;
            }
        }
        let info = RequestInfo { has_asked: true, ..info };
        let lease = self.checkpoints.lease_with(&self.core, Chain::from(chain), info);
        let (blocks, fault) = (lease.blocks(Tier::Host), refused.as_ref().map(Error::to_string));
        Ok(Followed { pulled: Pulled { lease, blocks, copied, fault }, refused })
    }
}
