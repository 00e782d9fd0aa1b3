//! Fairness between the tenants that share a tier.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::Eviction;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest, Standing};

/// Another policy, fair between tenants.
///
/// Each tenant is entitled to a share of the tier in proportion to its weight. The victim is taken
/// from the tenant that is furthest above its share, the one with the most blocks for its weight,
/// if it has a leaf that may go; else from the next one. Of a tenant's leaves those of the lowest
/// [priority](crate::Hints::priority) go first, and of these the one that the other policy gives up
/// first. So a tenant that alone uses a tier has all of it, and one that comes later gets its share
/// from those that have more than theirs.
///
/// A block is charged to the tenant whose request brought it, at that request's priority, whichever
/// uses it later. Requests that name no tenant are one tenant together.
///
/// The other policy is asked for its next victim until one fits; those that do not fit are set
/// aside in that order, until they are used or their turn comes. A leaf is set aside once for each
/// time that the policy takes it up, so a victim costs O(log tenants) amortised, besides groups
/// (tenants and priorities) that have blocks but no leaf that may go. 16 bytes a block and 16 more
/// for each leaf set aside.
#[derive(Debug)]
pub struct Tenants {
    policy: Box<dyn Eviction>,
    terms: TenantTerms,
    /// By block.
    charges: Vec<Option<SlotCharge>>,
    groups: BTreeMap<GroupId, TenantGroup>,
    /// Tenants by load.
    order: BTreeSet<(TenantExcess, TenantId)>,
    blocks: HashMap<TenantId, u32>,
    last_ticket: u32,
}

/// The terms on which tenants share a tier.
#[derive(Clone, Debug, Default)]
pub struct TenantTerms {
    /// How large a tenant's share is, compared to others. Tenants that are not named weigh 1; what
    /// is not positive counts as almost nothing.
    pub weights: HashMap<u32, f64>,
    /// Blocks beyond which a tenant gives way before all that are within their quotas. It may use
    /// what no other tenant wants: a quota evicts nothing while there is room.
    pub quotas: HashMap<u32, u32>,
}

type TenantId = Option<u32>;
/// A tenant and a priority.
type GroupId = (TenantId, u8);

/// The priority of requests that name none.
pub const USUAL_PRIORITY: u8 = 50;

/// How far above its share a tenant is. A tenant above its quota is further than all that are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct TenantExcess {
    is_over_quota: bool,
    /// Blocks for each unit of weight; not negative, so the bits order like the number.
    per_weight: u64,
}

#[derive(Clone, Copy, Debug)]
struct SlotCharge {
    group: GroupId,
    /// By which its group's list knows it; 0 where it is not set aside.
    ticket: u32,
}

#[derive(Debug, Default)]
struct TenantGroup {
    blocks: u32,
    /// Leaves set aside, the first to go first, with tickets, among some that are no longer.
    aside: VecDeque<(BlockId, u32)>,
}

impl Tenants {
    /// Makes `policy` fair, on these terms.
    pub fn new(policy: Box<dyn Eviction>, terms: TenantTerms) -> Self {
        Self {
            policy,
            terms,
            charges: Vec::new(),
            groups: BTreeMap::new(),
            order: BTreeSet::new(),
            blocks: HashMap::new(),
            last_ticket: 0,
        }
    }

    /// Blocks that are charged to `tenant`.
    pub fn blocks(&self, tenant: Option<u32>) -> u32 {
        self.blocks.get(&tenant).copied().unwrap_or(0)
    }

    fn charge(&mut self, block: BlockId, group: GroupId) {
        *block.entry(&mut self.charges) = Some(SlotCharge { group, ticket: 0 });
        self.groups.entry(group).or_default().blocks += 1;
        self.set_blocks(group.0, self.blocks(group.0) + 1);
    }

    fn discharge(&mut self, block: BlockId) {
        let Some(charge) = self.charges.get_mut(block.0 as usize).and_then(Option::take) else {
            return;
        };
        if let Some(group) = self.groups.get_mut(&charge.group) {
            group.blocks -= 1;
            if group.blocks == 0 {
                self.groups.remove(&charge.group);
            }
        }
        self.set_blocks(charge.group.0, self.blocks(charge.group.0) - 1);
    }

    fn set_blocks(&mut self, tenant: TenantId, blocks: u32) {
        // Under the load that it has had so far, which the count below still tells.
        self.order.remove(&(self.load(tenant, self.blocks(tenant)), tenant));
        if blocks == 0 {
            self.blocks.remove(&tenant);
        } else {
            self.blocks.insert(tenant, blocks);
            self.order.insert((self.load(tenant, blocks), tenant));
        }
    }

    fn load(&self, tenant: TenantId, blocks: u32) -> TenantExcess {
        let weight =
            tenant.and_then(|tenant| self.terms.weights.get(&tenant)).map_or(1.0, |&weight| weight);
        let quota = tenant.and_then(|tenant| self.terms.quotas.get(&tenant));
        TenantExcess {
            is_over_quota: quota.is_some_and(|&quota| blocks > quota),
            // 0, less or no number would spoil the order of the bits.
            per_weight: (f64::from(blocks) / weight.max(1e-9)).to_bits(),
        }
    }

    fn charge_of(&mut self, block: BlockId) -> Option<&mut SlotCharge> {
        self.charges.get_mut(block.0 as usize)?.as_mut()
    }

    fn is_aside(&self, block: BlockId) -> bool {
        self.charges
            .get(block.0 as usize)
            .copied()
            .flatten()
            .is_some_and(|charge| charge.ticket != 0)
    }

    fn set_aside(&mut self, block: BlockId) {
        // Never 0, which says that a leaf is not set aside.
        self.last_ticket = self.last_ticket.wrapping_add(1).max(1);
        let ticket = self.last_ticket;
        let Some(charge) = self.charge_of(block) else { return };
        charge.ticket = ticket;
        let id = charge.group;
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.aside.push_back((block, ticket));
        // Entries of leaves that were taken back stay until they are the more: swept then, in O(1)
        // amortised.
        if group.aside.len() > 2 * group.blocks as usize + 64 {
            let charges = &self.charges;
            group.aside.retain(|&(block, ticket)| holds(charges, block, ticket));
        }
    }

    /// What was used, exposed or removed goes back to the other policy.
    fn take_back(&mut self, block: BlockId) {
        if let Some(charge) = self.charge_of(block) {
            charge.ticket = 0;
        }
    }

    /// The first leaf of a group to go.
    fn first(&mut self, id: GroupId, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId> {
        self.first_aside(id, forest).or_else(|| self.next_of(id, forest, reuse))
    }

    fn first_aside(&mut self, id: GroupId, forest: &dyn Forest) -> Option<BlockId> {
        loop {
            let (block, ticket) =
                *self.groups.get(&id)?.aside.front().filter(|_| forest.may_look())?;
            if holds(&self.charges, block, ticket) {
                if forest.standing(block) == Standing::Evictable {
                    return Some(block);
                }
                // Busy or interior now. When that ends, the other policy is told and names it
                // again.
                self.take_back(block);
            }
            self.groups.get_mut(&id)?.aside.pop_front();
        }
    }

    /// The next victim of the other policy that is of this group. Those before it are set aside.
    fn next_of(&mut self, id: GroupId, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId> {
        loop {
            // What is set aside looks busy to it: it passes that over and names the next one.
            let block = self.policy.victim(&TierRest { forest, charges: &self.charges }, reuse)?;
            match self.charge_of(block) {
                Some(charge) if charge.group != id => self.set_aside(block),
                _ => return Some(block),
            }
        }
    }
}

fn holds(charges: &[Option<SlotCharge>], block: BlockId, ticket: u32) -> bool {
    charges.get(block.0 as usize).copied().flatten().is_some_and(|charge| charge.ticket == ticket)
}

/// The tier without what is set aside.
struct TierRest<'a> {
    forest: &'a dyn Forest,
    charges: &'a [Option<SlotCharge>],
}

impl Forest for TierRest<'_> {
    fn standing(&self, block: BlockId) -> Standing {
        let charge = self.charges.get(block.0 as usize).copied().flatten();
        match self.forest.standing(block) {
            Standing::Evictable if charge.is_some_and(|charge| charge.ticket != 0) => {
                Standing::Busy
            }
            standing => standing,
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.forest.parent(block)
    }

    fn key(&self, block: BlockId) -> u64 {
        self.forest.key(block)
    }

    fn may_look(&self) -> bool {
        self.forest.may_look()
    }
}

impl Eviction for Tenants {
    fn charged_to(&self, tenant: Option<u32>) -> u32 {
        self.blocks(tenant)
    }

    /// Always: it knows in which tenant's name a block goes down, and the tier below charges that
    /// tenant.
    fn needs_reuse(&self) -> bool {
        true
    }

    fn touch(&mut self, access: &Access, forest: &dyn Forest, reuse: &ReuseModel) {
        let group = (access.hints.tenant, access.hints.priority.unwrap_or(USUAL_PRIORITY));
        let path = std::iter::successors(Some(access.deepest), |&block| forest.parent(block));
        path.take(access.inserted as usize).for_each(|block| self.charge(block, group));
        self.take_back(access.deepest);
        self.policy.touch(access, forest, reuse);
    }

    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, reuse: &ReuseModel) {
        self.discharge(block);
        // It may have been set aside when it was a leaf before: the other policy ranks it anew.
        if let Some(parent) = exposed {
            self.take_back(parent);
        }
        self.policy.removed(block, exposed, reuse);
    }

    fn victim(&mut self, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId> {
        let mut heaviest = self.order.last().copied();
        while let Some((load, tenant)) = heaviest {
            let mut lowest =
                self.groups.range((tenant, 0)..=(tenant, u8::MAX)).next().map(|(&id, _)| id);
            while let Some((_, priority)) = lowest {
                if let Some(block) = self.first((tenant, priority), forest, reuse) {
                    return Some(block);
                }
                let above = priority.checked_add(1);
                lowest = above.and_then(|above| {
                    self.groups.range((tenant, above)..=(tenant, u8::MAX)).next().map(|(&id, _)| id)
                });
            }
            // No block of this tenant may go now, and the need for room must not wait for it.
            heaviest = self.order.range(..(load, tenant)).next_back().copied();
        }
        None
    }

    fn released(&mut self, block: BlockId, reuse: &ReuseModel) {
        // Else it stands in its group's list already, and the other policy would name it as well.
        if !self.is_aside(block) {
            self.policy.released(block, reuse);
        }
    }

    fn may_decline(&self) -> bool {
        self.policy.may_decline()
    }

    fn finished(&mut self, reuse: &ReuseModel) {
        self.policy.finished(reuse);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::eviction::EvictionKind;
    use crate::eviction::model::{Op, Tree, ops};
    use crate::seam::{Hints, RequestId};
    use crate::testing::Loose;

    use super::*;

    const KINDS: [EvictionKind; 4] =
        [EvictionKind::Lru, EvictionKind::Hazard, EvictionKind::Arc, EvictionKind::Sieve];

    fn weigh(weights: HashMap<u32, f64>) -> TenantTerms {
        TenantTerms { weights, ..TenantTerms::default() }
    }

    fn fair(kind: EvictionKind) -> Tenants {
        Tenants::new(kind.build(8), weigh(HashMap::from([(0, 3.0), (1, 0.0)])))
    }

    /// The tree's requests belong to tenants 0, 1, 2 and none in turn, at two priorities.
    fn play(policy: &mut dyn Eviction, ops: &[Op]) -> Vec<(u64, u64)> {
        let mut tree = Tree::with_tenants();
        let victims = ops.iter().filter_map(|&op| tree.apply(op, policy));
        let victims = victims.map(|victim| (victim.arrival, victim.last_use)).collect();
        for _ in ops {
            tree.apply(Op::Release(0), policy);
        }
        while tree.apply(Op::Evict, policy).is_some() {}
        victims
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn victims_are_idle_leaves_until_the_tier_is_empty(ops in ops()) {
            for kind in KINDS {
                let mut policy = fair(kind);
                play(&mut policy, &ops);
                prop_assert!(policy.groups.is_empty() && policy.order.is_empty() && policy.blocks.is_empty());
            }
        }

        #[test]
        fn the_same_history_gives_the_same_victims(ops in ops()) {
            for kind in KINDS {
                prop_assert_eq!(play(&mut fair(kind), &ops), play(&mut fair(kind), &ops));
            }
        }

        #[test]
        fn nobody_notices_who_is_alone(ops in ops()) {
            for kind in EvictionKind::ALL {
                let alone = |policy: &mut dyn Eviction| {
                    let mut tree = Tree::default();
                    let victims = ops.iter().filter_map(|&op| tree.apply(op, policy));
                    victims.map(|victim| (victim.arrival, victim.last_use)).collect::<Vec<_>>()
                };
                prop_assert_eq!(alone(&mut fair(kind)), alone(kind.build(8).as_mut()), "{}", kind);
            }
        }

        #[test]
        fn the_victim_is_the_heaviest_tenants(
            blocks in prop::collection::vec((0_u32..4, 0_u8..3), 1..60),
            weights in prop::collection::hash_map(0_u32..4, 0.5_f64..4.0, 0..4),
        ) {
            let mut tier = TenantRoots::new(Tenants::new(EvictionKind::Lru.build(64), weigh(weights.clone())));
            blocks.iter().for_each(|&(tenant, priority)| tier.insert(tenant, priority));
            while let Some(victim) = tier.policy.victim(&Loose, &ReuseModel::idle()) {
                let load = |tenant: u32| {
                    f64::from(tier.policy.blocks(Some(tenant))) / weights.get(&tenant).copied().unwrap_or(1.0)
                };
                let (tenant, priority) = blocks[victim.0 as usize];
                prop_assert!((0..4).all(|other| load(other) <= load(tenant)));
                let rest = tier.left.iter().filter(|&&block| blocks[block].0 == tenant);
                let first = rest.min_by_key(|&&block| (blocks[block].1, block)).copied();
                prop_assert_eq!(first, Some(victim.0 as usize), "priority {}", priority);
                tier.remove(victim);
            }
            prop_assert!(tier.left.is_empty());
        }
    }

    /// A tier of blocks without parents.
    struct TenantRoots {
        policy: Tenants,
        left: BTreeSet<usize>,
        inserted: u32,
    }

    impl TenantRoots {
        fn new(policy: Tenants) -> Self {
            Self { policy, left: BTreeSet::new(), inserted: 0 }
        }

        fn insert(&mut self, tenant: u32, priority: u8) {
            let deepest = BlockId(self.inserted);
            self.left.insert(self.inserted as usize);
            self.inserted += 1;
            let hints =
                Hints { tenant: Some(tenant), priority: Some(priority), ..Hints::default() };
            let request = Some(RequestId(deepest.0.into()));
            let access =
                Access { now_ms: 0, request, deepest, depth: 1, inserted: 1, path: 1, hints };
            self.policy.touch(&access, &Loose, &ReuseModel::idle());
        }

        fn remove(&mut self, block: BlockId) {
            self.left.remove(&(block.0 as usize));
            self.policy.removed(block, None, &ReuseModel::idle());
        }
    }

    #[test]
    fn a_scan_takes_no_more_than_its_share() {
        let mut tier = TenantRoots::new(Tenants::new(
            EvictionKind::Lru.build(100),
            weigh(HashMap::from([(1, 3.0)])),
        ));
        (0..100).for_each(|_| tier.insert(1, 50));
        for _ in 0..1_000 {
            tier.insert(2, 50);
            let victim = tier.policy.victim(&Loose, &ReuseModel::idle()).unwrap();
            tier.remove(victim);
        }
        assert_eq!((tier.policy.blocks(Some(1)), tier.policy.blocks(Some(2))), (75, 25));
    }

    #[test]
    fn who_is_above_his_quota_gives_way_first() {
        let quotas = HashMap::from([(1, 10)]);
        let terms = TenantTerms { quotas, ..weigh(HashMap::from([(1, 100.0)])) };
        let mut tier = TenantRoots::new(Tenants::new(EvictionKind::Lru.build(100), terms));
        (0..40).for_each(|_| tier.insert(1, 50));
        (0..60).for_each(|_| tier.insert(2, 50));
        let mut evict = |blocks| {
            for _ in 0..blocks {
                let victim = tier.policy.victim(&Loose, &ReuseModel::idle()).unwrap();
                tier.remove(victim);
            }
            (tier.policy.blocks(Some(1)), tier.policy.blocks(Some(2)))
        };
        assert_eq!(evict(30), (10, 60), "whatever its weight");
        assert_eq!(evict(30), (10, 30), "within its quota the weights count");
    }

    #[test]
    fn memory_is_bounded_by_the_blocks() {
        let mut tier = TenantRoots::new(fair(EvictionKind::Lru));
        (0..10).for_each(|_| tier.insert(0, 50));
        (0..9).for_each(|_| tier.insert(2, 50));
        for turn in 0..10_000_u32 {
            let deepest = BlockId(turn % 10);
            let request = Some(RequestId(u64::from(turn) + 100));
            let hints = Hints::default();
            let access =
                Access { now_ms: 0, request, deepest, depth: 1, inserted: 0, path: 1, hints };
            tier.policy.touch(&access, &Loose, &ReuseModel::idle());
            tier.policy.victim(&Loose, &ReuseModel::idle());
        }
        assert!(tier.policy.groups.values().all(|group| group.aside.len() <= 2 * 10 + 65));
    }

    /// The documentation states it.
    #[test]
    fn what_is_kept_is_small() {
        assert!(size_of::<Option<SlotCharge>>() <= 16, "{}", size_of::<Option<SlotCharge>>());
        assert!(size_of::<(BlockId, u32)>() <= 8);
    }
}
