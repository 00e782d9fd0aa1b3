//! Several engines at once on one manager over real tiers, every byte checked.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvbm::{BlockHash, Manager, Tier};
use kvbm_tests::engine::{self, Served, serve};
use kvbm_tests::rig::hash;
use prometheus::Registry;

const THREADS: u32 = 4;
const LASTS: Duration = Duration::from_secs(4);
/// Blocks of a conversation at most: all threads' requests together fit onto the device, almost.
const LONGEST: u32 = 18;

#[test]
fn engines_share_a_manager() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = engine::settings(16 << 10, 64, 256);
    engine::add_disk(&mut settings, 1024, dir.path().join("slots"));
    settings.object.url = Some(format!("file://{}/objects", dir.path().display()));
    settings.flush.interval_ms = 50;
    let manager = engine::open(settings, &Registry::new()).unwrap();
    let requests = AtomicUsize::new(0);
    let total = std::thread::scope(|scope| {
        let (manager, requests) = (&manager, &requests);
        let engine = |seed| scope.spawn(move || chat(manager, seed, requests));
        let engines: Vec<_> = (0..THREADS).map(engine).collect();
        engines
            .into_iter()
            .fold(Served::default(), |total, engine| add(&total, &engine.join().unwrap()))
    });
    assert!(manager.drain(Duration::from_mins(1)).is_complete(), "something is still in flight");
    println!("{} requests, {total:?}, {:?}", requests.into_inner(), manager.admin().bytes());
    assert_eq!((total.wrong, total.failed, manager.admin().failures()), (0, 0, 0));
    assert!(total.hit > 0 && total.computed > 0);
    assert_eq!(manager.admin().audit(), []);
    for tier in Tier::ALL {
        let counts = manager.admin().counts(tier);
        assert_eq!((counts.filling, counts.lost), (0, 0), "{tier}: {counts:?}");
    }
    let lower = |from| {
        manager.admin().bytes().iter().any(|&(source, to, _)| (source, to) == (from, Tier::Host))
    };
    assert!(lower(Tier::Disk), "the disk was never read");
}

/// Conversations that grow turn by turn and share their beginnings with those of other threads.
fn chat(manager: &Manager, seed: u32, requests: &AtomicUsize) -> Served {
    let mut random = Random(u64::from(seed) + 1);
    let mut total = Served::default();
    let start = Instant::now();
    while start.elapsed() < LASTS {
        let conversation = random.below(160);
        let turns = 3 + random.below(LONGEST - 3);
        total = add(&total, &serve(manager, &conversation_until(conversation, turns)));
        requests.fetch_add(1, Ordering::Relaxed);
    }
    total
}

/// The leading `blocks` blocks of a conversation: eight share a system prompt of four blocks.
fn conversation_until(conversation: u32, blocks: u32) -> Vec<BlockHash> {
    let system = (0..4).map(|i| 1_000_000 + 10 * (conversation / 8) + i);
    let own = (0..).map(|i| 100 * (conversation + 1) + i);
    system.chain(own).take(blocks as usize).map(hash).collect()
}

fn add(a: &Served, b: &Served) -> Served {
    Served {
        hit: a.hit + b.hit,
        failed: a.failed + b.failed,
        wrong: a.wrong + b.wrong,
        computed: a.computed + b.computed,
        saved: a.saved + b.saved,
    }
}

/// Marsaglia's xorshift: arbitrary, and the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32 % limit
    }
}
