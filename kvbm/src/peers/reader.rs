//! The reader's side: it leases at a peer what the tiers here lack, takes the blocks into slots of
//! the host tier, and compares each with the checksum that came with the lease.
//!
//! Nothing else writes these slots meanwhile, and nobody sees them before: a peer that sends wrong
//! bytes, dies or does not answer costs a miss of what is missing, and time.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{DramRegion, Tier};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::discovery::PeerList;
use super::greeting::Credentials;
use super::link::{NamedBlocks, PeerFault, PeerLink, Wanted};
use super::protocol::{BrokenLink, LeaseEnd, ReadEnd};
use crate::api::filling::FillingSlots;
use crate::api::lease::Lease;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{PeerLeaseEnd, PeerMetrics};
use crate::names::hash::{BlockHash, Chain};
use crate::scheduler::Core;
use crate::sync::Mutex;
use crate::table::RequestInfo;
use crate::task::Class;

/// Connections to a peer that wait for their next use.
const MAX_WAITING: usize = 4;

/// Reads what others hold.
pub(super) struct Reader {
    pub(super) core: Arc<Core>,
    pub(super) memory: Arc<DramRegion>,
    pub(super) credentials: Arc<Credentials>,
    pub(super) known: watch::Receiver<Arc<PeerList>>,
    /// Connections that wait for their next use, by peer.
    pub(super) waiting: Mutex<HashMap<String, Vec<PeerLink>>>,
    /// A holder answers within this time.
    pub(super) limit: Duration,
    pub(super) metrics: PeerMetrics,
}

/// The right to read the leading blocks of a chain at a peer, for a while. It ends when it is
/// dropped.
#[must_use = "dropping a lease ends it"]
pub struct PeerLease {
    pub(super) link: PeerLink,
    pub(super) peer: String,
    pub(super) chain: Vec<BlockHash>,
    pub(super) info: RequestInfo,
    pub(super) named: NamedBlocks,
    /// It was asked for then.
    pub(super) asked: Instant,
}

impl fmt::Debug for PeerLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerLease")
            .field("peer", &self.peer)
            .field("blocks", &self.blocks())
            .finish_non_exhaustive()
    }
}

impl PeerLease {
    /// The peer that gave it.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Leading blocks of the chain that are here or at the peer.
    pub const fn blocks(&self) -> usize {
        self.named.before + self.named.checksums.len()
    }

    /// How many of them only the peer has.
    pub const fn only_there(&self) -> usize {
        self.named.checksums.len()
    }
}

/// How a load from a peer ended. Counts are in blocks.
#[derive(Debug)]
pub struct Pulled {
    /// Holds as much of the chain as the tiers have now.
    pub lease: Lease,
    /// Leading blocks of the chain that the host tier has now.
    pub blocks: usize,
    /// Brought from the peer by this load.
    pub copied: usize,
    /// Why the peer did not give the others, if that is why they are missing: else they found no
    /// room.
    pub fault: Option<String>,
}

impl Reader {
    /// Leases at a peer what the tiers here lack of a chain.
    pub(super) async fn lease(
        &self,
        peer: String,
        chain: Vec<BlockHash>,
        info: RequestInfo,
    ) -> Result<PeerLease> {
        let asked = Instant::now();
        let mut link = self.link(&peer).await?;
        let before = self.core.matches(Chain::from(&chain)).longest();
        let (epoch, tenant) = (self.core.table().epoch(), info.hints.tenant);
        let wanted = Wanted { chain: &chain, before, epoch, tenant, limit: self.limit };
        match link.lease(&wanted).await {
            Ok(named) => Ok(PeerLease { link, peer, chain, info, named, asked }),
            Err(fault) => {
                self.metrics.lease_in_ended(end_of(&fault));
                let message = format!("the peer {peer} gives no lease: {fault}");
                // It answered, so the connection is as good as before.
                if matches!(fault, PeerFault::Ended(_)) {
                    self.keep(peer, link);
                }
                Err(Error::unavailable(message))
            }
        }
    }

    /// A connection to a peer: one that waits, or a new one.
    async fn link(&self, peer: &str) -> Result<PeerLink> {
        if let Some(link) = self.waiting.lock().get_mut(peer).and_then(Vec::pop) {
            return Ok(link);
        }
        let address = self.known.borrow().get(peer).map(str::to_owned);
        let address = address.ok_or_else(|| Error::invalid(format!("no peer {peer} is known")))?;
        PeerLink::connect(&address, &self.credentials).await.map_err(|why| {
            let message = format!("cannot read at the peer {peer} ({address})");
            Error::caused(ErrorKind::Unavailable, message, why)
        })
    }

    fn keep(&self, peer: String, link: PeerLink) {
        let mut waiting = self.waiting.lock();
        let links = waiting.entry(peer).or_default();
        if links.len() < MAX_WAITING {
            links.push(link);
        }
    }

    /// Brings what a lease names into the host tier.
    pub(super) async fn pull(&self, lease: PeerLease) -> Result<Pulled> {
        let PeerLease { mut link, peer, chain, info, named, asked } = lease;
        let blocks = named.before + named.checksums.len();
        let chain = Chain::from(&chain).prefix(blocks);
        self.bring_ours(chain, info).await?;
        let mut filling = FillingSlots::take(&self.core, &self.memory, chain, info)?;
        let before = filling.kept();
        let read = if asked.elapsed() > named.ttl {
            Err(PeerFault::Ended(LeaseEnd::Expired))
        } else if filling.left() > 0 && !self.are_removals_noted().await {
            Ok(())
        } else {
            link.read(&named, &mut filling).await
        };
        let copied = filling.kept() - before;
        let published = filling.publish();
        let fault = read.err();
        self.metrics.pulled(copied as u64, asked.elapsed());
        self.metrics.lease_in_ended(fault.as_ref().map_or(PeerLeaseEnd::Whole, end_of));
        self.release(peer, link, fault.as_ref()).await;
        let told = published.ok_or_else(Error::closed)?.await?;
        let fault = fault.map(|fault| fault.to_string());
        Ok(Pulled { lease: told.lease, blocks: told.blocks, copied, fault })
    }

    /// What a lower tier here has need not come from a peer.
    async fn bring_ours(&self, chain: Chain<'_>, info: RequestInfo) -> Result<()> {
        let lease = self.core.lease(chain, RequestInfo { has_asked: true, ..info });
        if lease.blocks(Tier::Host) < lease.held().longest() {
            self.core.transfer(Class::Load, Tier::Host, lease).await?;
        }
        Ok(())
    }

    /// As for a backend that writes a slot: see `Journal::after_removals`.
    async fn are_removals_noted(&self) -> bool {
        let (told, noted) = oneshot::channel();
        self.core.after_removals(Tier::Host, move || _ = told.send(()));
        noted.await.is_ok()
    }

    /// Ends a lease at its holder, who hears how; the connection waits for its next use, if nothing
    /// is left in it.
    async fn release(&self, peer: String, mut link: PeerLink, fault: Option<&PeerFault>) {
        let end = match fault {
            None => ReadEnd::Whole,
            Some(PeerFault::Ended(_)) => ReadEnd::GivenUp,
            // Blocks are still on their way: the next answer would be taken for another.
            Some(PeerFault::Wrong) => {
                let _ = link.release(ReadEnd::Wrong).await;
                return;
            }
            Some(PeerFault::Link(_)) => return,
        };
        if link.release(end).await.is_ok() {
            self.keep(peer, link);
        }
    }
}

fn end_of(fault: &PeerFault) -> PeerLeaseEnd {
    match fault {
        PeerFault::Wrong => PeerLeaseEnd::Wrong,
        PeerFault::Ended(LeaseEnd::Expired) | PeerFault::Link(BrokenLink::Late) => {
            PeerLeaseEnd::Expired
        }
        PeerFault::Ended(LeaseEnd::Busy) => PeerLeaseEnd::Busy,
        PeerFault::Ended(LeaseEnd::Void | LeaseEnd::OtherEpoch) => PeerLeaseEnd::Void,
        PeerFault::Link(_) => PeerLeaseEnd::Gone,
    }
}
