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
use super::link::PeerFault;
use super::loading::EngineLoads;
use super::reader::{Pulled, Reader};
use crate::error::{Error, ErrorKind, Result};
use crate::names::hash::Chain;
use crate::table::RequestInfo;

/// The pause before a peer is asked again that answered at once, and had nothing to lease.
const PAUSE: Duration = Duration::from_millis(5);

/// A chain that a peer has, or computes now.
#[derive(Clone, Debug)]
pub struct FollowRequest {
    /// The peer's name.
    pub peer: String,
    /// What the blocks are called.
    pub chain: ChainNames,
    /// The request that wants them.
    pub info: RequestInfo,
    /// How long to wait while nothing comes.
    pub patience: Duration,
}

impl FollowRequest {
    /// For what the peer has by now, and no request that is named.
    pub fn new(peer: &str, chain: impl Into<ChainNames>) -> Self {
        let (info, patience) = (RequestInfo::default(), Duration::ZERO);
        Self { peer: peer.to_owned(), chain: chain.into(), info, patience }
    }
}

/// Longer than any request waits.
const LONGEST: Duration = Duration::from_hours(1 << 20);

/// What has come of a chain, and why the peer gave no further lease of it, if that is the end.
pub(super) struct Followed {
    pub(super) pulled: Pulled,
    refused: Option<Error>,
}

impl Reader {
    /// See [`Peers::follow`](super::Peers::follow).
    pub(super) async fn follow(
        &self,
        asked: FollowRequest,
        cancelled: &CancellationToken,
    ) -> Result<Pulled> {
        let Followed { pulled, refused } = self.follow_in_parts(asked, None, cancelled).await?;
        match refused {
            Some(error) if pulled.copied == 0 => Err(error),
            _ => Ok(pulled),
        }
    }

    /// The same into an engine's slots, if it has any, where that nothing came is no error.
    pub(super) async fn follow_in_parts(
        &self,
        mut asked: FollowRequest,
        mut loads: Option<&mut EngineLoads<'_>>,
        cancelled: &CancellationToken,
    ) -> Result<Followed> {
        // Of what is for ever an end can be named all the same.
        let patience = asked.patience.min(LONGEST);
        let (mut copied, mut refused, mut since) = (0, None, Instant::now());
        loop {
            // What it takes to reach the peer and to bring what lies here is no wait for blocks.
            let left = patience.saturating_sub(since.elapsed());
            let held = loads.as_ref().map_or(0, |loads| loads.held());
            let leasing = self.lease(asked.clone(), left, held);
            let Some(leased) = cancelled.run_until_cancelled(leasing).await else { break };
            let came = match leased {
                Ok(lease) => {
                    (asked.info.has_asked, refused) = (true, None);
                    if loads.as_mut().is_some_and(|loads| loads.begin_again(&lease)) {
                        self.release(lease, Some(&PeerFault::Behind)).await;
                        continue;
                    }
                    let (leased, came) = (lease.blocks(), lease.only_there() > 0);
                    let pulled = match &mut loads {
                        Some(loads) => Box::pin(loads.bring(self, lease, cancelled)).await?,
                        None => self.pull(lease, None, cancelled).await?,
                    };
                    copied += pulled.copied;
                    let is_over = pulled.fault.is_some() || pulled.blocks < leased;
                    if is_over || pulled.blocks == asked.chain.here.len() {
                        return Ok(Followed { pulled: Pulled { copied, ..pulled }, refused: None });
                    }
                    if let Some(loads) = &mut loads {
                        loads.go_on(pulled.lease);
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
        let info = RequestInfo { has_asked: true, ..asked.info };
        let chain = Chain::from(&asked.chain.here);
        let lease = self.checkpoints.lease_with(&self.core, chain, info);
        let (blocks, fault) = (lease.blocks(Tier::Host), refused.as_ref().map(Error::to_string));
        Ok(Followed { pulled: Pulled { lease, blocks, copied, fault }, refused })
    }
}
