//! From a neighbour's memory straight into an engine's slots.
//!
//! Through the host tier each byte is copied twice before the engine has it, and other blocks may
//! have to leave for it. Here threads copy a block once, compute the checksum of what arrives on
//! the way, and compare it with the lease's. The host tier does not get these blocks: the engine
//! saves them from its slots with those that it computes, once no request waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvbm_tiers::{DeviceRegion, PeerMemory, SlotId, Space};
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::link::{NamedBlocks, PeerFault};
use super::loading::EngineLoads;
use super::nixl::ReadByNixl;
use super::protocol::LeaseEnd;
use super::reader::{PeerLease, Pulled, PulledLease, PulledPart, Reader};
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// Where blocks are copied from and to.
pub(super) struct StraightWay {
    memory: Arc<PeerMemory>,
    engine: Arc<DeviceRegion>,
}

impl StraightWay {
    /// Between a holder and an engine whose slots may be written by now. `None`: blocks must pass
    /// through the host tier, since they are changed on the way, come in layers or over a network,
    /// or go to memory that the CPU cannot write.
    pub(super) fn between(lease: &PeerLease, loads: &EngineLoads<'_>) -> Option<Self> {
        let (link, named) = (&lease.link, &lease.named);
        let is_plain = link.conversion.is_none() && named.seal.is_none() && named.layers.is_none();
        let memory = link.memory.clone().filter(|_| is_plain)?;
        let engine = loads.writable_engine().filter(|engine| engine.space() == Space::Host)?;
        Some(Self { memory, engine })
    }
}

/// A copy that several threads share.
struct StraightCopy {
    way: StraightWay,
    blocks: Vec<StraightBlock>,
    /// When the lease ends.
    until: Instant,
    cancelled: CancellationToken,
    /// The first block that no thread has taken.
    next: AtomicUsize,
    end: Mutex<StraightEnd>,
    /// Dropped once no thread writes the engine's slots.
    _with_media: Arc<()>,
}

struct StraightBlock {
    from: SlotId,
    to: SlotId,
    checksum: u32,
}

/// How many leading blocks have arrived when all threads have ended, and why no more have.
#[derive(Default)]
struct StraightEnd {
    blocks: usize,
    fault: Option<PeerFault>,
}

impl StraightCopy {
    async fn run(self, threads: usize) -> StraightEnd {
        let copy = Arc::new(self);
        let work = |_| {
            let copy = Arc::clone(&copy);
            spawn_blocking(move || copy.work())
        };
        // One at least: what no thread takes would count as arrived.
        let threads = threads.max(1).min(copy.blocks.len());
        let threads: Vec<_> = (0..threads).map(work).collect();
        for thread in threads {
            if let Err(error) = thread.await {
                // It is not known which block it was copying.
                tracing::error!(%error, "a copy from a neighbour's memory ended early");
                copy.end_at(0, PeerFault::Cancelled);
            }
        }
        std::mem::take(&mut *copy.end.lock())
    }

    /// Copies blocks until none is left, or one does not arrive: those behind it are of no use.
    fn work(&self) {
        loop {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(block) = self.blocks.get(at) else { return };
            if let Err(fault) = self.copy(block) {
                self.next.fetch_max(self.blocks.len(), Ordering::Relaxed);
                return self.end_at(at, fault);
            }
        }
    }

    /// Once the lease is over the neighbour may write its slot during the copy: then what arrived
    /// does not match the checksum.
    fn copy(&self, block: &StraightBlock) -> Result<(), PeerFault> {
        if self.cancelled.is_cancelled() {
            return Err(PeerFault::Cancelled);
        }
        if Instant::now() >= self.until {
            return Err(PeerFault::Ended(LeaseEnd::Expired));
        }
        let StraightWay { memory, engine } = &self.way;
        let arrived = memory.copy_to_engine(block.from, engine, block.to);
        let is_right = arrived.is_ok_and(|sum| sum == block.checksum);
        if is_right { Ok(()) } else { Err(PeerFault::Wrong.of_reading(self.until)) }
    }

    fn end_at(&self, block: usize, fault: PeerFault) {
        let mut end = self.end.lock();
        if block < end.blocks || end.fault.is_none() {
            *end = StraightEnd { blocks: block.min(end.blocks), fault: Some(fault) };
        }
    }
}

impl Reader {
    /// Brings what a lease names into an engine's slots, behind the blocks that the tiers here have,
    /// which are loaded as ever.
    pub(super) async fn pull_straight(
        &self,
        lease: PeerLease,
        way: StraightWay,
        loads: &mut EngineLoads<'_>,
        cancelled: &CancellationToken,
    ) -> Result<Pulled> {
        let span = self.pull_span(&lease)?;
        self.finish_pull(self.bring_straight(lease, way, loads, cancelled), span, cancelled).await
    }

    async fn bring_straight(
        &self,
        mut lease: PeerLease,
        way: StraightWay,
        loads: &mut EngineLoads<'_>,
        cancelled: &CancellationToken,
    ) -> Result<PulledLease> {
        let started = Instant::now();
        let held = self.lease_here(&lease);
        if held.pins().namespace() != lease.namespace {
            // A reset came since: what the peer has counts as old here.
            return Err(Error::stale());
        }
        loads.go_on(held);
        let (first, slots) = loads.left(lease.blocks());
        let end = match blocks_behind(first, &lease.named, slots) {
            Ok(blocks) => {
                let copy = StraightCopy {
                    end: Mutex::new(StraightEnd { blocks: blocks.len(), fault: None }),
                    blocks,
                    way,
                    until: lease.asked + lease.named.ttl,
                    cancelled: cancelled.clone(),
                    next: AtomicUsize::new(0),
                    _with_media: loads.with_media(),
                };
                copy.run(self.copy_threads).await
            }
            Err(fault) => StraightEnd { blocks: 0, fault: Some(fault) },
        };
        let StraightEnd { blocks: copied, fault } = end;
        self.count(&mut lease.link, copied, ReadByNixl::default());
        let held = self.lease_here(&lease);
        let blocks = if fault.is_none() { lease.blocks() } else { first + copied };
        loads.came_straight(copied, blocks, &held);
        Ok(self.pulled_lease(lease, PulledPart { held, blocks, copied, fault }, started))
    }
}

/// What is to be copied: the blocks from position `first` on, one for each of `slots`.
fn blocks_behind(
    first: usize,
    named: &NamedBlocks,
    slots: &[SlotId],
) -> Result<Vec<StraightBlock>, PeerFault> {
    let block = |(place, &to): (usize, &SlotId)| {
        let (&from, &checksum) = named.slots.get(place).zip(named.checksums.get(place))?;
        Some(StraightBlock { from, to, checksum })
    };
    match first.checked_sub(named.before) {
        Some(place) => {
            let blocks = (place..).zip(slots).map(block).collect::<Option<_>>();
            blocks.ok_or(PeerFault::Wrong)
        }
        None if slots.is_empty() => Ok(Vec::new()),
        None => Err(PeerFault::Behind),
    }
}
