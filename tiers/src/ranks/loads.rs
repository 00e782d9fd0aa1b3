//! Loads that an engine awaits layer by layer in each rank: the rank counts what has come of its
//! slice, and hears from the leader how the load ended in all of them.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::backend::Layers;
use crate::layer_count::LayerCount;

/// Loads that a rank knows of at most. Of those that have ended and that no engine asked for, the
/// oldest go.
const MAX_LOADS: usize = 1 << 16;

/// A load, as its leader and the ranks call it. An engine passes it on to its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankLoad {
    /// Its number among the leader's loads.
    pub number: u64,
    /// Layers of a slice.
    pub layers: NonZeroU16,
    /// Blocks that are wanted.
    pub blocks: u32,
}

/// A rank's slice of a load, as its engine waits for it. Dropping it forgets the load: wait for its
/// end first, since until then its slots may be written.
#[derive(Debug)]
pub struct SliceLoad {
    loads: Arc<RankLoads>,
    number: u64,
    count: Arc<LayerCount>,
}

impl SliceLoad {
    /// Blocks the thread, for `limit` at most, until the first `layers` layers of every block are
    /// there in this rank. False: they are not there, and if the load has ended they will not come.
    pub fn wait_layers(&self, layers: u16, limit: Duration) -> bool {
        self.count.wait(layers, limit) >= layers
    }

    /// Blocks the thread, for `limit` at most, until the load has ended and nothing touches its
    /// slots any more. Returns how many leading blocks are there in every rank; `None`: it goes on.
    pub fn wait(&self, limit: Duration) -> Option<usize> {
        self.count.wait_end(limit)
    }
}

impl Drop for SliceLoad {
    fn drop(&mut self) {
        self.loads.0.lock().loads.remove(&self.number);
    }
}

/// All loads whose layers a rank counts.
#[derive(Debug, Default)]
pub struct RankLoads(Mutex<LoadBook>);

#[derive(Debug, Default)]
struct LoadBook {
    /// By number. An engine may ask for a load before its leader has sent anything of it.
    loads: BTreeMap<u64, CountedLoad>,
    /// No load is under way or to come.
    is_closed: bool,
}

#[derive(Clone, Debug)]
struct CountedLoad {
    count: Arc<LayerCount>,
    /// The same for all its batches.
    layers: Layers,
}

impl RankLoads {
    /// What an engine waits for.
    pub fn slice(self: &Arc<Self>, load: RankLoad) -> SliceLoad {
        let CountedLoad { count, .. } = self.of(load);
        SliceLoad { loads: Arc::clone(self), number: load.number, count }
    }

    /// The layers that a batch of it counts.
    pub(super) fn layers(&self, load: RankLoad) -> Layers {
        self.of(load).layers
    }

    /// The leader says that this many leading blocks came.
    pub(super) fn ended(&self, load: RankLoad, arrived: u32) {
        self.of(load).count.end(arrived as usize);
    }

    fn of(&self, load: RankLoad) -> CountedLoad {
        let mut book = self.0.lock();
        let counted = book.loads.entry(load.number).or_insert_with(|| CountedLoad::new(load));
        let counted = counted.clone();
        if book.is_closed {
            counted.count.end(0);
        }
        book.forget_oldest();
        counted
    }

    /// The service has ended, and its copies have: nothing more comes of any load.
    pub(super) fn close(&self) {
        let mut book = self.0.lock();
        book.is_closed = true;
        book.loads.values().for_each(|load| load.count.end(0));
    }
}

impl LoadBook {
    fn forget_oldest(&mut self) {
        if self.loads.len() > MAX_LOADS {
            let ended = self.loads.iter().find(|(_, load)| load.count.ended().is_some());
            let oldest = ended.map(|(&number, _)| number);
            oldest.and_then(|number| self.loads.remove(&number));
        }
    }
}

impl CountedLoad {
    fn new(load: RankLoad) -> Self {
        let count = Arc::new(LayerCount::new(load.layers, load.blocks as usize));
        Self { layers: Layers::counted(&count), count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_mins(1);

    fn load(number: u64) -> RankLoad {
        RankLoad { number, layers: 2.try_into().unwrap(), blocks: 3 }
    }

    #[test]
    fn an_engine_may_ask_before_or_after_the_load() {
        let loads = Arc::new(RankLoads::default());
        let before = loads.slice(load(7));
        assert!(!before.wait_layers(1, Duration::ZERO));
        loads.layers(load(7)).arrived(0, 2);
        loads.layers(load(7)).arrived(0, 1);
        assert!(before.wait_layers(1, LIMIT) && !before.wait_layers(2, Duration::ZERO));
        loads.ended(load(7), 1);
        assert!(!before.wait_layers(2, LIMIT), "it has ended without them");
        assert_eq!(before.wait(LIMIT), Some(1));
        loads.ended(load(8), 3);
        let after = loads.slice(load(8));
        assert!(after.wait_layers(2, LIMIT));
        assert_eq!(after.wait(LIMIT), Some(3));
        drop((before, after));
        assert!(loads.0.lock().loads.is_empty());
    }

    #[test]
    fn batches_of_a_load_go_together() {
        let loads = RankLoads::default();
        let [one, same, other] = [7, 7, 8].map(|number| loads.layers(load(number)));
        assert!(one.are_of_load(&same) && !one.are_of_load(&other));
    }

    #[test]
    fn a_service_that_ends_ends_its_loads() {
        let loads = Arc::new(RankLoads::default());
        let before = loads.slice(load(1));
        loads.close();
        for slice in [before, loads.slice(load(2))] {
            assert!(!slice.wait_layers(1, LIMIT));
            assert_eq!(slice.wait(LIMIT), Some(0));
        }
    }

    #[test]
    fn loads_that_no_engine_asks_for_do_not_pile_up() {
        let loads = Arc::new(RankLoads::default());
        let awaited = loads.slice(load(0));
        (1..2 * MAX_LOADS as u64).for_each(|number| loads.ended(load(number), 3));
        assert!(loads.0.lock().loads.len() <= MAX_LOADS);
        loads.ended(load(0), 2);
        assert_eq!(awaited.wait(LIMIT), Some(2), "what is under way is kept");
    }
}
