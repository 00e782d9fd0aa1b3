use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::clock;
use crate::copy::{SlotId, Tier};
use crate::dram::{DramOptions, DramRegion};
use crate::error::SetupError;
use crate::memory::Memory;

/// `memcpy` from one region to another, block by block.
#[derive(Debug)]
pub struct RawCopy {
    from: DramRegion,
    to: DramRegion,
}

impl RawCopy {
    /// Two regions of this shape. Nothing else gets at them.
    ///
    /// # Errors
    /// `NoSpace`: the system has not that much memory to give.
    pub fn open(options: DramOptions) -> Result<Self, SetupError> {
        Ok(Self {
            from: DramRegion::open(Tier::Device, options)?,
            to: DramRegion::open(Tier::Host, options)?,
        })
    }

    /// Copies every block once, `threads` threads taking blocks in turns. The time does not include
    /// starting the threads.
    pub fn run(&mut self, threads: usize) -> Duration {
        let (ready, next) = (Barrier::new(threads + 1), AtomicU32::new(0));
        let regions = &*self;
        std::thread::scope(|scope| {
            let copy = || {
                ready.wait();
                while regions.copy(SlotId(next.fetch_add(1, Ordering::Relaxed))) {}
            };
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(copy)).collect();
            ready.wait();
            let started = clock::now();
            workers.into_iter().for_each(|worker| drop(worker.join()));
            started.elapsed()
        })
    }

    /// False: there is no such slot. [`run`](Self::run) alone calls this, once per slot.
    fn copy(&self, slot: SlotId) -> bool {
        let (Some(from), Some(to)) = (self.from.slot(slot), self.to.slot(slot)) else {
            return false;
        };
        let bytes = self.from.block_bytes();
        // SAFETY: both slots exist and hold a block; no slot handle to any slot was given out,
        // `run` borrows both regions mutably, and each of its threads takes other slots.
        unsafe { from.cast::<u8>().copy_to_nonoverlapping(to.cast(), bytes) };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{fill_pattern, has_pattern, options};

    #[test]
    fn every_block_is_copied() {
        let mut raw = RawCopy::open(options(9, 5000)).unwrap();
        let mut frames = raw.from.frames().unwrap();
        let mut slots: Vec<_> = std::iter::from_fn(|| frames.take()).collect();
        for (number, slot) in slots.iter_mut().enumerate() {
            fill_pattern(number, raw.from.write(slot).unwrap());
        }
        raw.run(3);
        let mut frames = raw.to.frames().unwrap();
        let slots = std::iter::from_fn(|| frames.take());
        for (number, slot) in slots.enumerate() {
            assert!(has_pattern(number, raw.to.read(&slot).unwrap()));
        }
    }
}
