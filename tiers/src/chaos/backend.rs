//! Faults around a backend.

#![expect(unsafe_code, reason = "a backend writes slots, and flips bits of them here")]

use std::sync::Arc;
use std::time::Instant;
use std::{fmt, io};

use super::late::LateTimer;
use super::{Chaos, EpisodeHit, Kind};
use crate::backend::{Backend, Fences};
use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, Route, SlotRef};
use crate::memory::CpuMemories;

/// Decides what becomes of operations.
pub trait Faults: Send + Sync + fmt::Debug {
    /// What becomes of the next operation; `None`: the inner backend has it.
    fn next(&self, op: &CopyOp) -> Option<Effect>;

    /// Does `job` at `when`.
    fn at(&self, when: Instant, job: Box<dyn FnOnce() + Send>);
}

/// What a fault does to one operation.
#[derive(Clone, Debug)]
pub enum Effect {
    /// It fails, and nothing is moved.
    Fail(CopyError),
    /// It is executed, a bit of the destination is flipped, and it counts as done. Where the
    /// destination cannot be reached, as on a disk, nothing is moved instead: a lost write.
    Corrupt,
    /// It is executed without the last byte, and counts as done. The byte that is there instead
    /// always differs, so that the fault shows. Where the destination cannot be reached, nothing
    /// is moved.
    Torn,
    /// It is executed from then on and not before.
    Late(Instant),
    /// It never completes. Its slots are left alone.
    Never,
}

/// A backend that fails as [`Faults`] say. Operations that they spare are the inner backend's.
#[derive(Debug)]
pub struct ChaosBackend<B, F = Chaos> {
    inner: Arc<B>,
    memories: Arc<CpuMemories>,
    faults: F,
}

impl<B: Backend + 'static, F: Faults> ChaosBackend<B, F> {
    /// Blocks can be spoilt where they arrive in `memories`.
    pub(crate) fn new(inner: B, memories: CpuMemories, faults: F) -> Self {
        Self { inner: Arc::new(inner), memories: Arc::new(memories), faults }
    }

    fn strike(&self, effect: Effect, index: usize, op: CopyOp, done: &Done) {
        match effect {
            Effect::Fail(error) => done.report(vec![(index, Err(error))]),
            Effect::Never => {}
            Effect::Late(when) => {
                let (inner, done) =
                    (Arc::clone(&self.inner), done.clone().renumbered(move |_| index));
                let submit = move || inner.submit(vec![op], done);
                self.faults.at(when, Box::new(submit));
            }
            // What no write reached keeps its old bytes, which are not those of the checksum.
            Effect::Corrupt | Effect::Torn if self.memories.block(op.to).is_none() => {
                done.report(vec![(index, Ok(()))]);
            }
            Effect::Corrupt => self.spoil(index, op, done, |byte| byte.wrapping_add(0x10)),
            Effect::Torn => {
                let before = self.memories.last_byte(op.to);
                let other = move |byte: u8| before.filter(|&b| b != byte).unwrap_or(!byte);
                self.spoil(index, op, done, other);
            }
        }
    }

    /// Executes the operation and changes the last byte of the destination before its end is
    /// reported.
    fn spoil(
        &self,
        index: usize,
        op: CopyOp,
        done: &Done,
        change: impl Fn(u8) -> u8 + Send + Sync + 'static,
    ) {
        let (memories, done) = (Arc::clone(&self.memories), done.clone());
        let done = Done::new(move |ended| {
            memories.change_last_byte(op.to, &change);
            done.report(ended);
        });
        self.inner.submit(vec![op], done.renumbered(move |_| index));
    }
}

// SAFETY: an operation ends in the inner backend, or here without having been started; bytes are
// changed while the destination is still the operation's. One that never completes touches no slot,
// and one that hangs none before it is given to the inner backend.
unsafe impl<B: Backend + 'static, F: Faults> Backend for ChaosBackend<B, F> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn routes(&self) -> &[Route] {
        self.inner.routes()
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.submit_fenced(batch, Fences::default(), done);
    }

    /// What is hit does not wait for a GPU's fence: it is executed without, or not at all.
    fn submit_fenced(&self, batch: Vec<CopyOp>, fences: Fences, done: Done) {
        let blocks = batch.len();
        let mut spared = Vec::new();
        for (index, op) in batch.into_iter().enumerate() {
            match self.faults.next(&op) {
                None => spared.push((index, op)),
                Some(effect) => self.strike(effect, index, op, &done),
            }
        }
        if spared.is_empty() {
            return;
        }
        // A layer is there when every block of the batch has it, and those that were hit come
        // without layers.
        let layers = fences.layers.filter(|_| spared.len() == blocks);
        let fences = Fences { layers, ..fences };
        let (indices, ops): (Vec<_>, Vec<_>) = spared.into_iter().unzip();
        self.inner.submit_fenced(ops, fences, done.renumbered(move |index| indices[index]));
    }
}

impl<F: Faults + ?Sized> Faults for Arc<F> {
    fn next(&self, op: &CopyOp) -> Option<Effect> {
        (**self).next(op)
    }

    fn at(&self, when: Instant, job: Box<dyn FnOnce() + Send>) {
        (**self).at(when, job);
    }
}

impl Faults for Chaos {
    fn next(&self, op: &CopyOp) -> Option<Effect> {
        Some(self.hit_copy(op)?.effect(op))
    }

    fn at(&self, when: Instant, job: Box<dyn FnOnce() + Send>) {
        self.late().at(when, job);
    }
}

impl Chaos {
    fn late(&self) -> &LateTimer {
        &self.0.late
    }
}

impl EpisodeHit {
    fn effect(self, op: &CopyOp) -> Effect {
        let system = |kind, errno| {
            let error = io::Error::from_raw_os_error(errno);
            Effect::Fail(CopyError::caused(kind, format!("{}: injected: {error}", op.to), error))
        };
        let fail =
            |kind, what| Effect::Fail(CopyError::new(kind, format!("{}: injected: {what}", op.to)));
        match self.kind {
            Kind::Io => system(CopyErrorKind::Io, libc::EIO),
            Kind::TooManyFiles => system(CopyErrorKind::Io, libc::EMFILE),
            Kind::NoSpace => system(CopyErrorKind::NoSpace, libc::ENOSPC),
            Kind::Short => fail(CopyErrorKind::Io, "fewer bytes than a block"),
            Kind::Http500 | Kind::Http503 | Kind::Http403 => {
                fail(CopyErrorKind::Unavailable, self.kind.name())
            }
            Kind::Delay => Effect::Late(clock::now() + Kind::DELAY),
            Kind::Hang => Effect::Late(self.until),
            Kind::Torn => Effect::Torn,
            Kind::Corrupt => Effect::Corrupt,
            // Jumps of the clock hit no operation.
            Kind::Never | Kind::Jump | Kind::Back => Effect::Never,
        }
    }
}

impl CpuMemories {
    fn last_byte(&self, slot: SlotRef) -> Option<u8> {
        let block = self.block(slot)?;
        // SAFETY: the last byte of a block that exists, of an operation in flight whose copy has
        // not begun.
        Some(unsafe { block.cast::<u8>().add(block.len() - 1).read() })
    }

    fn change_last_byte(&self, slot: SlotRef, change: &dyn Fn(u8) -> u8) {
        let Some(block) = self.block(slot) else { return };
        // SAFETY: the last byte of the destination of an operation whose copy has ended and that is
        // not reported yet.
        unsafe {
            let last = block.cast::<u8>().add(block.len() - 1);
            last.write(change(last.read()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::backend::Layers;
    use crate::chaos::Schedule;
    use crate::checksum::Checksums;
    use crate::copy::Tier;
    use crate::dram::DramRegion;
    use crate::frame::Frame;
    use crate::media_layer::MediaLayer as _;
    use crate::memcpy::MemcpyBackend;
    use crate::testing::conformance::{self, Pair};
    use crate::testing::{
        MemoryStore, each, fill_pattern, frames, has_pattern, host, options, order, run, start,
    };
    use crate::verify::Verified;

    const BLOCK: usize = 5000;

    /// Verified around chaos around a store that plays a disk.
    struct ChaosFixture {
        memory: Arc<DramRegion>,
        chaos: Chaos,
        backend: Verified<Arc<dyn Backend>>,
        here: Vec<Frame>,
        there: Vec<Frame>,
    }

    impl ChaosFixture {
        fn new(script: &str) -> Self {
            let memory = Arc::new(host(4, BLOCK));
            let store = MemoryStore::new(Arc::clone(&memory) as _, Tier::Disk, 4).unwrap();
            let (mut here, there) = (frames(&memory), frames(store.region()));
            fill_pattern(1, memory.write(&mut here[0]).unwrap());
            fill_pattern(9, memory.write(&mut here[1]).unwrap());
            let chaos = Chaos::new(Schedule::scripted([script.parse().unwrap()]));
            let backend = chaos.around(Arc::new(store), Arc::clone(&memory) as _).unwrap();
            let backend =
                Verified::new(backend, Arc::clone(&memory) as _, Arc::new(Checksums::new()))
                    .unwrap();
            Self { memory, chaos, backend, here, there }
        }

        fn store(&self) -> Result<(), CopyError> {
            run(&self.backend, vec![self.storing()]).remove(0)
        }

        fn storing(&self) -> CopyOp {
            order(1, self.here[0].slot_ref(), self.there[0].slot_ref())
        }

        fn load(&self) -> Result<(), CopyError> {
            run(&self.backend, vec![self.loading()]).remove(0)
        }

        fn loading(&self) -> CopyOp {
            order(1, self.there[0].slot_ref(), self.here[1].slot_ref())
        }

        fn has_arrived(&self) -> bool {
            has_pattern(1, self.memory.read(&self.here[1]).unwrap())
        }

        /// And then it heals, and everything works again.
        fn assert_heals(&self, kind: Kind, times: u64) {
            self.chaos.heal();
            self.store().unwrap();
            self.load().unwrap();
            assert!(self.has_arrived());
            assert_eq!(self.chaos.injected().into_iter().collect::<Vec<_>>(), [(kind, times)]);
        }
    }

    #[test]
    fn conforms_while_nothing_goes_wrong_and_while_everything_is_late() {
        for script in ["clock:jump@0s+1h", "disk:delay@0s+1h"] {
            conformance::check(|slots, block_bytes| {
                let memory = Arc::new(host(slots, block_bytes));
                let store = MemoryStore::new(Arc::clone(&memory) as _, Tier::Disk, slots).unwrap();
                let chaos = Chaos::new(Schedule::scripted([script.parse().unwrap()]));
                chaos.start();
                let backend = chaos.around(Arc::new(store), Arc::clone(&memory) as _).unwrap();
                Pair { memory, other: Tier::Disk, backend }
            });
        }
    }

    #[test]
    fn an_error_is_the_systems_and_moves_nothing() {
        for (kind, as_error) in [
            (Kind::Io, CopyErrorKind::Io),
            (Kind::TooManyFiles, CopyErrorKind::Io),
            (Kind::NoSpace, CopyErrorKind::NoSpace),
            (Kind::Short, CopyErrorKind::Io),
        ] {
            let fixture = ChaosFixture::new(&format!("disk:{kind}@0s+1h"));
            fixture.store().unwrap();
            fixture.chaos.start();
            assert_eq!(fixture.load().unwrap_err().kind(), as_error, "{kind}");
            assert!(!fixture.has_arrived());
            fixture.assert_heals(kind, 1);
        }
    }

    #[test]
    fn checksums_catch_what_is_spoilt_in_either_direction() {
        for kind in [Kind::Corrupt, Kind::Torn] {
            let fixture = ChaosFixture::new(&format!("disk.read:{kind}@0s+1h"));
            fixture.chaos.start();
            fixture.store().unwrap();
            assert_eq!(
                fixture.load().unwrap_err().kind(),
                CopyErrorKind::Corrupt,
                "{kind} on a read"
            );
            fixture.assert_heals(kind, 1);
            let fixture = ChaosFixture::new(&format!("disk.write:{kind}@0s+1h"));
            fixture.chaos.start();
            fixture.store().unwrap();
            assert_eq!(
                fixture.load().unwrap_err().kind(),
                CopyErrorKind::Corrupt,
                "{kind} on a write"
            );
            fixture.assert_heals(kind, 1);
        }
    }

    #[test]
    fn what_is_torn_shows_over_the_same_block() {
        let fixture = ChaosFixture::new("disk.read:torn@0s+1h");
        fixture.store().unwrap();
        fixture.load().unwrap();
        fixture.chaos.start();
        assert_eq!(fixture.load().unwrap_err().kind(), CopyErrorKind::Corrupt);
        fixture.assert_heals(Kind::Torn, 1);
    }

    #[test]
    fn what_hangs_is_executed_only_after_the_episode() {
        let fixture = ChaosFixture::new("disk.read:hang@0s+30ms");
        fixture.store().unwrap();
        let began = Instant::now();
        fixture.chaos.start();
        fixture.load().unwrap();
        assert!(fixture.has_arrived() && began.elapsed() >= Duration::from_millis(29));
        fixture.assert_heals(Kind::Hang, 1);
    }

    #[test]
    fn what_hangs_goes_on_when_all_is_well_again() {
        let fixture = ChaosFixture::new("disk.read:hang@0s+1h");
        fixture.store().unwrap();
        fixture.chaos.start();
        let reports = start(&fixture.backend, vec![fixture.loading()]);
        assert!(reports.recv_timeout(Duration::from_millis(5)).is_err());
        assert!(!fixture.has_arrived(), "its slots are left alone meanwhile");
        fixture.chaos.heal();
        reports.recv().unwrap().1.unwrap();
        fixture.assert_heals(Kind::Hang, 1);
    }

    #[test]
    fn what_never_completes_touches_nothing_and_is_counted() {
        let fixture = ChaosFixture::new("disk.read:never@0s+1h x1");
        fixture.store().unwrap();
        fixture.chaos.start();
        let reports = start(&fixture.backend, vec![fixture.loading()]);
        assert!(reports.recv_timeout(Duration::from_millis(5)).is_err());
        assert!(!fixture.has_arrived());
        fixture.assert_heals(Kind::Never, 1);
    }

    /// Copies four blocks in two layers while `script` is played; returns how many failed, and the
    /// layers that were told.
    fn layered(script: &str) -> (usize, Vec<u16>) {
        let (from, to) =
            (Arc::new(host(4, BLOCK)), DramRegion::open(Tier::Device, options(4, BLOCK)));
        let to = Arc::new(to.unwrap());
        let (mut here, mut there) = (from.frames().unwrap(), to.frames().unwrap());
        let pairs = std::iter::from_fn(|| here.take().zip(there.take()));
        let ops: Vec<_> =
            pairs.map(|(from, to)| order(1, from.slot_ref(), to.slot_ref())).collect();
        let memcpy = MemcpyBackend::new(vec![from.clone() as _, to as _], 1).unwrap();
        let chaos = Chaos::new(Schedule::scripted([script.parse().unwrap()]));
        let backend = chaos.around(Arc::new(memcpy), from).unwrap();
        chaos.start();
        let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let layers = Arc::clone(&told);
        let layers =
            Layers::new(NonZeroU16::new(2).unwrap(), move |layer, _| layers.lock().push(layer));
        let (report, reports) = mpsc::channel();
        let fences = Fences { layers: Some(layers), ..Fences::default() };
        backend.submit_fenced(ops, fences, each(move |_, result| report.send(result).unwrap()));
        let failed = reports.into_iter().filter(Result::is_err).count();
        (failed, told.lock().clone())
    }

    #[test]
    fn layers_are_told_of_batches_that_are_spared() {
        assert_eq!(layered("disk:eio@0s+1h"), (0, vec![0, 1]));
        assert_eq!(layered("memory:eio@0s+1h x1"), (1, vec![]));
        assert_eq!(layered("memory:delay@0s+1h x1"), (0, vec![]));
    }
}
