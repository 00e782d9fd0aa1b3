//! From a neighbour's memory straight into an engine's slots.
//!
//! Through the host tier each byte is copied twice before the engine has it, and other blocks may
//! have to leave for it. Here it is copied once, by threads or by the engine's GPU, and the checksum
//! of what arrives is compared with the lease's. The host tier does not get these blocks: the engine
//! saves them from its slots with those that it computes, once no request waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvbm_tiers::{CopyErrorKind, EngineCopies, SlotId, StraightBlock};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::link::{NamedBlocks, PeerFault};
use super::loading::EngineLoads;
use super::nixl::ReadByNixl;
use super::protocol::LeaseEnd;
use super::reader::{PeerLease, Pulled, PulledLease, PulledPart, Reader};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::task::WithMedia;

/// How often an engine's event is asked whether it has passed.
const ASK_AGAIN: Duration = Duration::from_micros(500);
/// Copies that have begun end within this time of the lease's end, or of being cancelled.
const GRACE: Duration = Duration::from_secs(2);

/// Between a holder and an engine whose slots may be written, or waited for. `None`: blocks must pass
/// through the host tier, since they are changed on the way, come in layers or over a network, or go
/// to memory that neither the CPU nor a GPU writes from there.
pub(super) fn way_between(lease: &PeerLease, loads: &EngineLoads<'_>) -> Option<EngineCopies> {
    let (link, named) = (&lease.link, &lease.named);
    let is_plain = link.conversion.is_none() && named.seal.is_none() && named.layers.is_none();
    let memory = link.memory.as_ref().filter(|_| is_plain)?;
    let (engine, after) = loads.engine()?;
    EngineCopies::between(memory, &engine, after)
}

/// A copy that several threads share.
struct StraightCopy {
    way: EngineCopies,
    blocks: Vec<NamedBlock>,
    /// When the lease ends.
    until: Instant,
    cancelled: CancellationToken,
    /// The first block that no thread has taken.
    next: AtomicUsize,
    end: Mutex<StraightEnd>,
    /// Dropped once no thread writes the engine's slots: of the load, and of all that a close waits
    /// for.
    _with_media: (WithMedia, Arc<()>),
}

struct NamedBlock {
    block: StraightBlock,
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
        if let Err(fault) = copy.await_engine().await {
            return StraightEnd { blocks: 0, fault: Some(fault) };
        }
        let work = |_| {
            let copy = Arc::clone(&copy);
            spawn_blocking(move || copy.work())
        };
        // One at least: what no thread takes would count as arrived.
        let threads = threads.max(1).min(copy.blocks.len());
        let threads: Vec<_> = (0..threads).map(work).collect();
        let ended = async {
            for thread in threads {
                if let Err(error) = thread.await {
                    // It is not known which block it was copying.
                    tracing::error!(%error, "a copy from a neighbour's memory ended early");
                    copy.end_at(0, PeerFault::Cancelled);
                }
            }
        };
        tokio::select! {
            biased;
            () = ended => {}
            // A GPU hangs, or no thread is free. `_with_media` tells what may still be written.
            () = copy.overdue() => {
                copy.cancelled.cancel();
                copy.end_at(0, PeerFault::Stuck);
            }
        }
        std::mem::take(&mut *copy.end.lock())
    }

    /// Until the engine's slots may be written. No thread is taken for that.
    async fn await_engine(&self) -> Result<(), PeerFault> {
        while !self.way.is_ready().map_err(PeerFault::Gpu)? {
            self.check_time()?;
            sleep(ASK_AGAIN).await;
        }
        Ok(())
    }

    async fn overdue(&self) {
        tokio::select! {
            () = self.cancelled.cancelled() => sleep(GRACE).await,
            () = sleep_until(self.until + GRACE) => {}
        }
    }

    fn check_time(&self) -> Result<(), PeerFault> {
        if self.cancelled.is_cancelled() {
            return Err(PeerFault::Cancelled);
        }
        let is_over = Instant::now() >= self.until;
        if is_over { Err(PeerFault::Ended(LeaseEnd::Expired)) } else { Ok(()) }
    }

    /// Copies blocks until none is left, or one does not arrive: those behind it are of no use.
    fn work(&self) {
        let at_once = self.way.at_once();
        loop {
            let first = self.next.fetch_add(at_once, Ordering::Relaxed);
            let until = (first + at_once).min(self.blocks.len());
            let Some(blocks) = self.blocks.get(first..until).filter(|blocks| !blocks.is_empty())
            else {
                return;
            };
            if let Err((arrived, fault)) = self.copy(blocks) {
                self.next.fetch_max(self.blocks.len(), Ordering::Relaxed);
                return self.end_at(first + arrived, fault);
            }
        }
    }

    /// An error has the number of leading blocks that have arrived. Once the lease is over the
    /// neighbour may write its slots during the copy: then what arrived does not match its checksum.
    fn copy(&self, blocks: &[NamedBlock]) -> Result<(), (usize, PeerFault)> {
        self.check_time().map_err(|fault| (0, fault))?;
        let moves: Vec<_> = blocks.iter().map(|named| named.block).collect();
        let arrived = match self.way.copy(&moves) {
            Ok(arrived) => arrived,
            Err(error) if error.kind() == CopyErrorKind::Io => {
                return Err((0, PeerFault::Gpu(error)));
            }
            // The peer named a slot that it has not.
            Err(_) => return Err((0, PeerFault::Wrong)),
        };
        let is_wrong = |(sum, named): (&u32, &NamedBlock)| *sum != named.checksum;
        match arrived.iter().zip(blocks).position(is_wrong) {
            Some(wrong) => Err((wrong, PeerFault::Wrong.expired_if_over(self.until))),
            None => Ok(()),
        }
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
        way: EngineCopies,
        loads: &mut EngineLoads<'_>,
        cancelled: &CancellationToken,
    ) -> Result<Pulled> {
        let span = self.pull_span(&lease)?;
        self.finish_pull(self.bring_straight(lease, way, loads, cancelled), span, cancelled).await
    }

    async fn bring_straight(
        &self,
        mut lease: PeerLease,
        way: EngineCopies,
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
                    _with_media: (loads.with_media(), self.core.with_media()),
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
) -> Result<Vec<NamedBlock>, PeerFault> {
    let block = |(place, &to): (usize, &SlotId)| {
        let (&from, &checksum) = named.slots.get(place).zip(named.checksums.get(place))?;
        Some(NamedBlock { block: StraightBlock { from, to }, checksum })
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

#[cfg(test)]
mod tests {
    use std::thread;

    use kvbm_tiers::checksum::checksum;
    use kvbm_tiers::testing::{TensorView, Tensors, fill_pattern, has_pattern};
    use kvbm_tiers::{DramOptions, DramRegion, Fence, Geometry, PeerMemory};
    use proptest::prelude::*;

    use super::super::tests::simulated;
    use super::*;

    const BLOCK: usize = 5000;
    /// More than one call takes.
    const BLOCKS: u32 = 150;
    const TTL: Duration = Duration::from_secs(10);

    /// A neighbour whose slots have the patterns of their numbers.
    fn neighbour() -> (Arc<PeerMemory>, Vec<u32>) {
        let geometry = Geometry::new(BLOCKS, BLOCK).unwrap();
        let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
        let region = DramRegion::shareable_host(options).unwrap();
        let (mut frames, mut sums) = (region.frames().unwrap(), Vec::new());
        while let Some(mut frame) = frames.take() {
            let slot = frame.slot();
            let block = region.write(&mut frame).unwrap();
            fill_pattern(slot.0 as usize, block);
            sums.push(checksum(block));
        }
        (Arc::new(PeerMemory::map(region.shareable().unwrap()).unwrap()), sums)
    }

    /// A copy of all blocks, slot to slot, and a view of where they go.
    fn copy_of_all(is_right: impl Fn(u32) -> bool, until: Instant) -> (StraightCopy, TensorView) {
        let (memory, sums) = neighbour();
        let (engine, view) = Tensors::new(BLOCKS, BLOCK, 3).shared();
        let block = |(slot, sum)| NamedBlock {
            block: StraightBlock { from: SlotId(slot), to: SlotId(slot) },
            checksum: if is_right(slot) { sum } else { !sum },
        };
        let way = EngineCopies::between(&memory, &Arc::new(engine), &Fence::Done);
        let copy = StraightCopy {
            way: way.unwrap(),
            blocks: (0..BLOCKS).zip(sums).map(block).collect(),
            until,
            cancelled: CancellationToken::new(),
            next: AtomicUsize::new(0),
            end: Mutex::new(StraightEnd { blocks: BLOCKS as usize, fault: None }),
            _with_media: (Arc::new(()), Arc::new(())),
        };
        (copy, view)
    }

    fn check(view: &TensorView, end: &StraightEnd) {
        for slot in 0..end.blocks {
            assert!(has_pattern(slot, &view.read(SlotId(slot as u32))), "a wrong block in {slot}");
        }
    }

    proptest! {
        #[test]
        fn what_is_wrong_ends_a_copy_before_it(
            wrong in prop::collection::hash_set(0..BLOCKS, 0..4),
            threads in 0_usize..5,
        ) {
            simulated(async {
                let until = Instant::now() + TTL;
                let (copy, view) = copy_of_all(|slot| !wrong.contains(&slot), until);
                let end = copy.run(threads).await;
                let first = wrong.iter().min();
                assert_eq!(end.blocks, *first.unwrap_or(&BLOCKS) as usize);
                assert_eq!(end.fault.as_ref().map(PeerFault::is_wrong), first.map(|_| true));
                check(&view, &end);
            });
        }

        #[test]
        fn a_cancelled_copy_has_only_whole_blocks(yields in 0_usize..200, threads in 1_usize..4) {
            simulated(async {
                let (copy, view) = copy_of_all(|_| true, Instant::now() + TTL);
                let cancelled = copy.cancelled.clone();
                let cancels = thread::spawn(move || {
                    (0..yields).for_each(|_| thread::yield_now());
                    cancelled.cancel();
                });
                let end = copy.run(threads).await;
                cancels.join().unwrap();
                let is_whole = end.blocks == BLOCKS as usize;
                let is_cancelled = matches!(end.fault, Some(PeerFault::Cancelled));
                assert!(is_whole != is_cancelled, "{} blocks, {:?}", end.blocks, end.fault);
                check(&view, &end);
            });
        }
    }

    #[test]
    fn a_lease_that_is_over_gives_nothing() {
        simulated(async {
            let (copy, _view) = copy_of_all(|_| true, Instant::now());
            let end = copy.run(2).await;
            assert_eq!(end.blocks, 0);
            assert!(matches!(end.fault, Some(PeerFault::Ended(LeaseEnd::Expired))));
        });
    }
}
