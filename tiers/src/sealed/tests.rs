//! The decorator, around stores in memory and around faults.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::{
    Cipher, FoundKey, KeyId, KeyStore, SEAL_BYTES, Scratch, ScratchOptions, Sealed, TenantKeys,
    WrappedKey,
};
use crate::backend::{Backend, Fences, Layers};
use crate::checksum::{Checksums, checksum};
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Owner, Route, Tier};
use crate::disk::{ThreadsBackend, UringBackend};
use crate::dram::DramRegion;
use crate::error::SetupErrorKind;
use crate::frame::Frame;
use crate::memcpy::MemcpyBackend;
use crate::memory::Memory;
use crate::testing::conformance::{self, Pair};
use crate::testing::{
    Fault, FaultBackend, MemoryStore, ParkedBackend, assert_fails, disk, each, fill_pattern,
    frames, has_pattern, host, key_ring, options, order, run, skip, start,
};
use crate::verify::Verified;

const OUT: Route = Route::new(Tier::Host, Tier::Disk);
const BACK: Route = Route::new(Tier::Disk, Tier::Host);
const BLOCK: usize = 5000;

fn keys(number: u32) -> Arc<TenantKeys> {
    Arc::new(TenantKeys::in_memory(key_ring(number, "0123456789abcdef"), "test"))
}

fn scratch(block_bytes: usize, blocks: u32) -> Scratch {
    Scratch::open(ScratchOptions { block_bytes, blocks, huge_pages: false }).unwrap()
}

fn seal<B: Backend + 'static>(
    inner: B,
    memory: &Arc<DramRegion>,
    scratch: Scratch,
    run: usize,
) -> Sealed<B> {
    let cipher = Cipher::new(keys(1), Tier::Disk, "test", memory.block_bytes());
    Sealed::new(inner, Arc::clone(memory) as _, scratch, cipher, run).unwrap()
}

/// As where it is assembled: what arrives is left to the seal.
fn verified<B: Backend + 'static>(inner: B, scratch: &Scratch) -> Verified<B> {
    Verified::new(inner, scratch.memory(), Arc::default()).unwrap().of_departures()
}

#[test]
fn conforms() {
    for (room, run) in [(1, 1), (40, 32)] {
        conformance::check(|slots, block_bytes| {
            let (memory, scratch) =
                (Arc::new(host(slots, block_bytes)), scratch(block_bytes, room));
            let store = MemoryStore::new(scratch.memory(), Tier::Disk, slots).unwrap();
            let verified = verified(store, &scratch);
            Pair {
                backend: Arc::new(seal(verified, &memory, scratch, run)),
                memory,
                other: Tier::Disk,
            }
        });
    }
}

#[test]
fn conforms_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let disk =
        |slots, scratch: &Scratch| disk(&[dir.path()], slots, scratch.memory().block_bytes());
    conformance::check(|slots, block_bytes| {
        let (memory, scratch) = (Arc::new(host(slots, block_bytes)), scratch(block_bytes, 8));
        let threads = ThreadsBackend::new(scratch.memory(), disk(slots, &scratch), 4).unwrap();
        let verified = verified(threads, &scratch);
        Pair { backend: Arc::new(seal(verified, &memory, scratch, 1)), memory, other: Tier::Disk }
    });
    if let Err(error) = UringBackend::probe() {
        return skip("uring", &error);
    }
    conformance::check(|slots, block_bytes| {
        let (memory, scratch) = (Arc::new(host(slots, block_bytes)), scratch(block_bytes, 8));
        let ring = UringBackend::new(scratch.memory(), disk(slots, &scratch), 8).unwrap();
        let verified = verified(ring, &scratch);
        Pair { backend: Arc::new(seal(verified, &memory, scratch, 1)), memory, other: Tier::Disk }
    });
}

/// Between a device and memory that is sealed itself: the device plays memory here.
#[test]
fn conforms_around_memory() {
    for (room, run) in [(1, 1), (40, 32)] {
        conformance::check(|slots, block_bytes| {
            let device =
                Arc::new(DramRegion::emulated_device(options(slots, block_bytes)).unwrap());
            let memory = Arc::new(host(slots, block_bytes + SEAL_BYTES));
            let backend = around_memory(&device, &memory, room, run);
            Pair { backend: Arc::new(backend), memory: device, other: Tier::Host }
        });
    }
}

fn around_memory(
    device: &Arc<DramRegion>,
    memory: &Arc<DramRegion>,
    blocks: u32,
    run: usize,
) -> Sealed<MemcpyBackend> {
    let block_bytes = device.block_bytes();
    let options = ScratchOptions { block_bytes, blocks, huge_pages: false };
    let scratch = Scratch::in_the_clear(options).unwrap();
    let copies = MemcpyBackend::new(vec![Arc::clone(device) as _, scratch.memory()], 2).unwrap();
    let cipher = Cipher::new(keys(1), Tier::Host, "test", block_bytes);
    Sealed::of_memory(copies, Arc::clone(memory) as _, scratch, cipher, run).unwrap()
}

#[test]
fn memory_shows_nothing_and_bad_blocks_cost_no_other() {
    let device = Arc::new(DramRegion::emulated_device(options(8, BLOCK)).unwrap());
    let memory = Arc::new(host(4, BLOCK + SEAL_BYTES));
    let sealed = around_memory(&device, &memory, 4, 4);
    let (mut here, mut there) = (frames(&device), frames(&memory));
    (0..4).for_each(|slot| fill_pattern(slot, device.write(&mut here[slot]).unwrap()));
    let out: Vec<_> = (0..4).map(|n| order(n, here[n].slot_ref(), there[n].slot_ref())).collect();
    assert!(run(&sealed, out.clone()).iter().all(Result::is_ok));
    for (slot, frame) in there.iter().enumerate() {
        let [plain, stored] = [device.read(&here[slot]), memory.read(frame)].map(Option::unwrap);
        assert!(plain.chunks_exact(8).all(|word| stored.windows(8).all(|bytes| bytes != word)));
        assert_eq!(memory.checksums().unwrap().get(frame.slot()), Some(checksum(stored)));
    }
    memory.write(&mut there[2]).unwrap()[BLOCK + 3] ^= 1;
    let back: Vec<_> =
        (0..4).map(|n| order(n, there[n].slot_ref(), here[4 + n].slot_ref())).collect();
    // Layers are of all blocks or of none.
    let (layers, heard) = (Arc::new(Mutex::new(0)), 8.try_into().unwrap());
    let told = Arc::clone(&layers);
    let fences = || {
        let told = Arc::clone(&told);
        let layers = Layers::new(heard, move |_, blocks| *told.lock() += blocks);
        Fences { layers: Some(layers), ..Fences::default() }
    };
    let load = || {
        let (report, reports) = std::sync::mpsc::channel();
        let done = each(move |op, result| report.send((op, result)).unwrap());
        sealed.submit_fenced(back.clone(), fences(), done);
        let mut results: Vec<_> = reports.iter().take(4).collect();
        results.sort_by_key(|(op, _)| *op);
        results.into_iter().map(|(_, result)| result).collect::<Vec<_>>()
    };
    let results = load();
    assert_eq!(results[2].as_ref().unwrap_err().kind(), CopyErrorKind::Corrupt);
    assert!([0, 1, 3].into_iter().all(|n| results[n].is_ok()));
    assert_eq!(*layers.lock(), 0);
    // And then it heals.
    assert!(run(&sealed, out).iter().all(Result::is_ok) && load().iter().all(Result::is_ok));
    assert_eq!(*layers.lock(), 8 * 4);
    (0..4).for_each(|n| assert!(has_pattern(n, device.read(&here[4 + n]).unwrap())));
}

/// Sealed around verified around faults around a store; the first block of memory has a pattern.
struct Fixture {
    memory: Arc<DramRegion>,
    store: Arc<MemoryStore>,
    faults: Arc<FaultBackend<Arc<MemoryStore>>>,
    checksums: Arc<Checksums>,
    sealed: Sealed<Verified<Arc<FaultBackend<Arc<MemoryStore>>>>>,
    here: Vec<Frame>,
    there: Vec<Frame>,
}

impl Fixture {
    fn new() -> Self {
        let (memory, scratch) = (Arc::new(host(4, BLOCK)), scratch(BLOCK, 2));
        let store = Arc::new(MemoryStore::new(scratch.memory(), Tier::Disk, 4).unwrap());
        let regions = vec![scratch.memory(), Arc::clone(store.region()) as Arc<dyn Memory>];
        let faults = Arc::new(FaultBackend::new(Arc::clone(&store), regions).unwrap());
        let checksums = Arc::new(Checksums::new());
        let verified =
            Verified::new(Arc::clone(&faults), scratch.memory(), Arc::clone(&checksums)).unwrap();
        let verified = verified.of_departures();
        let sealed = seal(verified, &memory, scratch, 1);
        let (mut here, there) = (frames(&memory), frames(store.region()));
        fill_pattern(1, memory.write(&mut here[0]).unwrap());
        Self { memory, store, faults, checksums, sealed, here, there }
    }

    fn out(&self) -> CopyOp {
        order(1, self.here[0].slot_ref(), self.there[0].slot_ref())
    }

    fn back(&self) -> CopyOp {
        order(1, self.there[0].slot_ref(), self.here[1].slot_ref())
    }

    fn run(&self, op: CopyOp) -> Result<(), CopyError> {
        run(&self.sealed, vec![op]).remove(0)
    }

    /// Several times what the scratch holds, so that a slot that is lost shows.
    fn works(&mut self) {
        for _ in 0..6 {
            fill_pattern(0, self.memory.write(&mut self.here[1]).unwrap());
            self.run(self.out()).unwrap();
            self.run(self.back()).unwrap();
            assert!(has_pattern(1, self.memory.read(&self.here[1]).unwrap()));
        }
    }
}

#[test]
fn the_medium_and_its_checksum_see_only_sealed_bytes() {
    let fixture = Fixture::new();
    fixture.run(fixture.out()).unwrap();
    let plain = fixture.memory.read(&fixture.here[0]).unwrap();
    let stored = fixture.store.region().read(&fixture.there[0]).unwrap();
    assert_eq!(stored.len(), BLOCK + SEAL_BYTES);
    for word in plain.chunks_exact(8) {
        assert!(stored.windows(8).all(|bytes| bytes != word));
    }
    assert_eq!(fixture.checksums.get(fixture.there[0].slot()), Some(checksum(stored)));
    assert!(has_pattern(1, plain), "it is only read");
}

#[test]
fn every_flipped_bit_is_caught_and_then_it_heals() {
    let mut fixture = Fixture::new();
    for byte in [
        0,
        4096,
        BLOCK - 1,
        BLOCK,
        BLOCK + 5,
        BLOCK + 21,
        BLOCK + 24,
        BLOCK + 30,
        BLOCK + SEAL_BYTES - 1,
    ] {
        fixture.run(fixture.out()).unwrap();
        fixture.store.flip_bit(fixture.there[0].slot(), byte);
        assert_fails(fixture.run(fixture.back()), CopyErrorKind::Corrupt);
    }
    fixture.works();
}

#[test]
fn a_block_that_arrives_is_opened_and_not_summed_before() {
    let mut fixture = Fixture::new();
    fixture.run(fixture.out()).unwrap();
    // A caller that finds the medium's checksum wrong has read the block once more than need be.
    fixture.checksums.record(fixture.there[0].slot(), 1);
    fixture.run(fixture.back()).unwrap();
    assert!(has_pattern(1, fixture.memory.read(&fixture.here[1]).unwrap()));
    fixture.works();
}

#[test]
fn a_block_that_lies_where_another_should_is_caught() {
    let mut fixture = Fixture::new();
    fixture.run(fixture.out()).unwrap();
    let other =
        CopyOp { block: order(2, fixture.back().from, fixture.back().to).block, ..fixture.back() };
    assert_fails(fixture.run(other), CopyErrorKind::Corrupt);
    fixture.works();
}

#[test]
fn failures_of_the_medium_pass_through_and_cost_no_room() {
    let mut fixture = Fixture::new();
    fixture.run(fixture.out()).unwrap();
    for _ in 0..5 {
        fixture.faults.inject(Fault::FailAfter(0, CopyErrorKind::NoSpace), &[OUT]);
        assert_fails(fixture.run(fixture.out()), CopyErrorKind::NoSpace);
        for (fault, kind) in [
            (Fault::Short, CopyErrorKind::Io),
            (Fault::LyingShort, CopyErrorKind::Corrupt),
            (Fault::BitFlip, CopyErrorKind::Corrupt),
        ] {
            fixture.faults.inject(fault, &[BACK]);
            assert_fails(fixture.run(fixture.back()), kind);
        }
        fixture.faults.heal();
    }
    fixture.works();
}

#[test]
fn small_blocks_go_where_room_is_while_others_hang() {
    let fixture = Fixture::new();
    fixture.faults.inject(Fault::NeverCompletes, &[OUT]);
    let elsewhere = CopyOp { to: fixture.there[1].slot_ref(), ..fixture.out() };
    assert!(
        start(&fixture.sealed, vec![elsewhere]).recv_timeout(Duration::from_millis(20)).is_err()
    );
    fixture.faults.heal();
    assert!(run(&fixture.sealed, vec![fixture.out(); 5]).iter().all(Result::is_ok));
}

#[test]
fn a_medium_that_takes_nothing_can_still_be_read() {
    let fixture = Fixture::new();
    fixture.run(fixture.out()).unwrap();
    fixture.faults.inject(Fault::NeverCompletes, &[OUT]);
    let elsewhere = CopyOp { to: fixture.there[1].slot_ref(), ..fixture.out() };
    let hung = start(&fixture.sealed, vec![elsewhere; 5]);
    assert!(hung.recv_timeout(Duration::from_millis(20)).is_err());
    for _ in 0..5 {
        fixture.run(fixture.back()).unwrap();
    }
    assert!(has_pattern(1, fixture.memory.read(&fixture.here[1]).unwrap()));
}

#[test]
fn what_finds_no_room_waits_and_ends_in_turn() {
    const LARGE: usize = 128 << 10;
    let (memory, scratch) = (Arc::new(host(8, LARGE)), scratch(LARGE, 2));
    let store = MemoryStore::new(scratch.memory(), Tier::Disk, 8).unwrap();
    let regions = vec![scratch.memory(), Arc::clone(store.region()) as Arc<dyn Memory>];
    let parked = Arc::new(ParkedBackend::new(regions, vec![OUT, BACK]).unwrap());
    let sealed = seal(Arc::clone(&parked), &memory, scratch, 1);
    let (here, there) = (frames(&memory), frames(store.region()));
    let out = |n: usize| order(n, here[n].slot_ref(), there[n].slot_ref());
    let reports = start(&sealed, (0..8).map(out).collect());
    for ended in 0..8 {
        let pending = loop {
            let pending = parked.pending();
            if pending.len() == 2.min(8 - ended) {
                break pending;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(parked.finish(pending[0].id, Ok(())));
        assert_eq!(reports.recv().unwrap().0, pending[0].op.block.hash as usize);
    }
}

#[test]
fn a_bit_flipped_in_memory_is_caught_on_return() {
    let mut fixture = Fixture::new();
    let slot = fixture.here[0].slot();
    fixture.memory.remember_checksum(&fixture.here[0]);
    let sum = fixture.memory.checksums().unwrap().get(slot).unwrap();
    fixture.run(fixture.out()).unwrap();
    fixture.run(fixture.back()).unwrap();
    let arrived = fixture.memory.checksums().unwrap().get(fixture.here[1].slot());
    assert_eq!(arrived, Some(sum), "memory remembers what arrived");
    fixture.memory.checksums().unwrap().record(slot, !sum);
    fixture.run(fixture.out()).unwrap();
    assert_fails(fixture.run(fixture.back()), CopyErrorKind::Corrupt);
    assert_eq!(fixture.memory.checksums().unwrap().get(fixture.here[1].slot()), None);
    fixture.memory.checksums().unwrap().record(slot, sum);
    fixture.works();
}

#[test]
fn a_backend_that_panics_takes_no_thread_along() {
    let mut fixture = Fixture::new();
    fixture.faults.inject(Fault::Panics, &[OUT]);
    assert!(
        start(&fixture.sealed, vec![fixture.out()])
            .recv_timeout(Duration::from_millis(20))
            .is_err()
    );
    fixture.faults.heal();
    fixture.works();
}

/// A store of keys that keeps those waiting that ask it for a tenant.
#[derive(Debug, Clone, Default)]
struct SlowKeys(Arc<(Mutex<(bool, usize)>, Condvar)>);

impl SlowKeys {
    fn hold(&self, holds: bool) {
        self.0.0.lock().0 = holds;
        self.0.1.notify_all();
    }

    fn wait_for_callers(&self) {
        let mut state = self.0.0.lock();
        while state.1 == 0 {
            self.0.1.wait(&mut state);
        }
    }

    fn wait(&self) {
        let mut state = self.0.0.lock();
        state.1 += 1;
        self.0.1.notify_all();
        while state.0 {
            self.0.1.wait(&mut state);
        }
        state.1 -= 1;
    }
}

impl KeyStore for SlowKeys {
    fn find(&self, _: KeyId) -> io::Result<FoundKey> {
        self.wait();
        Ok(FoundKey::Absent)
    }

    fn of_tenants(&self, tenants: &[Option<u32>]) -> Vec<io::Result<Vec<WrappedKey>>> {
        tenants.iter().map(|_| Ok(Vec::new())).collect()
    }

    fn add(&self, _: &WrappedKey) -> io::Result<()> {
        self.wait();
        Ok(())
    }

    fn destroy(&self, _: u32, _: &[KeyId]) -> io::Result<usize> {
        Ok(0)
    }
}

#[test]
fn a_slow_key_store_delays_no_block_with_known_key() {
    let (memory, scratch) = (Arc::new(host(32, BLOCK)), scratch(BLOCK, 16));
    let store = MemoryStore::new(scratch.memory(), Tier::Disk, 32).unwrap();
    let there = frames(store.region());
    let slow = SlowKeys::default();
    let ring = key_ring(1, "0123456789abcdef");
    let keys = Arc::new(TenantKeys::new(ring, "test", Box::new(slow.clone())));
    let cipher = Cipher::new(Arc::clone(&keys), Tier::Disk, "test", BLOCK);
    let sealed = Sealed::new(store, Arc::clone(&memory) as _, scratch, cipher, 1).unwrap();
    let mut here = frames(&memory);
    fill_pattern(1, memory.write(&mut here[0]).unwrap());
    let out = |tenant, slot: usize| CopyOp {
        owner: Some(Owner { tenant, life: 0 }),
        ..order(1, here[0].slot_ref(), there[slot].slot_ref())
    };
    run(&sealed, vec![out(1, 0)]).remove(0).unwrap();
    // More than there are threads, of as many tenants.
    slow.hold(true);
    let waiting: Vec<_> = (1..9).map(|n| start(&sealed, vec![out(100 + n as u32, n)])).collect();
    slow.wait_for_callers();
    for _ in 0..20 {
        run(&sealed, vec![out(1, 0)]).remove(0).unwrap();
        let back = order(1, there[0].slot_ref(), here[1].slot_ref());
        run(&sealed, vec![back]).remove(0).unwrap();
        assert!(has_pattern(1, memory.read(&here[1]).unwrap()));
    }
    // And then it answers.
    slow.hold(false);
    assert!(waiting.iter().all(|reports| reports.recv().unwrap().1.is_ok()));
}

#[test]
fn what_does_not_fit_is_refused() {
    let memory = Arc::new(host(1, BLOCK));
    let refused = |inner_over: &Arc<dyn Memory>, scratch: Scratch, block_bytes| {
        let store = MemoryStore::new(Arc::clone(inner_over), Tier::Disk, 1).unwrap();
        let cipher = Cipher::new(keys(1), Tier::Disk, "test", block_bytes);
        let error = Sealed::new(store, Arc::clone(&memory) as _, scratch, cipher, 1).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid, "{error}");
    };
    let other = scratch(BLOCK + 1, 1);
    refused(&other.memory(), other, BLOCK);
    let other = scratch(BLOCK, 1);
    refused(&other.memory(), other, BLOCK + 1);
    let device: Arc<dyn Memory> =
        Arc::new(DramRegion::open(Tier::Device, crate::testing::options(1, BLOCK)).unwrap());
    refused(&device, scratch(BLOCK, 1), BLOCK);
    for (block_bytes, blocks) in [(0, 1), (BLOCK, 0), (usize::MAX, 1)] {
        assert!(Scratch::open(ScratchOptions { block_bytes, blocks, huge_pages: false }).is_err());
    }
}
