//! Loads from a peer: what has come to the host tier goes on to the device, or into an engine's
//! slots, while the rest is on its way; or it comes [straight](super::straight) into these.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvbm_tiers::{DeviceRegion, Fence, LayerCount, SlotId, Tier};

use tokio_util::sync::CancellationToken;

use super::reader::{PeerLease, Pulled, Reader};
use super::straight::way_between;
use super::{FollowRequest, Peers};
use crate::api::engine_memory::EngineMemory;
use crate::api::lease::Lease;
use crate::api::transfer::{Loaded, Transfer, Transferred, Writers};
use crate::error::{Error, Result};
use crate::metrics::PeerWay;
use crate::scheduler::{Core, EndsLayers, JoinedTransfer, LoadInto};
use crate::task::{Class, WithMedia};

/// What comes from a peer before it goes on: over a connection, where the next request for blocks
/// waits for it, and from a neighbour's memory, where it is still in the caches then.
const PART_BYTES: usize = 16 << 20;
const NEIGHBOUR_PART_BYTES: usize = 4 << 20;

/// An engine's slots for successive blocks of a chain.
pub(crate) struct EngineSlots {
    engine: EngineMemory,
    /// The position of the first block.
    first: usize,
    slots: Vec<SlotId>,
    /// Raised when these may be written.
    after: Fence,
}

impl EngineSlots {
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): a slot does not exist or is named twice,
    /// or the positions are beyond any chain.
    pub(crate) fn new(
        engine: EngineMemory,
        first: usize,
        slots: &[SlotId],
        after: Fence,
    ) -> Result<Self> {
        engine.check_load(slots)?;
        if first.checked_add(slots.len()).is_none() {
            return Err(Error::invalid(format!("position {first} is beyond any chain")));
        }
        Ok(Self { engine, first, slots: slots.to_vec(), after })
    }

    fn wanted(&self) -> Range<usize> {
        self.first..self.first + self.slots.len()
    }
}

impl Peers {
    /// Brings what a lease names into the host tier, and all of its chain onto the device.
    pub(crate) fn load(&self, lease: PeerLease) -> Transfer<Transferred> {
        let reader = Arc::clone(&self.reader);
        self.start_on_thread(async move |cancelled| {
            let pulled = reader.pull(lease, None, &cancelled).await?;
            let loading = reader.core.transfer(Class::Load, Tier::Device, pulled.lease);
            cancelled_with(loading, &cancelled).await
        })
    }

    /// [`pull`](Self::pull), of a lease that is still to come. `arrived` counts blocks.
    pub(crate) fn pull_when_leased(
        &self,
        leasing: Transfer<PeerLease>,
        arrived: &Arc<AtomicUsize>,
    ) -> Transfer<Pulled> {
        let (reader, arrived) = (Arc::clone(&self.reader), Arc::clone(arrived));
        self.start_on_thread(async move |cancelled| {
            let lease = cancelled_with(leasing, &cancelled).await?;
            let mut on_part =
                |held: Lease| arrived.store(held.blocks(Tier::Host), Ordering::Relaxed);
            reader.pull(lease, Some(&mut on_part), &cancelled).await
        })
    }

    /// Brings what a lease names into an engine's slots. `arrived` counts blocks.
    pub(crate) fn load_into(
        &self,
        leasing: Transfer<PeerLease>,
        slots: EngineSlots,
        arrived: &Arc<AtomicUsize>,
    ) -> Transfer<Loaded> {
        let (reader, arrived) = (Arc::clone(&self.reader), Arc::clone(arrived));
        self.start_loading(slots, async move |slots, cancelled| {
            let lease = cancelled_with(leasing, &cancelled).await?;
            let mut loads = EngineLoads::new(&reader.core, slots, arrived);
            let pulled = loads.bring(&reader, lease, &cancelled).await;
            loads.end(pulled, &cancelled).await
        })
    }

    /// [`follow`](Self::follow), and what comes goes on into an engine's slots.
    pub(crate) fn follow_into(&self, asked: FollowRequest, slots: EngineSlots) -> Transfer<Loaded> {
        let reader = Arc::clone(&self.reader);
        self.start_loading(slots, async move |slots, cancelled| {
            let mut loads = EngineLoads::new(&reader.core, slots, Arc::default());
            let followed = reader.follow_in_parts(asked, Some(&mut loads), &cancelled).await;
            loads.end(followed.map(|followed| followed.pulled), &cancelled).await
        })
    }

    fn start_loading<Work>(
        &self,
        slots: EngineSlots,
        work: impl FnOnce(EngineSlots, CancellationToken) -> Work,
    ) -> Transfer<Loaded>
    where
        Work: Future<Output = Result<Loaded>> + Send + 'static,
    {
        let layers = slots.engine.layers();
        let count = Arc::new(LayerCount::new(layers, slots.slots.len()));
        let ends = EndsLayers(Arc::clone(&count));
        let transfer = self.start_on_thread(|cancelled| {
            let work = work(slots, cancelled);
            async move {
                let loaded = work.await?;
                ends.0.end(loaded.arrived);
                Ok(loaded)
            }
        });
        transfer.in_layers(count)
    }
}

impl Reader {
    /// Blocks of a part.
    pub(super) fn part(&self, way: PeerWay) -> usize {
        let is_mapped = matches!(way, PeerWay::SharedMemory);
        let bytes = if is_mapped { NEIGHBOUR_PART_BYTES } else { PART_BYTES };
        (bytes / self.block_bytes()).max(1)
    }
}

/// The answer of a part of a transfer, which is cancelled with the whole.
async fn cancelled_with<T>(mut part: Transfer<T>, whole: &CancellationToken) -> Result<T> {
    tokio::select! {
        biased;
        answer = &mut part => return answer,
        () = whole.cancelled() => part.cancel(),
    }
    part.await
}

/// Loads into an engine's slots, one for each part of a pull.
pub(super) struct EngineLoads<'a> {
    core: &'a Arc<Core>,
    slots: EngineSlots,
    /// The position of the first block that is not asked for yet.
    next: usize,
    /// Leading blocks of the chain that a peer need not give any more, though the tiers lack some.
    held: usize,
    /// Nothing comes straight any more.
    by_host: bool,
    /// Counts leading blocks that have come.
    arrived: Arc<AtomicUsize>,
    loads: Vec<Transfer<Loaded>>,
    with_media: WithMedia,
    joined: Arc<JoinedTransfer>,
}

impl<'a> EngineLoads<'a> {
    fn new(core: &'a Arc<Core>, slots: EngineSlots, arrived: Arc<AtomicUsize>) -> Self {
        Self {
            core,
            next: slots.first,
            slots,
            held: 0,
            by_host: false,
            arrived,
            loads: Vec::new(),
            with_media: Arc::new(()),
            joined: JoinedTransfer::of(core),
        }
    }

    /// Brings what a lease names: straight, where that can be.
    pub(super) async fn bring(
        &mut self,
        reader: &Reader,
        lease: PeerLease,
        cancelled: &CancellationToken,
    ) -> Result<Pulled> {
        if let Some(way) = way_between(&lease, self) {
            return reader.pull_straight(lease, way, self, cancelled).await;
        }
        let mut on_part = |held: Lease| self.go_on(held);
        reader.pull(lease, Some(&mut on_part), cancelled).await
    }

    pub(super) const fn held(&self) -> usize {
        self.held
    }

    /// Whether what came straight is needed in the host tier after all, as what a lease names behind
    /// it has to pass there: layers, or what comes over a new connection. It is leased anew then.
    pub(super) fn begin_again(&mut self, lease: &PeerLease) -> bool {
        let is_stuck = self.held > 0 && way_between(lease, self).is_none();
        if is_stuck {
            (self.held, self.by_host) = (0, true);
        }
        is_stuck
    }

    /// The engine's memory, if its slots are in this process, and what they may be written behind.
    pub(super) fn engine(&self) -> Option<(Arc<DeviceRegion>, &Fence)> {
        let region = self.slots.engine.region().ok().filter(|_| !self.by_host)?;
        Some((region, &self.slots.after))
    }

    /// The position of the first block that is not asked for yet, and slots from it up to `until`.
    pub(super) fn left(&self, until: usize) -> (usize, &[SlotId]) {
        let until = until.clamp(self.next, self.slots.wanted().end.max(self.next));
        (self.next, &self.slots.slots[self.next - self.slots.first..until - self.slots.first])
    }

    /// What is kept while something writes the slots.
    pub(super) fn with_media(&self) -> WithMedia {
        Arc::clone(&self.with_media)
    }

    /// This number of blocks is in their slots now, and of the chain `held` need not come any more.
    pub(super) fn came_straight(&mut self, blocks: usize, held: usize, tiers: &Lease) {
        let came = self.next..self.next + blocks;
        (self.next, self.held) = (came.end, held);
        self.arrived.store(self.next, Ordering::Relaxed);
        let writers = Writers::new(&self.with_media);
        let loaded = Loaded::new(came, blocks, tiers.of_nothing(), writers);
        self.loads.push(Transfer::ended(loaded));
    }

    /// Loads what is in the host tier by now.
    pub(super) fn go_on(&mut self, held: Lease) {
        self.arrived.fetch_max(held.blocks(Tier::Host), Ordering::Relaxed);
        let until = held.blocks(Tier::Host).min(self.slots.wanted().end);
        if until > self.next {
            self.load(held, until);
        }
    }

    fn load(&mut self, lease: Lease, until: usize) {
        let (blocks, first) = (self.next..until, self.slots.first);
        let load = LoadInto {
            lease,
            slots: &self.slots.slots[blocks.start - first..blocks.end - first],
            blocks,
            after: self.slots.after.clone(),
            layers: Arc::new(LayerCount::new(self.slots.engine.layers(), until - self.next)),
            in_ranks: None,
            with_media: Arc::clone(&self.with_media),
            part_of: Some(Arc::clone(&self.joined)),
        };
        self.loads.push(self.core.load_into(load));
        self.next = until;
    }

    /// Loads the rest, from whichever tier has it, and waits for all: the engine may use its slots
    /// then. What was begun is answered for even if the pull failed.
    async fn end(
        mut self,
        pulled: Result<Pulled>,
        cancelled: &CancellationToken,
    ) -> Result<Loaded> {
        let wanted = self.slots.wanted();
        let (fault, failure) = match pulled {
            Ok(Pulled { lease, fault, .. }) => {
                self.load(lease, wanted.end);
                (fault, None)
            }
            Err(error) => (Some(error.to_string()), Some(error)),
        };
        let writers = Writers::new(&self.with_media);
        drop(self.with_media);
        let (mut arrived, mut is_whole, mut held) = (0, true, None);
        for load in self.loads {
            // None of an engine's slots was begun to be written, else it is no error.
            let loaded = cancelled_with(load, cancelled).await.ok();
            arrived += loaded.as_ref().filter(|_| is_whole).map_or(0, |loaded| loaded.arrived);
            is_whole = is_whole && loaded.as_ref().is_some_and(|loaded| loaded.is_whole);
            held = loaded.map(|loaded| loaded.lease).or(held);
        }
        match held {
            Some(lease) => Ok(Loaded { fault, ..Loaded::new(wanted, arrived, lease, writers) }),
            None => Err(failure.unwrap_or_else(Error::closed)),
        }
    }
}
