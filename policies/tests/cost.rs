//! What a use of a long path costs: as much as it changes, not as much as it is long.

use std::time::{Duration, Instant};

use kvbm_policies::{
    Access, BlockId, EvictionKind, Forest, Hints, RequestId, Standing, TierPolicies,
};
use rustix::time::{ClockId, clock_gettime};

/// One path whose blocks are named by their position.
struct Line {
    blocks: u32,
}

impl Forest for Line {
    fn standing(&self, block: BlockId) -> Standing {
        if block.0 + 1 < self.blocks { Standing::Interior } else { Standing::Evictable }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        block.0.checked_sub(1).map(BlockId)
    }

    fn key(&self, block: BlockId) -> u64 {
        block.0.into()
    }
}

fn access(now: u64, blocks: u32, inserted: u32) -> Access {
    Access {
        now_ms: 1_000 * now,
        request: Some(RequestId(now)),
        deepest: BlockId(blocks - 1),
        depth: blocks,
        inserted,
        path: blocks,
        hints: Hints::default(),
    }
}

/// The median time of a use of all `blocks` blocks by a request of its own.
fn time_of_a_use(blocks: u32) -> Duration {
    let line = Line { blocks };
    let mut policies = TierPolicies::new(EvictionKind::Hazard.build(blocks), None);
    policies.touch(&access(0, blocks, blocks), &line);
    let mut times: Vec<_> = (1..1_000)
        .map(|now| {
            let access = access(now, blocks, 0);
            let start = Instant::now();
            policies.touch(&access, &line);
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn a_use_does_not_cost_more_for_a_longer_path() {
    let times = [64, 8_192, 65_536].map(time_of_a_use);
    eprintln!("a use of 64, 8,192 and 65,536 blocks: {times:?}");
    // A pass over the blocks would take a thousand times as long.
    assert!(times[2] < 20 * times[0].max(Duration::from_nanos(200)), "{times:?}");
}

/// Chains of 16 blocks without common ones, in a tier of a million blocks; a block's id says where
/// it is.
struct Chains {
    /// By id: whether the block below it is there.
    has_child: Vec<bool>,
}

const CHAIN: u32 = 16;
const TIER: u32 = 1 << 20;

impl Forest for Chains {
    fn standing(&self, block: BlockId) -> Standing {
        if self.has_child[block.0 as usize] { Standing::Interior } else { Standing::Evictable }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        (!block.0.is_multiple_of(CHAIN)).then(|| BlockId(block.0 - 1))
    }

    fn key(&self, block: BlockId) -> u64 {
        block.0.into()
    }
}

/// Longest time of a call, by kind.
#[derive(Debug, Default)]
struct Longest {
    touch: Duration,
    victim: Duration,
    removed: Duration,
    upkeep: Duration,
}

/// By the time that the thread had a processor: what else a machine does meanwhile says nothing of
/// a call.
fn timed<T>(longest: &mut Duration, call: impl FnOnce() -> T) -> T {
    let start = cpu_time();
    let result = call();
    *longest = cpu_time().saturating_sub(start).max(*longest);
    result
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().expect("it does not go back")
}

/// A tier is filled and used over and over; of the blocks that leave, the last ones are forgotten
/// all in the same second. The bound leaves room for the first use of memory: what is done in one
/// piece takes 100 ms and more.
#[test]
fn calls_are_short_in_a_tier_of_a_million_blocks() {
    let mut tier = Chains { has_child: vec![false; TIER as usize] };
    let mut policies = TierPolicies::new(EvictionKind::Hazard.build(TIER), None);
    let (mut longest, mut work, mut now) = (Longest::default(), Vec::new(), 0);
    let mut use_chain = |tier: &mut Chains,
                         policies: &mut TierPolicies,
                         longest: &mut Longest,
                         chain: u32,
                         at_s: u64| {
        now += 1;
        let first = chain * CHAIN;
        tier.has_child[first as usize..(first + CHAIN - 1) as usize].fill(true);
        let deepest = BlockId(first + CHAIN - 1);
        let access = Access {
            deepest,
            now_ms: 1_000 * at_s,
            request: Some(RequestId(now)),
            ..access(0, CHAIN, CHAIN)
        };
        timed(&mut longest.touch, || policies.touch(&access, tier));
        while timed(&mut longest.upkeep, || policies.upkeep(&mut work)) {}
        // A fit is another thread's: undone, it is asked for again.
        work.clear();
    };
    for chain in 0..TIER / CHAIN {
        use_chain(&mut tier, &mut policies, &mut longest, chain, u64::from(chain) / 1_000);
    }
    for _ in 0..TIER / 2 {
        let victim =
            timed(&mut longest.victim, || policies.victim(&tier)).expect("nothing is busy");
        let exposed = tier.parent(victim);
        if let Some(parent) = exposed {
            tier.has_child[parent.0 as usize] = false;
        }
        timed(&mut longest.removed, || policies.removed(victim, tier.key(victim), exposed));
    }
    eprintln!("half a tier of a million blocks left: {longest:?}");
    let limit = Duration::from_millis(50);
    assert!(longest.touch < limit && longest.victim < limit, "{longest:?}");
    assert!(longest.removed < limit && longest.upkeep < limit, "{longest:?}");
}
