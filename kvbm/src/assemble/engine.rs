//! An engine's memory in place of a device tier: its connection, and a trial.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use kvbm_settings::Settings;
use kvbm_tiers::{
    Backend, BlockKey, CopyOp, DeviceRegion, Done, DramRegion, Frame, FramePool, MemcpyBackend,
    Memory, SlotId, SlotRef, Space, Tier,
};

use super::{gpu, setup};
use crate::error::{Error, ErrorKind, Result};

/// Checks that the settings fit the engine's memory, whose blocks have `theirs` bytes.
pub(super) fn check(theirs: u64, settings: &Settings) -> Result<()> {
    let ours = settings.block_bytes.unwrap_or_default();
    if settings.device.capacity.is_some() {
        let message = "device.capacity (DYN_KVBM_DEVICE_CACHE_*) names a device tier, and the engine brings its own \
             memory: leave one out";
        return Err(Error::invalid(message));
    }
    if ours != theirs {
        let message = format!(
            "block_bytes (DYN_KVBM_BLOCK_BYTES) is {ours}, and a block of the engine has {theirs} bytes: set it to that"
        );
        return Err(Error::invalid(message));
    }
    Ok(())
}

pub(super) fn no_memory() -> Error {
    let message = "an engine's memory needs DRAM to copy to: set host.capacity, or host.staging_blocks above 0 with a \
         lower tier";
    Error::invalid(message)
}

/// Between the engine's memory and ours.
pub(super) fn connect(
    engine: &Arc<DeviceRegion>,
    host: Arc<dyn Memory>,
    settings: &Settings,
) -> Result<Arc<dyn Backend>> {
    match engine.space() {
        Space::Host => {
            let threads = settings.transfer.copy_threads as usize;
            let backend =
                MemcpyBackend::with_device(host, Arc::clone(engine), threads).map_err(setup)?;
            Ok(Arc::new(backend))
        }
        Space::Cuda(ordinal) => gpu::connect_engine(ordinal, engine, host, settings.peers.enabled),
    }
}

/// Sends a block of a known pattern through the first and the last slot, compares what comes back,
/// and restores the slots. Each of its copies may take as long as `limit`: a driver that hangs must
/// not hang the start.
///
/// It detects memory that no backend can copy to, that is not there, or whose slots share bytes. It
/// does not detect a wrong base or stride that leads to other memory of the engine: the same values
/// say where to write and where to read, and only the engine knows what it meant.
pub(super) fn try_out(
    engine: &DeviceRegion,
    backend: &Arc<dyn Backend>,
    limit: Duration,
    host: &DramRegion,
    pool: Option<&mut FramePool>,
    staging: &mut Vec<Frame>,
) -> Result<()> {
    let (frame, pool) = match (staging.pop(), pool) {
        // Either is fine: no block has come yet, and no copy waits.
        (Some(frame), _) => (frame, None),
        (None, Some(pool)) => (pool.take().ok_or_else(no_memory)?, Some(pool)),
        (None, None) => return Err(no_memory()),
    };
    // A slot of the tier may hold what an earlier process left.
    let before = pool.is_some().then(|| host.read(&frame).map(<[u8]>::to_vec)).flatten();
    let mut canary = MemoryCanary { backend, limit, host, frame, hangs: false };
    // The ends: if a size or stride is so wrong that there is no memory, it shows at the far one.
    let mut slots = vec![SlotId(0), SlotId(engine.segments().slots() - 1)];
    slots.dedup();
    let outcome = canary.fly(&slots);
    if let Some(before) = before.filter(|_| !canary.hangs)
        && let Some(slot) = host.write(&mut canary.frame)
    {
        slot.copy_from_slice(&before);
    }
    match pool {
        Some(pool) => pool.give_back(canary.frame),
        None => staging.push(canary.frame),
    }
    outcome
}

const NOT_COPIED: &str = "a block could not be copied between the engine's memory and ours";

struct MemoryCanary<'a> {
    backend: &'a Arc<dyn Backend>,
    limit: Duration,
    host: &'a DramRegion,
    frame: Frame,
    /// A copy has not ended: it owns the frame, which is not touched any more.
    hangs: bool,
}

impl MemoryCanary<'_> {
    /// All slots get their patterns before any is read: this shows an overlap.
    fn fly(&mut self, slots: &[SlotId]) -> Result<()> {
        let before = slots.iter().map(|&slot| self.read(slot)).collect::<Result<Vec<_>>>()?;
        let patterns: Vec<_> =
            (0..).zip(&before).map(|(seed, block)| pattern(seed, block.len())).collect();
        let written =
            slots.iter().zip(&patterns).try_for_each(|(&slot, block)| self.write(slot, block));
        let came_back = written.and_then(|()| {
            let read = |&slot| self.read(slot);
            slots.iter().map(read).collect::<Result<Vec<_>>>()
        });
        // Before any judgement: the engine gets its bytes back, whatever the result.
        let restored =
            slots.iter().zip(&before).try_for_each(|(&slot, block)| self.write(slot, block));
        let wrong = came_back?.iter().zip(&patterns).position(|(block, pattern)| block != pattern);
        restored?;
        wrong.map_or(Ok(()), |place| {
            let message = format!(
                "a block that went through the engine's slot {} came back changed: its memory does not lie as its \
                 parts say",
                slots[place].0
            );
            Err(Error::unavailable(message))
        })
    }

    fn read(&mut self, slot: SlotId) -> Result<Vec<u8>> {
        self.copy(there(slot), self.frame.slot_ref())?;
        self.host.read(&self.frame).map(<[u8]>::to_vec).ok_or_else(no_memory)
    }

    fn write(&mut self, slot: SlotId, block: &[u8]) -> Result<()> {
        if self.hangs {
            return Err(self.hanging());
        }
        self.host.write(&mut self.frame).ok_or_else(no_memory)?.copy_from_slice(block);
        self.copy(self.frame.slot_ref(), there(slot))
    }

    fn copy(&mut self, from: SlotRef, to: SlotRef) -> Result<()> {
        let (report, reported) = channel();
        // After the limit the receiver is gone, which is fine.
        let done = Done::new(move |ended| {
            ended.into_iter().for_each(|(_, result)| drop(report.send(result)));
        });
        let block = BlockKey { hash: 0, group: 0 };
        self.backend.submit(vec![CopyOp { block, parent: None, owner: None, from, to }], done);
        match reported.recv_timeout(self.limit) {
            Ok(copied) => copied.map_err(|error| {
                Error::caused(ErrorKind::Unavailable, format!("{NOT_COPIED}: {error}"), error)
            }),
            Err(RecvTimeoutError::Timeout) => {
                self.hangs = true;
                Err(self.hanging())
            }
            Err(error) => Err(Error::caused(ErrorKind::Unavailable, NOT_COPIED, error)),
        }
    }

    fn hanging(&self) -> Error {
        let message = format!(
            "{NOT_COPIED} within {:?}: what copies to the engine's memory hangs, or transfer.timeout_ms \
             (DYN_KVBM_TRANSFER_TIMEOUT_MS) is too short for it",
            self.limit
        );
        Error::unavailable(message)
    }
}

const fn there(slot: SlotId) -> SlotRef {
    SlotRef { tier: Tier::Device, slot, generation: 0 }
}

/// Bytes that differ from place to place and from slot to slot.
fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64)
        .map(|at| {
            (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(21) ^ seed.wrapping_add(at >> 8))
                as u8
        })
        .collect()
}
