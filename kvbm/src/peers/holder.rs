//! The holder's side: it leases what its host tier has, and sends what a lease names.
//!
//! A connection has one lease at a time, and goes from one request to the next. So a lease ends
//! with its connection, its time, or a release, whichever comes first, and no two requests of a
//! lease overlap. While blocks are sent they are lent, as to a reader at home.

mod layers;

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt;
use kvbm_policies::Hints;
use kvbm_tiers::sealed::{HostSeal, KeyId};
use kvbm_tiers::{Loan, Memory, OneSided, SlotId, Tier, checksum::checksum};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::bytes::BytesMut;
use tokio_util::codec::{FramedRead, LengthDelimitedCodec};
use tracing::{Instrument, Span};

use super::book::{OpenAtPeer, PeerBook, PeerUse};
use super::greeting::{Credentials, random};
use super::probes::gap_behind;
use super::protocol::{
    BrokenLink, Hello, LeaseAnswer, LeaseEnd, LeaseRequest, MAX_BLOCKS, MAX_PROBES, Member,
    NamedKey, Probe, ReadEnd, ReadRequest, SlotRun, ToHolder, ToReader, decode, requests, send,
    shortened,
};
use super::slices::HostBytes;
use super::{Serves, nixl, parts, sealed, spans, stream};
use crate::api::allocation::LentSlot;
use crate::api::groups::{CheckpointGroups, CheckpointLeases, NamedCheckpoint, checkpoint_names};
use crate::api::layers::LayeredBlocks;
use crate::api::lease::Lease;
use crate::metrics::{CountedLease, PeerLeaseEnd, PeerMetrics, PeerRefusal};
use crate::names::hash::{BlockHash, Chain};
use crate::scheduler::Core;
use crate::sync::Mutex;
use crate::table::RequestInfo;
use crate::task::Class;
use crate::traces::TraceParent;

/// A reader that connects says who it is within this time.
pub(super) const MAX_GREETING: Duration = Duration::from_secs(10);
/// A reader that asks for nothing is let go after this time.
pub(super) const MAX_IDLE: Duration = Duration::from_mins(5);
/// Blocks lent under one lock of the table.
const LENT: usize = 32;

/// What a worker gives to others.
pub(super) struct Holder {
    pub(super) core: Arc<Core>,
    pub(super) host: HostBytes,
    pub(super) credentials: Arc<Credentials>,
    pub(super) ttl: Duration,
    pub(super) leased: Arc<LeasedBlocks>,
    /// `None`: no worker reads here by NIXL.
    pub(super) nixl: Option<Arc<dyn OneSided>>,
    pub(super) book: Arc<PeerBook>,
    pub(super) metrics: PeerMetrics,
    /// Which cache group's; 0: full attention's.
    pub(super) group: u8,
    /// Blocks that the group looks back over.
    pub(super) window: usize,
    /// Of the holder of full attention: checkpoints of the other groups, and their holders.
    pub(super) checkpoints: Arc<CheckpointGroups>,
    pub(super) others: Vec<Self>,
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
            send(link.get_mut(), &ToReader::Welcome(Box::new(credentials.member.clone()))).await?;
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
    let reader = Hello::parse(&next(link).await?)?;
    let ours = random().map_err(|error| BrokenLink::Refused(error.to_string()))?;
    send(link.get_mut(), &ToReader::Challenge(credentials.challenge(&reader, ours))).await?;
    let (proof, member) = match decode(&next(link).await?)? {
        ToHolder::Join(join) => (join.proof, Some(join.member)),
        ToHolder::Look(proof) => (proof, None),
        _ => return Err(BrokenLink::Unexpected("it asks before it says who it is")),
    };
    credentials.admit([&reader, &ours], proof.as_ref(), member.as_ref())?;
    Ok(member)
}

async fn next<S: AsyncRead + Unpin>(link: &mut Requests<S>) -> Result<BytesMut, BrokenLink> {
    let frame = link.next().await.ok_or(io::ErrorKind::UnexpectedEof);
    Ok(frame.map_err(io::Error::from)??)
}

/// Blocks that leases of others pin: never more than a share of the host tier, so that the engine
/// here has room.
#[derive(Debug)]
pub(super) struct LeasedBlocks {
    most: usize,
    blocks: AtomicUsize,
    /// What checkpoints take, by the blocks that they hang on.
    checkpoints: Mutex<HashMap<BlockHash, Weak<LeasedShare>>>,
}

/// Some of them, until it is dropped.
#[derive(Debug)]
pub(super) struct LeasedShare {
    of: Arc<LeasedBlocks>,
    blocks: usize,
}

impl LeasedBlocks {
    pub(super) fn new(most: usize) -> Self {
        Self { most, blocks: AtomicUsize::new(0), checkpoints: Mutex::default() }
    }

    /// How many there are.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    /// As many of `wanted` as there may be more.
    pub(super) fn take(self: &Arc<Self>, wanted: usize) -> LeasedShare {
        let fits = |leased: usize| wanted.min(self.most.saturating_sub(leased));
        let add = |leased| Some(leased + fits(leased));
        let leased = self.blocks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        LeasedShare { of: Arc::clone(self), blocks: leased.map_or(0, fits) }
    }

    /// Room for a checkpoint of `blocks`, all of it or none: several leases pin the same.
    fn take_checkpoint(self: &Arc<Self>, at: BlockHash, blocks: usize) -> Option<Arc<LeasedShare>> {
        let mut known = self.checkpoints.lock();
        known.retain(|_, share| share.strong_count() > 0);
        let found = known.get(&at).and_then(Weak::upgrade);
        if let Some(share) = found.filter(|share| share.blocks >= blocks) {
            return Some(share);
        }
        let share = Some(Arc::new(self.take(blocks))).filter(|share| share.blocks == blocks)?;
        known.insert(at, Arc::downgrade(&share));
        Some(share)
    }
}

impl Drop for LeasedShare {
    fn drop(&mut self) {
        self.of.blocks.fetch_sub(self.blocks, Ordering::Relaxed);
    }
}

/// A lease that a reader has.
struct HeldLease {
    group: u8,
    lease: Lease,
    /// Keeps the other groups' checkpoints at the end of it.
    _checkpoints: Option<CheckpointLeases>,
    chain: Vec<BlockHash>,
    /// Those of its blocks that may be read: the reader has those before.
    named: Range<usize>,
    until: Instant,
    /// What they are, if they are still being saved.
    layers: Option<Arc<LayeredBlocks>>,
    /// Blocks that were sent.
    sent: usize,
    counted: CountedLease,
    /// What it takes while it lasts.
    _taken: (Vec<Arc<LeasedShare>>, OpenAtPeer),
    span: Span,
}

impl HeldLease {
    fn end(mut self, how: PeerLeaseEnd) {
        self.counted.end = how;
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        spans::served(&self.span, self.sent, self.counted.end);
    }
}

/// A block that a lease names.
struct NamedSlot {
    slot: SlotId,
    /// Its checksum, or the life of its slot in the ranks.
    name: u32,
    /// What it is sealed with, if it is.
    key: KeyId,
}

/// The answer to a request for a lease, and what it leased.
type Leased = (ToReader, Option<HeldLease>);

impl Holder {
    /// Serves one reader until it leaves, once its stream is opened. `greeted` is called once it is
    /// let in.
    pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        opened: impl Future<Output = Result<S, BrokenLink>>,
        greeted: impl FnOnce(),
    ) {
        let welcomed = async { welcome(opened.await?, &self.credentials).await };
        let welcomed = timeout(MAX_GREETING, welcomed).await;
        let (member, link) = match welcomed.unwrap_or(Err(BrokenLink::Late)) {
            Ok((Some(member), link)) => (member, link),
            Ok((None, _)) => return,
            // A probe of a port, most often.
            Err(why @ (BrokenLink::Closed(_) | BrokenLink::Late)) => {
                return tracing::debug!(%why, "a connection ends before it says whose it is");
            }
            Err(why) => {
                tracing::warn!(%why, "a worker that connected is not let in");
                return self.metrics.refused((&why).into());
            }
        };
        greeted();
        tracing::debug!(reader = member.name, "a worker reads here");
        let reader = &member.name;
        let _open = self.book.open(reader, PeerUse::Reader, 1);
        let mut session =
            Session { holder: self, reader, link, held: None, parent: None, asked: None };
        if let Err(why) = session.run().await {
            tracing::debug!(reader = member.name, %why, "a reader is gone");
        }
    }

    async fn lease(&self, reader: &str, request: &LeaseRequest) -> Result<Leased, BrokenLink> {
        let lengths: Vec<_> = request.probes.iter().map(|probe| probe.blocks as usize).collect();
        let is_sound = request.probes.len() <= MAX_PROBES
            && lengths.is_sorted()
            && lengths.iter().all(|&blocks| blocks > 0 && blocks <= MAX_BLOCKS as usize);
        if !is_sound {
            return Err(BrokenLink::Unexpected("a request for a lease that makes no sense"));
        }
        if request.epoch != self.core.table().epoch_digest() {
            return Ok(self.refusal(LeaseEnd::OtherEpoch));
        }
        if self.group > 0 {
            return self.lease_checkpoint(reader, request).await;
        }
        let is_held =
            |probe: &&Probe| self.core.table().is_held_at(probe.last(), probe.blocks as usize);
        let found = request.probes.iter().rev().find(is_held);
        if found.is_none_or(|found| found.blocks <= request.held)
            && let Some((saved, blocks)) = self.in_layers(request)
        {
            if !request.form.is_last && gap_behind(blocks, &lengths).is_some() {
                return Ok((ToReader::Between(blocks as u32), None));
            }
            return Ok(self.lease_layers(reader, saved, blocks, request));
        }
        let Some(found) = found else { return Ok(self.nothing(request)) };
        if !request.form.is_last && gap_behind(found.blocks as usize, &lengths).is_some() {
            return Ok((ToReader::Between(found.blocks), None));
        }
        match self.core.chain_ending_with(found.last(), found.blocks as usize) {
            Some(chain) => Ok(self.lease_chain(reader, chain, request).await),
            // It left just now.
            None => Ok(self.nothing(request)),
        }
    }

    /// Waits for the shortest prefix that is asked for, or its first layers, if the reader does.
    async fn await_first(&self, request: &LeaseRequest) {
        let Some(first) = request.probes.first() else { return };
        if request.wait_ms == 0 {
            return;
        }
        let limit = Duration::from_millis(request.wait_ms.into()).min(self.ttl);
        let is_told = || {
            let is_held = {
                let table = self.core.table();
                table.epoch_digest() != request.epoch
                    || table.is_held_at(first.last(), first.blocks as usize)
            };
            is_held || self.in_layers(request).is_some()
        };
        let _ = timeout(limit, self.core.until_landed(is_told)).await;
    }

    /// It has nothing of the chain.
    fn nothing(&self, request: &LeaseRequest) -> Leased {
        (ToReader::Leased(self.answer(0, &[], request, false)), None)
    }

    /// The holder of a cache group's blocks.
    fn of(&self, group: u8) -> Result<&Self, BrokenLink> {
        let Some(place) = usize::from(group).checked_sub(1) else { return Ok(self) };
        self.others.get(place).ok_or(BrokenLink::Unexpected("there is no such cache group"))
    }

    /// Its names say all of it: those of a checkpoint's blocks come from the block that it hangs on.
    async fn lease_checkpoint(
        &self,
        reader: &str,
        request: &LeaseRequest,
    ) -> Result<Leased, BrokenLink> {
        let Some(last) = request.probes.last() else { return Ok(self.nothing(request)) };
        if last.blocks as usize > self.window {
            return Err(BrokenLink::Unexpected("a checkpoint of more blocks than its window has"));
        }
        let names = checkpoint_names(last.last(), last.blocks as usize);
        Ok(match self.leased.take_checkpoint(last.last(), names.len()) {
            Some(share) => self.lease_named(reader, names, share, request).await,
            None => self.refusal(LeaseEnd::Busy),
        })
    }

    /// Room for the checkpoints at the end of a chain, which its lease keeps. `None`: there is none.
    fn shares_of_checkpoints(&self, chain: &[BlockHash]) -> Option<Vec<Arc<LeasedShare>>> {
        if chain.is_empty() {
            return Some(Vec::new());
        }
        let kept = self.checkpoints.checkpoints_at(chain, chain.len());
        kept.map(|NamedCheckpoint { group, hash, names }| {
            self.of(group).ok()?.leased.take_checkpoint(hash, names.len())
        })
        .collect()
    }

    fn chain<'a>(&self, hashes: &'a [BlockHash]) -> Chain<'a> {
        Chain::of_group(self.group, hashes)
    }

    fn refusal(&self, why: LeaseEnd) -> Leased {
        self.metrics.lease_out().end = why.into();
        (ToReader::Ended(why), None)
    }

    async fn lease_chain(
        &self,
        reader: &str,
        chain: Vec<BlockHash>,
        request: &LeaseRequest,
    ) -> Leased {
        // A lease pins the whole chain, whatever the reader has of it.
        let share = Arc::new(self.leased.take(chain.len()));
        if share.blocks <= request.held as usize {
            return self.refusal(LeaseEnd::Busy);
        }
        self.lease_named(reader, chain, share, request).await
    }

    /// As much of a chain as there is room for.
    async fn lease_named(
        &self,
        reader: &str,
        mut chain: Vec<BlockHash>,
        share: Arc<LeasedShare>,
        request: &LeaseRequest,
    ) -> Leased {
        let (before, is_cut) = (request.held as usize, share.blocks < chain.len());
        chain.truncate(share.blocks);
        let hints = Hints { tenant: request.tenant, ..Hints::default() };
        let info = RequestInfo { hints, has_asked: true, ..RequestInfo::default() };
        let seats = self.host.seats();
        if self.host.memory().is_none() && seats.is_none() {
            return self.refusal(LeaseEnd::RankAway);
        }
        let mut lease = self.checkpoints.lease_with(&self.core, self.chain(&chain), info);
        let checkpoints = lease.take_checkpoints();
        let kept = checkpoints.as_ref().map_or(0, |checkpoints| checkpoints.blocks);
        let Some(mut shares) = self.shares_of_checkpoints(&chain[..kept]) else {
            return self.refusal(LeaseEnd::Busy);
        };
        let lease = self.brought_to_host(lease).await;
        let Some(lease) = lease else { return self.refusal(LeaseEnd::Void) };
        let mut blocks = self.named_blocks(&lease, &chain, before).await;
        let keys = match self.host.sealed() {
            Some(seal) => Some(keys_of(seal, &mut blocks).await),
            None => None,
        };
        let named = before..before + blocks.len();
        let mut answer = self.answer(named.end, &blocks, request, is_cut);
        answer.keys = keys;
        answer.seats = seats.unwrap_or_default();
        if let Some(checkpoints) = &checkpoints {
            // Not what has left since.
            let usable = Some(checkpoints.blocks).filter(|&usable| usable <= named.end);
            answer.usable = usable.unwrap_or_default() as u32;
        }
        if is_cut {
            self.metrics.cut();
        }
        let until = Instant::now() + self.ttl;
        let (counted, span) = (self.metrics.lease_out(), Span::current());
        let open = self.book.open(reader, PeerUse::LeasedOut, share.blocks);
        shares.push(share);
        let held = HeldLease {
            group: self.group,
            lease,
            _checkpoints: checkpoints,
            chain,
            named,
            until,
            layers: None,
            sent: 0,
            counted,
            _taken: (shares, open),
            span,
        };
        (ToReader::Leased(answer), Some(held))
    }

    /// A reader reads the host tier: what lies further down comes there first. No request here waits
    /// for that, so it comes as a prefetch, behind what engines wait for and only while queues have
    /// room: a miss costs a reader less than a delay costs here. `None`: a reset came in between.
    async fn brought_to_host(&self, lease: Lease) -> Option<Lease> {
        if lease.blocks(Tier::Host) >= lease.held().longest() {
            return Some(lease);
        }
        let brought = self.core.transfer(Class::Prefetch, Tier::Host, lease).await;
        brought.ok().map(|brought| brought.lease)
    }

    fn answer(
        &self,
        blocks: usize,
        named: &[NamedSlot],
        request: &LeaseRequest,
        is_cut: bool,
    ) -> LeaseAnswer {
        let asked = if request.form.wants_slots { named } else { &[] };
        let (epoch, forgotten) = {
            let table = self.core.table();
            (table.epoch_digest(), table.naming().epoch.forgotten)
        };
        LeaseAnswer {
            epoch,
            blocks: blocks as u32,
            ttl_ms: self.ttl.as_millis().try_into().unwrap_or(u32::MAX),
            checksums: named.iter().map(|block| block.name.to_le_bytes()).collect(),
            slots: SlotRun::all(asked.iter().map(|block| block.slot)),
            is_cut,
            seats: Vec::new(),
            usable: blocks as u32,
            keys: None,
            layers: 0,
            forgotten,
        }
    }

    /// Slots and checksums of the leased blocks behind the first `before`, up to the first that is
    /// not as it should be.
    async fn named_blocks(
        &self,
        lease: &Lease,
        chain: &[BlockHash],
        before: usize,
    ) -> Vec<NamedSlot> {
        let chain = self.chain(chain);
        let mut named = Vec::new();
        for part in parts(before..lease.blocks(Tier::Host), LENT) {
            let lent = LentSlot::leading(&self.core, Tier::Host, lease, chain, part.clone());
            let found = lent.loans().len();
            let known: Vec<_> = lent.loans().iter().map_while(|loan| self.named(loan)).collect();
            drop(lent);
            if known.len() < found {
                self.core.lent_is_corrupt(Tier::Host, chain, part.start + known.len());
            }
            let is_whole = known.len() == part.len();
            named.extend(known);
            if !is_whole {
                break;
            }
            // Sums take a while, and others have this thread too.
            tokio::task::yield_now().await;
        }
        named
    }

    /// `None`: the block has changed.
    fn named(&self, loan: &Loan) -> Option<NamedSlot> {
        let key = match self.host.sealed() {
            Some(_) => HostSeal::key_of(self.host.memory()?.read_loan(loan)?)?,
            None => KeyId::default(),
        };
        Some(NamedSlot { slot: loan.slot(), name: self.name(loan)?, key })
    }

    /// A block's checksum, or the life of its slot in the ranks. `None`: an earlier process left the
    /// block, and it has changed.
    fn name(&self, loan: &Loan) -> Option<u32> {
        let Some(memory) = self.host.memory() else { return Some(loan.generation()) };
        memory.verify_loan(loan).ok()?;
        let known = memory.checksums()?;
        // A GPU that copied the block did not sum it.
        known.get(loan.slot()).or_else(|| {
            let crc = checksum(memory.read_loan(loan)?);
            known.record(loan.slot(), crc);
            Some(crc)
        })
    }

    /// A reader got wrong bytes. If they are wrong here, no one else gets them. Ranks look at what
    /// they give.
    async fn examine(&self, held: &HeldLease) {
        let Some(memory) = self.host.memory() else { return };
        let chain = self.chain(&held.chain);
        for part in parts(held.named.clone(), LENT) {
            let lent = LentSlot::leading(&self.core, Tier::Host, &held.lease, chain, part.clone());
            let is_sound = |loan: &Loan| {
                let expected = memory.checksums().and_then(|known| known.get(loan.slot()));
                memory.read_loan(loan).map(checksum) == expected
            };
            let wrong = lent.loans().iter().position(|loan| !is_sound(loan));
            drop(lent);
            if let Some(wrong) = wrong {
                tracing::error!("a block in the host tier has changed: it is dropped");
                return self.core.lent_is_corrupt(Tier::Host, chain, part.start + wrong);
            }
            tokio::task::yield_now().await;
        }
    }
}

/// What opens these blocks; those from the first on whose key cannot be had are left out.
async fn keys_of(seal: &Arc<HostSeal>, blocks: &mut Vec<NamedSlot>) -> Vec<NamedKey> {
    let needed = sealed::first_uses(blocks.iter().map(|block| block.key));
    let keys = sealed::named_keys(seal, &needed).await;
    if let Some((first, _)) = needed.get(keys.len()) {
        blocks.truncate(*first);
    }
    keys
}

impl Serves for Holder {
    async fn serve(&self, stream: TcpStream, greeted: impl FnOnce() + Send) {
        let opened = stream::accept(stream, self.credentials.proofs.tls.as_ref());
        self.serve(opened, greeted).await;
    }

    fn is_full(&self) {
        self.metrics.refused(PeerRefusal::Full);
    }
}

/// One reader's connection.
struct Session<'a, S> {
    holder: &'a Holder,
    reader: &'a str,
    link: Requests<S>,
    held: Option<HeldLease>,
    /// What the next lease is a part of.
    parent: Option<TraceParent>,
    /// The span of a lease of which more is asked for.
    asked: Option<Span>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Session<'_, S> {
    async fn run(&mut self) -> Result<(), BrokenLink> {
        loop {
            let until = self.held.as_ref().map(|held| held.until);
            let limit = until.unwrap_or_else(|| Instant::now() + MAX_IDLE);
            let Ok(frame) = timeout_at(limit, self.link.next()).await else {
                match self.held.take() {
                    Some(held) => held.end(PeerLeaseEnd::Expired),
                    None => return Ok(()),
                }
                continue;
            };
            let Some(frame) = frame.transpose()? else { return Ok(()) };
            match decode(&frame)? {
                ToHolder::Lease(request) => self.lease(&request).await?,
                ToHolder::Read(request) => self.read(request).await?,
                ToHolder::Layers(request) => self.layers(request).await?,
                ToHolder::Release(end) => self.release(end).await,
                ToHolder::Trace(parent) => self.parent = Some(parent),
                ToHolder::Nixl(group, asked) => {
                    let holder = self.holder.of(group)?;
                    let answer = nixl::answer(holder.nixl.as_ref(), &asked).await;
                    self.send(&answer).await?;
                }
                ToHolder::Slices(..) | ToHolder::SliceSums(_) => {
                    return Err(BrokenLink::Unexpected("it asks a leader for a rank's slices"));
                }
                ToHolder::Hello(_) | ToHolder::Join(_) | ToHolder::Look(_) => {
                    return Err(BrokenLink::Unexpected("it says again who it is"));
                }
            }
        }
    }

    /// A reader that takes nothing for the time of a lease is gone.
    async fn send(&mut self, message: &ToReader) -> Result<(), BrokenLink> {
        let sent = timeout(self.holder.ttl, send(self.link.get_mut(), message)).await;
        sent.unwrap_or(Err(BrokenLink::Late))
    }

    async fn release(&mut self, end: ReadEnd) {
        let Some(held) = self.held.take() else { return };
        if end == ReadEnd::Wrong
            && let Ok(holder) = self.holder.of(held.group)
        {
            holder.examine(&held).await;
        }
        held.end(end.into());
    }

    async fn lease(&mut self, request: &LeaseRequest) -> Result<(), BrokenLink> {
        self.release(ReadEnd::GivenUp).await;
        tokio::select! {
            biased;
            () = self.holder.await_first(request) => {}
            said = next(&mut self.link) => {
                // It is gone, or takes no answer.
                said?;
                return Err(BrokenLink::Unexpected("it asks again before it is answered"));
            }
        }
        let span = self.asked.take();
        let span = span.unwrap_or_else(|| spans::of_serving(self.reader, self.parent.take()));
        let (answer, held) = self
            .holder
            .of(request.group)?
            .lease(self.reader, request)
            .instrument(span.clone())
            .await?;
        spans::answered(&span, &answer);
        self.asked = matches!(answer, ToReader::Between(_)).then_some(span);
        self.held = held;
        self.send(&answer).await
    }

    async fn read(&mut self, request: ReadRequest) -> Result<(), BrokenLink> {
        let Some(held) = &mut self.held else {
            return self.send(&ToReader::Ended(LeaseEnd::Expired)).await;
        };
        let first = request.first as usize;
        let wanted = first..first + request.count as usize;
        if wanted.is_empty() || wanted.start < held.named.start || wanted.end > held.named.end {
            return Err(BrokenLink::Unexpected("it asks for blocks that it did not lease"));
        }
        // A transfer that moves keeps its lease.
        held.until = Instant::now() + self.holder.ttl;
        let sent = timeout_at(held.until, self.send_blocks(request, wanted)).await;
        sent.unwrap_or(Err(BrokenLink::Late))
    }

    async fn send_blocks(
        &mut self,
        request: ReadRequest,
        wanted: Range<usize>,
    ) -> Result<(), BrokenLink> {
        let Some(held) = &mut self.held else { return Ok(()) };
        let holder = self.holder.of(held.group)?;
        let Holder { core, host, .. } = holder;
        let memory = host.memory().ok_or(BrokenLink::Unexpected("its ranks have its blocks"))?;
        let mut header = Some(ToReader::Blocks(request));
        for part in parts(wanted, LENT) {
            let chain = holder.chain(&held.chain);
            let lent = LentSlot::leading(core, Tier::Host, &held.lease, chain, part.clone());
            if lent.loans().len() < part.len() {
                drop(lent);
                return self.end_void(header.is_some()).await;
            }
            let stream = self.link.get_mut();
            if let Some(header) = header.take() {
                send(stream, &header).await?;
            }
            for loan in lent.loans() {
                let block = memory.read_loan(loan);
                stream
                    .write_all(block.ok_or(BrokenLink::Unexpected("a slot of other memory"))?)
                    .await?;
            }
            held.sent += part.len();
            self.holder.metrics.sent(part.len() as u64);
        }
        Ok(self.link.get_mut().flush().await?)
    }

    /// The leased blocks are gone. In the midst of blocks there is no room for words.
    async fn end_void(&mut self, can_tell: bool) -> Result<(), BrokenLink> {
        if let Some(held) = self.held.take() {
            held.end(PeerLeaseEnd::Void);
        }
        if can_tell {
            send(self.link.get_mut(), &ToReader::Ended(LeaseEnd::Void)).await
        } else {
            Err(BrokenLink::Unexpected("the blocks that it reads are gone"))
        }
    }
}
