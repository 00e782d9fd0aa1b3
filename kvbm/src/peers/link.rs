//! A reader's connection to a holder: it asks for a lease, and takes the blocks that it names.

mod layers;

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::ranks::PeerSeat;
use kvbm_tiers::sealed::{HostSeal, OtherSeal};
use kvbm_tiers::{CopyError, CopyErrorKind, PeerMemory, SlotId};
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use self::layers::NamedLayers;
use super::arriving::{Arriving, ConvertedSlots, OpenedSlots, ReadableByNixl};
use super::book::OpenAtPeer;
use super::chain_names::PeerChain;
use super::conversion::Conversion;
use super::greeting::Credentials;
use super::nixl::{HolderReads, ReadByNixl};
use super::protocol::{
    BrokenLink, LeaseAnswer, LeaseEnd, LeaseForm, LeaseRequest, MAX_BLOCKS, MAX_WAIT_MS, Member,
    Probe, ReadEnd, ReadRequest, SlotRun, ToHolder, ToReader, receive, send,
};
use super::sealed::{self, Intake, NOT_CONVERTED};
use super::stream::{PeerStream, connect};
use super::{parts, probes};
use crate::api::filling::FillingSlots;
use crate::metrics::PeerWay;
use crate::names::epoch::EpochDigest;
use crate::names::hash::BlockHash;
use crate::table::EpochNames;
use crate::traces::TraceParent;

/// What a request for blocks asks for. Tests have small blocks.
const READ_BYTES: usize = if cfg!(test) { 2 << 10 } else { 4 << 20 };
/// Requests for blocks that are on their way: one, while the blocks of another arrive.
const READS: usize = 2;

/// A connection to a holder that has let us in.
pub(super) struct PeerLink {
    pub(super) stream: Box<dyn PeerStream>,
    pub(super) holder: Member,
    /// How its blocks become ours, if they are others.
    pub(super) conversion: Option<Arc<Conversion>>,
    /// Numbers that were too large for the type that they have here, not counted yet.
    pub(super) saturated: u64,
    /// The holder's host tier, if that is a neighbour's.
    pub(super) memory: Option<Arc<PeerMemory>>,
    /// Reads of the holder's host tier by NIXL, if both sides have it.
    pub(super) nixl: Option<Arc<HolderReads>>,
    /// Blocks come by NIXL, if not from a neighbour's memory, or not at all.
    pub(super) needs_nixl: bool,
    /// In the book, if it is there.
    pub(super) open: Option<OpenAtPeer>,
    /// An answer may be on its way.
    pub(super) is_asked: bool,
}

/// What a reader wants of a chain.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) chain: &'a [BlockHash],
    pub(super) block_tokens: u64,
    /// What its blocks are called where they have another number of tokens.
    pub(super) there: Option<&'a PeerChain>,
    /// The cache group whose chain it is.
    pub(super) group: u8,
    /// Leading blocks that it has.
    pub(super) before: usize,
    pub(super) epoch: EpochDigest,
    pub(super) naming: EpochNames,
    pub(super) tenant: Option<u32>,
    /// How long the holder may wait for the first of them, if it has none yet.
    pub(super) wait: Patience,
    /// How long it waits for blocks, at most.
    pub(super) limit: Duration,
    /// What the holder's part is to be a part of.
    pub(super) trace: Option<TraceParent>,
    /// For blocks that lie sealed there. `None`: no key is given.
    pub(super) seal: Option<&'a HostSeal>,
}

/// How long something is waited for that comes bit by bit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Patience {
    /// From now on, for the next bit.
    pub(super) left: Duration,
    /// From each bit to the next.
    pub(super) whole: Duration,
}

/// What a lease names: the blocks behind the first `before`, by their checksums, or with ranks by the
/// lives of their slots. It lasts for `ttl` from each request for blocks on.
pub(super) struct NamedBlocks {
    pub(super) before: usize,
    pub(super) checksums: Vec<u32>,
    /// In place of checksums, if they are still being saved there.
    pub(super) layers: Option<NamedLayers>,
    /// Where they lie in the holder's memory.
    pub(super) slots: Vec<SlotId>,
    /// It was asked for then.
    pub(super) asked: Instant,
    pub(super) ttl: Duration,
    /// The peer has more, but no more room for leases.
    pub(super) is_cut: bool,
    /// Where its ranks are.
    pub(super) seats: Vec<PeerSeat>,
    /// What opens them, if they come sealed.
    pub(super) seal: Option<OtherSeal>,
    /// The bits in which their names differ there.
    pub(super) renamed: u128,
}

impl NamedBlocks {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.layers.map_or(self.checksums.len(), |layers| layers.blocks)
    }
}

/// Why a peer gave less than it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum PeerFault {
    #[error(transparent)]
    Link(#[from] BrokenLink),
    #[error("a block is not what its checksum says")]
    Wrong,
    #[error("an encrypted block: {0}")]
    Seal(#[from] CopyError),
    #[error("the GPU here does not copy its blocks: {0}")]
    Gpu(CopyError),
    #[error("copies from its memory do not end")]
    Stuck,
    #[error("its blocks are encrypted, and {0}")]
    NoKey(String),
    #[error("blocks before those that it named have left here meanwhile")]
    Behind,
    #[error("the index of the host tier does not know yet what left it")]
    NoIndex,
    #[error("blocks before those that came are still on their way from elsewhere")]
    Awaited,
    #[error("it was cancelled")]
    Cancelled,
    #[error("the next layer of its blocks does not come in time")]
    Stalled,
    #[error("NIXL: {0}")]
    Nixl(String),
    #[error("ranks: {0}")]
    Ranks(String),
    #[error(
        "its blocks have {0} tokens, and {1} here: ask with the names that the prompt has in blocks \
         of {0} (ChainNames::in_blocks_of)"
    )]
    OtherTokens(u64, u64),
    #[error("{0}")]
    Ended(LeaseEnd),
}

impl PeerFault {
    /// It is required, and was there when the blocks were leased.
    pub(super) fn nixl_is_gone() -> Self {
        Self::Nixl("it has failed before".to_owned())
    }

    /// Once a lease is over, its slots may hold other blocks: what is read from a peer's memory then is
    /// late, not damaged.
    pub(super) fn expired_if_over(self, until: Instant) -> Self {
        match self {
            Self::Wrong if Instant::now() >= until => Self::Ended(LeaseEnd::Expired),
            fault => fault,
        }
    }

    /// Whether the peer, or the way to it, is why.
    pub(super) const fn is_of_peer(&self) -> bool {
        matches!(
            self,
            Self::Link(_) | Self::Nixl(_) | Self::Ended(_) | Self::Ranks(_) | Self::NoKey(_)
        ) || self.is_wrong()
    }

    /// Whether a block came that is not what it should be.
    pub(super) const fn is_wrong(&self) -> bool {
        match self {
            Self::Wrong => true,
            Self::Seal(error) => matches!(error.kind(), CopyErrorKind::Corrupt),
            _ => false,
        }
    }
}

impl From<std::io::Error> for PeerFault {
    fn from(error: std::io::Error) -> Self {
        Self::Link(error.into())
    }
}

impl PeerLink {
    pub(super) async fn connect(
        address: &str,
        credentials: &Credentials,
    ) -> Result<Self, BrokenLink> {
        Self::over(connect(address, &credentials.proofs).await?, credentials).await
    }

    pub(super) async fn over(
        mut stream: Box<dyn PeerStream>,
        credentials: &Credentials,
    ) -> Result<Self, BrokenLink> {
        let holder = credentials.greet(&mut stream).await?;
        let conversion = Conversion::between(&credentials.member, &holder).map(Arc::new);
        Ok(Self { conversion, ..Self::to(holder, stream) })
    }

    /// To a holder of blocks as they are here.
    pub(super) const fn to(holder: Member, stream: Box<dyn PeerStream>) -> Self {
        Self {
            stream,
            holder,
            conversion: None,
            saturated: 0,
            memory: None,
            nixl: None,
            needs_nixl: false,
            open: None,
            is_asked: false,
        }
    }

    /// Reads by NIXL, unless they have failed.
    pub(super) fn reads(&self) -> Option<&Arc<HolderReads>> {
        self.nixl.as_ref().filter(|reads| !reads.is_over())
    }

    /// Leading blocks of ours that as many of the holder's make.
    pub(super) fn whole_here(&self, there: usize) -> usize {
        self.conversion.as_ref().map_or(there, |conversion| conversion.whole_here(there))
    }

    /// What is wanted in blocks of the holder's.
    fn as_there<'a>(&self, wanted: &Wanted<'a>) -> Result<Wanted<'a>, PeerFault> {
        let (here, there) = (wanted.block_tokens, self.holder.fingerprint.block_tokens);
        let chain = match wanted.there.filter(|names| names.block_tokens == there) {
            Some(names) => &names.hashes[..],
            None if there == here => wanted.chain,
            None => return Err(PeerFault::OtherTokens(there, here)),
        };
        let (most, before) = (wanted.chain.len(), wanted.before);
        let (most, before) = self.conversion.as_ref().map_or((most, before), |conversion| {
            (conversion.needed_there(most), conversion.whole_there(before))
        });
        let most = most.min(chain.len());
        let before = before.min(most);
        Ok(Wanted { chain: &chain[..most], block_tokens: there, before, ..*wanted })
    }

    /// Asks the holder something.
    pub(super) async fn exchange(&mut self, message: &ToHolder) -> Result<ToReader, BrokenLink> {
        self.is_asked = true;
        send(&mut self.stream, message).await?;
        let answer = receive(&mut self.stream).await?;
        self.is_asked = false;
        Ok(answer)
    }

    /// Leases what is there: two messages if that is all that is wanted or nothing, else four.
    pub(super) async fn lease(&mut self, wanted: &Wanted<'_>) -> Result<NamedBlocks, PeerFault> {
        let wanted = &self.as_there(wanted)?;
        let since = Instant::now();
        if let Some(parent) = wanted.trace {
            send(&mut self.stream, &ToHolder::Trace(parent)).await?;
        }
        let asked = probes::first(wanted.before, wanted.chain.len().min(MAX_BLOCKS as usize));
        let answer = match self.ask(wanted, &asked, false).await? {
            ToReader::Between(found) => {
                let found = found as usize;
                let most = probes::gap_behind(found, &asked).filter(|_| asked.contains(&found));
                let most = most.ok_or(BrokenLink::Unexpected("it found what was not asked for"))?;
                self.ask(wanted, &probes::second(found, most), true).await?
            }
            answer => answer,
        };
        match answer {
            ToReader::Leased(answer) if answer.keys.is_some() && self.conversion.is_some() => {
                Err(PeerFault::NoKey(NOT_CONVERTED.to_owned()))
            }
            ToReader::Leased(answer) if answer.layers > 0 && !self.takes_layers(wanted) => {
                Err(BrokenLink::Unexpected("layers that were not asked for").into())
            }
            ToReader::Leased(answer) => named(wanted, answer, since, &self.holder),
            ToReader::Ended(why) => Err(PeerFault::Ended(why)),
            _ => Err(BrokenLink::Unexpected("no answer to a request for a lease").into()),
        }
    }

    async fn ask(
        &mut self,
        wanted: &Wanted<'_>,
        lengths: &[usize],
        is_last: bool,
    ) -> Result<ToReader, BrokenLink> {
        let probe = |&blocks: &usize| Probe::new(blocks, wanted.chain[blocks - 1]);
        let request = LeaseRequest {
            epoch: wanted.epoch,
            tenant: wanted.tenant,
            held: wanted.before as u32,
            probes: lengths.iter().map(probe).collect(),
            form: LeaseForm {
                is_last,
                wants_slots: self.memory.is_some()
                    || self.reads().is_some()
                    || self.holder.ranks > 0,
                takes_layers: self.takes_layers(wanted),
            },
            group: wanted.group,
            wait_ms: wanted.wait.left.as_millis().min(MAX_WAIT_MS.into()) as u16,
        };
        self.exchange(&ToHolder::Lease(request)).await
    }

    /// Brings blocks into slots, as many as there are, and keeps those that are what their checksums
    /// say. Everything behind one that does not come is left. Where NIXL fails, the others come over
    /// the connection, unless it is required. `came`: what came by NIXL.
    pub(super) async fn bring(
        &mut self,
        named: &NamedBlocks,
        until: Instant,
        filling: &mut FillingSlots<'_>,
        intake: Option<Intake<'_>>,
        came: &mut ReadByNixl,
        cancelled: &CancellationToken,
    ) -> Result<(), PeerFault> {
        // A lease of nothing may have been waited for that long, and each request for layers renews
        // one of these.
        if filling.left() > 0 && named.layers.is_none() && Instant::now() >= until {
            return Err(PeerFault::Ended(LeaseEnd::Expired));
        }
        let (mut saturated, conversion) = (0, self.conversion.clone());
        let leased = named.before + named.checksums.len();
        let bytes = self.holder.block_bytes as usize;
        let arriving = async {
            if let Some(layers) = named.layers {
                return self.bring_layers(named, layers, filling, came).await;
            }
            match (conversion, intake) {
                (Some(_), Some(_)) => Err(CopyError::refused(NOT_CONVERTED).into()),
                (Some(conversion), None) => {
                    let too_large = &mut saturated;
                    let slots =
                        &mut ConvertedSlots::new(filling, &conversion, too_large, leased, bytes);
                    self.bring_in_clear(named, until, slots, came).await
                }
                (None, Some(intake)) => {
                    let slots = &mut OpenedSlots::new(filling, intake);
                    self.bring_each(named, until, slots).await
                }
                (None, None) => self.bring_in_clear(named, until, filling, came).await,
            }
        };
        // All may end anywhere: this thread writes the slots, and nothing goes on to; or NIXL does,
        // and has their frames until it has ended.
        let brought = tokio::select! {
            biased;
            () = cancelled.cancelled() => Err(PeerFault::Cancelled),
            arrived = arriving => arrived,
        };
        self.saturated += saturated;
        brought
    }

    /// By NIXL if it can be, else as all others.
    async fn bring_in_clear(
        &mut self,
        named: &NamedBlocks,
        until: Instant,
        slots: &mut impl ReadableByNixl,
        came: &mut ReadByNixl,
    ) -> Result<(), PeerFault> {
        if slots.kept() >= named.before
            && self.memory.is_none()
            && let Some(reads) = self.reads().cloned()
        {
            match slots.read(&reads, named, until, came).await {
                Err(PeerFault::Nixl(_)) if !self.needs_nixl && !slots.is_lent() => {}
                brought => return brought,
            }
        }
        self.bring_each(named, until, slots).await
    }

    /// From a neighbour's memory or over the connection, one after the other.
    async fn bring_each(
        &mut self,
        named: &NamedBlocks,
        until: Instant,
        slots: &mut impl Arriving,
    ) -> Result<(), PeerFault> {
        if slots.kept() < named.before {
            return Err(PeerFault::Behind);
        }
        if let Some(memory) = &self.memory {
            let copied = copy(memory, named, until, slots).await;
            return copied.map_err(|fault| fault.expired_if_over(until));
        }
        if self.needs_nixl {
            return Err(PeerFault::nixl_is_gone());
        }
        self.read(named, slots).await
    }

    async fn read(
        &mut self,
        named: &NamedBlocks,
        slots: &mut impl Arriving,
    ) -> Result<(), PeerFault> {
        let wanted = slots.kept()..slots.kept() + slots.left();
        let Some(block_bytes) = slots.next().map(|slot| slot.len()) else { return Ok(()) };
        let mut parts = parts(wanted, (READ_BYTES / block_bytes).max(1));
        let mut asked = VecDeque::new();
        loop {
            while asked.len() < READS
                && let Some(part) = parts.next()
            {
                let request = ReadRequest { first: part.start as u32, count: part.len() as u32 };
                // Counted from before it is asked for.
                let until = Instant::now() + named.ttl;
                let sent =
                    timeout_at(until, send(&mut self.stream, &ToHolder::Read(request))).await;
                sent.unwrap_or(Err(BrokenLink::Late))?;
                asked.push_back((request, until));
            }
            let Some((request, until)) = asked.pop_front() else { return Ok(()) };
            let arrived = timeout_at(until, self.take(request, named, slots)).await;
            match arrived.unwrap_or(Err(BrokenLink::Late.into())) {
                Err(fault @ (PeerFault::Wrong | PeerFault::Seal(_))) => {
                    let left = asked.into_iter().map(|(request, _)| request);
                    let drained = timeout_at(until, self.drain(left, block_bytes)).await;
                    drained.unwrap_or(Err(BrokenLink::Late))?;
                    return Err(fault);
                }
                arrived => arrived?,
            }
        }
    }

    /// Takes the blocks of one request: all of them from the stream, and into slots those before the
    /// first that is wrong.
    async fn take(
        &mut self,
        request: ReadRequest,
        named: &NamedBlocks,
        slots: &mut impl Arriving,
    ) -> Result<(), PeerFault> {
        self.expect(request).await?;
        let mut taken = Ok(());
        for _ in 0..request.count {
            let slot =
                slots.next().ok_or(BrokenLink::Unexpected("there is no slot for a block"))?;
            self.stream.read_exact(slot).await?;
            if taken.is_ok() {
                let expected = named.checksums.get(slots.kept() - named.before).copied();
                let is_right = expected.is_some() && slots.written() == expected;
                taken = if is_right { slots.keep() } else { Err(PeerFault::Wrong) };
            }
        }
        taken
    }

    async fn expect(&mut self, request: ReadRequest) -> Result<(), PeerFault> {
        match receive(&mut self.stream).await? {
            ToReader::Blocks(blocks) if blocks == request => Ok(()),
            ToReader::Ended(why) => Err(PeerFault::Ended(why)),
            _ => Err(BrokenLink::Unexpected("other blocks than were asked for").into()),
        }
    }

    /// Takes what is still on its way and of no use, so that the next answer is one to the next
    /// request.
    async fn drain(
        &mut self,
        left: impl Iterator<Item = ReadRequest>,
        block_bytes: usize,
    ) -> Result<(), BrokenLink> {
        let mut block = vec![0; block_bytes];
        for request in left {
            if self.expect(request).await.is_ok() {
                for _ in 0..request.count {
                    self.stream.read_exact(&mut block).await?;
                }
            }
        }
        Ok(())
    }

    /// How blocks come over it.
    pub(super) fn way(&self) -> PeerWay {
        match (&self.memory, self.reads()) {
            _ if self.holder.ranks > 0 => PeerWay::Ranks,
            (Some(_), _) => PeerWay::SharedMemory,
            (None, Some(_)) => PeerWay::Nixl,
            (None, None) => PeerWay::Tcp,
        }
    }

    /// The lease is not needed any more.
    pub(super) async fn release(&mut self, end: ReadEnd) -> Result<(), BrokenLink> {
        send(&mut self.stream, &ToHolder::Release(end)).await
    }
}

/// Copies blocks from a neighbour's memory. The neighbour may write them meanwhile, once the lease
/// is over: then they are not what their checksums say.
async fn copy(
    memory: &PeerMemory,
    named: &NamedBlocks,
    until: Instant,
    slots: &mut impl Arriving,
) -> Result<(), PeerFault> {
    let part = (READ_BYTES / memory.geometry().block_bytes()).max(1);
    while slots.left() > 0 {
        if Instant::now() >= until {
            return Err(PeerFault::Ended(LeaseEnd::Expired));
        }
        for _ in 0..part.min(slots.left()) {
            let place = slots.kept() - named.before;
            let known = named.slots.get(place).zip(named.checksums.get(place));
            let (&slot, &expected) = known.ok_or(PeerFault::Wrong)?;
            let arrived = slots.copy(memory, slot);
            if arrived != Some(expected) {
                return Err(PeerFault::Wrong);
            }
            slots.keep()?;
        }
        // Others have this thread too.
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// What an answer names, if it is one to what was wanted.
fn named(
    wanted: &Wanted<'_>,
    answer: LeaseAnswer,
    asked: Instant,
    holder: &Member,
) -> Result<NamedBlocks, PeerFault> {
    let (blocks, before) = (answer.blocks as usize, wanted.before);
    let layers = NonZeroU16::new(answer.layers);
    let behind = blocks.saturating_sub(before);
    let layers = layers.map(|count| NamedLayers { count, blocks: behind, wait: wanted.wait });
    let whole = if layers.is_some() { 0 } else { behind };
    if answer.epoch != wanted.epoch {
        return Err(PeerFault::Ended(LeaseEnd::OtherEpoch));
    }
    if blocks > wanted.chain.len()
        || answer.checksums.len() != whole
        || !(answer.checksums.is_empty() || answer.seats.len() == usize::from(holder.ranks))
    {
        return Err(BrokenLink::Unexpected("a lease of other blocks than were asked for").into());
    }
    let is_hybrid = wanted.group == 0 && !holder.groups.is_empty();
    // What a group has no checkpoint behind is of no use.
    let usable = if is_hybrid { answer.usable as usize } else { blocks };
    let checksums = answer.checksums.iter().take(usable.saturating_sub(before));
    let mut checksums: Vec<_> = checksums.map(|crc| u32::from_le_bytes(*crc)).collect();
    // A peer does not say how long we wait at most.
    let ttl = Duration::from_millis(answer.ttl_ms.into()).min(wanted.limit);
    let renamed = wanted.naming.renamed_after(answer.forgotten);
    let (seal, openable) = match &answer.keys {
        Some(keys) if !checksums.is_empty() => {
            let (seal, openable) = sealed::unwrapped(wanted.seal, keys, renamed)?;
            (Some(seal), openable)
        }
        _ => (None, usize::MAX),
    };
    if is_hybrid && openable < checksums.len() {
        return Err(PeerFault::NoKey(
            "the last of them are under a main key that is not here".to_owned(),
        ));
    }
    checksums.truncate(openable);
    let slots = SlotRun::slots(&answer.slots, layers.map_or(checksums.len(), |_| behind));
    let LeaseAnswer { is_cut, seats, .. } = answer;
    Ok(NamedBlocks { before, checksums, layers, slots, asked, ttl, is_cut, seats, seal, renamed })
}
