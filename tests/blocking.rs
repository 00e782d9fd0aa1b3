//! Engines that copy for themselves: `get` and `put` on plain threads, every byte checked.

use std::fs::OpenOptions;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvbm::blocking::Blocks;
use kvbm::{BlockHash, Error, ErrorKind, Manager, Options, RequestId, RequestInfo, Tier};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine;
use kvbm_tests::rig::{chain, chaos, files_of, hash, metric, number_of, wait_until};
use kvbm_tiers::testing::{fill_pattern, has_pattern};
use prometheus::Registry;
use proptest::prelude::*;

const BLOCK: u64 = 4096;
const LIMIT: Duration = Duration::from_mins(1);

/// How an engine's own copy fails.
#[derive(Debug, thiserror::Error)]
enum EngineError {
    #[error("the engine's copy of block {0} failed")]
    Copy(usize),
    #[error(transparent)]
    Kvbm(#[from] Error),
}

/// What `get` showed or `put` asked for: positions, and the result.
#[derive(Debug)]
struct Copied {
    positions: Vec<usize>,
    result: Result<usize, EngineError>,
}

impl Copied {
    #[track_caller]
    fn assert(&self, positions: Range<usize>, blocks: usize) {
        assert_eq!(self.positions, positions.collect::<Vec<_>>());
        assert_eq!(*self.result.as_ref().unwrap(), blocks);
    }

    #[track_caller]
    fn assert_closed(&self) {
        self.assert_fails(ErrorKind::Closed);
    }

    #[track_caller]
    fn assert_fails(&self, kind: ErrorKind) {
        let Err(EngineError::Kvbm(error)) = &self.result else { panic!("{:?}", self.result) };
        assert_eq!(error.kind(), kind);
    }
}

/// A manager without a device tier, and what an engine does with it.
struct Engine {
    blocks: Blocks,
    registry: Registry,
    dir: tempfile::TempDir,
}

impl Engine {
    fn open(change: impl FnOnce(&mut Settings, &Options)) -> Self {
        Self::with(Options::default(), change)
    }

    fn with(options: Options, change: impl FnOnce(&mut Settings, &Options)) -> Self {
        let (dir, registry) = (tempfile::tempdir().unwrap(), options.registry.clone());
        let mut settings = host_only(16);
        settings.disk.dirs = vec![dir.path().join("slots")];
        change(&mut settings, &options);
        Self { blocks: Blocks::open(settings, options).unwrap(), registry, dir }
    }

    fn of_host(blocks: u64) -> Self {
        Self::open(|settings, _| settings.host.capacity = Some(Capacity::Blocks(blocks)))
    }

    fn with_disk() -> Self {
        Self::open(|settings, _| settings.disk.capacity = Some(Capacity::Blocks(64)))
    }

    fn manager(&self) -> &Manager {
        self.blocks.manager()
    }

    fn get(&self, chain: &[BlockHash]) -> Copied {
        self.get_until(chain, usize::MAX)
    }

    /// Fails at position `failing`. Every block that comes must be right.
    fn get_until(&self, chain: &[BlockHash], failing: usize) -> Copied {
        let mut positions = Vec::new();
        let result = self.blocks.get(chain, |position, block| {
            if position == failing {
                return Err(EngineError::Copy(position));
            }
            assert_eq!(block.len(), self.blocks.block_bytes());
            assert!(
                has_pattern(number_of(chain[position]), block),
                "block {position} is not its own"
            );
            positions.push(position);
            Ok(())
        });
        Copied { positions, result }
    }

    fn put(&self, chain: &[BlockHash]) -> Copied {
        self.put_until(chain, usize::MAX)
    }

    /// Fails at position `failing`, the block half written.
    fn put_until(&self, chain: &[BlockHash], failing: usize) -> Copied {
        let mut positions = Vec::new();
        let result = self.blocks.put(chain, |position, slot| {
            assert_eq!(slot.len(), self.blocks.block_bytes());
            if position == failing {
                slot[..BLOCK as usize / 2].fill(1);
                return Err(EngineError::Copy(position));
            }
            fill_pattern(number_of(chain[position]), slot);
            positions.push(position);
            Ok(())
        });
        Copied { positions, result }
    }

    /// The chain lies on disk, and nowhere else.
    fn sink(&self, chain: &[BlockHash]) {
        self.put(chain).assert(0..chain.len(), chain.len());
        assert!(self.manager().drain(LIMIT).is_complete());
        self.manager().admin().evict(Tier::Host, usize::MAX);
        assert_eq!(self.held(chain, Tier::Host), 0);
        assert_eq!(self.held(chain, Tier::Disk), chain.len());
    }

    fn held(&self, chain: &[BlockHash], tier: Tier) -> usize {
        self.manager().matches(chain).blocks(tier)
    }

    /// Flips a bit of a block where it lies on disk.
    fn spoil_on_disk(&self, hash: BlockHash) {
        let number = number_of(hash);
        let file = OpenOptions::new().read(true).write(true).open(self.slot_file()).unwrap();
        let mut block = vec![0; BLOCK as usize];
        let slots = file.metadata().unwrap().len() / BLOCK;
        let offset = (0..slots).map(|slot| slot * BLOCK).find(|&offset| {
            file.read_exact_at(&mut block, offset).unwrap();
            has_pattern(number, &block)
        });
        let offset = offset.expect("the block is in the file");
        file.write_all_at(&[block[9] ^ 4], offset + 9).unwrap();
        file.sync_all().unwrap();
    }

    fn slot_file(&self) -> PathBuf {
        files_of(self.dir.path(), "blocks").pop().expect("a slot file")
    }

    /// Every slot is free or resident, the table is sound, and everything works.
    #[track_caller]
    fn assert_sound(&self) {
        assert!(self.manager().drain(LIMIT).is_complete());
        self.assert_no_slot_is_missing();
        let anew = chain(999, 6);
        assert_eq!(self.put(&anew).result.unwrap(), anew.len());
        self.get(&anew).assert(0..anew.len(), anew.len());
    }

    #[track_caller]
    fn assert_no_slot_is_missing(&self) {
        assert_eq!(self.manager().admin().audit(), []);
        for tier in Tier::ALL {
            // What a reset forgot comes back in the background.
            let deadline = Instant::now() + LIMIT;
            while self.manager().admin().counts(tier).forgotten > 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            let counts = self.manager().admin().counts(tier);
            assert_eq!(counts.free + counts.resident, counts.total, "{tier}: {counts:?}");
        }
        let staging = self.manager().admin().staging();
        assert_eq!(staging.idle, staging.total, "{staging:?}");
    }
}

/// A host tier of `host` blocks, which gives up what was used longest ago.
fn host_only(host: u64) -> Settings {
    let mut settings = engine::without_device(BLOCK, host);
    settings.disk.keep = true;
    // A disk that others use may stand still for seconds.
    settings.transfer.timeout_ms = LIMIT.as_millis() as u64;
    settings
}

/// What an engine does next.
#[derive(Clone, Debug)]
enum Step {
    Get {
        prompt: u32,
        blocks: usize,
    },
    Put {
        prompt: u32,
        blocks: usize,
    },
    /// The engine's copy fails at one block.
    PutFailing {
        prompt: u32,
        blocks: usize,
        at: usize,
    },
    Evict(Tier, usize),
    Drain,
}

/// Prompts in two families, which begin with three blocks of their own.
fn prompt(prompt: u32, blocks: usize) -> Vec<BlockHash> {
    let shared = (0..3).map(|i| 100 * (prompt / 4 + 1) + i);
    let own = (0..).map(|i| 1000 * (prompt + 1) + i);
    shared.chain(own).take(blocks).map(hash).collect()
}

fn step() -> impl Strategy<Value = Step> {
    let tier = prop_oneof![Just(Tier::Host), Just(Tier::Disk)];
    prop_oneof![
        4 => (0..8u32, 1..11usize).prop_map(|(prompt, blocks)| Step::Get { prompt, blocks }),
        4 => (0..8u32, 1..11usize).prop_map(|(prompt, blocks)| Step::Put { prompt, blocks }),
        1 => (0..8u32, 1..11usize, 0..11usize)
            .prop_map(|(prompt, blocks, at)| Step::PutFailing { prompt, blocks, at }),
        1 => (tier, 1..20usize).prop_map(|(tier, blocks)| Step::Evict(tier, blocks)),
        1 => Just(Step::Drain),
    ]
}

/// What must hold of each step, whatever came before it.
fn take(engine: &Engine, step: &Step) {
    match *step {
        Step::Get { prompt: number, blocks } => {
            let chain = prompt(number, blocks);
            let (here, all) =
                (engine.held(&chain, Tier::Host), engine.manager().matches(&chain).longest());
            let got = engine.get(&chain);
            let found = *got.result.as_ref().unwrap();
            got.assert(0..found, found);
            assert!(
                (here..=all).contains(&found),
                "{found} blocks of {here} here and {all} in all"
            );
        }
        Step::Put { prompt: number, blocks } => {
            let chain = prompt(number, blocks);
            let here = engine.held(&chain, Tier::Host);
            let put = engine.put(&chain);
            let kept = *put.result.as_ref().unwrap();
            put.assert(here..kept, kept);
            assert_eq!(engine.held(&chain, Tier::Host), kept);
        }
        Step::PutFailing { prompt: number, blocks, at } => {
            let chain = prompt(number, blocks);
            let here = engine.held(&chain, Tier::Host);
            let put = engine.put_until(&chain, at);
            let kept = put.result.unwrap_or(at);
            assert_eq!(put.positions, (here..kept).collect::<Vec<_>>());
            assert_eq!(engine.held(&chain, Tier::Host), kept);
        }
        Step::Evict(tier, blocks) => drop(engine.manager().admin().evict(tier, blocks)),
        Step::Drain => assert!(engine.manager().drain(LIMIT).is_complete()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn what_was_put_is_got_and_only_the_absent_asked(
        has_disk: bool,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let engine = if has_disk { Engine::with_disk() } else { Engine::of_host(16) };
        for step in &steps {
            take(&engine, step);
        }
        engine.assert_sound();
    }
}

#[test]
fn blocks_come_in_order_up_to_the_first_miss() {
    let engine = Engine::of_host(16);
    let (all, beginning) = (chain(1, 6), &chain(1, 6)[..4]);
    engine.get(&all).assert(0..0, 0);
    engine.put(beginning).assert(0..4, 4);
    engine.get(&all).assert(0..4, 4);
    engine.put(&all).assert(4..6, 6);
    engine.put(&all).assert(0..0, 6);
    engine.get(beginning).assert(0..4, 4);
    engine.get(&[]).assert(0..0, 0);
    engine.put(&[]).assert(0..0, 0);
    // Not a chain: a block cannot come after itself.
    engine.put(&[all[0], all[1], all[0], all[3]]).result.unwrap();
    engine.assert_sound();
}

#[test]
fn blocks_of_any_size_come_whole() {
    for bytes in [1, 512, 4097, 300_000] {
        let mut settings = host_only(8);
        settings.block_bytes = Some(bytes);
        let engine = Engine {
            blocks: Blocks::open(settings, Options::default()).unwrap(),
            registry: Registry::new(),
            dir: tempfile::tempdir().unwrap(),
        };
        assert_eq!(engine.blocks.block_bytes() as u64, bytes);
        engine.put(&chain(1, 6)).assert(0..6, 6);
        engine.get(&chain(1, 6)).assert(0..6, 6);
    }
}

#[test]
fn disk_blocks_come_back_through_the_host_tier_and_stay() {
    let engine = Engine::with_disk();
    engine.sink(&chain(1, 6));
    engine.put(&chain(1, 6)[..2]).assert(0..2, 2);
    engine.get(&chain(1, 6)).assert(0..6, 6);
    assert_eq!(engine.held(&chain(1, 6), Tier::Host), 6);
    engine.put(&chain(1, 6)).assert(0..0, 6);
    engine.assert_sound();
}

#[test]
fn what_lies_in_objects_comes_back_too() {
    let engine = Engine::open(|settings, _| settings.object.url = Some("memory:///".to_owned()));
    engine.put(&chain(1, 6)).assert(0..6, 6);
    assert!(engine.manager().drain(LIMIT).is_complete());
    engine.manager().admin().evict(Tier::Host, usize::MAX);
    assert_eq!(
        (engine.held(&chain(1, 6), Tier::Host), engine.held(&chain(1, 6), Tier::Object)),
        (0, 6)
    );
    engine.get(&chain(1, 6)).assert(0..6, 6);
    engine.assert_sound();
}

/// Three parts of what is loaded at a time, the last one short.
#[test]
fn a_long_prompt_is_handed_over_during_its_load() {
    const BLOCKS: u32 = 70;
    let mut settings = host_only(80);
    settings.block_bytes = Some(1 << 20);
    settings.disk.capacity = Some(Capacity::Blocks(80));
    let dir = tempfile::tempdir().unwrap();
    settings.disk.dirs = vec![dir.path().join("slots")];
    let blocks = Blocks::open(settings, Options::default()).unwrap();
    let engine = Engine { blocks, registry: Registry::new(), dir };
    let chain = chain(1, BLOCKS);
    engine.sink(&chain);
    let mut in_host = Vec::new();
    let got = engine.blocks.get(&chain, |position, block| {
        assert!(has_pattern(number_of(chain[position]), block));
        in_host.push(engine.held(&chain, Tier::Host));
        Ok::<_, Error>(())
    });
    assert_eq!(got.unwrap(), BLOCKS as usize);
    assert!(in_host[0] < BLOCKS as usize, "the first block waited for the last one");
    engine.manager().admin().evict(Tier::Host, usize::MAX);
    // It ends early: what is on its way comes, and does no harm.
    let until = engine.get_until(&chain, 3);
    assert!(matches!(until.result, Err(EngineError::Copy(3))), "{until:?}");
    assert!(engine.manager().drain(LIMIT).is_complete());
    engine.get(&chain).assert(0..BLOCKS as usize, BLOCKS as usize);
    engine.assert_no_slot_is_missing();
}

#[test]
fn a_prompt_beyond_the_host_tier_is_kept_in_part() {
    for engine in [Engine::of_host(16), Engine::with_disk()] {
        let chain = chain(1, 40);
        engine.put(&chain).assert(0..16, 16);
        engine.get(&chain).assert(0..16, 16);
        assert!(engine.manager().drain(LIMIT).is_complete());
        engine.get(&chain).assert(0..16, 16);
        engine.assert_sound();
    }
}

#[test]
fn a_rotten_block_ends_the_get_and_is_written_anew() {
    let engine = Engine::with_disk();
    let chain = chain(1, 6);
    engine.sink(&chain);
    engine.spoil_on_disk(chain[3]);
    engine.get(&chain).assert(0..3, 3);
    assert_eq!(engine.manager().admin().stats(Tier::Disk).quarantined, 3);
    engine.put(&chain).assert(3..6, 6);
    engine.get(&chain).assert(0..6, 6);
    assert!(engine.manager().drain(LIMIT).is_complete());
    engine.manager().admin().evict(Tier::Host, usize::MAX);
    engine.get(&chain).assert(0..6, 6);
    engine.assert_sound();
}

#[test]
fn an_engine_whose_copy_fails_keeps_what_came_before() {
    let engine = Engine::with_disk();
    let put = engine.put_until(&chain(1, 6), 4);
    assert!(matches!(put.result, Err(EngineError::Copy(4))), "{put:?}");
    engine.get(&chain(1, 6)).assert(0..4, 4);
    let got = engine.get_until(&chain(1, 6), 2);
    assert!(matches!(got.result, Err(EngineError::Copy(2))), "{got:?}");
    assert_eq!(got.positions, [0, 1]);
    engine.put(&chain(1, 6)).assert(4..6, 6);
    engine.get(&chain(1, 6)).assert(0..6, 6);
    engine.assert_sound();
}

#[test]
fn a_panic_in_the_engines_copy_leaks_nothing() {
    let engine = Engine::with_disk();
    let put = AssertUnwindSafe(|| {
        engine.blocks.put(&chain(1, 6), |position, slot| {
            assert!(position < 2, "injected panic");
            fill_pattern(number_of(chain(1, 6)[position]), slot);
            Ok::<_, Error>(())
        })
    });
    assert!(catch_unwind(put).is_err());
    engine.assert_no_slot_is_missing();
    engine.get(&chain(1, 6)).assert(0..2, 2);
    let get = AssertUnwindSafe(|| {
        engine.blocks.get(&chain(1, 6), |_, _| -> Result<(), Error> { panic!("injected") })
    });
    assert!(catch_unwind(get).is_err());
    engine.put(&chain(1, 6)).assert(2..6, 6);
    engine.get(&chain(1, 6)).assert(0..6, 6);
    assert!(engine.manager().drain(LIMIT).is_complete());
    engine.manager().admin().evict(Tier::Host, usize::MAX);
    assert_eq!(
        engine.manager().admin().counts(Tier::Host).resident,
        0,
        "somebody still holds what was shown"
    );
    engine.assert_sound();
}

#[test]
fn each_block_is_written_by_one_of_many() {
    const ENGINES: usize = 8;
    let engine = Engine::of_host(64);
    for round in 0..50 {
        let chain = chain(round, 12);
        let (written, start) = (AtomicUsize::new(0), Barrier::new(ENGINES));
        std::thread::scope(|scope| {
            for beginning in (0..ENGINES).map(|n| &chain[..5 + n]) {
                let (engine, written, start) = (&engine, &written, &start);
                scope.spawn(move || {
                    start.wait();
                    let put = engine.put(beginning);
                    assert_eq!(put.result.unwrap(), beginning.len());
                    written.fetch_add(put.positions.len(), Ordering::Relaxed);
                });
            }
        });
        engine.get(&chain).assert(0..12, 12);
        assert_eq!(written.into_inner(), 12, "blocks were written twice");
    }
    engine.assert_sound();
}

/// One engine is still writing the beginning of a prompt that another one has all of.
fn meanwhile(engine: &Engine, end: Result<(), EngineError>) {
    let all = chain(1, 6);
    let (begun, has_begun) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel();
    std::thread::scope(|scope| {
        let beginning = &all[..4];
        let first = scope.spawn(move || {
            let mut end = Some(end);
            engine.blocks.put(beginning, |position, slot| {
                if position == 2 {
                    begun.send(()).unwrap();
                    may_go_on.recv().unwrap();
                    end.take().expect("it is asked for once")?;
                }
                fill_pattern(number_of(beginning[position]), slot);
                Ok::<_, EngineError>(())
            })
        });
        has_begun.recv().unwrap();
        engine.put(&all).assert(4..6, 6);
        engine.get(&all).assert(0..0, 0);
        go_on.send(()).unwrap();
        drop(first.join().unwrap());
    });
}

#[test]
fn nobody_waits_for_what_another_one_writes() {
    let engine = Engine::with_disk();
    meanwhile(&engine, Ok(()));
    engine.get(&chain(1, 6)).assert(0..6, 6);
    engine.assert_sound();
}

#[test]
fn what_hangs_on_an_unwritten_block_goes_with_it() {
    let engine = Engine::with_disk();
    meanwhile(&engine, Err(EngineError::Copy(2)));
    engine.get(&chain(1, 6)).assert(0..2, 2);
    engine.assert_no_slot_is_missing();
    engine.put(&chain(1, 6)).assert(2..6, 6);
    engine.get(&chain(1, 6)).assert(0..6, 6);
    engine.assert_sound();
}

#[test]
fn engines_share_a_small_host_tier_over_a_disk() {
    let engine = Engine::open(|settings, _| {
        settings.host.capacity = Some(Capacity::Blocks(48));
        settings.disk.capacity = Some(Capacity::Blocks(256));
        settings.flush.interval_ms = 5;
    });
    let (began, lasts) = (Instant::now(), Duration::from_secs(3));
    let was_read = || engine.manager().admin().bytes().iter().any(|&(from, ..)| from == Tier::Disk);
    let found = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (engine, found, was_read) = (&engine, &found, &was_read);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                while began.elapsed() < lasts || !was_read() && began.elapsed() < LIMIT {
                    let chain = prompt(random.u32(..40), random.usize(1..11));
                    let got = engine.get(&chain);
                    found.fetch_add(got.result.unwrap(), Ordering::Relaxed);
                    let failing = if random.u8(..8) == 0 { random.usize(..10) } else { usize::MAX };
                    let put = engine.put_until(&chain, failing);
                    assert!(matches!(put.result, Ok(_) | Err(EngineError::Copy(_))), "{put:?}");
                }
            });
        }
    });
    assert!(found.into_inner() > 0);
    assert_eq!(engine.manager().admin().failures(), 0);
    assert!(was_read(), "the disk was never read");
    engine.assert_sound();
}

#[test]
fn a_manager_closed_midway_says_so_and_keeps_no_slot() {
    let engine = Engine::with_disk();
    engine.sink(&chain(1, 6));
    let put = engine.blocks.put(&chain(2, 6), |position, slot| {
        if position == 3 {
            assert!(engine.manager().close(LIMIT).is_complete());
        }
        fill_pattern(number_of(chain(2, 6)[position]), slot);
        Ok::<_, EngineError>(())
    });
    Copied { positions: Vec::new(), result: put }.assert_closed();
    assert_eq!(engine.held(&chain(2, 6), Tier::Host), 0);
    engine.get(&chain(1, 6)).assert_closed();
    engine.put(&chain(1, 6)).assert_closed();
    engine.assert_no_slot_is_missing();
}

#[test]
fn a_manager_closed_midway_hands_over_no_wrong_block() {
    let engine = Engine::with_disk();
    engine.sink(&chain(1, 6));
    engine.put(&chain(1, 6)[..2]).assert(0..2, 2);
    let mut shown = 0;
    let got = engine.blocks.get(&chain(1, 6), |position, block| {
        let _ = engine.manager().close(Duration::ZERO);
        assert!(has_pattern(number_of(chain(1, 6)[position]), block));
        shown += 1;
        Ok::<_, Error>(())
    });
    // What had arrived before the end may still come.
    assert!(
        got.as_ref().is_ok_and(|&found| found == shown)
            || got.unwrap_err().kind() == ErrorKind::Closed
    );
    assert!(engine.manager().close(LIMIT).is_complete());
    engine.assert_no_slot_is_missing();
}

/// Weights change while the engine copies: what it gets or puts is of the old ones.
#[test]
fn a_reset_midway_is_told_and_nothing_old_comes_back() {
    let engine = Engine::with_disk();
    engine.sink(&chain(1, 6));
    engine.put(&chain(1, 6)[..2]).assert(0..2, 2);
    let got = engine.blocks.get(&chain(1, 6), |position, _| {
        if position == 1 {
            engine.manager().reset(1)?;
        }
        Ok::<_, EngineError>(())
    });
    Copied { positions: Vec::new(), result: got }.assert_fails(ErrorKind::Stale);
    engine.get(&chain(1, 6)).assert(0..0, 0);
    let put = engine.blocks.put(&chain(1, 6), |position, slot| {
        if position == 3 {
            engine.manager().reset(2)?;
        }
        slot.fill(1);
        Ok::<_, EngineError>(())
    });
    Copied { positions: Vec::new(), result: put }.assert_fails(ErrorKind::Stale);
    engine.get(&chain(1, 6)).assert(0..0, 0);
    engine.put(&chain(1, 6)).assert(0..6, 6);
    engine.get(&chain(1, 6)).assert(0..6, 6);
    engine.assert_sound();
}

/// A disk that hangs is given up after the time limit; when it is well again, everything is.
#[test]
fn a_disk_that_hangs_costs_time_and_what_lies_there() {
    let chaos = chaos(&["disk:hang@0s+1h"]);
    let options = Options { media_layer: Some(chaos.layer()), ..Options::default() };
    let engine = Engine::with(options, |settings, _| {
        settings.disk.capacity = Some(Capacity::Blocks(64));
        settings.transfer.timeout_ms = 1_000;
    });
    engine.sink(&chain(1, 6));
    engine.put(&chain(1, 6)[..2]).assert(0..2, 2);
    chaos.start();
    engine.get(&chain(1, 6)).assert(0..2, 2);
    engine.put(&chain(1, 6)[..3]).assert(2..3, 3);
    chaos.heal();
    wait_until(LIMIT, "the disk is not used again", || {
        engine.get(&chain(1, 6)).result.unwrap() == 6
    });
    engine.assert_sound();
}

#[test]
fn a_request_that_is_named_is_counted_once() {
    let engine = Engine::of_host(16);
    let info = RequestInfo { request: Some(RequestId(7)), ..RequestInfo::default() };
    let requested = || metric(&engine.registry, "kvbm_requested_tokens_total", &[]);
    let got = engine.blocks.get_for(info, &chain(1, 6), |_, _| Ok::<_, Error>(()));
    assert_eq!(got.unwrap(), 0);
    let put = engine.blocks.put_for(info, &chain(1, 6), |_, slot| {
        slot.fill(1);
        Ok::<_, Error>(())
    });
    assert_eq!(put.unwrap(), 6);
    engine.manager().finished(RequestId(7), 100);
    assert_eq!(requested(), 6 * 16);
}

#[test]
fn without_a_host_tier_the_error_names_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = host_only(16);
    settings.host.capacity = None;
    engine::add_disk(&mut settings, 64, dir.path());
    let error = Blocks::open(settings, Options::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("host.capacity (DYN_KVBM_CPU_CACHE_GB)"), "{error}");
}

#[test]
fn inside_of_an_async_runtime_a_manager_is_opened_first() {
    let error =
        engine::block_on(async { Blocks::open(host_only(16), Options::default()) }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let manager = engine::open_with(host_only(16), Options::default()).unwrap();
    let blocks = Blocks::of(Arc::new(manager)).unwrap();
    assert_eq!(blocks.get(&chain(1, 6), |_, _| Ok::<_, Error>(())).unwrap(), 0);
}
