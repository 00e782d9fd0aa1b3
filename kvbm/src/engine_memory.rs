//! An engine's own memory: its KV cache is adopted as it is, and blocks go straight between its slots and our tiers.
//!
//! The engine stays the master of its memory. It names slots, we copy from and to them and record nothing about what lies
//! there: so a block that it saves goes down at once, and one that it wants back goes to the slot that it chose.

use std::collections::HashSet;
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_settings::Settings;
use kvbm_tiers::{DeviceRegion, Fence, SlotId, Tier, clock};

use crate::error::{Error, ErrorKind, Result};
use crate::hash::Chain;
use crate::lease::Lease;
use crate::manager::Manager;
use crate::scheduler::{LoadInto, SaveFrom};
use crate::table::{RequestInfo, TransferEnd};
use crate::task::TransferId;
use crate::transfer::Transfer;

/// An engine's KV cache: where its blocks lie, and how many layers each has. A clone is of the same memory.
#[derive(Clone, Debug)]
pub struct EngineMemory {
    place: Place,
    layers: NonZeroU16,
}

#[derive(Clone, Debug)]
enum Place {
    Here(Arc<DeviceRegion>),
    /// Bytes of a block where the settings are not of it.
    InRanks {
        slots: u32,
        block_bytes: Option<u64>,
    },
}

impl EngineMemory {
    /// Adopts `region`, whose blocks are `layers` equal shares of bytes, the first layer first: keys and values of a layer
    /// lie in parts next to each other, as [`SegmentMap`](kvbm_tiers::SegmentMap) lists them.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: no layers, or a block cannot be divided into so many.
    pub fn new(region: DeviceRegion, layers: u16) -> Result<Self> {
        let layers = layers_of(region.segments().block_bytes() as u64, layers)?;
        Ok(Self { place: Place::Here(Arc::new(region)), layers })
    }

    /// For the leader of [ranks](crate::Rank), each of which [brings](crate::Rank::join_with) its slice of `slots` slots.
    /// Layers are told at the end of a load, since they come in other processes.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: no layers.
    pub fn in_ranks(slots: u32, layers: u16) -> Result<Self> {
        let place = Place::InRanks { slots, block_bytes: None };
        Ok(Self { place, layers: layers_of(u64::from(layers), layers)? })
    }

    /// [`in_ranks`](Self::in_ranks), of another [cache group](crate::CacheGroup), whose slices have `block_bytes` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]: no layers, or a block cannot be divided into so many.
    pub fn group_in_ranks(slots: u32, layers: u16, block_bytes: u64) -> Result<Self> {
        let place = Place::InRanks { slots, block_bytes: Some(block_bytes) };
        Ok(Self { place, layers: layers_of(block_bytes, layers)? })
    }

    pub(crate) const fn layers(&self) -> NonZeroU16 {
        self.layers
    }

    pub(crate) fn slots(&self) -> u32 {
        match &self.place {
            Place::Here(region) => region.segments().slots(),
            Place::InRanks { slots, .. } => *slots,
        }
    }

    /// Bytes of a block; `None`: the settings say.
    pub(crate) fn block_bytes(&self) -> Option<u64> {
        match &self.place {
            Place::Here(region) => Some(region.segments().block_bytes() as u64),
            Place::InRanks { block_bytes, .. } => *block_bytes,
        }
    }

    /// The memory of a process that has it.
    pub(crate) fn region(&self) -> Result<Arc<DeviceRegion>> {
        match &self.place {
            Place::Here(region) => Ok(Arc::clone(region)),
            Place::InRanks { .. } => Err(Error::new(
                ErrorKind::Invalid,
                "the engine's memory is in ranks, and there are none: set Options::ranks",
            )),
        }
    }

    /// That a leader's ranks have it.
    pub(crate) fn check_in_ranks(&self, settings: &Settings) -> Result<()> {
        match &self.place {
            Place::InRanks { .. } => {
                layers_of(settings.block_bytes.unwrap_or_default(), self.layers.get()).map(drop)
            }
            Place::Here(_) => Err(Error::new(
                ErrorKind::Invalid,
                "a leader of ranks has no memory of its own: say EngineMemory::in_ranks, and give it to the ranks",
            )),
        }
    }

    /// That each of `slots` is one of the engine's.
    pub(crate) fn check(&self, slots: &[SlotId]) -> Result<()> {
        let all = self.slots();
        match slots.iter().find(|slot| slot.0 >= all) {
            None => Ok(()),
            Some(slot) => {
                let message = format!("slot {} is not among the engine's {all} slots", slot.0);
                Err(Error::new(ErrorKind::Invalid, message))
            }
        }
    }
}

/// How a [`Manager::save_from`] ended. All counts are in blocks.
#[derive(Debug)]
pub struct Saved {
    /// Holds the chain, as far as the tiers have it now.
    pub lease: Lease,
    /// Leading blocks of the chain that the uppermost tier has now.
    pub blocks: usize,
    /// Copied by this save.
    pub copied: usize,
    /// There before, or on their way: each is copied once.
    pub duplicates: usize,
    /// Not kept, because those before them are not there: bring these as well.
    pub orphans: usize,
    /// Not worth the room that they would take.
    pub declined: usize,
    /// Found no room or no queue space, or the medium is left alone for now.
    pub refused: usize,
    /// Failed, with those behind them.
    pub failed: usize,
}

impl Saved {
    pub(crate) fn new(ended: &TransferEnd, duplicates: usize, lease: Lease) -> Self {
        Self {
            blocks: lease.blocks(ended.to),
            copied: ended.copied,
            duplicates,
            orphans: 0,
            declined: ended.declined,
            refused: ended.refused,
            failed: ended.blocks - ended.copied,
            lease,
        }
    }

    pub(crate) fn orphans(orphans: usize, to: Tier, lease: Lease) -> Self {
        let blocks = lease.blocks(to);
        Self { lease, blocks, copied: 0, duplicates: 0, orphans, declined: 0, refused: 0, failed: 0 }
    }
}

/// How a [`Manager::load_into`] ended. Counts are in blocks.
#[derive(Debug)]
pub struct Loaded {
    /// Holds the chain as before, but for blocks that turned out bad.
    pub lease: Lease,
    /// Leading wanted blocks that are in the engine's slots now.
    pub arrived: usize,
    /// The wanted blocks behind them: their slots hold no bytes that can be used.
    pub failed: usize,
    /// Who may still write the slots of those that failed.
    pub writers: Writers,
}

/// Copies into an engine's slots that nobody waits for any more, but that a medium may not have ended: until they are
/// gone, the engine must not use the slots of blocks that failed.
#[derive(Clone, Debug)]
pub struct Writers(Weak<()>);

impl Writers {
    pub(crate) fn new(with_media: &Arc<()>) -> Self {
        Self(Arc::downgrade(with_media))
    }

    /// Whether no medium has any of the slots any more.
    pub fn are_gone(&self) -> bool {
        self.0.strong_count() == 0
    }

    /// Waits for that, at most for `limit`. False: a medium still has one.
    pub fn wait(&self, limit: Duration) -> bool {
        const LOOK: Duration = Duration::from_micros(200);
        // None: beyond the end of time.
        let deadline = clock::now().checked_add(limit);
        // A medium that hangs is rare, and goes on when it will.
        while !self.are_gone() && deadline.is_none_or(|deadline| clock::now() < deadline) {
            std::thread::sleep(LOOK);
        }
        self.are_gone()
    }
}

impl Manager {
    /// Copies successive blocks of a request's `chain`, from position `first` on, out of the engine's `slots` to the
    /// uppermost tier, once `ready` has come. Blocks that are there already are not copied again. Those before `first` must
    /// be there or on their way: so bring a chain from its root, or a prefill's chunks in their order.
    ///
    /// The slots must not change until the answer. It is an error of kind [`Invalid`](ErrorKind::Invalid) if there is no
    /// engine's memory, a slot does not exist or the chain is shorter, and of kind [`Closed`](ErrorKind::Closed) after
    /// [`close`](Self::close). Where `ready` does not come within `transfer.timeout_ms` (`DYN_KVBM_TRANSFER_TIMEOUT_MS`),
    /// or cannot come any more, all of its blocks count as failed.
    pub fn save_from<'a>(
        &self,
        info: RequestInfo,
        chain: impl Into<Chain<'a>>,
        first: usize,
        slots: &[SlotId],
        ready: Fence,
    ) -> Transfer<Saved> {
        let chain = chain.into();
        let is_long_enough = first.checked_add(slots.len()).is_some_and(|end| end <= chain.len());
        let checked = self.engine().and_then(|engine| engine.check(slots)).and_then(|()| {
            let blocks = (slots.len(), chain.len());
            if is_long_enough { self.uppermost() } else { Err(too_short(first, blocks)) }
        });
        match checked {
            Ok(to) => self.core().save_from(to, SaveFrom { info, chain, first, slots, ready }),
            Err(error) => Transfer::failed(error),
        }
    }

    /// Copies the blocks at the positions `blocks` of what `lease` holds into the engine's `slots`, once `after` has come:
    /// the work that used the slots before. Blocks that no tier holds count as failed, as do those behind one that
    /// cannot be read.
    ///
    /// Nobody else may use the slots until the answer, and those that failed until its [`Writers`] are gone. It is an
    /// error of kind [`Invalid`](ErrorKind::Invalid) if there is no engine's memory, a slot does not exist or is named
    /// twice, there is not one for each block, or the lease is of another manager; of kind [`Stale`](ErrorKind::Stale) if it is
    /// from before a [`reset`](Self::reset), and of kind [`Closed`](ErrorKind::Closed) after [`close`](Self::close). For `after` what [`save_from`](Self::save_from) says of `ready` holds.
    pub fn load_into(
        &self,
        lease: Lease,
        blocks: Range<usize>,
        slots: &[SlotId],
        after: Fence,
    ) -> Transfer<Loaded> {
        let checked = self.engine().and_then(|engine| {
            engine.check(slots)?;
            // Two blocks that come into one slot mix. Saving one slot twice harms nobody, so it is not looked for.
            check_distinct(slots)?;
            self.core().check_lease(&lease)?;
            if blocks.len() == slots.len() {
                Ok(engine.layers)
            } else {
                Err(too_short(0, (blocks.len(), slots.len())))
            }
        });
        match checked {
            Ok(layers) => self.core().load_into(LoadInto { lease, blocks, slots, after, layers }),
            Err(error) => Transfer::failed(error),
        }
    }

    /// Adds the names of the saves from and loads into the engine's memory that have ended since the last call: for an
    /// engine that polls. They are noted from the first call on.
    pub fn completions(&self, out: &mut Vec<TransferId>) {
        self.core().completions(out);
    }

    fn uppermost(&self) -> Result<Tier> {
        self.below_device().ok_or_else(|| {
            Error::new(ErrorKind::Invalid, "there is no tier to save to: set host.capacity, or a lower tier")
        })
    }
}

fn layers_of(bytes: u64, layers: u16) -> Result<NonZeroU16> {
    NonZeroU16::new(layers).filter(|&layers| bytes.is_multiple_of(u64::from(layers.get()))).ok_or_else(|| {
        let message = format!("a block of {bytes} bytes has no {layers} layers of one size");
        Error::new(ErrorKind::Invalid, message)
    })
}

fn too_short(first: usize, (wanted, there): (usize, usize)) -> Error {
    let message =
        format!("{wanted} blocks from position {first} on, of {there}: name one slot for each block");
    Error::new(ErrorKind::Invalid, message)
}

pub(crate) fn check_distinct(slots: &[SlotId]) -> Result<()> {
    let mut seen = HashSet::with_capacity(slots.len());
    match slots.iter().find(|&&slot| !seen.insert(slot)) {
        None => Ok(()),
        Some(slot) => {
            Err(Error::new(ErrorKind::Invalid, format!("slot {} is to get two blocks at once", slot.0)))
        }
    }
}
