//! Which layers of a load have arrived, for an engine that computes the first while the last is on
//! its way.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// The blocks that have arrived, by layer.
#[derive(Debug)]
pub(crate) struct LayerCount {
    state: Mutex<LayerState>,
    changed: Condvar,
}

#[derive(Debug)]
struct LayerState {
    /// Of each layer: blocks that are still to come.
    missing: Vec<usize>,
    has_ended: bool,
}

impl LayerCount {
    /// For a load of `blocks` blocks.
    pub(crate) fn new(layers: u16, blocks: usize) -> Self {
        let state = LayerState { missing: vec![blocks; layers.into()], has_ended: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// `layer` of `blocks` more blocks has arrived.
    pub(crate) fn add(&self, layer: u16, blocks: usize) {
        let mut state = self.state.lock();
        let Some(missing) = state.missing.get_mut(usize::from(layer)) else { return };
        *missing = missing.saturating_sub(blocks);
        // Engines wait for whole layers: a part of one wakes no one.
        if *missing == 0 {
            self.changed.notify_all();
        }
    }

    /// No more will come. A backend that copies block by block has reported no layer: `is_whole`
    /// says that all are there.
    pub(crate) fn end(&self, is_whole: bool) {
        let mut state = self.state.lock();
        state.has_ended = true;
        if is_whole {
            state.missing.fill(0);
        }
        self.changed.notify_all();
    }

    /// Leading layers that are there in every block.
    pub(crate) fn arrived(&self) -> u16 {
        self.state.lock().arrived()
    }

    /// Waits, for `limit` at most, until the first `layers` layers are there or the load has ended.
    /// Returns how many are there.
    pub(crate) fn wait(&self, layers: u16, limit: Duration) -> u16 {
        let mut state = self.state.lock();
        self.changed.wait_while_for(
            &mut state,
            |state| !state.has_ended && state.arrived() < layers,
            limit,
        );
        state.arrived()
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

    #[test]
    fn a_layer_counts_when_all_blocks_have_it_and_earlier() {
        let count = LayerCount::new(3, 4);
        assert_eq!(count.arrived(), 0);
        count.add(1, 4);
        count.add(0, 3);
        assert_eq!(count.arrived(), 0);
        count.add(0, 1);
        assert_eq!(count.wait(2, Duration::ZERO), 2);
        assert_eq!(count.wait(3, Duration::from_millis(1)), 2);
        count.end(false);
        assert_eq!(count.wait(3, Duration::from_mins(1)), 2);
        count.end(true);
        assert_eq!(count.arrived(), 3);
    }
}
