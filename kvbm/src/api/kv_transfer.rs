//! One call that moves KV blocks from where they are to where they are wanted, and calls back: for a
//! caller that neither awaits nor polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvbm_tiers::{Fence, SlotId};

use crate::api::groups::{GroupSlots, SaveRequest};
use crate::api::manager::Manager;
use crate::api::transfer::{Loaded, Writers};
use crate::error::{Error, ErrorKind, Result};
use crate::names::hash::Chain;
use crate::peers::EngineSlots;
use crate::sync::spawn;
use crate::table::RequestInfo;

/// Where KV blocks come from or go to.
#[derive(Clone, Copy, Debug)]
pub enum KvPlace<'a> {
    /// The tiers of this manager.
    Tiers,
    /// Those of the [peer](crate::Peers) with this name: blocks come from there, and go nowhere
    /// else than here.
    Peer(&'a str),
    /// Slots of the [engine's own memory](crate::EngineMemory), one for each block.
    Slots(&'a [SlotId]),
}

/// What a [`Manager::transfer_kv_cache`] moved.
#[derive(Debug)]
pub struct KvMoved {
    /// Leading blocks of the chain that are at the destination now.
    pub blocks: usize,
    /// The media that may still write slots of the blocks that did not come.
    pub writers: Writers,
}

/// A [`Manager::transfer_kv_cache`] under way.
#[derive(Clone, Debug)]
pub struct KvTransfer {
    arrived: Arc<AtomicUsize>,
    wanted: usize,
}

impl KvTransfer {
    /// Blocks that are to be moved.
    pub const fn wanted(&self) -> usize {
        self.wanted
    }

    /// Blocks that have come to this worker so far. Those that do not come from a peer count at the
    /// end.
    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::Relaxed)
    }
}

impl Manager {
    /// Moves the blocks of a chain, and calls `on_done` on a thread of its own. It takes that
    /// thread until it has ended: a caller with many transfers at a time uses
    /// [`save_from`](Self::save_from), [`load_into`](Self::load_into) and
    /// [`Peers`](crate::Peers) itself, and awaits them.
    ///
    /// Blocks go from slots to the tiers, from the tiers to slots, and from a peer to either. What
    /// uses or fills the slots must have ended before, and nothing else may use them until
    /// `on_done`, which gets the errors of these calls too;
    /// [`Invalid`](crate::ErrorKind::Invalid) for any other two places.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the system refuses a thread. `on_done` is not called then, and
    /// what was begun goes on.
    pub fn transfer_kv_cache<'a>(
        &self,
        source: KvPlace<'_>,
        destination: KvPlace<'_>,
        blocks: impl Into<Chain<'a>>,
        on_done: impl FnOnce(Result<KvMoved>) + Send + 'static,
    ) -> Result<KvTransfer> {
        let chain = blocks.into();
        let under_way = KvTransfer { arrived: Arc::default(), wanted: chain.len() };
        let arrived = Arc::clone(&under_way.arrived);
        let moved = self.begin_moving(source, destination, chain, &arrived);
        let wait = move || {
            let moved = moved.and_then(|wait| wait());
            if let Ok(moved) = &moved {
                arrived.store(moved.blocks, Ordering::Relaxed);
            }
            on_done(moved);
        };
        spawn("kvbm-transfer", wait).map_err(|error| {
            Error::caused(ErrorKind::Unavailable, "no thread waits for the transfer", error)
        })?;
        Ok(under_way)
    }

    /// Returns what waits for the end.
    fn begin_moving(
        &self,
        source: KvPlace<'_>,
        destination: KvPlace<'_>,
        chain: Chain<'_>,
        arrived: &Arc<AtomicUsize>,
    ) -> Result<Box<dyn FnOnce() -> Result<KvMoved> + Send>> {
        match (source, destination) {
            (KvPlace::Slots(from), KvPlace::Tiers) => {
                let named = [GroupSlots::full(0, from)];
                let saving = self.save_from(&SaveRequest::of(chain, &named));
                Ok(Box::new(|| saving.wait().map(|saved| KvMoved::of(saved.blocks))))
            }
            (KvPlace::Tiers, KvPlace::Slots(to)) => {
                let named = [GroupSlots::full(0, to)];
                let loading = self.load_into(self.lease(chain), &named, &Fence::Done);
                Ok(Box::new(|| loading.wait().map(KvMoved::from)))
            }
            (KvPlace::Peer(peer), KvPlace::Tiers) => {
                let peers = self.own_peers()?;
                let leasing = peers.lease(peer, chain, RequestInfo::default());
                let pulling = peers.pull_when_leased(leasing, arrived);
                Ok(Box::new(|| pulling.wait().map(|pulled| KvMoved::of(pulled.blocks))))
            }
            (KvPlace::Peer(peer), KvPlace::Slots(to)) => {
                self.check_plain()?;
                let (peers, engine) = (self.own_peers()?, self.engine()?.clone());
                let slots = EngineSlots::new(engine, 0, to, Fence::Done)?;
                let leasing = peers.lease(peer, chain, RequestInfo::default());
                let loading = peers.load_into(leasing, slots, arrived);
                Ok(Box::new(|| loading.wait().map(KvMoved::from)))
            }
            _ => Err(Error::invalid(
                "blocks go from slots to the tiers, from the tiers to slots, or from a peer to either",
            )),
        }
    }
}

impl KvMoved {
    /// Nothing else uses a slot any more.
    fn of(blocks: usize) -> Self {
        Self { blocks, writers: Writers::none() }
    }
}

impl From<Loaded> for KvMoved {
    fn from(loaded: Loaded) -> Self {
        Self { blocks: loaded.arrived, writers: loaded.writers }
    }
}
