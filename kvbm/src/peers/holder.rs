//! The holder's side: it leases what its host tier has, and sends what a lease names.
//!
//! A connection has one lease at a time, and goes from one request to the next. So a lease ends
//! with its connection, its time, or a release, whichever comes first, and no two requests of a
//! lease overlap. While blocks are sent they are lent, as to a reader at home.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kvbm_policies::Hints;
use kvbm_tiers::{Checksums, DramRegion, Loan, Memory, Tier, checksum::checksum};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::codec::{FramedRead, LengthDelimitedCodec};

use super::greeting::{Credentials, random};
use super::probes::gap_behind;
use super::protocol::{
    BrokenLink, Hello, Join, LeaseAnswer, LeaseEnd, LeaseRequest, MAX_BLOCKS, MAX_PROBES, Member, Probe,
    ReadEnd, ReadRequest, ToHolder, ToReader, decode, requests, send, shortened,
};
use crate::api::allocation::LentSlot;
use crate::api::lease::Lease;
use crate::metrics::{PeerLeaseEnd, PeerMetrics};
use crate::names::hash::{BlockHash, Chain};
use crate::scheduler::Core;
use crate::sync::Mutex;
use crate::table::RequestInfo;
use crate::task::Class;

/// A reader that connects says who it is within this time.
pub(super) const MAX_GREETING: Duration = Duration::from_secs(10);
/// A reader that asks for nothing is let go after this time.
const MAX_IDLE: Duration = Duration::from_mins(5);
/// Blocks lent under one lock of the table.
const LENT: usize = 32;

/// What a worker gives to others.
pub(super) struct Holder {
    pub(super) core: Arc<Core>,
    pub(super) memory: Arc<DramRegion>,
    pub(super) credentials: Arc<Credentials>,
    pub(super) ttl: Duration,
    pub(super) leased: Arc<LeasedBlocks>,
    pub(super) metrics: PeerMetrics,
}

/// A stream that is cut into requests.
pub(super) type Requests<S> = FramedRead<S, LengthDelimitedCodec>;

/// Lets a reader in: returns who it is. `None`: it only looked.
pub(super) async fn welcome<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    credentials: &Credentials,
) -> Result<(Option<Member>, Requests<S>), BrokenLink> {
    let mut link = FramedRead::new(stream, requests());
    match admit(&mut link, credentials).await {
        Ok(member) => {
            send(link.get_mut(), &ToReader::Welcome(credentials.member.clone())).await?;
            Ok((member, link))
        }
        Err(why) => {
            // It may be gone, and then it need not hear it.
            let _ = send(link.get_mut(), &ToReader::Refused(shortened(&why.to_string()))).await;
            Err(why)
        }
    }
}

async fn admit<S: AsyncRead + AsyncWrite + Unpin>(
    link: &mut Requests<S>,
    credentials: &Credentials,
) -> Result<Option<Member>, BrokenLink> {
    let hello = link.next().await.ok_or(BrokenLink::Unexpected("it is closed"))??;
    let reader = Hello::parse(&hello).map_err(BrokenLink::Refused)?;
    let ours = random().map_err(|error| BrokenLink::Refused(error.to_string()))?;
    send(link.get_mut(), &ToReader::Challenge(credentials.challenge(&reader, ours))).await?;
    let join = link.next().await.ok_or(BrokenLink::Unexpected("it is closed"))??;
    let (proof, member) = match decode(&join)? {
        ToHolder::Join(Join { proof, member }) => (proof, Some(member)),
        ToHolder::Look(proof) => (proof, None),
        _ => return Err(BrokenLink::Unexpected("it asks before it says who it is")),
    };
    credentials.admit(proof.as_ref(), [&reader, &ours], member.as_ref())?;
    Ok(member)
}

/// Blocks that are leased to others, by tenant: never more than a share of the host tier, so that
/// the engine here always has room.
#[derive(Debug)]
pub(super) struct LeasedBlocks {
    most: usize,
    by_tenant: Mutex<HashMap<Option<u32>, usize>>,
}

/// Some of them, until it is dropped.
struct LeasedShare {
    of: Arc<LeasedBlocks>,
    tenant: Option<u32>,
    blocks: usize,
}

impl LeasedBlocks {
    pub(super) fn new(most: usize) -> Self {
        Self { most, by_tenant: Mutex::default() }
    }

    /// How many there are.
    pub(super) fn blocks(&self) -> usize {
        self.by_tenant.lock().values().sum()
    }

    /// `None`: there would be too many.
    fn take(self: &Arc<Self>, tenant: Option<u32>, blocks: usize) -> Option<LeasedShare> {
        let mut by_tenant = self.by_tenant.lock();
        let leased: usize = by_tenant.values().sum();
        if leased + blocks > self.most {
            return None;
        }
        *by_tenant.entry(tenant).or_default() += blocks;
        drop(by_tenant);
        Some(LeasedShare { of: Arc::clone(self), tenant, blocks })
    }
}

impl Drop for LeasedShare {
    fn drop(&mut self) {
        let mut by_tenant = self.of.by_tenant.lock();
        if let Some(leased) = by_tenant.get_mut(&self.tenant) {
            *leased -= self.blocks;
            if *leased == 0 {
                by_tenant.remove(&self.tenant);
            }
        }
    }
}

/// A lease that a reader has.
struct HeldLease {
    lease: Lease,
    chain: Vec<BlockHash>,
    /// Leading blocks that the reader had: the others may be read.
    before: usize,
    until: Instant,
    _share: LeasedShare,
}

/// The answer to a request for a lease, and what it leased.
type Leased = (ToReader, Option<HeldLease>);

impl Holder {
    /// Serves one reader until it leaves.
    pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) {
        let welcomed = timeout(MAX_GREETING, welcome(stream, &self.credentials)).await;
        let (member, link) = match welcomed.unwrap_or(Err(BrokenLink::Late)) {
            Ok((Some(member), link)) => (member, link),
            Ok((None, _)) => return,
            Err(why) => {
                tracing::warn!(%why, "a worker that connected is not let in");
                return self.metrics.refused();
            }
        };
        tracing::debug!(reader = member.name, "a worker reads here");
        let mut session = Session { holder: self, link, held: None };
        if let Err(why) = session.run().await {
            tracing::debug!(reader = member.name, %why, "a reader is gone");
        }
        if session.held.is_some() {
            self.metrics.lease_out_ended(PeerLeaseEnd::Gone);
        }
    }

    async fn lease(&self, request: &LeaseRequest) -> Result<Leased, BrokenLink> {
        let lengths: Vec<_> = request.probes.iter().map(|probe| probe.blocks as usize).collect();
        let is_sound = request.probes.len() <= MAX_PROBES
            && lengths.is_sorted()
            && lengths.iter().all(|&blocks| blocks > 0 && blocks <= MAX_BLOCKS as usize);
        if !is_sound {
            return Err(BrokenLink::Unexpected("a request for a lease that makes no sense"));
        }
        if request.epoch != self.core.table().epoch() {
            return Ok((ToReader::Ended(LeaseEnd::OtherEpoch), None));
        }
        let chain = request.probes.iter().rev().find_map(|probe| self.chain_of(probe));
        let Some(chain) = chain else { return Ok((self.answer(0, Vec::new()), None)) };
        if !request.is_last && gap_behind(chain.len(), &lengths).is_some() {
            return Ok((ToReader::Between(chain.len() as u32), None));
        }
        self.lease_chain(chain, request).await
    }

    fn chain_of(&self, probe: &Probe) -> Option<Vec<BlockHash>> {
        self.core.chain_ending_with(probe.last(), probe.blocks as usize)
    }

    async fn lease_chain(
        &self,
        chain: Vec<BlockHash>,
        request: &LeaseRequest,
    ) -> Result<Leased, BrokenLink> {
        let before = request.held as usize;
        let wanted = chain.len().saturating_sub(before);
        let Some(share) = self.leased.take(request.tenant, wanted) else {
            return Ok((ToReader::Ended(LeaseEnd::Busy), None));
        };
        let hints = Hints { tenant: request.tenant, ..Hints::default() };
        let info = RequestInfo { hints, has_asked: true, ..RequestInfo::default() };
        let lease = self.brought_to_host(self.core.lease(Chain::from(&chain), info)).await;
        let Some(lease) = lease else { return Ok((ToReader::Ended(LeaseEnd::Void), None)) };
        let checksums = self.checksums(&lease, &chain, before);
        let answer = self.answer(before + checksums.len(), checksums);
        let until = Instant::now() + self.ttl;
        Ok((answer, Some(HeldLease { lease, chain, before, until, _share: share })))
    }

    /// A reader reads the host tier: what lies further down comes there first. `None`: a reset came
    /// in between.
    async fn brought_to_host(&self, lease: Lease) -> Option<Lease> {
        if lease.blocks(Tier::Host) >= lease.held().longest() {
            return Some(lease);
        }
        let brought = self.core.transfer(Class::Load, Tier::Host, lease).await;
        brought.ok().map(|brought| brought.lease)
    }

    fn answer(&self, blocks: usize, checksums: Vec<u32>) -> ToReader {
        let checksums = checksums.into_iter().map(u32::to_le_bytes).collect();
        let (epoch, blocks) = (self.core.table().epoch(), blocks as u32);
        ToReader::Leased(LeaseAnswer {
            epoch,
            blocks,
            ttl_ms: self.ttl.as_millis().try_into().unwrap_or(u32::MAX),
            checksums,
        })
    }

    /// Of the leased blocks behind the first `before`, up to the first that is not as it should be.
    fn checksums(&self, lease: &Lease, chain: &[BlockHash], before: usize) -> Vec<u32> {
        let chain = Chain::from(chain);
        let end = lease.blocks(Tier::Host);
        let mut checksums = Vec::with_capacity(end.saturating_sub(before));
        while before + checksums.len() < end {
            let first = before + checksums.len();
            let next = first..end.min(first + LENT);
            let lent = LentSlot::leading(&self.core, Tier::Host, lease, chain, next);
            checksums.extend(lent.loans().iter().map_while(|loan| self.checksum(loan)));
            if before + checksums.len() < end.min(first + LENT) {
                break;
            }
        }
        checksums
    }

    /// `None`: an earlier process left the block, and it has changed.
    fn checksum(&self, loan: &Loan) -> Option<u32> {
        self.memory.verify_loan(loan).ok()?;
        let known = self.memory.checksums().and_then(|known: &Checksums| known.get(loan.slot()));
        // A GPU that copied the block did not sum it.
        known.or_else(|| self.memory.read_loan(loan).map(checksum))
    }
}

/// One reader's connection.
struct Session<'a, S> {
    holder: &'a Holder,
    link: Requests<S>,
    held: Option<HeldLease>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Session<'_, S> {
    async fn run(&mut self) -> Result<(), BrokenLink> {
        loop {
            let until = self.held.as_ref().map(|held| held.until);
            let limit = until.unwrap_or_else(|| Instant::now() + MAX_IDLE);
            let Ok(frame) = timeout_at(limit, self.link.next()).await else {
                if self.held.is_none() {
                    return Ok(());
                }
                self.end(PeerLeaseEnd::Expired);
                continue;
            };
            let Some(frame) = frame.transpose()? else { return Ok(()) };
            match decode(&frame)? {
                ToHolder::Lease(request) => self.lease(&request).await?,
                ToHolder::Read(request) => self.read(request).await?,
                ToHolder::Release(end) => self.end(end.into()),
                ToHolder::Hello(_) | ToHolder::Join(_) | ToHolder::Look(_) => {
                    return Err(BrokenLink::Unexpected("it says again who it is"));
                }
            }
        }
    }

    fn end(&mut self, how: PeerLeaseEnd) {
        if self.held.take().is_some() {
            self.holder.metrics.lease_out_ended(how);
        }
    }

    async fn lease(&mut self, request: &LeaseRequest) -> Result<(), BrokenLink> {
        self.end(PeerLeaseEnd::GivenUp);
        let (answer, held) = self.holder.lease(request).await?;
        self.held = held;
        send(self.link.get_mut(), &answer).await
    }

    async fn read(&mut self, request: ReadRequest) -> Result<(), BrokenLink> {
        let Some(held) = &mut self.held else {
            return send(self.link.get_mut(), &ToReader::Ended(LeaseEnd::Expired)).await;
        };
        let first = request.first as usize;
        let positions = first..first + request.count as usize;
        if positions.start < held.before || positions.end > held.chain.len() {
            return Err(BrokenLink::Unexpected("it asks for blocks that it did not lease"));
        }
        // A transfer that moves keeps its lease.
        held.until = Instant::now() + self.holder.ttl;
        let (until, blocks) = (held.until, positions.len());
        let chain = Chain::from(&held.chain);
        let lent =
            LentSlot::leading(&self.holder.core, Tier::Host, &held.lease, chain, positions);
        if lent.loans().len() < blocks {
            drop(lent);
            self.end(PeerLeaseEnd::Void);
            return send(self.link.get_mut(), &ToReader::Ended(LeaseEnd::Void)).await;
        }
        let stream = self.link.get_mut();
        send(stream, &ToReader::Blocks(request)).await?;
        timeout_at(until, send_blocks(stream, &self.holder.memory, lent.loans()))
            .await
            .unwrap_or(Err(BrokenLink::Late))?;
        self.holder.metrics.sent(blocks as u64);
        Ok(())
    }
}

async fn send_blocks(
    stream: &mut (impl AsyncWrite + Unpin),
    memory: &DramRegion,
    loans: &[Loan],
) -> Result<(), BrokenLink> {
    for loan in loans {
        let block = memory.read_loan(loan);
        stream.write_all(block.ok_or(BrokenLink::Unexpected("a slot of other memory"))?).await?;
    }
    Ok(stream.flush().await?)
}

impl From<ReadEnd> for PeerLeaseEnd {
    fn from(end: ReadEnd) -> Self {
        match end {
            ReadEnd::Whole => Self::Whole,
            ReadEnd::GivenUp => Self::GivenUp,
            ReadEnd::Wrong => Self::Wrong,
        }
    }
}
