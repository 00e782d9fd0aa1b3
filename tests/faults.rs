//! Media that fail: in every way that backends can fail, and real files that are damaged under a
//! manager.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvbm::scheduler::Tuning;
use kvbm::{
    BlockHash, Chain, Class, Clock, Defect, Drained, ErrorKind, Manager, Options, RequestInfo,
    SystemClock, Tier, Transferred,
};
use kvbm_policies::AdmissionKind;
use kvbm_settings::Settings;
use kvbm_tests::engine::{self, Served, push_down, serve};
use kvbm_tests::rig::{
    DISK, FaultyDisk, MEMORY, OBJECT, Rig, Sizes, TIGHT, TestClock, chain, files_of, metric, seed,
    wait_until,
};
use kvbm_tiers::testing::{Fault, ParkedBackend, holds_in_a_child, panics_are_meant};
use kvbm_tiers::{Backend, CopyErrorKind, Route};
use prometheus::Registry;

const SIZES: Sizes = Sizes { tiers: [16, 16, 32, 64], staging: 4 };
/// Longer than any test takes, unless it lets time pass.
const LIMIT: Duration = Duration::from_mins(1);
const FROM_DISK: Route = DISK[1];
const TO_DISK: Route = DISK[0];

/// A rig over stores that fail when told to.
struct Faulty {
    rig: Rig,
    disk: FaultyDisk,
}

impl Faulty {
    fn new() -> Self {
        Self::of(SIZES)
    }

    fn of(sizes: Sizes) -> Self {
        Self::with(sizes, Tuning { timeout: LIMIT, ..TIGHT })
    }

    fn with(sizes: Sizes, tuning: Tuning) -> Self {
        let (rig, disk) = Rig::with_faulty_disk(sizes, tuning);
        Self { rig, disk }
    }

    fn held(&self, chain: &[BlockHash], tier: Tier) -> usize {
        self.rig.core.table().matches(Chain::from(chain)).blocks(tier)
    }

    /// Flushes until it has come to that.
    fn drain_until(&self, has_come: impl Fn(&Drained) -> bool) {
        let began = Instant::now();
        loop {
            let drained = self.rig.core.drain(Duration::from_millis(10));
            if has_come(&drained) {
                return;
            }
            assert!(began.elapsed() < LIMIT, "{drained:?}");
        }
    }

    /// Computes a chain, saves it, flushes it to the bottom.
    fn store(&self, chain: &[BlockHash]) {
        self.save(chain);
        assert!(self.rig.core.drain(LIMIT).is_complete());
    }

    /// Computes a chain and saves it.
    fn save(&self, chain: &[BlockHash]) {
        let filled = self.rig.fill(Chain::from(chain));
        assert_eq!(filled.refused(), 0);
        let published = self.rig.publish(filled, Chain::from(chain)).wait().unwrap();
        self.rig.core.transfer(Class::Save, Tier::Host, published.lease).wait().unwrap();
    }

    /// The same, and nothing of it stays in memory.
    fn sink(&self, chain: &[BlockHash]) {
        self.store(chain);
        let mut table = self.rig.core.table();
        table.evict(Tier::Device, 64);
        table.evict(Tier::Host, 64);
        assert_eq!(
            (table.counts(Tier::Device).resident, table.counts(Tier::Host).resident),
            (0, 0)
        );
    }

    fn load(&self, chain: &[BlockHash]) -> Transferred {
        let lease = self.rig.core.lease(Chain::from(chain), RequestInfo::default());
        self.rig.core.transfer(Class::Load, Tier::Device, lease).wait().unwrap()
    }

    #[track_caller]
    fn assert_loads(&self, chain: &[BlockHash], blocks: usize) -> Transferred {
        let transferred = self.load(chain);
        assert_eq!(transferred.blocks, blocks, "{transferred:?}");
        for position in 0..blocks {
            let key = Chain::from(chain).key(position);
            assert_eq!(self.rig.is_intact(Tier::Device, key), Some(true), "block {position}");
        }
        assert_eq!(self.rig.core.table().audit(), []);
        transferred
    }
}

#[test]
fn a_failed_read_is_a_miss_for_the_chains_rest() {
    for fault in [
        Fault::FailAfter(2, CopyErrorKind::Io),
        Fault::FailAfter(0, CopyErrorKind::Io),
        Fault::Short,
    ] {
        let faulty = Faulty::new();
        faulty.sink(&chain(1, 6));
        faulty.disk.inject(fault, &[FROM_DISK]);
        let arrived = if fault == Fault::FailAfter(2, CopyErrorKind::Io) { 2 } else { 0 };
        assert_eq!(faulty.assert_loads(&chain(1, 6), arrived).failed, 6 - arrived);
        let counted =
            faulty.rig.metric("kvbm_transfer_failures_total", &[("kind", "io"), ("from", "disk")]);
        assert!(counted >= 1);
        faulty.disk.heal();
        faulty.assert_loads(&chain(1, 6), 6);
    }
}

#[test]
fn changed_bytes_are_quarantined_and_come_from_the_tier_below() {
    for (fault, route) in
        [Fault::LyingShort, Fault::BitFlip].into_iter().flat_map(|f| DISK.map(|r| (f, r)))
    {
        let faulty = Faulty::new();
        if route == TO_DISK {
            faulty.disk.inject(fault, &[route]);
        }
        faulty.sink(&chain(1, 6));
        faulty.disk.heal();
        // The slots of host memory shall hold other bytes, else a missing byte would not be
        // noticed.
        faulty.sink(&chain(2, 6));
        if route == FROM_DISK {
            faulty.disk.inject(fault, &[route]);
        }
        faulty.assert_loads(&chain(1, 6), 0);
        assert_eq!(
            faulty.rig.core.table().matches(Chain::from(&chain(1, 6))).blocks(Tier::Disk),
            0
        );
        assert!(
            faulty.rig.core.table().stats(Tier::Disk).quarantined >= 1,
            "{fault:?} on {route:?}"
        );
        assert!(faulty.rig.metric("kvbm_checksum_failures_total", &[("tier", "disk")]) >= 1);
        faulty.assert_loads(&chain(1, 6), 6);
    }
}

#[test]
fn rot_takes_the_descendants_along_and_spares_the_ancestors() {
    let faulty = Faulty::new();
    faulty.sink(&chain(1, 6));
    let hashes = chain(1, 6);
    let third = Chain::from(&hashes).key(2);
    let loan = faulty.rig.core.table().lend(Tier::Disk, third).unwrap();
    faulty.rig.places.disk.flip_bit(loan.slot(), 17);
    faulty.rig.core.table().return_loan(Tier::Disk, loan);
    faulty.assert_loads(&hashes, 2);
    assert_eq!(faulty.rig.core.table().stats(Tier::Disk).quarantined, 4);
    assert_eq!(faulty.rig.core.table().matches(Chain::from(&hashes)).blocks(Tier::Disk), 2);
}

#[test]
fn a_lease_from_before_a_quarantine_is_a_miss() {
    let faulty = Faulty::new();
    faulty.sink(&chain(1, 6));
    faulty.rig.core.table().evict(Tier::Object, 64);
    let hashes = chain(1, 6);
    let early = faulty.rig.core.lease(Chain::from(&hashes), RequestInfo::default());
    faulty.disk.inject(Fault::BitFlip, &[FROM_DISK]);
    faulty.assert_loads(&hashes, 0);
    faulty.disk.heal();
    // Other blocks take the places of those that are gone.
    faulty.sink(&chain(2, 6));
    let transferred = faulty.rig.core.transfer(Class::Load, Tier::Device, early).wait().unwrap();
    assert_eq!((transferred.blocks, transferred.copied), (0, 0));
    assert_eq!(faulty.rig.core.table().audit(), []);
}

#[test]
fn a_copy_that_never_ends_costs_only_its_slot() {
    let faulty = Faulty::new();
    faulty.sink(&chain(1, 6));
    faulty.disk.inject(Fault::NeverCompletes, &[FROM_DISK]);
    let lease = faulty.rig.core.lease(Chain::from(&chain(1, 6)), RequestInfo::default());
    let ticket = faulty.rig.core.transfer(Class::Load, Tier::Device, lease);
    faulty.disk.heal();
    faulty.rig.clock.pass(LIMIT * 2);
    faulty.rig.core.tick();
    let transferred = ticket.wait().unwrap();
    assert_eq!((transferred.blocks, transferred.failed), (0, 6));
    drop(transferred);
    let lost = faulty.rig.metric("kvbm_overdue_copies_total", &[("from", "disk")]);
    assert!(lost >= 1);
    assert_eq!(u64::from(faulty.rig.core.table().counts(Tier::Host).lost), lost);
    assert_eq!(faulty.rig.core.table().audit(), []);
    faulty.sink(&chain(2, 6));
    // The first block tries whether the disk is well again.
    faulty.assert_loads(&chain(2, 6), 1);
    faulty.assert_loads(&chain(2, 6), 6);
    faulty.assert_loads(&chain(1, 6), 6);
}

#[test]
fn slow_media_are_waited_for() {
    let faulty = Faulty::new();
    faulty.sink(&chain(1, 6));
    faulty.disk.inject(Fault::Slow(Duration::from_millis(10)), &DISK);
    faulty.assert_loads(&chain(1, 6), 6);
}

#[test]
fn a_full_disk_stops_nobody() {
    let faulty = Faulty::new();
    faulty.disk.inject(Fault::FailAfter(0, CopyErrorKind::NoSpace), &[TO_DISK]);
    for n in 1..12 {
        faulty.save(&chain(n, 6));
        let drained = faulty.rig.core.drain(Duration::from_millis(20));
        assert!(drained.unflushed[Tier::Host.index()] > 0, "{drained:?}");
        faulty.assert_loads(&chain(n, 6), 6);
    }
    assert!(faulty.rig.metric("kvbm_transfer_failures_total", &[("kind", "no_space")]) >= 1);
    assert!(faulty.rig.core.table().stats(Tier::Host).unflushed >= 1);
    assert_eq!(faulty.rig.core.table().counts(Tier::Disk).lost, 0);
    faulty.disk.heal();
    assert!(faulty.rig.core.drain(LIMIT).is_complete());
    assert_eq!(
        faulty.held(&chain(11, 6), Tier::Disk),
        6,
        "what is still in the host tier goes down after all"
    );
    faulty.sink(&chain(12, 6));
    faulty.assert_loads(&chain(12, 6), 6);
}

#[test]
fn a_full_disk_is_not_tried_all_the_time() {
    let faulty = Faulty::with(SIZES, Tuning { breaker_pause: LIMIT, timeout: 10 * LIMIT, ..TIGHT });
    faulty.sink(&chain(1, 6));
    faulty.disk.inject(Fault::FailAfter(0, CopyErrorKind::NoSpace), &[TO_DISK]);
    for n in 2..50 {
        faulty.rig.clock.pass(LIMIT / 16);
        faulty.save(&chain(n, 6));
        let _ = faulty.rig.core.drain(Duration::from_millis(1));
        faulty.load(&chain(1, 6));
        faulty.rig.core.table().evict(Tier::Device, 16);
        faulty.rig.core.table().evict(Tier::Host, 3);
    }
    let tried = faulty.rig.metric("kvbm_transfer_failures_total", &[("kind", "no_space")]);
    let window = TIGHT.max_concurrent * TIGHT.max_batch;
    assert!(tried <= window as u64 + 3, "{tried} copies tried a full disk");
    faulty.disk.heal();
    faulty.rig.clock.pass(16 * LIMIT);
    assert!(faulty.rig.core.drain(LIMIT).is_complete());
}

/// A block whose ancestors the disk lacks as well, as after a quarantine.
#[test]
fn one_block_tries_whether_the_disk_is_well_again() {
    let faulty = Faulty::with(SIZES, Tuning { breaker_pause: LIMIT, timeout: 10 * LIMIT, ..TIGHT });
    faulty.store(&chain(1, 6));
    let hashes = chain(1, 6);
    let root = Chain::from(&hashes).key(0);
    let (found, pins) = faulty.rig.core.table().pin_resident(Tier::Disk, root).unwrap();
    faulty.rig.core.table().release(pins);
    faulty.disk.inject(Fault::FailAfter(0, CopyErrorKind::Unavailable), &[TO_DISK]);
    faulty.save(&chain(2, 6));
    faulty.drain_until(|drained| !drained.in_flight);
    assert_eq!(faulty.rig.core.table().quarantine(root, found, Defect::Corrupt), 6);
    let tried = || faulty.rig.metric("kvbm_transfer_failures_total", &[("to", "disk")]);
    let before = tried();
    for _ in 0..6 {
        faulty.rig.clock.pass(LIMIT / 4);
        faulty.rig.core.tick();
        faulty.drain_until(|drained| !drained.in_flight);
    }
    assert_eq!(tried() - before, 1, "the pause ended once, and one block went");
    faulty.disk.heal();
    faulty.rig.clock.pass(4 * LIMIT);
    assert!(faulty.rig.core.drain(LIMIT).is_complete());
    assert_eq!(faulty.held(&hashes, Tier::Disk), 6);
}

/// Blocks come and go while the disk is away; what waits for it is in proportion to the tier.
#[test]
fn the_dirty_queue_is_bounded_while_the_disk_is_away() {
    let pause = Duration::from_mins(1);
    let faulty = Faulty::with(SIZES, Tuning { breaker_pause: pause, timeout: LIMIT, ..TIGHT });
    faulty.disk.inject(Fault::FailAfter(0, CopyErrorKind::Unavailable), &[TO_DISK]);
    faulty.save(&chain(1, 6));
    let kept = faulty.rig.core.lease(Chain::from(&chain(1, 6)), RequestInfo::default());
    for n in 2..1_000 {
        faulty.save(&chain(n, 6));
        faulty.rig.core.tick();
        faulty.rig.core.table().evict(Tier::Device, 16);
    }
    let dirty = faulty.rig.core.table().dirty(Tier::Host);
    assert!(dirty < 2_000, "{dirty} entries wait for a tier of 16 blocks");
    let unflushed = faulty.rig.core.drain(Duration::ZERO).unflushed[Tier::Host.index()];
    assert!(unflushed <= 16, "{unflushed} of 16 blocks are to be flushed");
    drop(kept);
}

/// The first block that is written, the one in the middle, or the last one.
#[test]
fn a_flush_that_failed_is_tried_again() {
    for fails_after in [0, 3, 5] {
        let faulty = Faulty::new();
        faulty.disk.inject(Fault::FailAfter(fails_after, CopyErrorKind::Io), &[TO_DISK]);
        faulty.save(&chain(1, 6));
        faulty.drain_until(|drained| {
            drained.unflushed[Tier::Host.index()] == 6 - fails_after as usize
        });
        assert!(faulty.rig.core.table().stats(Tier::Host).flush_failures >= 1);
        faulty.disk.heal();
        // No request asks for it: the background work does it when the pause is over.
        wait_until(LIMIT, "the flush is not tried again", || {
            faulty.rig.clock.advance_to(faulty.rig.clock.now_ms() + 1_000);
            faulty.rig.core.tick();
            faulty.held(&chain(1, 6), Tier::Disk) == 6
        });
        assert!(faulty.rig.core.drain(LIMIT).is_complete());
    }
}

#[test]
fn a_store_that_is_away_briefly_costs_no_flush() {
    let faulty = Faulty::new();
    faulty.disk.inject(Fault::FailAfter(0, CopyErrorKind::Unavailable), &[TO_DISK]);
    (1..=2).for_each(|n| faulty.save(&chain(n, 6)));
    let drained = faulty.rig.core.drain(Duration::from_millis(30));
    assert_eq!(drained.unflushed[Tier::Host.index()], 12);
    faulty.disk.heal();
    assert!(faulty.rig.core.drain(LIMIT).is_complete());
    assert_eq!([1, 2].map(|n| faulty.held(&chain(n, 6), Tier::Disk)), [6, 6]);
    assert_eq!(faulty.rig.core.table().stats(Tier::Host).unflushed, 0);
}

#[test]
fn an_unreadable_block_is_gone_and_is_written_anew() {
    let faulty = Faulty::new();
    faulty.sink(&chain(1, 6));
    faulty.rig.core.table().evict(Tier::Object, 64);
    faulty.disk.inject(Fault::FailAfter(3, CopyErrorKind::Io), &[FROM_DISK]);
    faulty.assert_loads(&chain(1, 6), 3);
    assert_eq!(faulty.held(&chain(1, 6), Tier::Disk), 3, "no match promises what cannot be read");
    let stats = faulty.rig.core.table().stats(Tier::Disk);
    assert_eq!((stats.unreadable, stats.quarantined), (3, 0), "counted apart from corruption");
    faulty.disk.heal();
    faulty.sink(&chain(1, 6));
    assert_eq!(faulty.held(&chain(1, 6), Tier::Disk), 6);
    // If three errors in a row had the disk left alone, the first block tries it.
    let first = faulty.load(&chain(1, 6)).blocks;
    assert!(first == 1 || first == 6, "{first} blocks");
    faulty.assert_loads(&chain(1, 6), 6);
}

/// The host has a good copy of what the disk lost.
#[test]
fn what_the_disk_lost_is_rewritten_from_the_tier_above() {
    let faulty = Faulty::new();
    faulty.store(&chain(1, 6));
    let hashes = chain(1, 6);
    let found = faulty.rig.core.table().pin_resident(Tier::Disk, Chain::from(&hashes).key(2));
    let (found, pins) = found.unwrap();
    faulty.rig.core.table().release(pins);
    let dropped =
        faulty.rig.core.table().quarantine(Chain::from(&hashes).key(2), found, Defect::Corrupt);
    assert_eq!((dropped, faulty.held(&hashes, Tier::Disk)), (4, 2));
    assert!(faulty.rig.core.drain(LIMIT).is_complete());
    assert_eq!(faulty.held(&hashes, Tier::Disk), 6);
}

#[test]
fn a_disk_that_fails_every_read_is_avoided_then_reused() {
    let faulty = Faulty::new();
    (1..=5).for_each(|n| faulty.sink(&chain(n, 6)));
    faulty.rig.core.table().evict(Tier::Object, 64);
    faulty.disk.inject(Fault::FailAfter(0, CopyErrorKind::Unavailable), &[FROM_DISK]);
    (1..=5).for_each(|n| drop(faulty.assert_loads(&chain(n, 6), 0)));
    faulty.disk.heal();
    // One block is the probe; its success opens the way for the others.
    faulty.assert_loads(&chain(1, 6), 1);
    (1..=5).for_each(|n| drop(faulty.assert_loads(&chain(n, 6), 6)));
}

#[test]
fn without_staging_blocks_find_another_way_or_none() {
    let faulty = Faulty::of(Sizes { tiers: [16, 6, 32, 64], staging: 0 });
    faulty.sink(&chain(1, 6));
    // The host tier is full of blocks that somebody reads: nothing can be promoted on its way up.
    faulty.store(&chain(2, 6));
    let lease = faulty.rig.core.lease(Chain::from(&chain(2, 6)), RequestInfo::default());
    let load = faulty.rig.core.lease(Chain::from(&chain(1, 6)), RequestInfo::default());
    let ticket = faulty.rig.core.transfer(Class::Load, Tier::Device, load);
    let answer = std::thread::spawn(move || ticket.wait());
    wait_until(LIMIT, "a load waits for ever", || answer.is_finished());
    assert_eq!(answer.join().unwrap().unwrap().blocks, 0);
    drop(lease);
}

#[test]
fn a_tier_whose_leaves_are_all_leased_is_full() {
    let faulty = Faulty::new();
    let leases: Vec<_> = [1, 2]
        .map(|n| {
            faulty.store(&chain(n, 6));
            faulty.rig.core.lease(Chain::from(&chain(n, 6)), RequestInfo::default())
        })
        .into();
    let filled = faulty.rig.fill(Chain::from(&chain(3, 6)));
    assert_eq!((filled.blocks(), filled.refused()), (4, 2));
    faulty.rig.abandon(filled);
    drop(leases);
    faulty.store(&chain(3, 6));
}

#[test]
fn whoever_waits_for_an_allocation_learns_that_it_was_dropped() {
    let faulty = Faulty::new();
    faulty.sink(&chain(1, 6));
    let hashes = chain(1, 6);
    let filled = faulty.rig.fill(Chain::from(&hashes[..3]));
    let lease = faulty.rig.core.lease(Chain::from(&hashes), RequestInfo::default());
    let ticket = faulty.rig.core.transfer(Class::Load, Tier::Device, lease);
    assert!(faulty.rig.core.drain(LIMIT).is_complete());
    faulty.rig.abandon(filled);
    let answer = std::thread::spawn(move || ticket.wait());
    wait_until(LIMIT, "a load waits for ever", || answer.is_finished());
    assert_eq!(answer.join().unwrap().unwrap().blocks, 0);
}

#[test]
fn a_core_dropped_amid_copies_goes_when_they_end() {
    let mut kept = None;
    let rig = Rig::new(SIZES, TIGHT, |places| {
        let routes = [MEMORY, DISK, OBJECT].concat();
        let parked = ParkedBackend::new(places.all(), routes).map(Arc::new).unwrap();
        vec![Arc::clone(kept.insert(parked)) as Arc<dyn Backend>]
    });
    let parked = kept.unwrap();
    let hashes = chain(1, 6);
    let filled = rig.fill(Chain::from(&hashes));
    let lease = rig.publish(filled, Chain::from(&hashes)).wait().unwrap().lease;
    drop(rig.core.transfer(Class::Save, Tier::Host, lease));
    let core = Arc::downgrade(&rig.core);
    drop(rig);
    assert!(core.upgrade().is_some(), "copies in flight keep what they touch");
    while let Some(pending) = parked.pending().first() {
        assert!(parked.finish(pending.id, Ok(())));
    }
    assert!(core.upgrade().is_none(), "the core outlives its last copy");
}

/// A manager over real files in a directory of its own, and its registry.
struct Real {
    manager: Manager,
    registry: Registry,
    dir: tempfile::TempDir,
}

impl Real {
    const BLOCK: u64 = 16 << 10;

    fn open(change: impl FnOnce(&mut Settings, &Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = engine::settings(Self::BLOCK, 16, 16);
        settings.transfer.timeout_ms = 2_000;
        change(&mut settings, dir.path());
        let registry = Registry::new();
        let manager = engine::open(settings, &registry).unwrap();
        Self { manager, registry, dir }
    }

    fn with_disk() -> Self {
        Self::open(|settings, dir| {
            engine::add_disk(settings, 64, dir);
            settings.disk.keep = true;
        })
    }

    fn slot_file(&self) -> PathBuf {
        files_of(self.dir.path(), "blocks").pop().expect("a slot file")
    }

    /// Serves a chain that lies on the disk, or below, alone.
    fn sink(&self, chain: &[BlockHash]) {
        assert_eq!(serve(&self.manager, chain).saved, chain.len());
        assert!(self.manager.drain(LIMIT).is_complete());
        push_down(&self.manager, chain);
    }

    fn metric(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        metric(&self.registry, name, labels)
    }

    /// Everything goes on as if nothing had been.
    fn assert_works(&self, chain: &[BlockHash]) {
        // Copies behind a failure end when they end; the tiers are small, and their slots are
        // needed.
        assert!(self.manager.drain(LIMIT).is_complete());
        let all = Served { saved: chain.len(), computed: chain.len(), ..Served::default() };
        assert_eq!(serve(&self.manager, chain), all);
        assert_eq!(serve(&self.manager, chain).hit, chain.len());
        assert_eq!(self.manager.admin().audit(), []);
    }
}

#[test]
fn a_flipped_bit_on_disk_is_found_and_never_served() {
    let real = Real::with_disk();
    real.sink(&chain(1, 6));
    let file = OpenOptions::new().read(true).write(true).open(real.slot_file()).unwrap();
    for slot in 0..64 {
        let (at, mut byte) = (slot * Real::BLOCK + 1000, [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }
    file.sync_all().unwrap();
    let served = serve(&real.manager, &chain(1, 6));
    assert_eq!((served.hit, served.wrong, served.computed), (0, 0, 6));
    assert_eq!(real.manager.admin().stats(Tier::Disk).quarantined, 6);
    assert!(real.metric("kvbm_checksum_failures_total", &[("tier", "disk")]) >= 1);
    real.assert_works(&chain(2, 6));
}

#[test]
fn a_slot_file_that_loses_its_tail_is_a_miss() {
    let real = Real::with_disk();
    real.sink(&chain(1, 6));
    OpenOptions::new().write(true).open(real.slot_file()).unwrap().set_len(0).unwrap();
    let served = serve(&real.manager, &chain(1, 6));
    assert_eq!((served.hit, served.wrong, served.computed), (0, 0, 6));
    assert!(real.manager.admin().failures() >= 1);
    real.assert_works(&chain(2, 6));
}

#[test]
fn an_object_store_that_goes_away_costs_hits_only() {
    let real = Real::open(|settings, dir| {
        settings.object.url = Some(format!("file://{}/objects", dir.display()));
    });
    real.sink(&chain(1, 6));
    let objects = real.dir.path().join("objects");
    fs::remove_dir_all(&objects).unwrap();
    fs::write(&objects, "not a directory any more").unwrap();
    let served = serve(&real.manager, &chain(1, 6));
    assert_eq!((served.hit, served.wrong, served.computed), (0, 0, 6));
    assert!(real.metric("kvbm_transfer_failures_total", &[("from", "object")]) >= 1);
    for n in 2..10 {
        assert_eq!(serve(&real.manager, &chain(n, 6)).saved, 6, "saves to the host go on");
        let _ = real.manager.drain(Duration::from_millis(200));
    }
    assert_eq!(real.manager.admin().counts(Tier::Object).lost, 0);
    let failed = real.metric("kvbm_transfer_failures_total", &[("to", "object")]);
    let unflushed = real.manager.admin().stats(Tier::Host).unflushed;
    assert!(failed + unflushed >= 1, "the degradation is not counted");
    fs::remove_file(&objects).unwrap();
    fs::create_dir(&objects).unwrap();
    real.assert_works(&chain(11, 6));
    assert!(real.manager.drain(LIMIT).is_complete());
    assert_eq!(real.manager.matches(&chain(11, 6)).blocks(Tier::Object), 6);
}

#[test]
fn a_manager_dropped_amid_transfers_leaves_nothing_behind() {
    for round in 0..20 {
        let real = Real::open(|settings, dir| {
            engine::add_disk(settings, 64, dir.join("slots"));
            settings.object.url = Some(format!("file://{}/objects", dir.display()));
        });
        real.sink(&chain(1, 6));
        for n in 2..5 {
            serve(&real.manager, &chain(n, 6));
        }
        drop(real.manager.load(real.manager.lease(&chain(1, 6))));
        let Real { manager, dir, .. } = real;
        drop(manager);
        if round == 0 {
            // Files without a name need no cleaning up; objects go with the last copy.
            wait_until(LIMIT, "files were left behind", || files_below(dir.path()) == 0);
        }
    }
}

fn files_below(dir: &Path) -> usize {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.map(|path| if path.is_dir() { files_below(&path) } else { 1 }).sum()
}

/// A clock that panics once on the background thread, as a policy or a backend might.
#[derive(Debug, Default)]
struct PanickyClock {
    time: SystemClock,
    has_panicked: AtomicBool,
}

impl Clock for PanickyClock {
    fn now_ms(&self) -> u64 {
        if std::thread::current().name() == Some("kvbm-background") {
            assert!(self.has_panicked.swap(true, Ordering::Relaxed), "injected panic");
        }
        self.time.now_ms()
    }
}

#[test]
fn a_panic_in_the_background_does_not_end_flushing() {
    panics_are_meant();
    let (dir, registry) = (tempfile::tempdir().unwrap(), Registry::new());
    let mut settings = engine::settings(Real::BLOCK, 16, 16);
    engine::add_disk(&mut settings, 64, dir.path());
    settings.flush.interval_ms = 1;
    let clock: Arc<dyn Clock> = Arc::new(PanickyClock::default());
    let options = Options { registry: registry.clone(), clock, ..Options::default() };
    let manager = engine::open_with(settings, options).unwrap();
    assert_eq!(serve(&manager, &chain(1, 6)).saved, 6);
    wait_until(LIMIT, "flushing has ended", || {
        manager.matches(&chain(1, 6)).blocks(Tier::Disk) == 6
    });
    assert_eq!(metric(&registry, "kvbm_background_panics_total", &[]), 1);
}

#[test]
fn a_forked_child_may_drop_the_manager_without_any_harm() {
    let real = Real::with_disk();
    real.sink(&chain(1, 6));
    let mut manager = Some(real.manager);
    assert!(holds_in_a_child(|| {
        drop(manager.take());
        true
    }));
    let manager = manager.unwrap();
    assert_eq!(serve(&manager, &chain(1, 6)).hit, 6);
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(serve(&manager, &chain(2, 6)).saved, 6);
}

#[test]
fn a_disk_that_is_too_small_names_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(1 << 20, 1, 1);
    engine::add_disk(&mut settings, 1 << 29, dir.path());
    let error = engine::open(settings, &Registry::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("DYN_KVBM_DISK_CACHE_GB"), "{error}");
    assert_eq!(files_below(dir.path()), 0);
}

#[test]
fn a_miss_says_what_became_of_the_block() {
    let real = Real::open(|_, _| {});
    let misses =
        |reason, tier| real.metric("kvbm_misses_total", &[("reason", reason), ("tier", tier)]);
    let one = chain(1, 6);
    serve(&real.manager, &one);
    assert_eq!((misses("never_seen", "none"), misses("evicted", "host")), (1, 0));
    real.manager.admin().evict(Tier::Device, 16);
    real.manager.admin().evict(Tier::Host, 16);
    drop(real.manager.lease(&one));
    assert_eq!(misses("evicted", "host"), 1);

    let filling = real.manager.allocate(&one, real.manager.lease(&one)).unwrap();
    drop(real.manager.lease(&one));
    assert_eq!(misses("in_flight", "device"), 1);
    drop(filling);
    drop(real.manager.lease(&one));
    assert_eq!(misses("io_error", "device"), 1);

    let long = chain(50, 20);
    assert_eq!(serve(&real.manager, &long).computed, 16);
    drop(real.manager.lease(&long));
    assert_eq!(misses("capacity", "device") + misses("capacity", "host"), 1);
}

#[test]
fn what_is_sooner_computed_is_left_to_the_engine() {
    let real = Real::open(|settings, _| settings.transfer.prefill_tokens_per_second = 100_000_000);
    let chain = chain(1, 6);
    assert_eq!(serve(&real.manager, &chain).saved, chain.len());
    let load = || {
        real.manager.admin().evict(Tier::Device, 16);
        real.manager.load(real.manager.lease(&chain)).wait().unwrap()
    };
    let tried = load();
    assert_eq!(
        (tried.blocks, tried.recompute),
        (chain.len(), 0),
        "the pace of the host is not known yet"
    );
    drop(tried);
    assert_eq!(real.manager.matches(&chain).worth_loading(), chain.len(), "they are on the device");
    let left = load();
    assert_eq!((left.blocks, left.recompute, left.refused), (0, chain.len(), 0));
    assert_eq!(real.manager.matches(&chain).worth_loading(), 0);
    assert_eq!(real.metric("kvbm_recompute_tokens_total", &[]), 16 * chain.len() as u64);
}

/// Else everything that is merely used would go down from then on.
#[test]
fn a_drain_that_panics_is_over() {
    let rig =
        Rig::with(TestClock::default(), Some(AdmissionKind::WriteBack), SIZES, TIGHT, |places| {
            vec![
                places.verified(Arc::clone(&places.disk)),
                places.verified(Arc::clone(&places.object)),
            ]
        });
    seed(&rig.core, Tier::Host, Chain::from(&chain(1, 6)));
    rig.clock.break_once();
    assert!(catch_unwind(AssertUnwindSafe(|| rig.core.drain(LIMIT))).is_err());
    rig.clock.advance_to(60_000);
    rig.core.tick();
    let below = rig.core.table().counts(Tier::Disk);
    assert_eq!((below.filling, below.resident), (0, 0), "written back is what leaves");
    let drained = rig.core.drain(LIMIT);
    assert!(drained.is_complete(), "{drained:?}");
    assert_eq!(rig.core.table().counts(Tier::Disk).resident, 6);
    assert_eq!(rig.core.table().audit(), []);
}
