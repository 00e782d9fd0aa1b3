//! The reader's side: it leases at a peer, takes the blocks into slots of the host tier here,
//! and compares each with the checksum that came with the lease.
//!
//! The limit of a lease counts from before it was asked for, here as there: what arrives behind it
//! is given up, and so is everything behind a block that is not what its checksum says.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{DramRegion, Memory, Tier};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::discovery::PeerList;
use super::greeting::Credentials;
use super::holder::MAX_GREETING;
use super::probes::{gap_behind, lengths};
use super::protocol::{
    BrokenLink, LeaseAnswer, LeaseEnd, LeaseRequest, MAX_BLOCKS, Member, Probe, ReadEnd,
    ReadRequest, ToHolder, ToReader, receive, send,
};
use crate::api::filling::FillingSlots;
use crate::api::lease::Lease;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{PeerLeaseEnd, PeerMetrics};
use crate::names::hash::{BlockHash, Chain};
use crate::scheduler::Core;
use crate::sync::Mutex;
use crate::table::RequestInfo;
use crate::task::Class;

/// A peer that does not take a connection within this time is away.
const MAX_CONNECT: Duration = Duration::from_secs(3);
/// What a request for blocks asks for. One is on its way while the blocks of another arrive.
const READ_BYTES: usize = 4 << 20;
/// Connections to a peer that wait for their next use.
const MAX_WAITING: usize = 4;

/// What a connection runs over.
pub(super) trait PeerStream: AsyncRead + AsyncWrite + Unpin + Send + Sync {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send + Sync> PeerStream for S {}

/// Reads what others hold.
pub(super) struct Reader {
    pub(super) core: Arc<Core>,
    pub(super) memory: Arc<DramRegion>,
    pub(super) credentials: Arc<Credentials>,
    pub(super) known: tokio::sync::watch::Receiver<Arc<PeerList>>,
    /// Connections that wait for their next use, by peer.
    pub(super) waiting: Mutex<HashMap<String, Vec<PeerLink>>>,
    pub(super) metrics: PeerMetrics,
}

/// A connection to a holder that has let us in.
pub(super) struct PeerLink {
    stream: Box<dyn PeerStream>,
    holder: Member,
}

/// The right to read the leading blocks of a chain at a peer, for a while. It ends when it is
/// dropped.
#[must_use = "dropping a lease ends it"]
pub struct PeerLease {
    link: PeerLink,
    peer: String,
    chain: Vec<BlockHash>,
    info: RequestInfo,
    /// Leading blocks that are here: the peer named those behind.
    before: usize,
    checksums: Vec<u32>,
    ttl: Duration,
    /// It was asked for then.
    asked: Instant,
}

impl fmt::Debug for PeerLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (peer, blocks) = (&self.peer, self.blocks());
        f.debug_struct("PeerLease").field("peer", peer).field("blocks", &blocks).finish_non_exhaustive()
    }
}

impl PeerLease {
    /// The peer that gave it.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Leading blocks of the chain that are here or at the peer.
    pub const fn blocks(&self) -> usize {
        self.before + self.checksums.len()
    }

    /// How many of them only the peer has.
    pub const fn only_there(&self) -> usize {
        self.checksums.len()
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
    /// The others that the peer was to give: they found no room, or are missing for this reason.
    pub missing: Option<String>,
}

/// Why a pull brought less than it should.
#[derive(Debug, thiserror::Error)]
enum PullFault {
    #[error(transparent)]
    Link(#[from] BrokenLink),
    #[error("a block is not what its checksum says")]
    Wrong,
    #[error("the lease ended at the peer: {0:?}")]
    Ended(LeaseEnd),
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
        let answer = self.ask(&mut link, &chain, info).await;
        let (before, answer) = answer.map_err(|why| {
            self.metrics.lease_in_ended(PeerLeaseEnd::Gone);
            Error::caused(ErrorKind::Unavailable, format!("the peer {peer} gives no lease"), why)
        })?;
        let checksums = answer.checksums.iter().map(|crc| u32::from_le_bytes(*crc)).collect();
        let ttl = Duration::from_millis(answer.ttl_ms.into());
        Ok(PeerLease { link, peer, chain, info, before, checksums, ttl, asked })
    }

    /// Two messages if all or none of the chain is there, else four.
    async fn ask(
        &self,
        link: &mut PeerLink,
        chain: &[BlockHash],
        info: RequestInfo,
    ) -> Result<(usize, LeaseAnswer), PullFault> {
        let (before, epoch) = (self.core.matches(Chain::from(chain)).longest(), self.epoch());
        let mut asked = lengths(before, chain.len().min(MAX_BLOCKS as usize));
        let mut is_last = false;
        loop {
            let probes = asked.iter().map(|&blocks| Probe::new(blocks, chain[blocks - 1]));
            let request = LeaseRequest {
                epoch,
                tenant: info.hints.tenant,
                held: before as u32,
                probes: probes.collect(),
                is_last,
            };
            send(&mut link.stream, &ToHolder::Lease(request)).await?;
            match timeout(MAX_GREETING, receive(&mut link.stream)).await {
                Err(_) => return Err(BrokenLink::Late.into()),
                Ok(answer) => match answer? {
                    ToReader::Leased(answer) => return Ok((before, self.checked(answer, before, chain.len())?)),
                    ToReader::Ended(why) => return Err(PullFault::Ended(why)),
                    ToReader::Between(found) if !is_last => {
                        let found = found as usize;
                        let most = gap_behind(found, &asked);
                        let most = most.filter(|_| found >= before && asked.contains(&found));
                        let most = most.ok_or(BrokenLink::Unexpected("it found what nobody asked"))?;
                        // The one that was found again, in case nothing more is there.
                        asked = std::iter::once(found).chain(lengths(found, most).into_iter().skip(1)).collect();
                        is_last = true;
                    }
                    _ => return Err(BrokenLink::Unexpected("no answer to a request for a lease").into()),
                },
            }
        }
    }

    fn checked(&self, answer: LeaseAnswer, before: usize, wanted: usize) -> Result<LeaseAnswer, PullFault> {
        let blocks = answer.blocks as usize;
        if answer.epoch != self.epoch() {
            return Err(PullFault::Ended(LeaseEnd::OtherEpoch));
        }
        if blocks > wanted || answer.checksums.len() != blocks.saturating_sub(before) {
            return Err(BrokenLink::Unexpected("a lease of other blocks than were asked for").into());
        }
        Ok(answer)
    }

    fn epoch(&self) -> u64 {
        self.core.table().epoch()
    }

    /// A connection to a peer: one that waits, or a new one.
    async fn link(&self, peer: &str) -> Result<PeerLink> {
        let waiting = self.waiting.lock().get_mut(peer).and_then(Vec::pop);
        if let Some(link) = waiting {
            return Ok(link);
        }
        let address = self.known.borrow().get(peer).map(|known| known.address.clone());
        let address = address.ok_or_else(|| Error::invalid(format!("no peer {peer} is known")))?;
        let away = |why: BrokenLink| {
            let message = format!("cannot read at the peer {peer} ({address})");
            Error::caused(ErrorKind::Unavailable, message, why)
        };
        let stream = timeout(MAX_CONNECT, TcpStream::connect(&address)).await;
        let stream = stream.map_err(|_| away(BrokenLink::Late))?.map_err(|error| away(error.into()))?;
        stream.set_nodelay(true).map_err(|error| away(error.into()))?;
        self.greet(Box::new(stream)).await.map_err(away)
    }

    pub(super) async fn greet(&self, mut stream: Box<dyn PeerStream>) -> Result<PeerLink, BrokenLink> {
        let greeted = timeout(MAX_GREETING, self.credentials.greet(&mut stream)).await;
        let holder = greeted.map_err(|_| BrokenLink::Late)??;
        Ok(PeerLink { stream, holder })
    }

    /// Brings what a lease holds into the host tier.
    pub(super) async fn pull(&self, lease: PeerLease) -> Result<Pulled> {
        let started = Instant::now();
        let chain = Chain::from(&lease.chain).prefix(lease.blocks());
        self.bring_ours(chain, lease.info).await?;
        let mut filling = FillingSlots::take(&self.core, &self.memory, chain, lease.info)?;
        let before = filling.kept();
        let mut fault = None;
        if self.are_removals_noted(&filling).await {
            fault = lease.link.fill(..)
        }
        todo!()
    }
}
