//! Blocks by NIXL: the reader copies them out of the holder's memory, over RDMA for one, and the
//! holder takes no part in it.
//!
//! The two exchange what NIXL needs to know once for each holder, over a connection that exists
//! already: a peer that is not even reached by TCP is none for NIXL. What fails costs time: blocks
//! come over the connection then, and NIXL is tried again after a while.
//!
//! Blocks that are as they are here come straight into their slots. All others, and slices that are
//! not ours as a whole, come whole into [scratch] first, since a checksum covers all of one.

pub(super) mod scratch;

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::{Frame, OneSided, SetupError, SlotId, SlotRead, SlotReads, TierPlace};
use serde::{Deserialize, Serialize};
use tokio::task::{spawn_blocking, yield_now};
use tokio::time::{Instant, timeout, timeout_at};

use self::scratch::{Scratch, ScratchReads};
use super::arriving::{Arriving, ConvertedSlots};
use super::link::{NamedBlocks, PeerFault, PeerLink};
use super::parts;
use super::protocol::{BrokenLink, LeaseEnd, Member, ToHolder, ToReader, shortened};
use crate::api::filling::{BlockSums, FillingSlots};
use crate::sync::Mutex;

/// Metadata of an agent has hundreds of bytes, and some thousands on a host with many devices.
const MAX_METADATA: usize = 64 << 10;
/// Two workers get to know each other within this time, or do without.
const MAX_MEETING: Duration = Duration::from_secs(5);
/// A holder says within this time that it cannot, so that its reader hears it.
const MAX_ANSWER: Duration = Duration::from_secs(3);
/// Reads that outlast their lease have this time more, since the end of the agent ends those of
/// others too. What they bring is verified as any.
pub(super) const GRACE: Duration = Duration::from_millis(500);
/// The end of an agent takes a second on a busy machine. Slots that are not back by then are lost
/// until they come.
const MAX_END: Duration = Duration::from_secs(3);
/// After a failure a holder's blocks come over the connection for this time, after a second one for
/// twice as long, up to the longest.
const PAUSE: Duration = Duration::from_mins(1);
const MAX_PAUSE: Duration = Duration::from_hours(1);

/// What a post moves. Tests have small blocks.
pub(super) const READ_BYTES: usize = if cfg!(test) { 2 << 10 } else { 4 << 20 };
/// Posts of a pull that wait or are under way.
pub(super) const READS: usize = if cfg!(test) { 2 } else { 3 };

/// The name of a worker's own agent, for the host tier of a cache group.
pub(super) fn agent_name(incarnation: u64, group: u8) -> String {
    match group {
        0 => format!("kvbm-{incarnation:016x}"),
        group => format!("kvbm-{incarnation:016x}-{group}"),
    }
}

/// What one side tells the other of NIXL, with a checksum: NIXL itself takes damaged bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NixlMessage {
    crc: [u8; 4],
    bytes: Vec<u8>,
}

impl NixlMessage {
    pub(super) fn new(content: &impl Serialize) -> Result<Self, BrokenLink> {
        let bytes = postcard::to_allocvec(content)?;
        if bytes.len() > MAX_METADATA {
            return Err(BrokenLink::TooLong(bytes.len(), MAX_METADATA));
        }
        Ok(Self { crc: checksum(&bytes).to_le_bytes(), bytes })
    }

    pub(super) fn content<'a, T: Deserialize<'a>>(&'a self) -> Result<T, BrokenLink> {
        if self.bytes.len() > MAX_METADATA {
            return Err(BrokenLink::TooLong(self.bytes.len(), MAX_METADATA));
        }
        if checksum(&self.bytes).to_le_bytes() != self.crc {
            return Err(BrokenLink::Unexpected("what it says of NIXL is damaged"));
        }
        Ok(postcard::from_bytes(&self.bytes)?)
    }
}

/// What a holder says of itself. A reader says its agent's metadata, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HolderPlace {
    metadata: Vec<u8>,
    base: u64,
    stride: u64,
    slots: u32,
}

/// A holder's answer to a reader that wants to read by NIXL.
pub(super) async fn answer(nixl: Option<&Arc<dyn OneSided>>, asked: &NixlMessage) -> ToReader {
    match place_for(nixl, asked).await {
        Ok(place) => ToReader::Nixl(place),
        Err(why) => ToReader::NoNixl(shortened(&why)),
    }
}

async fn place_for(
    nixl: Option<&Arc<dyn OneSided>>,
    asked: &NixlMessage,
) -> Result<NixlMessage, String> {
    let nixl = Arc::clone(nixl.ok_or("it has no NIXL")?);
    let reader: Vec<u8> = asked.content().map_err(|error| error.to_string())?;
    let looked = move || {
        nixl.admit(&reader)?;
        nixl.place()
    };
    let (metadata, TierPlace { base, stride, slots }) = blocking(MAX_ANSWER, looked).await?;
    NixlMessage::new(&HolderPlace { metadata, base, stride, slots })
        .map_err(|error| error.to_string())
}

/// Reads at a holder, which end when it is dropped.
#[derive(Debug)]
pub(super) struct HolderReads {
    reads: Box<dyn SlotReads>,
    /// Into which they go. `None`: into the host tier here.
    scratch: Option<Arc<Scratch>>,
}

impl HolderReads {
    pub(super) fn scratch(&self) -> Result<&Arc<Scratch>, PeerFault> {
        let why = || PeerFault::Nixl("its slots are read as they are".to_owned());
        self.scratch.as_ref().ok_or_else(why)
    }
}

impl Deref for HolderReads {
    type Target = dyn SlotReads;

    fn deref(&self) -> &Self::Target {
        &*self.reads
    }
}

/// Where what lies in a holder's slots goes: the same for all reads at it, since it depends on what
/// the two workers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadInto {
    /// Straight into slots here.
    Slots,
    /// Into scratch first: it becomes something else here, or a part of it is wanted.
    Scratch,
}

/// The holders that this worker reads by NIXL.
pub(super) struct NixlHolders {
    nixl: Arc<dyn OneSided>,
    /// Blocks come by NIXL or not at all.
    is_required: bool,
    /// The cache group whose host tiers these are.
    group: u8,
    /// By incarnation.
    known: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<KnownHolder>>>>,
}

/// One of them. It is locked while it is met: two connections do not make two agents.
struct KnownHolder {
    /// They last as long as connections use them.
    reads: Option<Weak<HolderReads>>,
    /// It failed, or the holder has no NIXL: it is not tried before then.
    again: Option<Instant>,
    /// How long it is not tried after the next failure.
    pause: Duration,
}

impl Default for KnownHolder {
    fn default() -> Self {
        Self { reads: None, again: None, pause: PAUSE }
    }
}

impl KnownHolder {
    /// A failure is remembered until long after NIXL may be tried again: another one follows a
    /// longer pause, and is not told.
    fn is_of_use(&self) -> bool {
        self.again.is_some_and(|again| again + MAX_PAUSE > Instant::now())
            || self.reads.as_ref().is_some_and(|reads| reads.strong_count() > 0)
    }

    fn give_up(&mut self, holder: &Member, why: &str) {
        let is_first = self.pause == PAUSE;
        (self.reads, self.again) = (None, Some(Instant::now() + self.pause));
        self.pause = (2 * self.pause).min(MAX_PAUSE);
        if is_first {
            let holder = &holder.name;
            tracing::warn!(holder, why, "its blocks do not come by NIXL for now, but by TCP");
        }
    }
}

impl NixlHolders {
    pub(super) fn new(nixl: Arc<dyn OneSided>, is_required: bool, group: u8) -> Self {
        Self { nixl, is_required, group, known: Mutex::default() }
    }

    /// Whether blocks come by NIXL or not at all.
    pub(super) const fn is_required(&self) -> bool {
        self.is_required
    }

    /// Has the blocks of a link come by NIXL, if both sides have it. An error: the link cannot be
    /// used any more.
    pub(super) async fn equip(&self, link: &mut PeerLink, into: ReadInto) -> Result<(), PeerFault> {
        if link.memory.is_some() || link.reads().is_some() {
            return Ok(());
        }
        link.needs_nixl = self.is_required;
        let known = self.known(&link.holder);
        let mut known = known.lock().await;
        link.nixl = known.reads.as_ref().and_then(Weak::upgrade);
        if link.reads().is_none() && known.again.is_none_or(|again| again <= Instant::now()) {
            match self.meet(link, into).await {
                Ok(Ok(reads)) => {
                    (known.reads, known.pause) = (Some(Arc::downgrade(&reads)), PAUSE);
                    link.nixl = Some(reads);
                }
                Ok(Err(why)) => known.give_up(&link.holder, &why),
                Err(fault) => {
                    known.give_up(&link.holder, &fault.to_string());
                    return Err(fault);
                }
            }
        }
        if self.is_required && link.reads().is_none() {
            let why = "it cannot be read by NIXL, which peers.nixl (DYN_KVBM_PEERS_NIXL) requires";
            return Err(PeerFault::Nixl(why.to_owned()));
        }
        Ok(())
    }

    fn known(&self, holder: &Member) -> Arc<tokio::sync::Mutex<KnownHolder>> {
        let mut known = self.known.lock();
        // Others may be about to meet one.
        let is_of_use = |known: &Arc<tokio::sync::Mutex<KnownHolder>>| {
            Arc::strong_count(known) > 1 || known.try_lock().is_ok_and(|known| known.is_of_use())
        };
        known.retain(|_, known| is_of_use(known));
        Arc::clone(known.entry(holder.incarnation).or_default())
    }

    /// The inner error says why there is no NIXL between the two; the link is as it was.
    async fn meet(
        &self,
        link: &mut PeerLink,
        into: ReadInto,
    ) -> Result<Result<Arc<HolderReads>, String>, PeerFault> {
        let nixl = Arc::clone(&self.nixl);
        let reader = match blocking(MAX_MEETING, move || nixl.reader()).await {
            Ok(reader) => reader,
            Err(why) => return Ok(Err(why)),
        };
        let asked = NixlMessage::new(&reader.metadata())?;
        let answer = timeout(MAX_MEETING, link.exchange(&ToHolder::Nixl(self.group, asked))).await;
        let place: HolderPlace = match answer.unwrap_or(Err(BrokenLink::Late))? {
            ToReader::Nixl(place) => match place.content() {
                Ok(place) => place,
                Err(why) => return Ok(Err(why.to_string())),
            },
            ToReader::NoNixl(why) => return Ok(Err(why)),
            _ => return Err(BrokenLink::Unexpected("no answer about NIXL").into()),
        };
        let name = agent_name(link.holder.incarnation, self.group);
        let HolderPlace { metadata, base, stride, slots } = place;
        let place = TierPlace { base, stride, slots };
        let block_bytes = link.holder.block_bytes;
        let meet = move || {
            let wants_scratch = into == ReadInto::Scratch;
            let scratch = wants_scratch.then(|| Scratch::of(place, block_bytes)).transpose()?;
            let memory = scratch.as_ref().map(|scratch| Arc::clone(scratch.memory()));
            let reads = reader.meet(&name, &metadata, place, memory)?;
            Ok(Arc::new(HolderReads { reads, scratch }))
        };
        Ok(blocking(MAX_MEETING, meet).await)
    }

    /// A link was used: if that ended the agent, NIXL is not tried at this holder for a while.
    pub(super) async fn look_back(&self, link: &mut PeerLink, why: Option<&PeerFault>) {
        let Some(reads) = link.nixl.take_if(|reads| reads.is_over()) else { return };
        let known = self.known(&link.holder);
        let mut known = known.lock().await;
        let is_present =
            |present: &Weak<HolderReads>| std::ptr::eq(present.as_ptr(), Arc::as_ptr(&reads));
        if known.reads.as_ref().is_some_and(is_present) {
            let why = why.map_or_else(|| "a read failed".to_owned(), ToString::to_string);
            known.give_up(&link.holder, &why);
        }
    }

    /// Ends all agents, so that their slots come back.
    pub(super) fn close(&self) {
        self.nixl.close();
    }
}

/// Does what takes a while, and need not be waited for if it takes too long.
async fn blocking<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> Result<T, SetupError> + Send + 'static,
) -> Result<T, String> {
    match timeout(limit, spawn_blocking(work)).await {
        Ok(Ok(done)) => done.map_err(|error| error.to_string()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("NIXL takes too long".to_owned()),
    }
}

/// What came by NIXL.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReadByNixl {
    pub(super) blocks: usize,
    /// Pieces of memory that were read, neighbours on both sides being one.
    pub(super) descriptors: usize,
}

/// Reads blocks into slots, and keeps those that are what their checksums say. The holder may write
/// them meanwhile, once the lease is over: then they are not.
pub(super) async fn read(
    reads: &HolderReads,
    named: &NamedBlocks,
    until: Instant,
    filling: &mut FillingSlots<'_>,
    came: &mut ReadByNixl,
) -> Result<(), PeerFault> {
    let brought = read_parts(reads, named, until, filling, came).await;
    let brought = brought.map_err(|fault| fault.expired_if_over(until));
    ended(reads, until, filling, brought).await
}

/// [`read`], for blocks that become others here.
pub(super) async fn read_converted(
    reads: &HolderReads,
    named: &NamedBlocks,
    until: Instant,
    slots: &mut ConvertedSlots<'_, '_>,
    came: &mut ReadByNixl,
) -> Result<(), PeerFault> {
    let from = slots_of(named, &(slots.kept()..slots.kept() + slots.left()))?;
    let (mut reading, before) = (ScratchReads::new(reads, from.to_vec())?, slots.made());
    let taken = take_converted(&mut reading, named, until, slots).await;
    came.blocks += slots.made() - before;
    came.descriptors += reading.descriptors();
    if taken.is_err() {
        reading.end(Instant::now()).await;
    }
    taken.map_err(|fault| fault.expired_if_over(until))
}

async fn take_converted(
    reading: &mut ScratchReads<'_>,
    named: &NamedBlocks,
    until: Instant,
    slots: &mut ConvertedSlots<'_, '_>,
) -> Result<(), PeerFault> {
    while let Some(mut part) = reading.next(until).await? {
        for at in 0..part.len() {
            let Some((block, sum)) = part.block(at) else { return Err(PeerFault::Wrong) };
            let expected = named.checksums.get(slots.kept() - named.before).copied();
            if expected.is_none() || sum != expected {
                return Err(PeerFault::Wrong);
            }
            slots.take(block)?;
        }
        // Others have this thread too.
        yield_now().await;
    }
    Ok(())
}

/// All slots are back, or lost until they come.
async fn ended(
    reads: &HolderReads,
    until: Instant,
    filling: &mut FillingSlots<'_>,
    brought: Result<(), PeerFault>,
) -> Result<(), PeerFault> {
    let until = until.max(Instant::now() + GRACE);
    if brought.is_ok() || timeout_at(until, filling.regain_all()).await.is_ok() {
        return brought;
    }
    // NIXL cancels nothing: the slots come back when the agent is gone.
    reads.end("it did not answer in time");
    let _ = timeout(MAX_END, filling.regain_all()).await;
    brought
}

async fn read_parts(
    reads: &HolderReads,
    named: &NamedBlocks,
    until: Instant,
    filling: &mut FillingSlots<'_>,
    came: &mut ReadByNixl,
) -> Result<(), PeerFault> {
    let wanted = filling.kept()..filling.kept() + filling.left();
    let Some(block_bytes) = filling.next().map(|slot| slot.len()) else { return Ok(()) };
    let mut parts = parts(wanted, (READ_BYTES / block_bytes).max(1));
    loop {
        while filling.lent() < READS
            && let Some(part) = parts.next()
        {
            let from = slots_of(named, &part)?.to_vec();
            let (to, done) = filling.lend(part.len());
            came.descriptors += descriptors(&from, &to);
            reads.read(SlotRead { from, to, bytes: None }, done);
        }
        if filling.lent() == 0 {
            return Ok(());
        }
        for sum in regained(filling, until).await? {
            let expected = named.checksums.get(filling.kept() - named.before).copied();
            if expected.is_none() || sum != expected {
                return Err(PeerFault::Wrong);
            }
            filling.keep();
            came.blocks += 1;
        }
    }
}

/// The checksums of what was lent first.
async fn regained(
    filling: &mut FillingSlots<'_>,
    until: Instant,
) -> Result<Vec<Option<u32>>, PeerFault> {
    let back: Option<BlockSums> = timeout_at(until, filling.regain())
        .await
        .map_err(|_| PeerFault::Ended(LeaseEnd::Expired))?;
    let sums = back.ok_or_else(|| PeerFault::Nixl("its slots do not come back".to_owned()))?;
    sums.map_err(|error| PeerFault::Nixl(error.to_string()))
}

/// Successive layers of blocks.
pub(super) struct LayerBytes<'a> {
    /// Where they lie in each block.
    pub(super) bytes: Range<usize>,
    /// Where each block lies at the holder, and the checksum up to there.
    pub(super) slots: &'a [SlotId],
    pub(super) expected: &'a [[u8; 4]],
}

/// Reads layers of all blocks that are wanted into their slots. `sums` are the checksums of the
/// layers before, and of these then: of all blocks, or as they were.
pub(super) async fn read_layers(
    reads: &HolderReads,
    layers: LayerBytes<'_>,
    until: Instant,
    filling: &mut FillingSlots<'_>,
    sums: &mut Vec<u32>,
    came: &mut ReadByNixl,
) -> Result<(), PeerFault> {
    let brought = read_layer_parts(reads, layers, until, filling, sums, came).await;
    match brought {
        Ok(summed) => {
            *sums = summed;
            Ok(())
        }
        Err(fault) => ended(reads, until, filling, Err(fault)).await,
    }
}

async fn read_layer_parts(
    reads: &HolderReads,
    LayerBytes { bytes, slots, expected }: LayerBytes<'_>,
    until: Instant,
    filling: &mut FillingSlots<'_>,
    sums: &[u32],
    came: &mut ReadByNixl,
) -> Result<Vec<u32>, PeerFault> {
    let mut parts = parts(0..sums.len(), (READ_BYTES / bytes.len().max(1)).max(1));
    let mut summed = Vec::with_capacity(sums.len());
    loop {
        while filling.lent() < READS
            && let Some(part) = parts.next()
        {
            let from = slots.get(part.clone()).ok_or(PeerFault::Wrong)?.to_vec();
            let before = sums[part.clone()].to_vec();
            let (to, done) = filling.lend_parts(part.start, bytes.clone(), before);
            came.descriptors += from.len();
            reads.read(SlotRead { from, to, bytes: Some(bytes.clone()) }, done);
        }
        if filling.lent() == 0 {
            return Ok(summed);
        }
        for sum in regained(filling, until).await? {
            let expected = expected.get(summed.len()).map(|crc| u32::from_le_bytes(*crc));
            summed.push(sum.filter(|_| sum == expected).ok_or(PeerFault::Wrong)?);
        }
    }
}

/// Where blocks lie at the holder, by their positions in the chain.
fn slots_of<'a>(named: &'a NamedBlocks, part: &Range<usize>) -> Result<&'a [SlotId], BrokenLink> {
    let behind = part.start - named.before..part.end - named.before;
    named.slots.get(behind).ok_or(BrokenLink::Unexpected("it does not say where a block lies"))
}

/// Successive slots on both sides are one piece, which NIXL reads at once.
fn descriptors(from: &[SlotId], to: &[Frame]) -> usize {
    let pairs: Vec<_> = from.iter().zip(to).map(|(from, to)| (from.0, to.slot().0)).collect();
    let is_one = |pair: &[(u32, u32)]| {
        let [(from, to), (next_from, next_to)] = pair else { return false };
        (from.checked_add(1), to.checked_add(1)) == (Some(*next_from), Some(*next_to))
    };
    pairs.len() - pairs.windows(2).filter(|pair| is_one(pair)).count()
}

#[cfg(test)]
pub(super) mod tests;
