//! Space stays bounded, whatever order slots are written in, and no reader notices how.

use super::*;

const PER_SEGMENT: usize = 32;

/// Slots that are written in any order, and what each holds.
struct Fixture {
    heap: Arc<Heap>,
    store: Arc<Faulty>,
    backend: ObjectBackend,
    /// Seed of the pattern by slot; `None`: nothing.
    content: Vec<Option<u32>>,
    seed: u32,
}

impl Fixture {
    fn new(slots: u32, fault: Fault) -> Self {
        Self::with(slots, fault, &options(PER_SEGMENT))
    }

    fn with(slots: u32, fault: Fault, options: &ObjectOptions) -> Self {
        let (heap, store) = (Heap::new(), Faulty::new(fault));
        let backend = backend(Store::with_client(store.clone()).unwrap(), &heap, options);
        let mut tier = Self { heap, store, backend, content: vec![None; slots as usize], seed: 0 };
        let all: Vec<_> = (0..slots).collect();
        all.chunks(PER_SEGMENT).for_each(|slots| _ = tier.write(slots));
        tier
    }

    fn write(&mut self, slots: &[u32]) -> Results {
        let blocks: Vec<_> = slots.iter().map(|&slot| (slot, self.seed + slot)).collect();
        self.seed += 100_000;
        let results = write(&self.backend, &self.heap, &blocks);
        for (&(slot, seed), result) in blocks.iter().zip(&results) {
            self.content[slot as usize] = result.is_ok().then_some(seed);
        }
        results
    }

    /// Reads everything back.
    fn check(&self) {
        let blocks: Vec<_> = (0..).zip(&self.content).collect();
        for blocks in blocks.chunks(PER_SEGMENT) {
            let full: Vec<_> =
                blocks.iter().filter_map(|&(slot, seed)| Some((slot, (*seed)?))).collect();
            assert!(all_ok(&read(&self.backend, &self.heap, &full)));
        }
    }

    fn assert_bounded(&self) {
        let stats = self.backend.stats();
        assert!(stats.stored_blocks * 10 <= stats.live_blocks * 13, "{stats:?}");
    }
}

/// `count` different slots, drawn by xorshift.
fn draw(state: &mut u64, count: usize, slots: u32) -> Vec<u32> {
    let mut drawn = Vec::new();
    while drawn.len() < count {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        let slot = (*state % u64::from(slots)) as u32;
        if !drawn.contains(&slot) {
            drawn.push(slot);
        }
    }
    drawn
}

#[test]
fn space_is_bounded_when_slots_are_written_in_random_order() {
    let slots = 3200;
    let mut tier = Fixture::new(slots, Fault::None);
    let (mut random, mut moved, rounds) = (1, 0, 600);
    for round in 0..rounds {
        if round == rounds / 2 {
            // It takes a while until segments are as empty as they will be.
            moved = tier.backend.stats().moved_blocks;
        }
        let picked = draw(&mut random, PER_SEGMENT, slots);
        assert!(all_ok(&tier.write(&picked)));
        tier.assert_bounded();
    }
    tier.check();
    let stats = tier.backend.stats();
    let amplification = 1.0 + (stats.moved_blocks - moved) as f64 / f64::from(rounds / 2 * 32);
    println!("blocks written for each that was given: {amplification:.2}; {stats:?}");
    assert!(amplification < 3.0, "{amplification}");
    delete_all_dead(&tier.backend);
    let bytes: u64 = tier.store.sizes().iter().sum();
    assert!(bytes < u64::from(slots) * BLOCK as u64 * 132 / 100, "{bytes} bytes, footers and all");
}

#[test]
fn space_is_bounded_when_all_segments_waste_the_same() {
    let segments = 40;
    let mut tier = Fixture::new(segments * 32, Fault::None);
    for round in 0..64 {
        let picked: Vec<_> = (0..segments).map(|segment| segment * 32 + round % 32).collect();
        for picked in picked.chunks(PER_SEGMENT) {
            assert!(all_ok(&tier.write(picked)));
            tier.assert_bounded();
        }
    }
    println!("all waste the same: {:?}", tier.backend.stats());
    tier.check();
}

#[test]
fn a_compaction_that_fails_half_way_changes_nothing() {
    // The first 20 requests fill the tier; each of the others fails in turn, with all that follow.
    for budget in (20..60).step_by(4) {
        let slots = 640;
        let limit =
            ObjectOptions { operation_limit: Duration::from_millis(500), ..options(PER_SEGMENT) };
        let mut tier = Fixture::with(slots, Fault::AfterRequests(AtomicI64::new(budget)), &limit);
        let mut state = budget as u64;
        for _ in 0..12 {
            tier.write(&draw(&mut state, PER_SEGMENT, slots));
        }
        tier.store.heal();
        tier.check();
        for _ in 0..40 {
            let picked = draw(&mut state, PER_SEGMENT, slots);
            assert!(all_ok(&tier.write(&picked)));
        }
        tier.assert_bounded();
        tier.check();
        delete_all_dead(&tier.backend);
        assert_eq!(tier.store.sizes().len() as u64, tier.backend.stats().segments);
    }
}

#[test]
fn a_reader_keeps_the_segment_that_a_compaction_empties() {
    let mut tier = Fixture::new(128, Fault::HoldsFirstGet(AtomicBool::new(false)));
    let seed = tier.content[0].unwrap();
    let (reports, receive) = std::sync::mpsc::channel();
    let read_op = op(slot_at(Tier::Object, 0), slot_at(Tier::Host, 63), seed);
    tier.backend.submit(vec![read_op], each(move |_, result| reports.send(result).unwrap()));
    let Fault::HoldsFirstGet(held) = &tier.store.fault else { unreachable!() };
    eventually("the read did not begin", || held.load(Ordering::Relaxed));
    for round in 0..8 {
        let first = 1 + round % 4 * 31;
        assert!(all_ok(&tier.write(&(first..first + 31).collect::<Vec<_>>())));
    }
    assert!(tier.backend.stats().moved_blocks > 0, "slot 0 moved");
    assert!(receive.try_recv().is_err());
    tier.store.heal();
    receive.recv().unwrap().unwrap();
    assert!(tier.heap.holds(63, seed));
    delete_all_dead(&tier.backend);
    assert_eq!(tier.store.sizes().len() as u64, tier.backend.stats().segments);
    tier.check();
}

#[test]
fn a_corrupt_block_is_not_made_whole_by_a_compaction() {
    let dir = tempfile::tempdir().unwrap();
    let heap = Heap::new();
    let (memory, checksums) = (Arc::clone(&heap) as Arc<dyn Memory>, Arc::new(Checksums::new()));
    let recorded = Some(Arc::clone(&checksums));
    let backend =
        ObjectBackend::new(open_directory(dir.path()), Arc::clone(&memory), recorded, &options(8))
            .unwrap();
    let backend = Arc::new(backend);
    let verified = Verified::new(Arc::clone(&backend), memory, checksums).unwrap();
    let old: Vec<_> = (0..8).map(|slot| (slot, slot + 1)).collect();
    assert!(all_ok(&write(&verified, &heap, &old)));
    let file = std::fs::File::options().write(true).open(&segment_files(dir.path())[0]).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"\xee\xee", 6 * BLOCK as u64 + 70).unwrap();
    let new: Vec<_> = (0..6).map(|slot| (slot, slot + 50)).collect();
    assert!(all_ok(&write(&verified, &heap, &new)));
    assert_eq!(backend.stats().moved_blocks, 1, "slot 7 moved, slot 6 did not");
    let results = read(&verified, &heap, &[new[0], old[7], old[6]]);
    assert_eq!(kinds(&results), [None, None, Some(CopyErrorKind::Corrupt)]);
    assert!(all_ok(&write(&verified, &heap, &old)));
    assert!(all_ok(&read(&verified, &heap, &old)));
}

#[test]
fn writers_and_readers_at_once_never_see_a_wrong_byte() {
    const THREADS: u32 = 4;
    let heap = Heap::new();
    let dir = tempfile::tempdir().unwrap();
    let options = ObjectOptions { concurrency: 8, ..options(8) };
    let backend = backend(open_directory(dir.path()), &heap, &options);
    let work = |thread: u32| {
        let (mut state, mut seeds) = (u64::from(thread) + 1, vec![None; 64]);
        let host = thread * SLOTS / THREADS;
        for round in 0..400 {
            let picked = draw(&mut state, 8, 64);
            let object = |slot: u32| slot_at(Tier::Object, thread * 64 + slot);
            let memory = |index: u32| slot_at(Tier::Host, host + index);
            let writes = (0..).zip(&picked).map(|(index, &slot)| {
                let seed = thread << 24 | round << 8 | slot;
                heap.fill(host + index, seed);
                seeds[slot as usize] = Some(seed);
                op(memory(index), object(slot), seed)
            });
            let writes = writes.collect();
            assert!(all_ok(&run(&backend, writes)));
            let picked = draw(&mut state, 8, 64);
            let known: Vec<_> =
                picked.iter().filter_map(|&slot| Some((slot, seeds[slot as usize]?))).collect();
            let reads = (0..)
                .zip(&known)
                .map(|(index, &(slot, seed))| op(object(slot), memory(index), seed));
            assert!(all_ok(&run(&backend, reads.collect())));
            for (index, &(_, seed)) in (0..).zip(&known) {
                assert!(heap.holds(host + index, seed));
            }
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| _ = scope.spawn(move || work(thread)));
    });
    assert!(backend.stats().moved_blocks > 0);
    // The last readers may still be at segments that were emptied meanwhile.
    eventually("segments are left that no worker needs", || {
        let stats = backend.stats();
        stats.undeleted == 0
            && stats.stored_blocks * 10 <= stats.live_blocks * 13
            && stats.segments == segment_files(dir.path()).len() as u64
    });
}
