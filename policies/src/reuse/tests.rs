use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;

use super::hazard::LifeRecord;
use super::*;
use crate::eviction::model::{Tree, ops};
use crate::eviction::{Eviction, EvictionKind, Hazard};
use crate::seam::{Ended, Hints, RequestId, Standing, TierPolicies};
use crate::simulation::single::simulate;
use crate::simulation::workload::{BLOCK_TOKENS, Request, Workload};

fn hazard(capacity: u32) -> TierPolicies {
    TierPolicies::new(EvictionKind::Hazard.build(capacity), None)
}

/// A tier without bounds; a block's id and content is its number.
#[derive(Default)]
struct World {
    parents: Vec<Option<BlockId>>,
    children: Vec<u32>,
    gone: Vec<bool>,
}

impl Forest for World {
    fn standing(&self, block: BlockId) -> Standing {
        match self.children[block.0 as usize] {
            0 => Standing::Evictable,
            _ => Standing::Interior,
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.parents[block.0 as usize]
    }

    fn key(&self, block: BlockId) -> u64 {
        block.0.into()
    }
}

impl World {
    /// The tree's nodes are numbers: `step` leads from one to the next. Returns the path and how
    /// much of it is resident.
    fn path(&mut self, steps: &[u32]) -> (Vec<BlockId>, usize) {
        let ids = steps.iter().scan(0, |node, step| {
            *node = *node * 3 + step;
            Some(BlockId(*node))
        });
        let path: Vec<_> = ids.collect();
        let resident = path.iter().take_while(|block| self.holds(**block)).count();
        (path, resident)
    }

    fn holds(&self, block: BlockId) -> bool {
        self.gone.get(block.0 as usize) == Some(&false)
    }

    fn insert(&mut self, block: BlockId, parent: Option<BlockId>) {
        let at = block.0 as usize;
        if self.gone.len() <= at {
            self.parents.resize(at + 1, None);
            self.children.resize(at + 1, 0);
            self.gone.resize(at + 1, true);
        }
        self.gone[at] = false;
        self.parents[at] = parent;
        if let Some(parent) = parent {
            self.children[parent.0 as usize] += 1;
        }
    }

    fn evict(&mut self, policy: &mut TierPolicies) -> Option<BlockId> {
        let victim = policy.victim(self)?;
        self.gone[victim.0 as usize] = true;
        let exposed = self.parent(victim).filter(|parent| {
            self.children[parent.0 as usize] -= 1;
            self.children[parent.0 as usize] == 0
        });
        policy.removed(victim, self.key(victim), exposed);
        Some(victim)
    }

    /// A request for the path of `steps`, whose use is reported in `parts`.
    fn play(&mut self, policy: &mut TierPolicies, now_ms: u64, steps: &[u32], parts: Parts) {
        let (path, resident) = self.path(steps);
        let access = |depth: usize, inserted: usize| Access {
            now_ms,
            request: (parts != Parts::Nameless).then_some(RequestId(now_ms)),
            deepest: path[depth - 1],
            depth: depth as u32,
            inserted: inserted as u32,
            path: path.len() as u32,
            hints: Hints::default(),
        };
        if parts != Parts::One && resident > 0 {
            policy.touch(&access(resident, 0), self);
        }
        for depth in resident..path.len() {
            self.insert(path[depth], depth.checked_sub(1).map(|above| path[above]));
            if parts != Parts::One {
                policy.touch(&access(depth + 1, 1), self);
            }
        }
        if parts == Parts::One {
            policy.touch(&access(path.len(), path.len() - resident), self);
        }
    }
}

/// How the use of a request is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parts {
    /// All at once.
    One,
    /// What is there at first, then each block that comes.
    Named,
    /// The same without the request's name.
    Nameless,
}

fn paths() -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop::collection::vec(prop::collection::vec(1_u32..4, 1..10), 0..40)
}

fn open(policy: &TierPolicies) -> Vec<LifeRecord> {
    (0..policy.reuse.known.paths()).flat_map(|path| policy.reuse.known.open_records(path)).collect()
}

/// What a policy knows after the requests, and the order in which it lets the blocks go.
fn outcome(paths: &[Vec<u32>], parts: Parts) -> (Vec<LifeRecord>, Vec<BlockId>) {
    let (mut world, mut policy) = (World::default(), hazard(64));
    for (path, minute) in paths.iter().zip(1..) {
        world.play(&mut policy, minute * 60_000, path, parts);
    }
    (open(&policy), std::iter::from_fn(|| world.evict(&mut policy)).collect())
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let request = (prop::collection::vec(1_u64..4, 0..8), 0_u64..100_000, 0_u32..3000);
    prop::collection::vec(request, 0..150).prop_map(|requests| {
        let mut timestamp_ms = 0;
        let request = |(hash_ids, gap, output_length): (Vec<u64>, u64, u32)| {
            timestamp_ms += gap;
            let input_length = hash_ids.len() as u32 * BLOCK_TOKENS;
            Request { timestamp_ms, input_length, output_length, hash_ids }
        };
        requests.into_iter().map(request).collect()
    })
}

/// Counts the hits of the first requests that fill a block.
#[derive(Debug)]
struct Cut {
    policy: Hazard,
    requests: usize,
    hits: Arc<AtomicU32>,
}

impl Eviction for Cut {
    fn needs_reuse(&self) -> bool {
        true
    }

    fn touch(&mut self, access: &Access, forest: &dyn Forest, reuse: &ReuseModel) {
        if self.requests > 0 {
            self.requests -= 1;
            self.hits.fetch_add(access.depth - access.inserted, Ordering::Relaxed);
        }
        self.policy.touch(access, forest, reuse);
    }

    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, reuse: &ReuseModel) {
        self.policy.removed(block, exposed, reuse);
    }

    fn victim(&mut self, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId> {
        self.policy.victim(forest, reuse)
    }

    fn released(&mut self, block: BlockId, reuse: &ReuseModel) {
        self.policy.released(block, reuse);
    }

    fn finished(&mut self, reuse: &ReuseModel) {
        self.policy.finished(reuse);
    }
}

fn hits(requests: &[Request], capacity: u32, cut: usize) -> u32 {
    let workload: Workload = requests.iter().collect();
    let requests =
        requests[..cut].iter().filter(|request| !request.full_blocks().is_empty()).count();
    let hits = Arc::default();
    let policy = Cut { policy: Hazard::default(), requests, hits: Arc::clone(&hits) };
    simulate(&workload, Box::new(policy), capacity);
    hits.load(Ordering::Relaxed)
}

proptest! {
    #[test]
    fn a_victim_is_found_wherever_there_is_one(ops in ops()) {
        let (mut tree, mut policy) = (Tree::default(), Hazard::default());
        for op in ops {
            tree.apply(op, &mut policy);
        }
    }

    #[test]
    fn the_parts_of_a_use_are_one_use(paths in paths()) {
        let expected = outcome(&paths, Parts::One);
        prop_assert_eq!(&outcome(&paths, Parts::Named), &expected);
        prop_assert_eq!(&outcome(&paths, Parts::Nameless), &expected);
    }

    #[test]
    fn the_future_changes_no_hit(requests in requests(), capacity in 0_u32..30, cut: prop::sample::Index) {
        let cut = cut.index(requests.len() + 1);
        prop_assert_eq!(hits(&requests, capacity, cut), hits(&requests[..cut], capacity, cut));
    }
}

fn held(policy: &TierPolicies) -> usize {
    policy.reuse.known.entries() + policy.reuse.records.iter().count()
}

/// Minutes of a load that repeats itself must leave no more behind than the first ones.
#[test]
fn memory_does_not_grow_with_time() {
    let mut world = World::default();
    let mut policy = hazard(64);
    let mut footprints = Vec::new();
    for k in 0_u32..120_000 {
        let steps = [1 + k % 3, 1 + k / 3 % 3, 1 + k / 9 % 3, 1 + k / 27 % 3, 1 + k / 81 % 3];
        world.play(&mut policy, 100 * u64::from(k), &steps, Parts::Named);
        while policy.reuse.known.resident() > 64 {
            world.evict(&mut policy).expect("nothing is busy");
        }
        if k % 40_000 == 39_999 {
            footprints.push(held(&policy));
        }
    }
    assert!(footprints[2] <= footprints[1] + footprints[1] / 10, "{footprints:?}");
}

/// The reuse counts along the path of `steps`, had it been used, forgotten or not, and used again.
fn reuse_after(away_ms: u64) -> Vec<LifeRecord> {
    let mut world = World::default();
    let mut policy = hazard(4);
    world.play(&mut policy, 1, &[1, 2], Parts::One);
    while world.evict(&mut policy).is_some() {}
    world.play(&mut policy, 1 + away_ms, &[1, 2], Parts::One);
    ended(&policy)
}

fn ended(policy: &TierPolicies) -> Vec<LifeRecord> {
    policy.reuse.records.iter().copied().chain(policy.reuse.known.returning()).collect()
}

/// A chain that comes back as a whole teaches as much, however its return is reported.
#[test]
fn a_return_in_parts_is_one_return() {
    let weights = |parts| {
        let (mut world, mut policy) = (World::default(), hazard(16));
        for minute in 1..4 {
            world.play(&mut policy, minute * 60_000, &[1, 2, 1, 2], parts);
            while world.evict(&mut policy).is_some() {}
        }
        ended(&policy).iter().map(|record| (record.returned, record.weight)).collect::<Vec<_>>()
    };
    assert_eq!(weights(Parts::One), [(true, 2.0), (true, 2.0)]);
    assert_eq!(weights(Parts::Named), weights(Parts::One));
}

#[test]
fn a_ghost_returns_and_an_older_one_is_forgotten() {
    let outcomes =
        |away_ms| reuse_after(away_ms).iter().map(|record| record.returned).collect::<Vec<_>>();
    assert_eq!(outcomes(900_000), [true]);
    assert_eq!(outcomes(900_001), [false]);
}

#[test]
fn what_will_not_return_goes_first() {
    let mut world = World::default();
    let mut policy = hazard(4);
    world.play(&mut policy, 1, &[1], Parts::One);
    world.insert(BlockId(2), None);
    let hints = Hints { will_not_return: true, ..Hints::default() };
    let access = Access {
        now_ms: 1000,
        request: None,
        deepest: BlockId(2),
        depth: 1,
        inserted: 1,
        path: 1,
        hints,
    };
    policy.touch(&access, &world);
    assert_eq!(world.evict(&mut policy), Some(BlockId(2)));
}

#[test]
fn a_fit_that_is_never_done_is_asked_for_again() {
    let mut world = World::default();
    let mut policy = hazard(4);
    let fits = (1..=200).filter(|&now_ms| {
        world.play(&mut policy, now_ms, &[1], Parts::One);
        let mut work = Vec::new();
        policy.upkeep(&mut work);
        !work.is_empty()
    });
    assert_eq!(fits.count(), 4);
}

/// Although the next fit is already due by the requests that came meanwhile, and none came since it
/// ended.
#[test]
fn a_fit_that_is_done_is_not_thrown_away() {
    let (mut world, mut policy) = (World::default(), hazard(4));
    let mut play = |policy: &mut TierPolicies, requests: std::ops::Range<u64>| {
        requests.for_each(|now_ms| world.play(policy, now_ms, &[1], Parts::One));
    };
    play(&mut policy, 1..51);
    let (mut work, mut more) = (Vec::new(), Vec::new());
    policy.upkeep(&mut work);
    let before = Arc::clone(&policy.reuse.model);
    play(&mut policy, 51..151);
    assert_eq!(work.len(), 1);
    work.into_iter().for_each(|fit| fit());
    policy.upkeep(&mut more);
    play(&mut policy, 151..152);
    assert!(!Arc::ptr_eq(&policy.reuse.model, &before), "what was learned is used");
    policy.upkeep(&mut more);
    assert_eq!(more.len(), 1, "the next fit begins then");
}

fn ended_for_good(request: u64, at_ms: u64) -> Ended {
    Ended { request: RequestId(request), output_tokens: 5, will_not_return: true, at_ms }
}

/// Though they were used before, and others are older.
#[test]
fn what_only_an_ended_request_used_goes_first() {
    let (mut world, mut policy) = (World::default(), hazard(8));
    world.play(&mut policy, 1, &[2], Parts::One);
    world.play(&mut policy, 2, &[1, 1, 1], Parts::One);
    world.play(&mut policy, 1_000, &[1, 1, 1], Parts::One);
    policy.finished(&ended_for_good(1_000, 2_000));
    let order = std::iter::from_fn(|| world.evict(&mut policy)).collect::<Vec<_>>();
    assert_eq!(order, [13, 4, 1, 2].map(BlockId));
}

#[test]
fn what_others_share_outlives_a_request_that_does_not_return() {
    let (mut world, mut policy) = (World::default(), hazard(8));
    world.play(&mut policy, 1, &[1, 1, 2], Parts::One);
    world.play(&mut policy, 100_000, &[2], Parts::One);
    world.play(&mut policy, 100_001, &[1, 1, 1], Parts::One);
    policy.finished(&ended_for_good(100_001, 100_002));
    let order = std::iter::from_fn(|| world.evict(&mut policy)).collect::<Vec<_>>();
    assert_eq!(
        order[..2],
        [13, 14].map(BlockId),
        "the shared blocks are no part of what is given up"
    );
}

#[test]
fn whose_use_was_the_last_is_remembered() {
    let (mut world, mut policy) = (World::default(), hazard(8));
    world.play(&mut policy, 1, &[1, 1, 1], Parts::One);
    world.play(&mut policy, 2, &[1, 1], Parts::One);
    let last = |block, depth| policy.last_use(BlockId(block), depth).and_then(|last| last.request);
    assert_eq!((last(4, 2), last(13, 3)), (Some(RequestId(2)), Some(RequestId(1))));
    assert_eq!(policy.last_use(BlockId(14), 3), None);
}
