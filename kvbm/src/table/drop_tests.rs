//! Drops, resets and forgets between the steps of plans and the ends of copies: each position has
//! its own bytes or none, and what was dropped is in no tier.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvbm_policies::{EvictionKind, Hints, Trigger};
use kvbm_tiers::object::{Discovery, FoundBlock};
use kvbm_tiers::{BlockKey, FramePool, SlotId, SlotRef, Tier};
use proptest::prelude::*;

use super::{
    Budget, Effects, Pins, Reply, RequestInfo, SaveAgain, Steps, Table, TierSet, TierSpec,
    TransferCursor, TransferPlan,
};
use crate::names::hash::{BlockHash, Chain};
use crate::task::{Class, CopyTask, Defect, Outcome, TransferId};

/// The device is an engine's own.
const TIERS: [(Tier, Option<Tier>); 3] =
    [(Tier::Host, Some(Tier::Disk)), (Tier::Disk, Some(Tier::Object)), (Tier::Object, None)];
const CHAINS: u8 = 9;
const SLOTS: u32 = 24;
/// Others have the table between any two of them, and hardly a drop is over in one.
const STEPS: Steps = Steps { placed: 2, looked_at: 3, dropped: 2 };

/// Chain `n`: of no tenant, of tenant 1 or of tenant 2, each with three branches.
fn chain(n: u8) -> Vec<BlockHash> {
    let (tenant, member) = (u128::from(n % 3), u128::from(n / 3 % 3));
    let trunk = (0..3).map(|at| 1_000 * tenant + at + 1);
    let own = (0..3 + member).map(|at| 1_000 * tenant + 100 * (member + 1) + at);
    trunk.chain(own).map(|n| BlockHash::from_u128(n * 0x1_0000_0001_0000_0001)).collect()
}

fn table() -> Table {
    let spec = |(tier, flush_to)| TierSpec {
        pool: FramePool::new(tier, SLOTS),
        policy: EvictionKind::Lru.build(SLOTS),
        flush_to,
        admission: None,
    };
    Table::new(TIERS.map(spec)).in_steps(STEPS)
}

fn tenant_of(n: u8) -> Option<u32> {
    Some(u32::from(n % 3)).filter(|&tenant| tenant > 0)
}

#[derive(Clone, Debug)]
enum Step {
    /// An engine saves blocks that it computed, perhaps without the beginning.
    Save {
        chain: u8,
        skip: usize,
        first: usize,
        blocks: usize,
    },
    Load {
        chain: u8,
        skip: usize,
        first: usize,
        blocks: usize,
    },
    Bring {
        chain: u8,
        to: usize,
    },
    /// One step of a plan.
    Plan(usize),
    Land {
        which: usize,
        outcome: u8,
    },
    Wrong {
        chain: u8,
        at: usize,
    },
    /// A medium lost a block.
    Corrupt {
        chain: u8,
        at: usize,
        tier: usize,
    },
    DropMore,
    Forget(u32),
    /// One step of what was begun to be forgotten.
    Forgetting,
    Reset,
    Flush(usize),
    Evict {
        tier: usize,
        blocks: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (chain, any, at) = (0..CHAINS, 0..64usize, 0..8usize);
    let skip = || prop_oneof![4 => Just(0_usize), 1 => 1..4usize];
    let blocks = || prop_oneof![1 => 1..4usize, 2 => Just(usize::MAX)];
    prop_oneof![
        8 => (chain.clone(), skip(), skip(), blocks())
            .prop_map(|(chain, skip, first, blocks)| Step::Save { chain, skip, first, blocks }),
        6 => (chain.clone(), skip(), skip(), blocks())
            .prop_map(|(chain, skip, first, blocks)| Step::Load { chain, skip, first, blocks }),
        6 => (chain.clone(), 0..3usize).prop_map(|(chain, to)| Step::Bring { chain, to }),
        24 => any.clone().prop_map(Step::Plan),
        24 => (any, 0..16u8).prop_map(|(which, outcome)| Step::Land { which, outcome }),
        3 => (chain.clone(), at.clone()).prop_map(|(chain, at)| Step::Wrong { chain, at }),
        2 => (chain, at, 0..3usize).prop_map(|(chain, at, tier)| Step::Corrupt { chain, at, tier }),
        4 => Just(Step::DropMore),
        2 => (1..3u32).prop_map(Step::Forget),
        6 => Just(Step::Forgetting),
        1 => Just(Step::Reset),
        4 => (0..2usize).prop_map(Step::Flush),
        2 => (0..3usize, 1..6usize).prop_map(|(tier, blocks)| Step::Evict { tier, blocks }),
    ]
}

/// What lies in a slot: whose name it was copied under, and which computation of it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bytes {
    name: BlockKey,
    version: u32,
}

struct OpenPlan {
    plan: TransferPlan,
    is_traced: bool,
    /// Of a load: the names of the wanted blocks, and where they go.
    wanted: Vec<(BlockKey, SlotId)>,
}

/// How far a forgetting has come.
enum Forgetting {
    UnderWay(TransferCursor),
    Records(u32),
}

struct World {
    table: Table,
    bytes: HashMap<(Tier, SlotId), Bytes>,
    next_version: u32,
    next_slot: u32,
    plans: Vec<OpenPlan>,
    copies: Vec<CopyTask>,
    loads: HashMap<TransferId, Vec<(BlockKey, SlotId)>>,
    forgetting: Option<Forgetting>,
    /// Computations that are gone, and those that are once what was begun has ended.
    dead: HashSet<u32>,
    dying: HashSet<u32>,
    epoch: u64,
}

impl World {
    fn new() -> Self {
        Self {
            table: table(),
            bytes: HashMap::new(),
            next_version: 0,
            next_slot: 0,
            plans: Vec::new(),
            copies: Vec::new(),
            loads: HashMap::new(),
            forgetting: None,
            dead: HashSet::new(),
            dying: HashSet::new(),
            epoch: 0,
        }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Save { chain, skip, first, blocks } => self.save(chain, skip, first, blocks),
            Step::Load { chain, skip, first, blocks } => self.load(chain, skip, first, blocks),
            Step::Bring { chain, to } => self.bring(chain, TIERS[to].0),
            Step::Plan(which) => self.step_plan(which),
            Step::Land { which, outcome } => self.land(which, outcome),
            Step::Wrong { chain, at } => {
                let key = self.key(chain, at);
                let below = self.below(key);
                self.kill(|name| below.contains(&name));
                self.table.drop_wrong(key);
            }
            Step::Corrupt { chain, at, tier } => {
                let key = self.key(chain, at);
                self.table.quarantine_resident(TIERS[tier].0, key, Defect::Corrupt);
            }
            Step::DropMore => _ = self.table.drop_more(),
            Step::Forget(tenant) => {
                self.finish_forgetting();
                let names = self.names(|n| tenant_of(n) == Some(tenant));
                self.kill(|name| names.contains(&name));
                self.table.begin_forgetting(tenant);
                self.forgetting = Some(Forgetting::UnderWay(TransferCursor::default()));
            }
            Step::Forgetting => self.forget_some(),
            Step::Reset => {
                self.dying.clear();
                self.dead.extend(0..self.next_version);
                self.epoch += 1;
                let effects = self.table.reset(self.epoch).expect("a greater epoch");
                self.apply(effects);
                let mut next = Some(0);
                while let Some(from) = next {
                    next = self.table.end_next(from, &mut Budget::of_a_hold());
                }
            }
            Step::Flush(tier) => {
                self.table.take_flush(TIERS[tier].0, 5, Trigger::Used, &mut Budget::of_a_hold());
            }
            Step::Evict { tier, blocks } => _ = self.table.evict(TIERS[tier].0, blocks),
        }
        self.apply_all();
        if !self.table.is_dropping() && self.forgetting.is_none() {
            self.dead.extend(self.dying.drain());
        }
    }

    fn key(&self, n: u8, at: usize) -> BlockKey {
        let hashes = chain(n);
        self.table.enter(Chain::from(&hashes)).key(at.min(hashes.len() - 1))
    }

    fn names(&self, is_of: impl Fn(u8) -> bool) -> HashSet<BlockKey> {
        let chains = (0..CHAINS).filter(|&n| is_of(n)).map(chain);
        let keys = |hashes: Vec<BlockHash>| {
            let chain = self.table.enter(Chain::from(&hashes));
            (0..chain.len()).map(|at| chain.key(at)).collect::<Vec<_>>()
        };
        chains.flat_map(keys).collect()
    }

    /// A block, and all that hangs on it.
    fn below(&self, key: BlockKey) -> HashSet<BlockKey> {
        let mut found: Vec<_> = self.table.find(key).into_iter().collect();
        let mut looked_at = 0;
        while let Some(&above) = found.get(looked_at) {
            found.extend(self.table.records.children(above));
            looked_at += 1;
        }
        found.into_iter().map(|record| self.table.records.at(record).key()).collect()
    }

    /// What tiers have now of some names is never found again.
    fn kill(&mut self, is_one: impl Fn(BlockKey) -> bool) {
        let mut dying = Vec::new();
        for (_, record) in self.table.records.live().filter(|(_, record)| is_one(record.key())) {
            for tier in Tier::ALL.into_iter().filter(|&tier| record.resident().has(tier)) {
                dying.extend(self.bytes.get(&(tier, record.slot(tier))).map(|bytes| bytes.version));
            }
        }
        self.dying.extend(dying);
    }

    fn computed(&mut self, keys: impl Iterator<Item = BlockKey>) -> Vec<SlotRef> {
        let compute = |name| {
            self.next_version += 1;
            self.next_slot += 1;
            let slot = SlotId(self.next_slot);
            self.bytes.insert((Tier::Device, slot), Bytes { name, version: self.next_version - 1 });
            SlotRef { tier: Tier::Device, slot, generation: 0 }
        };
        keys.map(compute).collect()
    }

    fn info(n: u8) -> RequestInfo {
        RequestInfo {
            hints: Hints { tenant: tenant_of(n), ..Hints::default() },
            ..RequestInfo::default()
        }
    }

    fn lease(&mut self, n: u8, hashes: &[BlockHash]) -> Pins {
        self.table.lease(Chain::from(hashes), Self::info(n))
    }

    fn save(&mut self, n: u8, skip: usize, first: usize, blocks: usize) {
        let hashes = chain(n)[skip..].to_vec();
        let pins = self.lease(n, &hashes);
        let chain = self.table.enter(Chain::from(&hashes));
        let end = first.saturating_add(blocks).min(hashes.len());
        let slots = self.computed((first..end).map(|at| chain.key(at)));
        let plan = self.table.plan_saving(Tier::Host, chain, first, &slots, pins);
        self.plans.push(OpenPlan { plan, is_traced: true, wanted: Vec::new() });
    }

    fn load(&mut self, n: u8, skip: usize, first: usize, blocks: usize) {
        let hashes = chain(n)[skip..].to_vec();
        let pins = self.lease(n, &hashes);
        let chain = self.table.enter(Chain::from(&hashes));
        let end = first.saturating_add(blocks).min(hashes.len());
        let slot = |at: usize| SlotId(self.next_slot + 1 + at as u32);
        let wanted: Vec<_> = (first..end).map(|at| (chain.key(at), slot(at))).collect();
        self.next_slot += hashes.len() as u32;
        let into =
            |&(_, slot): &(BlockKey, SlotId)| SlotRef { tier: Tier::Device, slot, generation: 0 };
        let slots = wanted.iter().map(into).collect();
        let plan = TransferPlan::into_engine(pins, first, slots, Arc::new(()));
        self.plans.push(OpenPlan { plan, is_traced: false, wanted });
    }

    fn bring(&mut self, n: u8, to: Tier) {
        let hashes = chain(n);
        let pins = self.lease(n, &hashes);
        let plan = TransferPlan::copying(Class::Prefetch, to, pins);
        self.plans.push(OpenPlan { plan, is_traced: false, wanted: Vec::new() });
    }

    fn plan_all(&mut self) {
        while !self.plans.is_empty() {
            self.step_plan(0);
            self.apply_all();
        }
    }

    fn step_plan(&mut self, which: usize) {
        if self.plans.is_empty() {
            return;
        }
        let mut open = self.plans.swap_remove(which % self.plans.len());
        if !open.is_traced {
            open.is_traced = self.table.trace(&mut open.plan);
            open.plan.pass_host_from(TierSet::default().with(Tier::Disk).with(Tier::Object));
            return self.plans.push(open);
        }
        let is_complete = self.table.extend(&mut open.plan);
        if let Some(id) = open.plan.transfer().filter(|_| !open.wanted.is_empty()) {
            self.loads.insert(id, std::mem::take(&mut open.wanted));
        }
        if is_complete {
            self.table.finish_plan(&mut open.plan, Reply::new(drop), Duration::ZERO);
        } else {
            self.plans.push(open);
        }
    }

    fn land(&mut self, which: usize, outcome: u8) {
        if self.copies.is_empty() {
            return;
        }
        let task = self.copies.swap_remove(which % self.copies.len());
        let outcome = match outcome {
            0 => Outcome::Failed { halfway: false, defect: None },
            1 if task.from.tier > Tier::Host => {
                Outcome::Failed { halfway: false, defect: Some(Defect::Corrupt) }
            }
            _ => {
                let bytes = self.bytes[&(task.from.tier, task.from.slot)];
                for to in task.via.into_iter().chain([task.to]) {
                    self.bytes.insert((to.tier, to.slot), bytes);
                }
                Outcome::Arrived
            }
        };
        let effects = self.table.land([task.ended(outcome)], Duration::ZERO);
        self.apply(effects);
    }

    fn forget_some(&mut self) {
        self.forgetting = match self.forgetting.take() {
            None => None,
            Some(Forgetting::UnderWay(from)) => {
                let next = self.table.end_forgotten(from, &mut Budget::of_a_hold());
                Some(next.map_or(Forgetting::Records(0), Forgetting::UnderWay))
            }
            Some(Forgetting::Records(from)) if self.table.is_dropping() => {
                self.table.drop_more();
                Some(Forgetting::Records(from))
            }
            Some(Forgetting::Records(from)) => {
                self.table.drop_forgotten(from, &mut Budget::of_a_hold()).map(Forgetting::Records)
            }
        };
    }

    fn finish_forgetting(&mut self) {
        while self.forgetting.is_some() {
            self.forget_some();
            self.apply_all();
        }
    }

    fn apply_all(&mut self) {
        let mut effects = self.table.take_effects();
        while effects.has_more {
            self.apply(effects);
            effects = self.table.publish_more();
        }
        self.apply(effects);
    }

    /// Does as a scheduler does.
    fn apply(&mut self, effects: Effects) {
        self.copies.extend(effects.tasks);
        for (id, from) in effects.cancelled {
            let is_in_vain = |task: &CopyTask| task.id.transfer == id && task.id.block >= from;
            // Only half of them wait in a queue: the media have the others.
            let dropped: Vec<CopyTask> = self
                .copies
                .iter()
                .copied()
                .filter(|task| is_in_vain(task) && task.id.block % 2 == 0)
                .collect();
            self.copies.retain(|task| !dropped.iter().any(|other| other.id == task.id));
            let effects =
                self.table.land(dropped.into_iter().map(CopyTask::dropped), Duration::ZERO);
            self.apply(effects);
            let effects = self.table.cancellation_made(id);
            self.apply(effects);
        }
        for SaveAgain { plan, .. } in effects.again {
            self.plans.push(OpenPlan { plan, is_traced: true, wanted: Vec::new() });
        }
        for ended in effects.ended {
            for &(name, slot) in self.loads.remove(&ended.id).iter().flatten().take(ended.copied) {
                assert_eq!(
                    self.bytes[&(Tier::Device, slot)].name,
                    name,
                    "another block was delivered"
                );
            }
            ended.pins.into_iter().for_each(|pins| self.table.release(pins));
        }
    }

    fn check(&self) {
        assert_eq!(self.table.audit(), []);
        for (id, record) in self.table.records.live() {
            for (tier, _) in TIERS.into_iter().filter(|&(tier, _)| record.resident().has(tier)) {
                let slot = record.slot(tier);
                if self.table.tier(tier).is_forgotten(slot) {
                    continue;
                }
                let bytes = self.bytes[&(tier, slot)];
                assert_eq!(bytes.name, record.key(), "{id:?} has other bytes in {tier}");
                assert!(
                    !self.dead.contains(&bytes.version),
                    "{id:?} was dropped, and is in {tier}"
                );
                assert!(!self.is_ownerless(record.key(), id), "{id:?} has no owner in {tier}");
            }
        }
    }

    /// Whether a tenant's block would be sealed with the key of all.
    fn is_ownerless(&self, key: BlockKey, record: super::RecordId) -> bool {
        let owned = self.names(|n| tenant_of(n).is_some());
        owned.contains(&key) && self.table.owners.of(record).is_none()
    }

    /// Lets everything end; then every slot can be emptied.
    fn end(mut self) {
        self.finish_forgetting();
        while !(self.plans.is_empty() && self.copies.is_empty()) || self.table.is_dropping() {
            self.step_plan(0);
            self.table.drop_more();
            self.apply_all();
            self.land(0, 9);
        }
        self.dead.extend(std::mem::take(&mut self.dying));
        self.check();
        while self.table.sweep(&mut Budget::of_a_hold()) {}
        for (tier, _) in TIERS {
            self.table.block_flushes(tier, true);
        }
        for (tier, _) in TIERS {
            self.table.evict(tier, SLOTS as usize);
            let counts = self.table.counts(tier);
            assert_eq!(counts.free, counts.total, "{tier} cannot be emptied: {counts:?}");
        }
        assert!(self.table.is_empty(), "{} left", self.table.len());
        assert!(self.table.transfers.is_empty(), "{:?}", self.table.transfers);
    }
}

/// A tenant's chain in the host tier, traced to be copied to disk.
fn traced() -> (World, Vec<BlockHash>) {
    let (mut world, n) = (World::new(), 1);
    world.save(n, 0, 0, usize::MAX);
    world.finish_plans();
    world.bring(n, Tier::Disk);
    while !world.plans[0].is_traced {
        world.step_plan(0);
    }
    (world, chain(n))
}

impl World {
    fn finish_plans(&mut self) {
        while !(self.plans.is_empty() && self.copies.is_empty()) {
            self.step_plan(0);
            self.apply_all();
            self.land(0, 9);
        }
    }

    fn held(&self, hashes: &[BlockHash]) -> usize {
        self.table.matches(Chain::from(hashes)).longest()
    }
}

#[test]
fn a_block_forgotten_before_its_copy_begins_stays_forgotten() {
    let (mut world, hashes) = traced();
    world.take(&Step::Forget(1));
    world.finish_forgetting();
    world.finish_plans();
    assert_eq!(world.held(&hashes), 0);
    world.take(&Step::DropMore);
    world.end();
}

#[test]
fn a_block_found_wrong_before_its_copy_stays_gone() {
    for at in 0..3 {
        let (mut world, hashes) = traced();
        world.take(&Step::Wrong { chain: 1, at });
        while world.table.drop_more() {}
        world.finish_plans();
        assert_eq!(world.held(&hashes), at);
        world.end();
    }
}

/// Two engines save a chain at once: all of it is on its way from the slots of the first.
fn saved_twice(n: u8) -> (World, Vec<BlockHash>) {
    let mut world = World::new();
    for _ in 0..2 {
        world.save(n, 0, 0, usize::MAX);
        world.plan_all();
    }
    let hashes = chain(n);
    assert_eq!(world.copies.len(), hashes.len());
    (world, hashes)
}

#[test]
fn a_save_relying_on_a_failed_copy_stores_its_own() {
    let blocks = chain(0).len();
    for fails in 0..blocks {
        let (mut world, hashes) = saved_twice(0);
        world.land(fails, 0);
        assert!(world.held(&hashes) <= fails);
        world.finish_plans();
        world.check();
        assert_eq!(world.held(&hashes), blocks);
        world.end();
    }
}

/// One engine saves the leading `blocks` of a chain, then another saves all of it.
fn saved_in_part(blocks: usize) -> (World, Vec<BlockHash>) {
    let mut world = World::new();
    for (first, blocks) in [(0, blocks), (0, usize::MAX)] {
        world.save(0, 0, first, blocks);
        world.plan_all();
    }
    (world, chain(0))
}

#[test]
fn a_save_let_down_ends_when_its_copies_hang() {
    let (mut world, _) = saved_in_part(3);
    let own = world.copies.split_off(3);
    world.land(0, 0);
    let overdue = Outcome::Overdue { writes_destination: false };
    let effects = world.table.land(own.iter().map(|task| task.ended(overdue)), Duration::ZERO);
    assert_eq!(effects.ended.len(), 1, "its caller waits for ever");
}

#[test]
fn a_late_cancellation_spares_the_copies_of_a_new_plan() {
    let (mut world, hashes) = saved_in_part(3);
    let own = world.copies.split_off(3);
    let failed = Outcome::Failed { halfway: false, defect: None };
    let late = world.table.land([world.copies[0].ended(failed)], Duration::ZERO);
    let effects = world.table.land(own.iter().map(|task| task.ended(failed)), Duration::ZERO);
    assert!(effects.again.is_empty(), "its old names are still to be cancelled");
    world.copies.remove(0);
    world.apply(effects);
    world.apply(late);
    world.finish_plans();
    assert_eq!(world.held(&hashes), hashes.len());
    world.end();
}

#[test]
fn all_chunks_of_a_save_let_down_are_stored() {
    let mut world = World::new();
    for (first, blocks) in [(0, 3), (0, 3), (3, usize::MAX)] {
        world.save(0, 0, first, blocks);
        world.plan_all();
    }
    world.land(0, 0);
    world.finish_plans();
    assert_eq!(world.held(&chain(0)), chain(0).len());
    world.end();
}

#[test]
fn a_block_found_wrong_before_a_new_plan_never_comes() {
    let (mut world, hashes) = saved_twice(0);
    world.land(0, 0);
    world.take(&Step::Wrong { chain: 0, at: 1 });
    world.finish_plans();
    assert!(world.held(&hashes) <= 1);
    world.end();
}

/// The second engine has what its name does not say, like the first.
#[test]
fn what_is_found_wrong_on_its_way_comes_from_nobody() {
    for at in 0..3 {
        let (mut world, hashes) = saved_twice(0);
        world.take(&Step::Wrong { chain: 0, at });
        world.finish_plans();
        assert_eq!(world.held(&hashes), at);
        world.end();
    }
}

#[test]
fn what_is_forgotten_on_its_way_comes_from_nobody() {
    let (mut world, hashes) = saved_twice(1);
    world.take(&Step::Forget(1));
    world.finish_forgetting();
    world.finish_plans();
    assert_eq!(world.held(&hashes), 0);
    world.end();
}

/// Four blocks are on their way to an engine.
fn loading() -> (World, Vec<BlockHash>, TransferId) {
    let (mut world, hashes) = traced();
    world.finish_plans();
    world.load(1, 0, 0, 4);
    while !world.plans.is_empty() {
        world.step_plan(0);
        world.apply_all();
    }
    let id = *world.loads.keys().next().expect("it is under way");
    (world, hashes, id)
}

/// The engine asked for four blocks, the third of which is found wrong while all are on their way.
#[test]
fn an_engine_is_not_given_what_was_found_wrong_meanwhile() {
    let (mut world, hashes, id) = loading();
    world.table.drop_wrong(Chain::from(&hashes).key(2));
    let copies =
        std::mem::take(&mut world.copies).into_iter().map(|task| task.ended(Outcome::Arrived));
    let effects = world.table.land(copies, Duration::ZERO);
    let ended = effects.ended.into_iter().find(|ended| ended.id == id).expect("it has ended");
    assert_eq!((ended.blocks, ended.copied), (4, 2));
}

#[test]
fn a_load_ends_although_its_blocks_leave_meanwhile() {
    let (mut world, hashes, id) = loading();
    let copies = std::mem::take(&mut world.copies);
    let mut given = 0;
    // The last block first: it waits for those before it.
    for task in copies.into_iter().rev() {
        let effects = world.table.land([task.ended(Outcome::Arrived)], Duration::ZERO);
        given += effects
            .ended
            .iter()
            .filter(|ended| ended.id == id)
            .map(|ended| ended.copied)
            .sum::<usize>();
        TIERS.iter().for_each(|&(tier, _)| _ = world.table.evict(tier, hashes.len()));
    }
    assert_eq!(given, 4);
}

/// A lease that is of more than the table has: the engine gets none of it, and least of all in the
/// slots of others.
#[test]
fn a_lease_of_more_than_there_is_gives_nothing() {
    let mut world = World::new();
    world.save(0, 0, 0, 4);
    world.finish_plans();
    let hashes = chain(0);
    let mut pins = world.lease(0, &hashes);
    let deepest = pins.deepest(Tier::Host).expect("four blocks are held");
    pins.hold(Tier::Host, deepest, 6);
    let slot = |at: u32| SlotRef { tier: Tier::Device, slot: SlotId(100 + at), generation: 0 };
    let mut plan = TransferPlan::into_engine(pins, 0, (0..6).map(slot).collect(), Arc::new(()));
    while !world.table.trace(&mut plan) {}
    assert_eq!(plan.sources().count(), 0);
}

/// What others stored is listed, and then its tenant is forgotten: whether it was stored before is
/// unknown.
#[test]
fn blocks_listed_before_their_tenant_was_forgotten_are_refused() {
    let mut world = World::new();
    let found = |n| {
        let (hashes, tenant) = (chain(n), tenant_of(n));
        let chain = Chain::from(&hashes);
        let parent = |at: usize| at.checked_sub(1).map(|above| chain.key(above).hash);
        let block = |at| FoundBlock { block: chain.key(at), parent: parent(at), tenant };
        (0..chain.len()).map(block).collect::<Vec<_>>()
    };
    world.take(&Step::Forget(1));
    world.finish_forgetting();
    let intakes =
        world.table.take_in(Tier::Object, &found(1), &mut |_, _| panic!("a slot stands for it"));
    assert!(intakes.iter().all(|&intake| intake == Discovery::Declined), "{intakes:?}");
    let intakes = world.table.take_in(Tier::Object, &found(2), &mut |_, _| {});
    assert!(
        intakes.iter().all(|&intake| intake == Discovery::Taken),
        "another tenant's: {intakes:?}"
    );
    assert_eq!([1, 2].map(|n| world.held(&chain(n))), [0, chain(2).len()]);
}

/// A record here tells no depth beyond three.
#[test]
fn a_long_chain_without_its_beginning_is_not_whole() {
    let hashes = chain(6);
    for skip in 1..hashes.len() {
        let mut world = World::new();
        world.save(6, skip, 0, usize::MAX);
        world.finish_plans();
        assert_eq!(world.held(&hashes), 0);
        assert_eq!(world.held(&hashes[skip..]), hashes.len() - skip);
        for begin in skip..hashes.len() {
            assert_eq!(
                world.held(&hashes[begin..]),
                hashes.len() - begin,
                "a part of what is there"
            );
        }
        // And then the beginning is saved: it is new, and the rest is of another chain until that
        // leaves.
        world.save(6, 0, 0, skip);
        world.finish_plans();
        assert_eq!(world.held(&hashes), skip);
        world.end();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn what_was_dropped_is_in_no_tier(steps in prop::collection::vec(step(), 1..160)) {
        let mut world = World::new();
        for step in &steps {
            world.take(step);
            world.check();
        }
        world.end();
    }
}
