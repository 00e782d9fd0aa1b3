//! What every backend must do, whatever it connects.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::backend::Backend;
use crate::copy::{CopyErrorKind, CopyOp, Done, SlotId, SlotRef, Tier};
use crate::dram::DramRegion;
use crate::frame::{Frame, FramePool};
use crate::memory::Memory;
use crate::testing::{fill_pattern, frames, has_pattern, order, run, start, take_all};

/// A backend and the two ends that it connects.
#[derive(Debug)]
pub struct Pair {
    /// The end whose bytes the suite looks at.
    pub memory: Arc<DramRegion>,
    /// The tier of the other end, which has as many slots as `memory`.
    pub other: Tier,
    /// What moves blocks between them, both ways.
    pub backend: Arc<dyn Backend>,
}

/// Block sizes tried: a page, an odd size, typical ones.
pub const BLOCK_BYTES: [usize; 4] = [4096, 5000, 64 << 10, 1 << 20];

/// Batch sizes tried, the largest with small blocks only.
const BATCHES: [usize; 3] = [1, 17, 1000];

/// Runs the suite. `make(slots, block_bytes)` sets up a pair with that many slots at both ends.
///
/// # Panics
/// If the backend does not conform.
pub fn check(make: impl Fn(u32, usize) -> Pair) {
    for block_bytes in BLOCK_BYTES {
        for batch in BATCHES.into_iter().filter(|batch| batch * block_bytes <= 32 << 20) {
            Bench::new(make(2 * batch as u32 + 3, block_bytes)).round_trip(batch);
        }
    }
    assert!(run(&*make(1, 4096).backend, Vec::new()).is_empty());
    Bench::new(make(4, 4096)).refuse_what_does_not_exist();
    drop_while_busy(make(64, 64 << 10));
    drop_in_completion(make(64, 64 << 10));
}

/// A pair with the slot handles to all its slots.
struct Bench {
    pair: Pair,
    here: Vec<Frame>,
    there: Vec<SlotRef>,
}

impl Bench {
    fn new(pair: Pair) -> Self {
        let mut here = frames(&pair.memory);
        let others = take_all(FramePool::new(pair.other, pair.memory.slots()));
        let mut there: Vec<_> = others.iter().map(Frame::slot_ref).collect();
        shuffle(&mut here, 1);
        shuffle(&mut there, 2);
        Self { pair, here, there }
    }

    /// Blocks go out and come back to other slots unchanged, in any order, and no other slot
    /// changes.
    fn round_trip(&mut self, batch: usize) {
        self.fill();
        let out = |number| order(number, self.here[number].slot_ref(), self.there[number]);
        self.succeed((0..batch).map(out).collect());
        self.fill_with_noise(batch);
        let mut back: Vec<usize> = (0..batch).collect();
        shuffle(&mut back, 3);
        // Block `n` returns to the slot `batch + n`, whose own content is overwritten.
        let order = |&number: &usize| {
            order(number, self.there[number], self.here[batch + number].slot_ref())
        };
        self.succeed(back.iter().map(order).collect());
        for (place, frame) in self.here.iter().enumerate() {
            let block = self.pair.memory.read(frame).expect("our frame");
            let number = match place {
                place if place < batch => NOISE + place,
                place if place < 2 * batch => place - batch,
                place => place,
            };
            assert!(
                has_pattern(number, block),
                "{} has not the bytes of block {number}",
                frame.slot_ref()
            );
        }
    }

    fn fill(&mut self) {
        for (number, frame) in self.here.iter_mut().enumerate() {
            fill_pattern(number, self.pair.memory.write(frame).expect("our frame"));
        }
    }

    fn fill_with_noise(&mut self, count: usize) {
        for (number, frame) in self.here.iter_mut().enumerate().take(count) {
            fill_pattern(NOISE + number, self.pair.memory.write(frame).expect("our frame"));
        }
    }

    fn succeed(&self, batch: Vec<CopyOp>) {
        for (index, result) in run(&*self.pair.backend, batch).into_iter().enumerate() {
            assert!(result.is_ok(), "operation {index}: {result:?}");
        }
    }

    /// An order for a slot or route that does not exist is an error, and the others of its batch
    /// are done.
    fn refuse_what_does_not_exist(&mut self) {
        self.fill();
        let here = self.here[0].slot_ref();
        let nowhere = |slot: SlotRef| SlotRef { slot: SlotId(u32::MAX), ..slot };
        let elsewhere =
            Tier::ALL.into_iter().find(|&tier| tier != here.tier && tier != self.pair.other);
        let unserved = SlotRef { tier: elsewhere.expect("four tiers"), ..here };
        let batch = vec![
            order(0, here, self.there[0]),
            order(1, nowhere(here), self.there[1]),
            order(2, here, nowhere(self.there[2])),
            order(3, here, unserved),
        ];
        let results = run(&*self.pair.backend, batch);
        assert!(results[0].is_ok(), "{:?}", results[0]);
        for result in &results[1..] {
            assert_eq!(
                result.as_ref().map_err(crate::CopyError::kind),
                Err(CopyErrorKind::Refused)
            );
        }
    }
}

/// Numbers from here on name patterns that are none of a test's blocks.
const NOISE: usize = 1 << 20;

/// Every operation ends exactly once even if the backend is dropped right after their submission.
fn drop_while_busy(pair: Pair) {
    let bench = Bench::new(pair);
    let out = |number| order(number, bench.here[number].slot_ref(), bench.there[number]);
    let count = bench.here.len();
    let reports = start(&*bench.pair.backend, (0..count).map(out).collect());
    let Bench { pair, .. } = bench;
    drop(pair);
    let mut ended = HashSet::new();
    while let Ok((index, _)) = reports.recv_timeout(Duration::from_mins(1)) {
        assert!(ended.insert(index), "operation {index} ended twice");
    }
    assert_eq!(ended.len(), count, "operations were forgotten");
}

/// The report of the last operation may hold the backend's last handle: it is then dropped by one
/// of its own threads, which must not wait for itself.
fn drop_in_completion(pair: Pair) {
    let bench = Bench::new(pair);
    let out = |number| order(number, bench.here[number].slot_ref(), bench.there[number]);
    let batch = (0..bench.here.len()).map(out).collect();
    let Bench { pair: Pair { memory, backend, .. }, .. } = bench;
    let (dropped, is_dropped) = mpsc::channel::<()>();
    // The sender goes after the backend, as the order of the fields says.
    let held = (Arc::clone(&backend), dropped);
    let done = Done::new(move |_| {
        let _: &(Arc<dyn Backend>, mpsc::Sender<()>) = &held;
    });
    backend.submit(batch, done);
    drop((backend, memory));
    let outcome = is_dropped.recv_timeout(Duration::from_mins(1));
    assert_eq!(outcome, Err(RecvTimeoutError::Disconnected), "the backend waits for itself");
}

/// Fisher and Yates, with a xorshift generator: the order is arbitrary but the same in every run.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for last in (1..items.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        items.swap(last, (state % (last as u64 + 1)) as usize);
    }
}
