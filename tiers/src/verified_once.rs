//! Blocks that an earlier process left in memory, verified when they are first used.

#![expect(unsafe_code, reason = "reads slots, and promises of a backend")]

use std::sync::Arc;

use crate::backend::{Backend, Fences};
use crate::checksum::{Checksums, checksum};
use crate::copy::{Completion, CopyError, CopyOp, Done, Route, SlotId, SlotRef};
use crate::error::SetupError;
use crate::memory::Memory;
use crate::verifiers::{BlockWorkers, GRAIN_BYTES, Urgency, WorkedCopy, part_with_failed};
use crate::verify::corrupt;

/// A backend around memory that outlives its process. Of the blocks that an earlier process left
/// there, each is compared with its [inherited](Checksums::inherit) checksum before its first copy
/// to elsewhere; one that is not what it was ends in
/// [`Corrupt`](crate::CopyErrorKind::Corrupt), and the others of its batch go on.
/// What arrives unsummed, as from a GPU, is summed: the next process will want to know.
///
/// Sums are computed by threads of this backend's, but for 128 KiB of a batch. When no checksum is
/// inherited any more, a batch costs one look at a counter.
#[derive(Debug)]
pub struct VerifiedOnce<B> {
    inner: Arc<B>,
    memory: Arc<dyn Memory>,
    verifiers: Arc<BlockWorkers>,
}

impl<B: Backend> VerifiedOnce<B> {
    /// `inner` moves blocks from or to `memory`, or neither.
    ///
    /// # Errors
    /// `Unavailable`: no threads.
    pub fn new(inner: B, memory: Arc<dyn Memory>) -> Result<Self, SetupError> {
        let verifiers = Arc::new(BlockWorkers::start()?);
        Ok(Self { inner: Arc::new(inner), memory, verifiers })
    }

    /// Another handle of the same.
    fn share(&self) -> Self {
        let (inner, memory) = (Arc::clone(&self.inner), Arc::clone(&self.memory));
        Self { inner, memory, verifiers: Arc::clone(&self.verifiers) }
    }

    fn checksums(&self) -> Option<&Checksums> {
        self.memory.checksums().filter(|checksums| checksums.inherited() > 0)
    }

    /// The copies of a batch whose sources have not been verified, which are bad until they are
    /// proven.
    fn doubtful(&self, batch: &[CopyOp]) -> Vec<WorkedCopy> {
        let Some(checksums) = self.checksums() else { return Vec::new() };
        let ours = self.memory.tier();
        let copies = batch.iter().enumerate();
        let doubtful =
            copies.filter(|(_, op)| op.from.tier == ours && checksums.is_inherited(op.from.slot));
        let unproven = doubtful.map(|(index, &op)| {
            let error = CopyError::refused(format!("{}: it was never verified", op.from));
            WorkedCopy { index, op, result: Err(error) }
        });
        unproven.collect()
    }

    fn verify(&self, from: SlotRef) -> Result<(), CopyError> {
        let (Some(checksums), Some(block)) =
            (self.memory.checksums(), block(&*self.memory, from.slot))
        else {
            // A slot that does not exist is left to the backend to refuse.
            return Ok(());
        };
        checksums
            .verify_inherited(from.slot, block)
            .map_err(|(expected, actual)| corrupt(from, expected, actual))
    }
}

impl<B: Backend + 'static> VerifiedOnce<B> {
    /// Has arrivals summed before they are reported, where they are not yet.
    fn summing(&self, batch: &[CopyOp], done: Done) -> Done {
        let ours = self.memory.tier();
        if batch.iter().all(|op| op.to.tier != ours) {
            return done;
        }
        let slots: Arc<[_]> =
            batch.iter().map(|op| (op.to.tier == ours).then_some(op.to.slot)).collect();
        let (memory, verifiers) = (Arc::clone(&self.memory), Arc::clone(&self.verifiers));
        Done::new(move |ended| {
            if !ended.iter().any(|completion| needs_sum(&*memory, &slots, completion)) {
                return done.report(ended);
            }
            let (memory, slots, done) = (Arc::clone(&memory), Arc::clone(&slots), done.clone());
            let block_bytes = memory.block_bytes();
            let sum = move |completion: &mut Completion| {
                if needs_sum(&*memory, &slots, completion) {
                    slots[completion.0].into_iter().for_each(|slot| sum(&*memory, slot));
                }
            };
            verifiers.work_on(Urgency::Awaited, block_bytes, ended, sum, move |ended| {
                done.report(ended);
            });
        })
    }
}

/// Whether a block arrived in memory unsummed.
fn needs_sum(memory: &dyn Memory, slots: &[Option<SlotId>], (op, result): &Completion) -> bool {
    match (result, slots[*op], memory.checksums()) {
        (Ok(()), Some(slot), Some(checksums)) => checksums.get(slot).is_none(),
        _ => false,
    }
}

/// Hands on what is not bad.
fn send(
    inner: &impl Backend,
    batch: Vec<CopyOp>,
    fences: Fences,
    done: Done,
    verified: Vec<WorkedCopy>,
) {
    // Where a block is missing no layer can have all blocks of the batch.
    let layers = fences.layers.filter(|_| verified.iter().all(|copy| copy.result.is_ok()));
    let fences = Fences { layers, ..fences };
    let (batch, done) = part_with_failed(batch, done, verified);
    if !batch.is_empty() {
        inner.submit_fenced(batch, fences, done);
    }
}

fn sum(memory: &dyn Memory, slot: SlotId) {
    if let (Some(checksums), Some(block)) = (memory.checksums(), block(memory, slot)) {
        checksums.record(slot, checksum(block));
    }
}

fn block(memory: &dyn Memory, slot: SlotId) -> Option<&[u8]> {
    let start = memory.slot(slot)?.cast::<u8>();
    // SAFETY: the slot is of an operation that is submitted and not reported: nothing writes it
    // now.
    Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), memory.block_bytes()) })
}

// SAFETY: the inner backend moves the blocks and reports each once; what it does not get is
// reported here, untouched. A report is passed on after the destination, which is still the
// operation's, has been read.
unsafe impl<B: Backend + 'static> Backend for VerifiedOnce<B> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn routes(&self) -> &[Route] {
        self.inner.routes()
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.submit_fenced(batch, Fences::default(), done);
    }

    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        let done = self.summing(&batch, done);
        let mut doubtful = self.doubtful(&batch);
        let block_bytes = self.memory.block_bytes();
        let verify = |once: &Self, copy: &mut WorkedCopy| copy.result = once.verify(copy.op.from);
        if doubtful.len() * block_bytes <= GRAIN_BYTES {
            doubtful.iter_mut().for_each(|copy| verify(self, copy));
            return send(&self.inner, batch, fences, done, doubtful);
        }
        let (checker, inner) = (self.share(), Arc::clone(&self.inner));
        let check = move |copy: &mut WorkedCopy| verify(&checker, copy);
        // An engine waits for these, as for what arrives.
        self.verifiers.work_on(Urgency::Awaited, block_bytes, doubtful, check, move |verified| {
            send(&inner, batch, fences, done, verified);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::CopyErrorKind;
    use crate::copy::Tier;
    use crate::dram::DramRegion;
    use crate::frame::Frame;
    use crate::memcpy::MemcpyBackend;
    use crate::memory::forget_checksum;
    use crate::testing::conformance::{self, Pair};
    use crate::testing::{
        MemoryStore, fill_pattern, frames, has_pattern, host, options, order, run,
    };

    const SLOTS: u32 = 40;
    const BLOCK: usize = 20_000;

    /// Memory with blocks that an earlier process left, and a device that they go to.
    struct InheritedFixture {
        memory: Arc<DramRegion>,
        device: Arc<DramRegion>,
        once: VerifiedOnce<MemcpyBackend>,
        here: Vec<Frame>,
        there: Vec<Frame>,
    }

    impl InheritedFixture {
        fn new() -> Self {
            let memory = Arc::new(host(SLOTS, BLOCK));
            let device = Arc::new(DramRegion::open(Tier::Device, options(SLOTS, BLOCK)).unwrap());
            let regions = vec![Arc::clone(&memory) as _, Arc::clone(&device) as Arc<dyn Memory>];
            let once = VerifiedOnce::new(
                MemcpyBackend::new(regions, 2).unwrap(),
                Arc::clone(&memory) as _,
            )
            .unwrap();
            let (mut here, there) = (frames(&memory), frames(&device));
            for (frame, number) in here.iter_mut().zip(0..) {
                fill_pattern(number, memory.write(frame).unwrap());
                let crc = checksum(memory.read(frame).unwrap());
                memory.checksums().unwrap().inherit(frame.slot(), crc);
            }
            Self { memory, device, once, here, there }
        }

        /// Not by a way that the region knows of.
        fn flip_bit(&self, slot: usize) {
            let start = self.memory.slot(self.here[slot].slot()).unwrap().cast::<u8>();
            // SAFETY: the slot is the test's, and no copy is under way.
            unsafe { *start.add(BLOCK - 1).as_ptr() ^= 1 };
        }

        /// Copies the first `blocks` blocks to the device: which were corrupt.
        fn load(&self, blocks: usize) -> Vec<usize> {
            let ops =
                (0..blocks).map(|n| order(n, self.here[n].slot_ref(), self.there[n].slot_ref()));
            let ended = run(&self.once, ops.collect());
            let is_bad = |result: &Result<(), CopyError>| match result {
                Ok(()) => false,
                Err(error) => error.kind() == CopyErrorKind::Corrupt,
            };
            for (n, result) in ended.iter().enumerate().filter(|(_, result)| result.is_ok()) {
                let block = self.device.read(&self.there[n]).unwrap();
                assert!(has_pattern(n, block), "block {n} is wrong: {result:?}");
            }
            ended.iter().enumerate().filter(|(_, result)| is_bad(result)).map(|(n, _)| n).collect()
        }

        fn inherited(&self) -> u32 {
            self.memory.checksums().unwrap().inherited()
        }
    }

    #[test]
    fn a_source_is_bad_until_it_is_proven() {
        let fixture = InheritedFixture::new();
        let op = order(0, fixture.here[0].slot_ref(), fixture.there[0].slot_ref());
        let sources = fixture.once.doubtful(&[op]);
        assert_eq!(sources.len(), 1);
        assert!(sources[0].result.is_err(), "it was not read yet");
    }

    #[test]
    fn conforms() {
        conformance::check(|slots, block_bytes| {
            let memory = Arc::new(host(slots, block_bytes));
            let store = MemoryStore::new(Arc::clone(&memory) as _, Tier::Disk, slots).unwrap();
            let backend = VerifiedOnce::new(store, Arc::clone(&memory) as _).unwrap();
            Pair { memory, other: Tier::Disk, backend: Arc::new(backend) }
        });
    }

    /// Few are verified by the submitting thread, many by others.
    #[test]
    fn a_flipped_bit_costs_its_block_alone() {
        for blocks in [4, SLOTS as usize] {
            let fixture = InheritedFixture::new();
            fixture.flip_bit(1);
            fixture.flip_bit(3);
            assert_eq!(fixture.load(blocks), [1, 3]);
            assert_eq!(fixture.load(blocks), [1, 3], "as long as they are there");
            assert_eq!(fixture.inherited() as usize, SLOTS as usize - blocks + 2);
        }
    }

    #[test]
    fn nothing_is_verified_twice() {
        let fixture = InheritedFixture::new();
        assert!(fixture.load(SLOTS as usize).is_empty());
        assert_eq!(fixture.inherited(), 0);
        fixture.flip_bit(0);
        let op = order(0, fixture.here[0].slot_ref(), fixture.there[0].slot_ref());
        run(&fixture.once, vec![op])
            .remove(0)
            .expect("what changes in memory later is found when it leaves DRAM");
    }

    #[test]
    fn a_batch_without_a_good_block_ends() {
        let fixture = InheritedFixture::new();
        fixture.flip_bit(0);
        assert_eq!(fixture.load(1), [0]);
    }

    #[test]
    fn a_rewritten_slot_belongs_to_its_process() {
        let mut fixture = InheritedFixture::new();
        fixture.flip_bit(0);
        fixture.flip_bit(1);
        fill_pattern(0, fixture.memory.write(&mut fixture.here[0]).unwrap());
        fill_pattern(1, fixture.device.write(&mut fixture.there[1]).unwrap());
        let save = order(1, fixture.there[1].slot_ref(), fixture.here[1].slot_ref());
        run(&fixture.once, vec![save]).remove(0).unwrap();
        assert!(fixture.load(2).is_empty());
    }

    #[test]
    fn many_readers_of_one_block_hear_the_same() {
        let fixture = InheritedFixture::new();
        fixture.flip_bit(5);
        std::thread::scope(|scope| {
            for reader in 0..4 {
                let fixture = &fixture;
                scope.spawn(move || {
                    for n in 0..10 {
                        let to = fixture.there[10 * reader + n].slot_ref();
                        let ended =
                            run(&fixture.once, vec![order(n, fixture.here[n].slot_ref(), to)]);
                        assert_eq!(ended[0].is_err(), n == 5);
                    }
                });
            }
        });
        assert_eq!(fixture.inherited(), SLOTS - 9);
    }

    /// As a GPU brings them.
    #[test]
    fn what_arrives_unsummed_is_summed() {
        #[derive(Debug)]
        struct Unsummed(MemcpyBackend, Arc<DramRegion>);
        // SAFETY: all is the inner backend's doing.
        unsafe impl Backend for Unsummed {
            fn name(&self) -> &'static str {
                "unsummed"
            }
            fn routes(&self) -> &[Route] {
                self.0.routes()
            }
            fn submit(&self, batch: Vec<CopyOp>, done: Done) {
                let (memory, ops) = (Arc::clone(&self.1), batch.clone());
                let forgetful = Done::new(move |ended| {
                    ended.iter().for_each(|&(op, _)| forget_checksum(&*memory, ops[op].to.slot));
                    done.report(ended);
                });
                self.0.submit(batch, forgetful);
            }
        }
        let InheritedFixture { memory, device, mut there, here, .. } = InheritedFixture::new();
        let regions = vec![Arc::clone(&memory) as _, Arc::clone(&device) as Arc<dyn Memory>];
        let inner = Unsummed(MemcpyBackend::new(regions, 1).unwrap(), Arc::clone(&memory));
        let once = VerifiedOnce::new(inner, Arc::clone(&memory) as _).unwrap();
        fill_pattern(77, device.write(&mut there[0]).unwrap());
        run(&once, vec![order(0, there[0].slot_ref(), here[3].slot_ref())]).remove(0).unwrap();
        let expected = checksum(device.read(&there[0]).unwrap());
        assert_eq!(memory.checksums().unwrap().get(here[3].slot()), Some(expected));
    }
}
