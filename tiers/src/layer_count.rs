//! How much of a load is there, layer by layer: an engine computes a layer as soon as it is.

use std::num::NonZeroU16;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// The blocks of a load that have arrived, by layer.
#[derive(Debug)]
pub struct LayerCount {
    layers: NonZeroU16,
    blocks: usize,
    state: Mutex<LayerState>,
    changed: Condvar,
}

#[derive(Debug)]
struct LayerState {
    /// Of each layer: blocks that are still to come.
    missing: Vec<usize>,
    /// Leading blocks that came, once no more will come.
    ended: Option<usize>,
}

impl LayerCount {
    /// For a load of `blocks` blocks.
    pub fn new(layers: NonZeroU16, blocks: usize) -> Self {
        let state = LayerState { missing: vec![blocks; layers.get().into()], ended: None };
        Self { layers, blocks, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Layers of a block.
    pub const fn layers(&self) -> NonZeroU16 {
        self.layers
    }

    /// `layer` of `blocks` more blocks has arrived.
    pub fn add(&self, layer: u16, blocks: usize) {
        let mut state = self.state.lock();
        let Some(missing) = state.missing.get_mut(usize::from(layer)) else { return };
        *missing = missing.saturating_sub(blocks);
        // Engines wait for whole layers: a part of one wakes no one.
        if *missing == 0 {
            self.changed.notify_all();
        }
    }

    /// No more will come, and this many leading blocks have. A backend that copies block by block
    /// has reported no layer: if all blocks came, all layers are there. The first call counts.
    pub fn end(&self, arrived: usize) {
        let mut state = self.state.lock();
        if state.ended.is_none() {
            state.ended = Some(arrived.min(self.blocks));
            if arrived >= self.blocks {
                state.missing.fill(0);
            }
        }
        self.changed.notify_all();
    }

    /// Leading blocks that came; `None`: it has not ended.
    pub fn ended(&self) -> Option<usize> {
        self.state.lock().ended
    }

    /// Leading layers that are there in every block.
    pub fn arrived(&self) -> u16 {
        self.state.lock().arrived()
    }

    /// Waits, for `limit` at most, until the first `layers` layers are there or the load has ended.
    /// Returns how many are there.
    pub fn wait(&self, layers: u16, limit: Duration) -> u16 {
        let mut state = self.state.lock();
        let is_awaited = |state: &mut LayerState| state.ended.is_none() && state.arrived() < layers;
        self.changed.wait_while_for(&mut state, is_awaited, limit);
        state.arrived()
    }

    /// Waits, for `limit` at most, until it has [ended](Self::ended).
    pub fn wait_end(&self, limit: Duration) -> Option<usize> {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |state| state.ended.is_none(), limit);
        state.ended
    }
}

impl LayerState {
    fn arrived(&self) -> u16 {
        self.missing.iter().take_while(|&&missing| missing == 0).count() as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_mins(1);

    fn count(blocks: usize) -> LayerCount {
        LayerCount::new(3.try_into().unwrap(), blocks)
    }

    #[test]
    fn a_layer_counts_when_all_blocks_have_it_and_earlier() {
        let count = count(4);
        assert_eq!(count.arrived(), 0);
        count.add(1, 4);
        count.add(0, 3);
        assert_eq!(count.arrived(), 0);
        count.add(0, 1);
        assert_eq!(count.wait(2, Duration::ZERO), 2);
        assert_eq!(count.wait(3, Duration::from_millis(1)), 2);
        assert_eq!(count.wait_end(Duration::ZERO), None);
    }

    #[test]
    fn a_load_ends_once_and_no_one_waits_after_that() {
        for (arrived, layers) in [(3, 1), (4, 3)] {
            let count = count(4);
            count.add(0, 4);
            count.end(arrived);
            count.end(0);
            assert_eq!(count.wait(3, LIMIT), layers);
            assert_eq!(count.wait_end(LIMIT), Some(arrived));
        }
    }
}
