use proptest::prelude::*;

use super::super::Hints;
use super::super::model::{Tree, ops};
use super::*;
use crate::simulate::simulate;
use crate::workload::{BLOCK_TOKENS, Request, Workload};

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
    /// The tree's nodes are numbers: `step` leads from one to the next. Answers the path and how much of it
    /// is resident.
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

    fn evict(&mut self, policy: &mut Hazard) -> Option<BlockId> {
        let victim = policy.victim(self)?;
        self.gone[victim.0 as usize] = true;
        let exposed = self.parent(victim).filter(|parent| {
            self.children[parent.0 as usize] -= 1;
            self.children[parent.0 as usize] == 0
        });
        policy.remove(victim, exposed);
        Some(victim)
    }

    /// A request for the path of `steps`, whose use is reported in `parts`.
    fn play(&mut self, policy: &mut Hazard, now_ms: u64, steps: &[u32], parts: Parts) {
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

/// What a policy knows after the requests, and the order in which it lets the blocks go.
fn outcome(paths: &[Vec<u32>], parts: Parts) -> (Vec<Record>, Vec<BlockId>) {
    let (mut world, mut policy) = (World::default(), Hazard::with_capacity(64));
    for (path, minute) in paths.iter().zip(1..) {
        world.play(&mut policy, minute * 60_000, path, parts);
    }
    let open = policy.segments.open_records().collect();
    (open, std::iter::from_fn(|| world.evict(&mut policy)).collect())
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
    hits: u32,
}

impl Eviction for Cut {
    fn touch(&mut self, access: &Access, forest: &dyn Forest) {
        if self.requests > 0 {
            self.requests -= 1;
            self.hits += access.depth - access.inserted;
        }
        self.policy.touch(access, forest);
    }

    fn remove(&mut self, block: BlockId, exposed: Option<BlockId>) {
        self.policy.remove(block, exposed);
    }

    fn victim(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        self.policy.victim(forest)
    }

    fn release(&mut self, block: BlockId) {
        self.policy.release(block);
    }

    fn finished(&mut self, request: RequestId, output_tokens: u32, now_ms: u64) {
        self.policy.finished(request, output_tokens, now_ms);
    }

    fn upkeep(&mut self) -> Option<Upkeep> {
        self.policy.upkeep()
    }
}

fn hits(requests: &[Request], capacity: u32, cut: usize) -> u32 {
    let workload: Workload = requests.iter().collect();
    let requests = requests[..cut].iter().filter(|request| !request.full_blocks().is_empty()).count();
    let mut policy = Cut { policy: Hazard::with_capacity(capacity), requests, hits: 0 };
    simulate(&workload, &mut policy, capacity);
    policy.hits
}

proptest! {
    #[test]
    fn a_victim_is_found_wherever_there_is_one(ops in ops()) {
        let (mut tree, mut policy) = (Tree::default(), Hazard::with_capacity(16));
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

fn held(policy: &Hazard) -> usize {
    policy.segments.entries() + policy.records.len() + policy.queue.len() + policy.entries.len()
}

/// Minutes of a load that repeats itself must leave no more behind than the first ones.
#[test]
fn memory_does_not_grow_with_time() {
    let mut world = World::default();
    let mut policy = Hazard::with_capacity(64);
    let mut footprints = Vec::new();
    for k in 0_u32..120_000 {
        let steps = [1 + k % 3, 1 + k / 3 % 3, 1 + k / 9 % 3, 1 + k / 27 % 3, 1 + k / 81 % 3];
        world.play(&mut policy, 100 * u64::from(k), &steps, Parts::Named);
        while policy.segments.resident() > 64 {
            world.evict(&mut policy).expect("nothing is busy");
        }
        if k % 40_000 == 39_999 {
            footprints.push(held(&policy));
        }
    }
    assert!(footprints[2] <= footprints[1] + footprints[1] / 10, "{footprints:?}");
}

#[test]
fn uses_alone_do_not_fill_the_queue() {
    let mut world = World::default();
    let mut policy = Hazard::with_capacity(64);
    for now_ms in 0..10_000 {
        world.play(&mut policy, now_ms, &[1, 2, 3], Parts::One);
    }
    assert!(policy.queue.len() < 100);
}

/// The reuse counts along the path of `steps`, had it been used, forgotten or not, and used again.
fn reuse_after(away_ms: u64) -> Vec<Record> {
    let mut world = World::default();
    let mut policy = Hazard::with_capacity(4);
    world.play(&mut policy, 1, &[1, 2], Parts::One);
    while world.evict(&mut policy).is_some() {}
    world.play(&mut policy, 1 + away_ms, &[1, 2], Parts::One);
    ended(&policy)
}

fn ended(policy: &Hazard) -> Vec<Record> {
    policy.records.iter().copied().chain(policy.segments.returning()).collect()
}

/// A chain that comes back as a whole teaches as much, however its return is reported.
#[test]
fn a_return_in_parts_is_one_return() {
    let weights = |parts| {
        let (mut world, mut policy) = (World::default(), Hazard::with_capacity(16));
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
    let outcomes = |away_ms| reuse_after(away_ms).iter().map(|record| record.returned).collect::<Vec<_>>();
    assert_eq!(outcomes(900_000), [true]);
    assert_eq!(outcomes(900_001), [false]);
}

#[test]
fn what_will_not_return_goes_first() {
    let mut world = World::default();
    let mut policy = Hazard::with_capacity(4);
    world.play(&mut policy, 1, &[1], Parts::One);
    world.insert(BlockId(2), None);
    let hints = Hints { will_not_return: true, ..Hints::default() };
    let access =
        Access { now_ms: 1000, request: None, deepest: BlockId(2), depth: 1, inserted: 1, path: 1, hints };
    policy.touch(&access, &world);
    assert_eq!(world.evict(&mut policy), Some(BlockId(2)));
}

#[test]
fn a_fit_that_is_never_done_is_asked_for_again() {
    let mut world = World::default();
    let mut policy = Hazard::with_capacity(4);
    let fits = (1..=200).filter(|&now_ms| {
        world.play(&mut policy, now_ms, &[1], Parts::One);
        policy.upkeep().is_some()
    });
    assert_eq!(fits.count(), 4);
}
