//! A manager over media that fail, lie and hang, in every way that the chaos layer knows: time is
//! lost, and some hits, but no byte is wrong, and when the medium is well again everything works
//! again.

use std::time::Duration;

use kvbm::{Manager, Options, Tier};
use kvbm_settings::{DiskBackend, Settings};
use kvbm_tests::engine::{self, serve};
use kvbm_tests::rig::{chain, chaos, metric, wait_until};
use kvbm_tiers::chaos::{Chaos, Kind, Medium};
use prometheus::Registry;

const LIMIT: Duration = Duration::from_mins(1);

/// A manager over real tiers, and what goes wrong in them.
struct Troubled {
    manager: Manager,
    chaos: Chaos,
    registry: Registry,
    _dir: tempfile::TempDir,
}

impl Troubled {
    fn new(fault: &str, backend: DiskBackend) -> Self {
        Self::with(fault, backend, |_| ())
    }

    fn with(fault: &str, backend: DiskBackend, change: impl FnOnce(&mut Settings)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = engine::settings(4096, 16, 16);
        settings.transfer.timeout_ms = 200;
        engine::add_disk(&mut settings, 64, dir.path());
        settings.disk.backend = backend;
        settings.object.url = Some("memory:///".to_owned());
        change(&mut settings);
        let chaos = chaos(&[fault]);
        let registry = Registry::new();
        let options = Options {
            media_layer: Some(chaos.layer()),
            registry: registry.clone(),
            ..Options::default()
        };
        let manager = engine::open_with(settings, options).unwrap();
        Self { manager, chaos, registry, _dir: dir }
    }

    /// Serves chains that go down to `tier` as far as they get, and again from there. No byte may
    /// be wrong.
    fn serve_some(&self, tier: Tier) {
        for _ in 0..2 {
            for n in 0..8 {
                assert_eq!(serve(&self.manager, &chain(n, 4)).wrong, 0);
                let _ = self.manager.drain(Duration::from_millis(50));
            }
            self.evict_above(tier);
        }
    }

    fn evict_above(&self, tier: Tier) {
        for upper in Tier::ALL.into_iter().filter(|&upper| upper < tier) {
            self.manager.admin().evict(upper, 64);
        }
    }

    /// A chain goes down to `tier` and comes back from there.
    #[track_caller]
    fn assert_works(&self, tier: Tier, n: u32) {
        let deadline = std::time::Instant::now() + LIMIT;
        let comes_back = || {
            assert!(
                self.manager.drain(LIMIT).is_complete(),
                "everything that is dirty can be flushed"
            );
            self.evict_above(tier);
            let held = self.manager.matches(&chain(n, 4));
            let served = serve(&self.manager, &chain(n, 4));
            assert_eq!(served.wrong, 0);
            (held.blocks(tier), held.blocks(Tier::Device), served.hit) == (4, 0, 4)
        };
        serve(&self.manager, &chain(n, 4));
        // A busy machine can have a tier left alone for a moment: the first block tries it then.
        while !comes_back() {
            assert!(std::time::Instant::now() < deadline, "{tier} does not work again");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Bytes were spoilt, and somebody noticed.
    fn assert_noticed(&self) {
        let dropped: u64 = [Tier::Disk, Tier::Object]
            .map(|tier| self.manager.admin().stats(tier).quarantined)
            .into_iter()
            .sum();
        assert!(dropped > 0, "{:?}", self.chaos.injected());
    }

    /// And then it heals, and everything works again.
    #[track_caller]
    fn assert_heals(&self, kind: Kind) {
        assert!(self.chaos.injected()[&kind] > 0);
        self.chaos.heal();
        // A medium that was away for a while is left alone for a while.
        let deadline = std::time::Instant::now() + LIMIT;
        while !self.manager_works_at_all() && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        for (n, tier) in (200..).zip([Tier::Host, Tier::Disk, Tier::Object]) {
            self.assert_works(tier, n);
        }
        assert_eq!(self.manager.admin().audit(), []);
        let never = self.chaos.injected().get(&Kind::Never).copied().unwrap_or_default();
        assert_eq!(self.manager.admin().overdue(), never);
    }

    fn manager_works_at_all(&self) -> bool {
        let probe = chain(100, 4);
        serve(&self.manager, &probe);
        let _ = self.manager.drain(LIMIT);
        let held = self.manager.matches(&probe);
        self.evict_above(Tier::Object);
        let is_everywhere = held.blocks(Tier::Disk) == 4 && held.blocks(Tier::Object) == 4;
        is_everywhere && serve(&self.manager, &probe).hit == 4
    }
}

fn each_kind_of(medium: Medium, tier: Tier, backend: DiskBackend) {
    // A copy that hangs or never ends is a test of the scheduler's time-outs: below, few at a time.
    let kinds =
        medium.kinds().iter().copied().filter(|kind| ![Kind::Hang, Kind::Never].contains(kind));
    for kind in kinds {
        let troubled = Troubled::new(&format!("{}:{kind}@0s+1h x8", medium.name()), backend);
        troubled.chaos.start();
        troubled.serve_some(tier);
        if [Kind::Corrupt, Kind::Torn].contains(&kind) {
            troubled.assert_noticed();
        }
        troubled.assert_heals(kind);
    }
}

#[test]
fn memory_copies_fail_in_every_way_and_work_again() {
    each_kind_of(Medium::Memory, Tier::Host, DiskBackend::Auto);
}

#[test]
fn a_disk_fails_in_every_way_and_works_again() {
    each_kind_of(Medium::Disk, Tier::Disk, DiskBackend::Threads);
    each_kind_of(Medium::Disk, Tier::Disk, DiskBackend::Auto);
}

#[test]
fn an_object_store_fails_in_every_way_and_works_again() {
    each_kind_of(Medium::Object, Tier::Object, DiskBackend::Auto);
}

#[test]
fn a_disk_that_hangs_below_the_time_out_is_awaited() {
    let patient = |settings: &mut Settings| settings.transfer.timeout_ms = 5_000;
    let troubled = Troubled::with("disk:hang@0s+500ms", DiskBackend::Auto, patient);
    troubled.chaos.start();
    troubled.serve_some(Tier::Disk);
    let _ = troubled.manager.drain(LIMIT);
    troubled.assert_heals(Kind::Hang);
}

#[test]
fn only_a_copy_that_never_completes_is_overdue() {
    let troubled = Troubled::new("disk.write:never@0s+1h x1", DiskBackend::Auto);
    troubled.chaos.start();
    troubled.serve_some(Tier::Disk);
    let _ = troubled.manager.drain(LIMIT);
    troubled.assert_heals(Kind::Never);
}

#[test]
fn an_avoided_disk_is_reported_until_it_is_used_again() {
    let troubled = Troubled::new("disk.write:eio@0s+1h", DiskBackend::Auto);
    let route = [("from", "host"), ("to", "disk")];
    let is_open = || metric(&troubled.registry, "kvbm_breaker_open", &route);
    serve(&troubled.manager, &chain(1, 4));
    assert!(troubled.manager.drain(LIMIT).is_complete());
    assert_eq!(is_open(), 0);
    troubled.chaos.start();
    let deadline = std::time::Instant::now() + LIMIT;
    for n in (2..50).cycle() {
        serve(&troubled.manager, &chain(n, 4));
        let _ = troubled.manager.drain(Duration::from_millis(20));
        if is_open() == 1 {
            break;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "a disk that fails every write is used on and on"
        );
    }
    troubled.assert_heals(Kind::Io);
    assert_eq!(is_open(), 0);
}

/// What the scrubber reads is overdue like any copy, nothing is kept waiting for it, and scrubbing
/// goes on.
fn scrubs_on_after(fault: &str, kind: Kind) {
    let troubled = Troubled::with(fault, DiskBackend::Auto, |settings| {
        settings.transfer.scrub_mib_per_second = 100;
    });
    let scrubbed = || {
        metric(
            &troubled.registry,
            "kvbm_scrubbed_blocks_total",
            &[("tier", "disk"), ("outcome", "sound")],
        )
    };
    serve(&troubled.manager, &chain(1, 4));
    serve(&troubled.manager, &chain(2, 4));
    assert!(troubled.manager.drain(LIMIT).is_complete());
    wait_until(LIMIT, "blocks are looked at", || {
        // A read beyond the time-out has the disk left alone until a request tries it.
        troubled.evict_above(Tier::Disk);
        serve(&troubled.manager, &chain(1, 4));
        scrubbed() > 10
    });
    let overdue = || metric(&troubled.registry, "kvbm_overdue_copies_total", &[]);
    let is_open = || metric(&troubled.registry, "kvbm_breaker_open", &[("from", "disk")]) > 0;
    let before = overdue();
    troubled.chaos.start();
    wait_until(LIMIT, "a read that does not end is not counted", || {
        // Another slow read may have been first.
        if is_open() {
            troubled.evict_above(Tier::Disk);
            serve(&troubled.manager, &chain(1, 4));
        }
        overdue() > before
    });
    troubled.assert_heals(kind);
    let before = scrubbed();
    wait_until(LIMIT, "nothing is looked at any more", || scrubbed() > before + 30);
    let overdue = troubled.manager.admin().overdue();
    assert_eq!(troubled.manager.close(Duration::from_secs(1)).copies_left, overdue);
}

#[test]
fn an_endless_scrub_read_is_overdue_and_scrubbing_goes_on() {
    scrubs_on_after("disk.read:never@0s+1h x1", Kind::Never);
}

#[test]
fn a_hanging_scrub_read_comes_back_and_scrubbing_goes_on() {
    scrubs_on_after("disk.read:hang@0s+900ms x1", Kind::Hang);
}
