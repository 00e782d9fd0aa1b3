//! An engine's own memory: its KV cache is adopted as it is, and blocks are copied directly between
//! its slots and our tiers.
//!
//! The engine stays in charge of its memory. It names slots; we copy from and to them, and record
//! nothing about their contents. So a block that it saves goes down at once, and one that it wants
//! back goes to the slot that it chose.

use std::num::NonZeroU16;
use std::sync::Arc;

use kvbm_settings::Settings;
use kvbm_tiers::{DeviceRegion, SlotId};

use crate::api::manager::Manager;
use crate::error::{Error, Result};
use crate::task::TransferId;

/// An engine's KV cache: where its blocks lie, and how many layers each has. A clone is a handle to
/// the same memory.
#[derive(Clone, Debug)]
pub struct EngineMemory {
    place: MemoryPlace,
    layers: NonZeroU16,
}

#[derive(Clone, Debug)]
enum MemoryPlace {
    Here(Arc<DeviceRegion>),
    /// Bytes of a block, where the settings do not say.
    InRanks {
        slots: u32,
        block_bytes: Option<u64>,
    },
}

impl EngineMemory {
    /// Adopts `region`, whose blocks are `layers` equal shares of bytes, the first layer first:
    /// keys and values of a layer lie in parts next to each other, as
    /// [`SegmentMap`](kvbm_tiers::SegmentMap) lists them.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): no layers, or a block cannot be divided
    /// into that many.
    pub fn new(region: DeviceRegion, layers: u16) -> Result<Self> {
        let layers = layers_of(region.segments().block_bytes() as u64, layers)?;
        Ok(Self { place: MemoryPlace::Here(Arc::new(region)), layers })
    }

    /// For the leader of [ranks](crate::Rank), each of which [brings](crate::RankOptions::engine)
    /// its slice of `slots` slots. Layers are reported at the end of a load, since they arrive in
    /// other processes, which may [wait for them](crate::Manager::load_in_ranks).
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): no layers.
    pub fn in_ranks(slots: u32, layers: u16) -> Result<Self> {
        let place = MemoryPlace::InRanks { slots, block_bytes: None };
        Ok(Self { place, layers: layers_of(u64::from(layers), layers)? })
    }

    /// [`in_ranks`](Self::in_ranks), of another [cache group](crate::CacheGroup), whose slices have
    /// `block_bytes` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): no layers, or a block cannot be divided
    /// into that many.
    pub fn group_in_ranks(slots: u32, layers: u16, block_bytes: u64) -> Result<Self> {
        let place = MemoryPlace::InRanks { slots, block_bytes: Some(block_bytes) };
        Ok(Self { place, layers: layers_of(block_bytes, layers)? })
    }

    pub(crate) const fn layers(&self) -> NonZeroU16 {
        self.layers
    }

    pub(crate) fn slots(&self) -> u32 {
        match &self.place {
            MemoryPlace::Here(region) => region.segments().slots(),
            MemoryPlace::InRanks { slots, .. } => *slots,
        }
    }

    /// Bytes of a block; `None`: as the settings say.
    pub(crate) fn block_bytes(&self) -> Option<u64> {
        match &self.place {
            MemoryPlace::Here(region) => Some(region.segments().block_bytes() as u64),
            MemoryPlace::InRanks { block_bytes, .. } => *block_bytes,
        }
    }

    /// The memory of a process that has it.
    pub(crate) fn region(&self) -> Result<Arc<DeviceRegion>> {
        match &self.place {
            MemoryPlace::Here(region) => Ok(Arc::clone(region)),
            MemoryPlace::InRanks { .. } => Err(Error::invalid(
                "the engine's memory is in ranks, and there are none: set Options::ranks",
            )),
        }
    }

    /// Checks that a leader's ranks have it.
    pub(crate) fn check_in_ranks(&self, settings: &Settings) -> Result<()> {
        match &self.place {
            MemoryPlace::InRanks { .. } => {
                layers_of(settings.block_bytes.unwrap_or_default(), self.layers.get()).map(drop)
            }
            MemoryPlace::Here(_) => Err(Error::invalid(
                "a leader of ranks has no memory of its own: say EngineMemory::in_ranks, and give it to the ranks",
            )),
        }
    }

    /// Checks that each of `slots` is one of the engine's.
    pub(crate) fn check(&self, slots: &[SlotId]) -> Result<()> {
        let all = self.slots();
        match slots.iter().find(|slot| slot.0 >= all) {
            None => Ok(()),
            Some(slot) => {
                let message = format!("slot {} is not among the engine's {all} slots", slot.0);
                Err(Error::invalid(message))
            }
        }
    }

    /// Checks slots that are to get blocks. Two blocks loaded into one slot would mix; saving one
    /// slot twice is harmless, so a save does not check that.
    pub(crate) fn check_load(&self, slots: &[SlotId]) -> Result<()> {
        self.check(slots).and_then(|()| check_distinct(slots))
    }
}

fn layers_of(bytes: u64, layers: u16) -> Result<NonZeroU16> {
    NonZeroU16::new(layers)
        .filter(|&layers| bytes.is_multiple_of(u64::from(layers.get())))
        .ok_or_else(|| {
            let message = format!("a block of {bytes} bytes has no {layers} layers of one size");
            Error::invalid(message)
        })
}

impl Manager {
    /// Adds the names of the saves from and loads into the engine's memory that have ended since
    /// the last call, successfully or not: for an engine that polls. A transfer of all cache groups
    /// is named once, when its last group has ended. They are noted from the first call on, the
    /// last 65,536 of them.
    pub fn completions(&self, out: &mut Vec<TransferId>) {
        self.core().completions(out);
    }
}

pub(crate) fn check_distinct(slots: &[SlotId]) -> Result<()> {
    // Sorted, not hashed: an engine waits, and most give them in order.
    let mut sorted: Vec<_> = slots.iter().map(|slot| slot.0).collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(Error::invalid(format!("slot {} is to get two blocks at once", pair[0]))),
    }
}
