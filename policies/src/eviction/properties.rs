//! What holds for every policy of [`EvictionKind::ALL`].

use proptest::prelude::*;

use super::model::{Op, Tree, ops};
use super::{Eviction, EvictionKind};
use crate::seam::{Access, BlockId, Forest, Hints, RequestId, Standing, TierPolicies};

const CAPACITY: u32 = 8;

/// Plays `ops` to a fresh policy. The tree checks each victim: an idle leaf, and one wherever there
/// is one.
fn play(kind: EvictionKind, ops: &[Op]) -> (Tree, Box<dyn Eviction>, Vec<(u64, u64)>) {
    let (mut tree, mut policy) = (Tree::default(), kind.build(CAPACITY));
    let victims = ops.iter().filter_map(|&op| tree.apply(op, policy.as_mut()));
    let victims = victims.map(|victim| (victim.arrival, victim.last_use)).collect();
    (tree, policy, victims)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn victims_are_idle_leaves_until_the_tier_is_empty(ops in ops()) {
        for kind in EvictionKind::ALL {
            let (mut tree, mut policy, _) = play(kind, &ops);
            for _ in &ops {
                tree.apply(Op::Release(0), policy.as_mut());
            }
            while tree.apply(Op::Evict, policy.as_mut()).is_some() {}
        }
    }

    #[test]
    fn what_was_removed_is_forgotten(before in ops(), after in ops()) {
        for kind in EvictionKind::ALL {
            let (mut tree, mut policy, _) = play(kind, &before);
            for _ in 0..2 * before.len() {
                tree.apply(Op::Drop(0), policy.as_mut());
            }
            for &op in &after {
                tree.apply(op, policy.as_mut());
            }
        }
    }

    #[test]
    fn the_same_history_gives_the_same_victims(ops in ops()) {
        for kind in EvictionKind::ALL {
            prop_assert_eq!(play(kind, &ops).2, play(kind, &ops).2);
        }
    }
}

/// A tier of blocks without parents or children, any of which may go.
struct Roots {
    keys: Vec<u64>,
    now_ms: u64,
}

impl Forest for Roots {
    fn standing(&self, _block: BlockId) -> Standing {
        Standing::Evictable
    }

    fn parent(&self, _block: BlockId) -> Option<BlockId> {
        None
    }

    fn key(&self, block: BlockId) -> u64 {
        self.keys[block.0 as usize]
    }
}

impl Roots {
    /// A request of one block. Returns whether it was a hit.
    fn request(&mut self, key: u64, capacity: usize, policies: &mut TierPolicies) -> bool {
        self.now_ms += 1;
        let known = self.keys.iter().position(|&other| other == key);
        let at = known.unwrap_or_else(|| self.insert(key, capacity, policies));
        let (deepest, inserted) = (BlockId(at as u32), u32::from(known.is_none()));
        policies.touch(&access(self.now_ms, deepest, inserted), self);
        known.is_some()
    }

    fn insert(&mut self, key: u64, capacity: usize, policies: &mut TierPolicies) -> usize {
        if self.keys.len() < capacity {
            self.keys.push(key);
            return self.keys.len() - 1;
        }
        let victim = policies.victim(self).expect("any block may go");
        policies.removed(victim, self.key(victim), None);
        self.keys[victim.0 as usize] = key;
        victim.0 as usize
    }
}

fn access(now_ms: u64, deepest: BlockId, inserted: u32) -> Access {
    let request = Some(RequestId(now_ms));
    Access { now_ms, request, deepest, depth: 1, inserted, path: 1, hints: Hints::default() }
}

/// `Debug` shows all that a policy keeps, so its length stands for memory.
fn footprint(kind: EvictionKind, requests: u64) -> usize {
    let mut tier = Roots { keys: Vec::new(), now_ms: 0 };
    let mut policies = TierPolicies::new(kind.build(32), None);
    for key in 0..requests {
        tier.request(key / 2, 32, &mut policies);
    }
    format!("{policies:?}").len()
}

#[test]
fn memory_is_bounded_by_the_capacity() {
    for kind in EvictionKind::ALL {
        let (early, late) = (footprint(kind, 1_000), footprint(kind, 30_000));
        assert!(late < early + early / 2, "{kind}: {early} to {late}");
    }
}

#[test]
fn a_scan_leaves_what_was_used_again() {
    use EvictionKind::{Arc, Lirs, Lru2, S3Fifo, Slru};
    for kind in [Lru2, Slru, Arc, S3Fifo, Lirs] {
        let mut tier = Roots { keys: Vec::new(), now_ms: 0 };
        let mut policies = TierPolicies::new(kind.build(100), None);
        let popular = (0..10).cycle().take(30);
        for key in popular.chain(100..1_000) {
            tier.request(key, 100, &mut policies);
        }
        let kept = (0..10).filter(|&key| tier.request(key, 100, &mut policies)).count();
        assert_eq!(kept, 10, "{kind}");
    }
}
