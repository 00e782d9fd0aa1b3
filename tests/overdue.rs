//! Media that are slow, hang, hang and then go on, or never end a copy: what that costs, and that
//! it comes back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm::scheduler::Tuning;
use kvbm::{BlockHash, Chain, Class, ErrorKind, RequestInfo, Tier, Transfer, Transferred};
use kvbm_tests::rig::{DISK, FaultyDisk, Rig, Sizes, TIGHT, chain};
use kvbm_tiers::Route;
use kvbm_tiers::testing::Fault;

const FROM_DISK: Route = DISK[1];
/// Longer than any test takes: it passes when the test lets it.
const LIMIT: Duration = Duration::from_mins(10);
const SOON: Duration = Duration::from_mins(1);
const SIZES: Sizes = Sizes { tiers: [64, 64, 128, 128], staging: 4 };

struct System {
    rig: Rig,
    disk: FaultyDisk,
}

impl System {
    fn new(sizes: Sizes) -> Self {
        Self::with(
            sizes,
            Tuning { timeout: LIMIT, object_timeout: LIMIT, queue_blocks: 2_000, ..TIGHT },
        )
    }

    fn with(sizes: Sizes, tuning: Tuning) -> Self {
        let (rig, disk) = Rig::with_faulty_disk(sizes, tuning);
        Self { rig, disk }
    }

    /// Brings a chain to disk, and nowhere else.
    fn sink(&self, chain: &[BlockHash]) {
        let filled = self.rig.fill(Chain::from(chain));
        let published = self.rig.publish(filled, Chain::from(chain)).wait().unwrap();
        drop(self.rig.core.transfer(Class::Save, Tier::Host, published.lease).wait().unwrap());
        assert!(self.rig.core.drain(SOON).is_complete());
        let mut table = self.rig.core.table();
        for tier in [Tier::Device, Tier::Host, Tier::Object] {
            table.evict(tier, 1_000);
        }
    }

    fn load(&self, chain: &[BlockHash]) -> Transfer<Transferred> {
        let lease = self.rig.core.lease(Chain::from(chain), RequestInfo::default());
        self.rig.core.transfer(Class::Load, Tier::Device, lease)
    }

    /// Waits for an answer while background work goes on.
    fn wait(&self, ticket: Transfer<Transferred>) -> Transferred {
        self.wait_in_steps(ticket, Duration::ZERO).0
    }

    /// The same while time passes, and how much did.
    fn outwait(&self, ticket: Transfer<Transferred>) -> (Transferred, Duration) {
        self.wait_in_steps(ticket, LIMIT / 8)
    }

    fn wait_in_steps(
        &self,
        ticket: Transfer<Transferred>,
        step: Duration,
    ) -> (Transferred, Duration) {
        let (began, mut passed) = (Instant::now(), Duration::ZERO);
        let answer = std::thread::spawn(move || ticket.wait().unwrap());
        while !answer.is_finished() {
            assert!(began.elapsed() < SOON, "a load waits for ever");
            self.rig.core.tick();
            std::thread::sleep(Duration::from_millis(2));
            self.rig.clock.pass(step);
            passed += step;
        }
        (answer.join().unwrap(), passed)
    }

    fn lost(&self) -> usize {
        let tiers = Tier::ALL.map(|tier| self.rig.core.table().counts(tier).lost as usize);
        tiers.iter().sum::<usize>() + self.rig.core.staging().lost
    }

    fn wait_until_nothing_is_lost(&self) {
        let began = Instant::now();
        while self.lost() > 0 {
            assert!(began.elapsed() < SOON, "{} slots do not come back", self.lost());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Full capacity, and every way is open.
    #[track_caller]
    fn assert_well(&self, chains: &[Vec<BlockHash>]) {
        self.wait_until_nothing_is_lost();
        for chain in chains {
            // The first load may be the probe, of one block.
            drop(self.wait(self.load(chain)));
            let transferred = self.wait(self.load(chain));
            assert_eq!(transferred.blocks, chain.len(), "{transferred:?}");
            for position in 0..chain.len() {
                assert_eq!(
                    self.rig.is_intact(Tier::Device, Chain::from(chain).key(position)),
                    Some(true)
                );
            }
        }
        assert!(self.rig.core.drain(SOON).is_complete());
        let staging = self.rig.core.staging();
        assert_eq!((staging.idle, staging.lost), (staging.total, 0));
        for tier in Tier::ALL {
            let counts = self.rig.core.table().counts(tier);
            assert_eq!((counts.filling, counts.lost), (0, 0), "{tier}: {counts:?}");
        }
        assert_eq!(self.rig.core.table().audit(), []);
    }
}

/// Every read takes longer than a medium may complete nothing, and succeeds in the end.
#[test]
fn a_slow_disk_costs_no_slot() {
    let system = System::new(SIZES);
    let prompts: Vec<_> = (1..=4).map(|n| chain(n, 12)).collect();
    prompts.iter().for_each(|chain| system.sink(chain));
    system.disk.inject(Fault::Slow(Duration::from_millis(50)), &[FROM_DISK]);
    for chain in prompts.iter().cycle().take(12) {
        drop(system.outwait(system.load(chain)));
        let lost = system.lost();
        assert!(lost <= 16, "{lost} slots are held by a disk that may work on 6 copies");
    }
    system.disk.heal();
    system.assert_well(&prompts);
    let overdue = system.rig.metric("kvbm_overdue_copies_total", &[]);
    assert!(overdue > 0);
    assert_eq!(system.rig.metric("kvbm_returned_copies_total", &[]), overdue);
}

/// A disk may be busy for longer than the limit: what counts is that it gets on.
#[test]
fn a_long_queue_makes_nothing_overdue() {
    // Of real time: the medium sets the pace.
    let limit = Duration::from_secs(1);
    let tuning = Tuning { timeout: limit, object_timeout: limit, queue_blocks: 2_000, ..TIGHT };
    let system = System::with(SIZES, tuning);
    let prompt = chain(1, 48);
    system.sink(&prompt);
    // One copy after another: the last of a batch waits for the others.
    system.disk.inject(Fault::Slow(Duration::from_millis(300)), &[FROM_DISK]);
    let began = Instant::now();
    let transferred = system.wait(system.load(&prompt));
    assert_eq!((transferred.blocks, system.rig.metric("kvbm_overdue_copies_total", &[])), (48, 0));
    assert!(began.elapsed() > limit * 2);
}

#[test]
fn any_load_from_a_hanging_disk_fails_after_one_limit() {
    let system = System::new(Sizes { tiers: [256, 256, 512, 512], staging: 4 });
    let prompt = chain(1, 192);
    system.sink(&prompt);
    system.disk.inject(Fault::NeverCompletes, &[FROM_DISK]);
    let (transferred, took) = system.outwait(system.load(&prompt));
    assert_eq!((transferred.blocks, transferred.failed), (0, 192));
    let batches = TIGHT.max_concurrent * TIGHT.max_batch;
    assert!(
        system.lost() <= batches,
        "{} slots are lost to the {batches} copies that were sent",
        system.lost()
    );
    // With 192 blocks in batches of 3, two at a time, a limit for each batch would be 32 limits.
    assert!(took < LIMIT * 16, "it took {took:?}");
    let (again, took) = system.outwait(system.load(&prompt));
    assert!(again.failed <= 1 && took < LIMIT * 16, "a probe at most: {again:?} after {took:?}");
    system.disk.heal();
    drop(system.wait(system.load(&prompt)));
    let transferred = system.wait(system.load(&prompt));
    assert_eq!(transferred.blocks, 192, "{transferred:?}");
}

/// Requests keep asking for blocks of a disk that hangs: one block tries it after each pause, and
/// pauses double.
#[test]
fn a_disk_that_hangs_for_long_gets_few_probes() {
    let tuning = Tuning { timeout: LIMIT, object_timeout: LIMIT, breaker_pause: LIMIT, ..TIGHT };
    let system = System::with(SIZES, tuning);
    let (one, two) = (chain(1, 12), chain(2, 12));
    system.sink(&one);
    system.sink(&two);
    system.disk.inject(Fault::NeverCompletes, &DISK);
    let mut hung = Duration::ZERO;
    while hung < LIMIT * 50 {
        for chain in [&one, &two] {
            hung += system.outwait(system.load(chain)).1 + LIMIT / 4;
            system.rig.clock.pass(LIMIT / 4);
        }
    }
    // Pauses of 1, 2, 4 … 32 limits, and a limit for each probe: five or six of them in fifty
    // limits.
    let first = TIGHT.max_concurrent * TIGHT.max_batch;
    let overdue = system.rig.core.overdue(FROM_DISK) as usize;
    assert!(overdue <= first + 7, "{overdue} copies were sent into a disk that hangs");
    system.disk.heal();
    for round in 0.. {
        if system.wait(system.load(&two)).blocks == 12 {
            break;
        }
        assert!(round < 100, "the disk is well, and is not read");
        system.rig.clock.pass(LIMIT);
    }
}

#[test]
fn what_never_completes_stays_lost_and_nothing_else_does() {
    let system = System::new(SIZES);
    let (one, two) = (chain(1, 3), chain(2, 12));
    system.sink(&one);
    system.sink(&two);
    system.disk.inject(Fault::NeverCompletes, &[FROM_DISK]);
    assert_eq!(system.outwait(system.load(&one)).0.blocks, 0);
    system.disk.heal();
    drop(system.wait(system.load(&two)));
    assert_eq!(system.wait(system.load(&two)).blocks, 12);
    assert_eq!(system.lost(), 3);
    assert_eq!(system.rig.core.overdue(FROM_DISK), 3);
    assert!(system.wait(system.load(&one)).blocks == 3, "its blocks are on disk still");
    assert_eq!(system.rig.core.table().audit(), []);
}

#[test]
fn a_backend_that_panics_costs_its_own_copies_only() {
    let system = System::new(SIZES);
    let (one, two) = (chain(1, 3), chain(2, 6));
    system.sink(&one);
    system.sink(&two);
    system.disk.inject(Fault::Panics, &[FROM_DISK]);
    assert_eq!(system.outwait(system.load(&one)).0.blocks, 0);
    system.disk.heal();
    drop(system.wait(system.load(&two)));
    assert_eq!(system.wait(system.load(&two)).blocks, 6);
    // Of three blocks; the last may not have been sent any more when the others were overdue.
    let lost = system.lost();
    assert!((1..=3).contains(&lost), "it is unknown whether the batch was taken: {lost} slots");
}

#[test]
fn closing_answers_everybody_and_takes_nothing_on() {
    let system = System::new(SIZES);
    let (one, two) = (chain(1, 12), chain(2, 6));
    system.sink(&one);
    system.sink(&two);
    let waits_for_engine = {
        let filled = system.rig.fill(Chain::from(&two[..3]));
        let ticket = system.load(&two);
        std::mem::forget(filled);
        ticket
    };
    system.disk.inject(Fault::NeverCompletes, &[FROM_DISK]);
    let hangs = system.load(&one);
    system.rig.core.close();
    assert_eq!(hangs.wait().unwrap().blocks, 0);
    drop(waits_for_engine.wait().unwrap());
    assert_eq!(system.load(&one).wait().unwrap_err().kind(), ErrorKind::Closed);
    // There is no lease any more, so nothing but the copies that hang keeps the core alive.
    let core = Arc::downgrade(&system.rig.core);
    drop(system);
    let began = Instant::now();
    while core.upgrade().is_some() {
        assert!(began.elapsed() < SOON, "a closed core is kept alive by copies without a caller");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn closing_waits_for_what_the_media_have() {
    // So long that none of them ends before we look.
    let slow = Duration::from_secs(3);
    let system = System::new(SIZES);
    let one = chain(1, 3);
    system.sink(&one);
    system.disk.inject(Fault::Slow(slow), &[FROM_DISK]);
    let began = Instant::now();
    let load = system.load(&one);
    system.rig.core.close();
    assert_eq!(load.wait().unwrap().blocks, 0);
    assert_eq!(
        system.rig.core.wait_for_media(Duration::ZERO),
        3,
        "a caller that does not wait is told what is left"
    );
    assert_eq!(system.rig.core.wait_for_media(SOON), 0);
    assert!(began.elapsed() >= slow, "the copies cannot have ended before");
    // The tiers' files may be removed now: nothing else may use them.
    let core = Arc::downgrade(&system.rig.core);
    drop(system);
    assert!(core.upgrade().is_none(), "a medium's thread still holds the core");
}
