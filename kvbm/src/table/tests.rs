//! Random histories of a small table, with every invariant checked after every step.

use kvbm_policies::admission::{TierPair, TierShape};
use kvbm_policies::eviction::EvictionKind;
use kvbm_policies::{AdmissionKind, Hints, Trigger};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{BlockKey, Checksums, Frame, FramePool, IndexEntry, SlotId, Tier};
use proptest::prelude::*;

use super::{
    Budget, Effects, Journal, Match, MissReason, Note, Notes, Pins, Reply, RequestInfo, Restored,
    SlotLimits, Table, TierSet, TierSpec, TransferPlan,
};
use crate::names::hash::{BlockHash, Chain};
use crate::task::{Class, CopyTask, Defect, Outcome, TransferId};

const SLOTS: [(Tier, u32, Option<Tier>); 4] = [
    (Tier::Device, 12, None),
    (Tier::Host, 16, Some(Tier::Disk)),
    (Tier::Disk, 24, Some(Tier::Object)),
    (Tier::Object, 64, None),
];

/// Slots count next to nothing themselves, and lives begin anew all the time.
const LIMITS: SlotLimits = SlotLimits { pins: 2, children: 2 };
const LIVES: u32 = 5;

fn small_table(eviction: EvictionKind, admission: Option<AdmissionKind>) -> Table {
    let table = Table::new(SLOTS.map(|(tier, slots, flush_to)| TierSpec {
        pool: FramePool::new(tier, slots).with_lives(LIVES),
        policy: eviction.build(slots),
        flush_to,
        admission: admission.map(|kind| {
            kind.build(&TierPair {
                upper: TierShape { capacity: slots, eviction },
                lower: TierShape { capacity: 2 * slots, eviction },
            })
        }),
    }));
    table.with_slot_limits(LIMITS)
}

/// Chain number `n`: four families that share their first three blocks, in members of different
/// length.
fn chain(n: u8) -> Vec<BlockHash> {
    let (family, member) = (u128::from(n % 4), u128::from(n / 4 % 3));
    let shared = (0..3).map(|i| 1000 * family + i + 1);
    let own = (0..4 + member).map(|i| 1000 * family + 100 * (member + 1) + i);
    shared.chain(own).map(|h| BlockHash::from_u128(h * 0x1_0000_0001_0000_0001)).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Reserve { tier: usize, chain: u8 },
    Fill { which: usize, fails: bool },
    Transfer { to: usize, chain: u8, loads: bool },
    Land { which: usize, outcome: u8 },
    Cancel(usize),
    Lease(u8),
    Release(usize),
    Quarantine { tier: usize, chain: u8, depth: usize },
    Flush { tier: usize, blocks: usize },
    Headroom { tier: usize, slots: usize },
    Block { tier: usize, blocked: bool },
    Evict { tier: usize, blocks: usize },
    Withdraw { tier: usize },
    Reset,
    Sweep,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..2usize, 0..12u8).prop_map(|(tier, chain)| Step::Reserve { tier, chain }),
        8 => (0..64usize, prop::bool::weighted(0.1)).prop_map(|(which, fails)| Step::Fill { which, fails }),
        4 => (0..4usize, 0..12u8, any::<bool>())
            .prop_map(|(to, chain, loads)| Step::Transfer { to, chain, loads }),
        12 => (0..64usize, 0..12u8).prop_map(|(which, outcome)| Step::Land { which, outcome }),
        1 => (0..16usize).prop_map(Step::Cancel),
        3 => (0..12u8).prop_map(Step::Lease),
        3 => (0..16usize).prop_map(Step::Release),
        1 => (0..4usize, 0..12u8, 0..9usize)
            .prop_map(|(tier, chain, depth)| Step::Quarantine { tier, chain, depth }),
        4 => (1..3usize, 1..9usize).prop_map(|(tier, blocks)| Step::Flush { tier, blocks }),
        2 => (1..3usize, 1..9usize).prop_map(|(tier, slots)| Step::Headroom { tier, slots }),
        1 => (1..3usize, any::<bool>()).prop_map(|(tier, blocked)| Step::Block { tier, blocked }),
        1 => (0..4usize, 1..5usize).prop_map(|(tier, blocks)| Step::Evict { tier, blocks }),
        1 => (1..4usize).prop_map(|tier| Step::Withdraw { tier }),
        1 => Just(Step::Reset),
        1 => Just(Step::Sweep),
    ]
}

/// A table, and what a scheduler and engines would hold of it.
struct History {
    table: Table,
    /// Slots that engines fill: the transfer, which of its blocks, and the handle.
    filling: Vec<(TransferId, usize, Frame)>,
    /// Copies that media work on, or that wait for them.
    copies: Vec<CopyTask>,
    /// Copies that are overdue.
    overdue: Vec<CopyTask>,
    leases: Vec<(Pins, Vec<BlockHash>)>,
    /// Transfers that a caller waits for.
    awaited: Vec<TransferId>,
    /// How many began, and how many have ended.
    begun: usize,
    ended: usize,
}

impl History {
    fn new(table: Table) -> Self {
        let (filling, copies, overdue, leases, awaited) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { table, filling, copies, overdue, leases, awaited, begun: 0, ended: 0 }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Reserve { tier, chain: n } => self.reserve(Tier::ALL[tier], n),
            Step::Fill { which, fails } => self.fill(which, fails),
            Step::Transfer { to, chain: n, loads } => self.transfer(Tier::ALL[to], n, loads),
            Step::Land { which, outcome } => self.land(which, outcome),
            Step::Cancel(which) if !self.awaited.is_empty() => {
                let effects = self.table.cancel(self.awaited[which % self.awaited.len()]);
                self.apply(effects);
            }
            Step::Lease(n) => {
                let hashes = chain(n);
                let pins = self.table.lease(Chain::from(&hashes), RequestInfo::default());
                self.leases.push((pins, hashes));
            }
            Step::Release(which) if !self.leases.is_empty() => {
                let (pins, _) = self.leases.swap_remove(which % self.leases.len());
                self.table.release(pins);
            }
            Step::Quarantine { tier, chain: n, depth } => {
                let hashes = chain(n);
                let key = self.table.enter(Chain::from(&hashes)).key(depth.min(hashes.len() - 1));
                let defect = if depth % 2 == 0 { Defect::Corrupt } else { Defect::Unreadable };
                quarantine(&mut self.table, Tier::ALL[tier], key, defect);
                self.apply_now();
            }
            Step::Flush { tier, blocks } => {
                self.table.take_flush(
                    Tier::ALL[tier],
                    blocks,
                    Trigger::Used,
                    &mut Budget::of_a_hold(),
                );
                self.apply_now();
            }
            Step::Headroom { tier, slots } => {
                self.table.make_headroom(Tier::ALL[tier], slots, 4, &mut Budget::of_a_hold());
                self.apply_now();
            }
            Step::Block { tier, blocked } => {
                self.table.block_flushes(Tier::ALL[tier], blocked);
            }
            Step::Evict { tier, blocks } => {
                self.table.evict(Tier::ALL[tier], blocks);
            }
            Step::Withdraw { tier } => {
                let effects = self.table.withdraw(Tier::ALL[tier]);
                self.apply(effects);
                self.end_each(Table::end_withdrawn);
            }
            Step::Reset => {
                let effects = self.table.reset(self.table.epoch() + 1).unwrap();
                self.apply(effects);
                self.end_each(|table, from| table.end_next(from, &mut Budget::of_a_hold()));
            }
            Step::Sweep => {
                self.table.sweep(&mut Budget::of_a_hold());
            }
            Step::Release(_) | Step::Cancel(_) => {}
        }
    }

    fn end_each(&mut self, end_next: impl Fn(&mut Table, u32) -> Option<u32>) {
        let mut from = Some(0);
        while let Some(place) = from {
            from = end_next(&mut self.table, place);
            self.apply_now();
        }
    }

    fn apply_now(&mut self) {
        let effects = self.table.take_effects();
        self.apply(effects);
    }

    /// Does as a scheduler does.
    fn apply(&mut self, effects: Effects) {
        assert!(!effects.has_more, "all that is ready fits into one step");
        self.copies.extend(effects.tasks);
        for ended in effects.ended {
            if let Some(pins) = ended.pins {
                self.ended += 1;
                self.table.release(pins);
            }
        }
        for (id, from) in effects.cancelled {
            let is_in_vain = |task: &CopyTask| task.id.transfer == id && task.id.block >= from;
            let dropped: Vec<CopyTask> = self.copies.iter().copied().filter(is_in_vain).collect();
            // Only half of them wait in a queue: the media have the others.
            for task in dropped.into_iter().filter(|task| task.id.block % 2 == 0) {
                self.copies.retain(|other| other.id != task.id);
                let effects = self.table.land([task.dropped()], Duration::ZERO);
                self.apply(effects);
            }
            let effects = self.table.cancellation_made(id);
            self.apply(effects);
        }
    }

    fn reserve(&mut self, tier: Tier, n: u8) {
        let hashes = chain(n);
        let reserved = self.table.reserve(tier, Chain::from(&hashes), RequestInfo::default());
        let id = reserved.transfer;
        self.filling.extend(
            reserved.frames.into_iter().enumerate().map(|(block, frame)| (id, block, frame)),
        );
        self.end_if_filled(id);
    }

    fn end_if_filled(&mut self, id: TransferId) {
        if self.filling.iter().all(|&(other, ..)| other != id) {
            self.table.end_plan(id);
        }
        self.apply_now();
    }

    fn fill(&mut self, which: usize, fails: bool) {
        if self.filling.is_empty() {
            return;
        }
        let (id, block, frame) = self.filling.swap_remove(which % self.filling.len());
        let effects = if fails {
            self.table.abandon(id, block, [frame])
        } else {
            self.table.fill(id, block, [frame])
        };
        self.apply(effects);
        self.end_if_filled(id);
    }

    fn transfer(&mut self, to: Tier, n: u8, loads: bool) {
        let hashes = chain(n);
        let pins = self.table.lease(Chain::from(&hashes), RequestInfo::default());
        let class = if loads && to == Tier::Device { Class::Load } else { Class::Prefetch };
        let mut plan = TransferPlan::copying(class, to, pins);
        while !self.table.trace(&mut plan) {}
        plan.pass_host_from(TierSet::default().with(Tier::Disk).with(Tier::Object));
        while !self.table.extend(&mut plan) {}
        self.awaited.extend(plan.transfer());
        self.begun += 1;
        self.table.finish_plan(&mut plan, Reply::new(drop), Duration::ZERO);
        self.apply_now();
    }

    fn land(&mut self, which: usize, outcome: u8) {
        if outcome == 2 && !self.overdue.is_empty() {
            let task = self.overdue.swap_remove(which % self.overdue.len());
            let effects = self.table.land([task.ended(Outcome::Returned)], Duration::ZERO);
            return self.apply(effects);
        }
        if self.copies.is_empty() {
            return;
        }
        let task = self.copies.swap_remove(which % self.copies.len());
        let halfway = task.via.is_some() && which.is_multiple_of(2);
        let outcome = match outcome {
            0 => Outcome::Failed { halfway, defect: None },
            1 if self.overdue.len() < 4 => {
                self.overdue.push(task);
                Outcome::Overdue { writes_destination: task.via.is_none() || halfway }
            }
            _ => Outcome::Arrived,
        };
        let effects = self.table.land([task.ended(outcome)], Duration::ZERO);
        self.apply(effects);
    }

    fn check(&self) {
        assert_eq!(self.table.audit(), []);
        for n in 0..12 {
            let hashes = chain(n);
            assert_eq!(
                self.table.matches(Chain::from(&hashes)),
                self.linear_match(Chain::from(&hashes))
            );
        }
    }

    /// The match by asking for every block.
    fn linear_match(&self, chain: Chain<'_>) -> Match {
        let chain = self.table.enter(chain);
        let held = |tier: Tier, i: usize| {
            let record = self.table.find(chain.key(i)).filter(|_| !self.table.is_withdrawn(tier));
            record.is_some_and(|record| self.table.records.at(record).resident().has(tier))
        };
        let blocks = |tier| (0..chain.len()).take_while(|&i| held(tier, i)).count() as u32;
        Match::new(Tier::ALL.map(blocks))
    }

    /// Lets everything end, or closes it; then every slot can be emptied again.
    fn end(mut self, closes: bool) {
        if closes {
            self.table.close();
            let mut from = Some(0);
            while let Some(place) = from {
                from = self.table.end_next(place, &mut Budget::of_a_hold());
                self.apply_now();
            }
            assert_eq!(self.ended, self.begun, "closing answers everybody");
        }
        while !(self.filling.is_empty() && self.copies.is_empty()) {
            self.fill(0, false);
            self.land(0, 9);
        }
        assert_eq!(self.ended, self.begun, "somebody still waits");
        while !self.overdue.is_empty() {
            self.land(0, 2);
        }
        assert!(self.table.transfers.is_empty(), "a transfer was forgotten on the books");
        for (pins, _) in std::mem::take(&mut self.leases) {
            self.table.release(pins);
        }
        self.check();
        while self.table.sweep(&mut Budget::of_a_hold()) {}
        for tier in Tier::ALL {
            self.table.block_flushes(tier, true);
        }
        for (tier, slots, _) in SLOTS {
            self.table.evict(tier, slots as usize);
            let counts = self.table.counts(tier);
            let left = (counts.resident, counts.filling, counts.forgotten);
            assert_eq!(left, (0, 0, 0), "{tier} cannot be emptied: {counts:?}");
            assert_eq!(counts.free, counts.total);
        }
        assert!(self.table.is_empty());
        assert_eq!(self.table.audit(), []);
    }
}

/// Drops a block where it is resident.
fn quarantine(table: &mut Table, tier: Tier, key: BlockKey, defect: Defect) {
    if let Some((found, pins)) = table.pin_resident(tier, key) {
        table.release(pins);
        assert!(table.quarantine(key, found, defect) > 0);
        assert_eq!(table.quarantine(key, found, defect), 0, "it is not there any more");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_history_keeps_every_invariant(
        eviction in prop::sample::select(&EvictionKind::ALL),
        admission in prop::option::of(prop::sample::select(&AdmissionKind::ALL)),
        steps in prop::collection::vec(step(), 1..120),
        closes in any::<bool>(),
    ) {
        let mut history = History::new(small_table(eviction, admission));
        for step in &steps {
            history.take(step);
            history.check();
        }
        history.end(closes);
    }
}

#[test]
fn a_full_tier_declines_blocks_worth_less_than_its_own() {
    let mut table = small_table(EvictionKind::Hazard, None);
    let tier = Tier::Object;
    for n in 0..12 {
        fill(&mut table, tier, &chain(n));
    }
    assert_eq!(table.counts(tier).free, 0);
    let before = table.counts(tier).resident;
    let parting = RequestInfo {
        hints: Hints { will_not_return: true, ..Hints::default() },
        request: None,
        ..RequestInfo::default()
    };
    let insertion: Vec<_> = (0..5).map(|i| BlockHash::from_u128((900 + i) << 64)).collect();
    let reserved = table.reserve(tier, Chain::from(&insertion), parting);
    assert!(reserved.frames.is_empty(), "{reserved:?}");
    assert_eq!((reserved.declined, reserved.refused), (insertion.len(), 0));
    table.end_plan(reserved.transfer);
    assert_eq!(table.counts(tier).resident, before);
    let miss = table.miss(Chain::from(&insertion), &Match::default());
    assert_eq!(miss.map(|miss| miss.reason), Some(MissReason::Admission));
    assert_eq!(table.audit(), []);
}

#[test]
fn a_leased_chain_survives_pressure() {
    let mut table = small_table(EvictionKind::default(), None);
    let held = chain(8);
    fill(&mut table, Tier::Device, &held);
    let pins = table.lease(Chain::from(&held), RequestInfo::default());
    for n in [1, 5, 9, 2, 6, 10] {
        fill(&mut table, Tier::Device, &chain(n));
    }
    assert_eq!(table.matches(Chain::from(&held)).blocks(Tier::Device), held.len());
    table.release(pins);
    assert_eq!(fill(&mut table, Tier::Device, &chain(11)), 0);
}

fn fill(table: &mut Table, tier: Tier, hashes: &Vec<BlockHash>) -> usize {
    let reserved = table.reserve(tier, Chain::from(hashes), RequestInfo::default());
    let mut effects = table.fill(reserved.transfer, 0, reserved.frames);
    while effects.has_more {
        effects = table.publish_more();
    }
    table.end_plan(reserved.transfer);
    let _ = table.take_effects();
    reserved.refused
}

/// Two directories of four slots, and an older chain in the first.
fn table_of_two_directories(eviction: EvictionKind) -> (Table, [Vec<BlockHash>; 2]) {
    let pool = FramePool::sharded(Tier::Disk, 8, 2);
    let spec = TierSpec { pool, policy: eviction.build(8), flush_to: None, admission: None };
    let mut table = Table::new([spec]);
    let chains = [0, 1].map(|n| chain(n)[..4].to_vec());
    for (dir, hashes) in (0..).zip(&chains) {
        let key = |depth| Chain::from(hashes).key(depth);
        let parent = |depth: usize| depth.checked_sub(1).map(|above| key(above).hash);
        let entry = |depth: usize| IndexEntry {
            slot: SlotId(2 * depth as u32 + dir),
            generation: 0,
            block: key(depth),
            parent: parent(depth),
            checksum: 1,
            tenant: None,
        };
        let entries: Vec<_> = (0..4).map(entry).collect();
        assert_eq!(table.restore(Tier::Disk, &entries).blocks, 4);
    }
    (table, chains)
}

#[test]
fn blocks_in_a_closed_directory_do_not_leave_for_room() {
    for eviction in [EvictionKind::Lru, EvictionKind::Fifo] {
        let (mut table, chains) = table_of_two_directories(eviction);
        let held = |table: &Table| {
            chains.each_ref().map(|chain| table.matches(Chain::from(chain)).blocks(Tier::Disk))
        };
        table.close_directory(Tier::Disk, 0, true);
        let other = chain(2)[..3].to_vec();
        assert_eq!(fill(&mut table, Tier::Disk, &other), 0, "{eviction:?}");
        assert_eq!(
            held(&table),
            [4, 1],
            "{eviction:?}: the older one lies in the closed directory"
        );
        // More than the open directory has.
        fill(&mut table, Tier::Disk, &chain(3)[..5].to_vec());
        assert_eq!(held(&table)[0], 4, "{eviction:?}");
        // And then all its slots take blocks again.
        table.close_directory(Tier::Disk, 0, false);
        while table.reconsider_reopened(&mut Budget::of_a_hold()) {}
        for n in [2, 3, 6, 7] {
            assert_eq!(fill(&mut table, Tier::Disk, &chain(n)[..4].to_vec()), 0, "{eviction:?}");
        }
        assert_eq!((held(&table), table.counts(Tier::Disk).free), ([0, 0], 0), "{eviction:?}");
        assert_eq!(table.audit(), []);
    }
}

/// A lease pins the deepest block; when that is quarantined, a reader may still be reading its
/// ancestors.
#[test]
fn readers_of_a_quarantined_chain_keep_its_ancestors() {
    let mut table = small_table(EvictionKind::default(), None);
    let held = chain(8);
    fill(&mut table, Tier::Device, &held);
    let pins = table.lease(Chain::from(&held), RequestInfo::default());
    for depth in [6, 4] {
        quarantine(&mut table, Tier::Device, Chain::from(&held).key(depth), Defect::Corrupt);
        assert_eq!(table.evict(Tier::Device, 12), 0);
        assert_eq!(table.matches(Chain::from(&held)).blocks(Tier::Device), depth);
    }
    let free = table.counts(Tier::Device).free;
    assert_eq!(free as usize, 12 - held.len(), "a slot that is being read was freed");
    table.release(pins);
    assert_eq!(table.evict(Tier::Device, 12), 4);
    assert_eq!(table.counts(Tier::Device).free, 12);
    assert_eq!(table.audit(), []);
}

#[test]
fn a_chain_that_contradicts_itself_or_another_is_refused() {
    let mut table = small_table(EvictionKind::default(), None);
    let hash = |n: u128| BlockHash::from_u128(n << 64 | n);
    assert_eq!(fill(&mut table, Tier::Device, &vec![hash(1), hash(1)]), 1);
    assert_eq!(fill(&mut table, Tier::Host, &vec![hash(2), hash(3)]), 0);
    assert_eq!(fill(&mut table, Tier::Device, &vec![hash(4), hash(3)]), 1);
    assert_eq!(table.audit(), []);
}

/// A trunk of 1,000 blocks, branches of 300 along it, and 400 leaves on one block: far more than
/// one step drops.
#[test]
fn many_descendants_are_hidden_at_once_and_dropped_in_steps() {
    let eviction = EvictionKind::default();
    let pool = FramePool::new(Tier::Disk, 8_000);
    let mut table = Table::new([TierSpec {
        pool,
        policy: eviction.build(8_000),
        flush_to: None,
        admission: None,
    }]);
    let hash = |n: u128| BlockHash::from_u128(n * 0x1_0000_0001_0000_0001);
    let trunk: Vec<_> = (1..=1_000).map(hash).collect();
    let branch = |from: usize, blocks: u128| -> Vec<BlockHash> {
        let own = (0..blocks).map(|n| hash(10_000 * from as u128 + n + 1_000_000));
        trunk[..from].iter().copied().chain(own).collect()
    };
    let mut chains: Vec<_> = [100, 500, 900].map(|from| branch(from, 300)).to_vec();
    chains.extend((0..400).map(|n| [&trunk[..700], &[hash(5_000_000 + n)]].concat()));
    chains.push(trunk.clone());
    for chain in &chains {
        assert_eq!(fill(&mut table, Tier::Disk, chain), 0);
    }
    let lease = table.lease(Chain::from(&trunk), RequestInfo::default());
    let bad = Chain::from(&trunk).key(49);
    let (found, pins) = table.pin_resident(Tier::Disk, bad).unwrap();
    table.release(pins);
    assert_eq!(table.quarantine(bad, found, Defect::Corrupt), 0, "too many for one step");
    assert_eq!(table.quarantine(bad, found, Defect::Corrupt), 0, "it is being dropped");
    let mut steps = 0;
    let mut left = table.counts(Tier::Disk).resident;
    while table.is_dropping() {
        for chain in &chains {
            assert_eq!(
                table.matches(Chain::from(chain)).blocks(Tier::Disk),
                49,
                "after {steps} steps"
            );
        }
        let early = table.lease(Chain::from(&trunk), RequestInfo::default());
        table.drop_more();
        table.release(early);
        assert_eq!(table.audit(), [], "after {steps} steps");
        let now = table.counts(Tier::Disk).resident;
        assert!(left - now <= 300, "{} blocks in one step", left - now);
        (left, steps) = (now, steps + 1);
    }
    assert_eq!(left, 49);
    assert_eq!(table.stats(Tier::Disk).quarantined, 1_000 - 49 + 900 + 400);
    table.release(lease);
    let counts = table.counts(Tier::Disk);
    assert_eq!((counts.quarantined, counts.free), (0, counts.total - 49));
}

/// A rule that sends blocks down when they leave is asked about leaves: what comes before them is
/// found, and goes first.
#[test]
fn a_long_chain_goes_down_in_steps() {
    let spec = |tier, flush_to: Option<Tier>| TierSpec {
        pool: FramePool::new(tier, 8_000),
        policy: EvictionKind::Lru.build(8_000),
        flush_to,
        admission: flush_to.map(|_| Box::new(kvbm_policies::admission::WriteBack) as Box<_>),
    };
    let mut table = Table::new([spec(Tier::Host, Some(Tier::Disk)), spec(Tier::Disk, None)]);
    let chain: Vec<_> =
        (1..=6_000).map(|n: u128| BlockHash::from_u128(n * 0x1_0000_0001_0000_0001)).collect();
    assert_eq!(fill(&mut table, Tier::Host, &chain), 0);
    let mut from = Some(0);
    while let Some(slot) = from {
        from = table.want_flush_of_all(Tier::Host, slot, &mut Budget::of_a_hold());
    }
    for step in 0..200 {
        table.take_flush(Tier::Host, 64, Trigger::Leaving, &mut Budget::of_a_hold());
        let tasks = table.take_effects().tasks;
        assert!(tasks.len() <= 256 + 64, "{} blocks in step {step}", tasks.len());
        let effects =
            table.land(tasks.into_iter().map(|task| task.ended(Outcome::Arrived)), Duration::ZERO);
        assert!(effects.tasks.is_empty());
        let mut has_more = effects.has_more;
        while has_more {
            has_more = table.publish_more().has_more;
        }
        if table.matches(Chain::from(&chain)).blocks(Tier::Disk) == chain.len() {
            assert_eq!(table.audit(), []);
            return;
        }
    }
    panic!(
        "{} of {} blocks went down",
        table.matches(Chain::from(&chain)).blocks(Tier::Disk),
        chain.len()
    );
}

#[test]
fn a_table_that_lost_count_is_found_in_steps() {
    let (eviction, pool) = (EvictionKind::default(), FramePool::new(Tier::Host, 1_000));
    let mut table = Table::new([TierSpec {
        pool,
        policy: eviction.build(1_000),
        flush_to: None,
        admission: None,
    }]);
    let trunk: Vec<_> = (1..=900).map(BlockHash::from_u128).collect();
    assert_eq!(fill(&mut table, Tier::Host, &trunk), 0);
    let pass = |table: &Table| {
        let (mut violations, mut next, mut steps) = (Vec::new(), Some(0), 0);
        while let Some(from) = next {
            next = table.audit_some(from, &mut violations, &mut Budget::of_a_hold());
            steps += 1;
        }
        (violations, steps)
    };
    let (sound, steps) = pass(&table);
    assert_eq!((sound.as_slice(), steps > 1), ([].as_slice(), true), "{steps} steps");
    let slot = table.records.live().last().map(|(_, record)| record.slot(Tier::Host)).unwrap();
    table.tier_mut(Tier::Host).gain_child(slot);
    assert_eq!(pass(&table).0, table.audit());
    assert_eq!(table.audit().len(), 1);
    table.tier_mut(Tier::Host).lose_child(slot);
    assert_eq!(pass(&table).0, []);
}

/// A list that an index might have: right in most places, with blocks missing, twice, in one slot,
/// below themselves, and in slots that there are not.
fn entries() -> impl Strategy<Value = Vec<IndexEntry>> {
    let place = (0..12u8, 0..9usize, 0..70u32, prop::bool::weighted(0.05));
    let entry = place.prop_map(|(n, depth, slot, is_own_parent)| {
        let hashes = chain(n);
        let depth = depth % hashes.len();
        let key = |depth: usize| Chain::from(&hashes).key(depth);
        let above = if is_own_parent { Some(depth) } else { depth.checked_sub(1) };
        let parent = above.map(|above| key(above).hash);
        IndexEntry {
            slot: SlotId(slot),
            generation: 0,
            block: key(depth),
            parent,
            checksum: 1,
            tenant: None,
        }
    });
    prop::collection::vec(entry, 0..150)
}

/// What lies in the slots of a tier.
fn residents(table: &Table, tier: Tier) -> Vec<IndexEntry> {
    let resident = table.records.live().filter(|(_, record)| record.resident().has(tier));
    let entry = |(_, record): (_, &super::record::BlockRecord)| IndexEntry {
        slot: record.slot(tier),
        generation: 0,
        block: record.key(),
        parent: record.parent().map(|parent| table.records.at(parent).key().hash),
        checksum: 1,
        tenant: None,
    };
    resident.map(entry).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever a list says, in any order: what it makes resident is in it, and prefix-closed. And
    /// then the table goes on.
    #[test]
    fn any_list_is_restored_as_far_as_it_makes_sense(
        eviction in prop::sample::select(&EvictionKind::ALL),
        admission in prop::option::of(prop::sample::select(&AdmissionKind::ALL)),
        lists in prop::collection::vec((1..4usize, entries()), 1..4),
        steps in prop::collection::vec(step(), 0..40),
        closes in any::<bool>(),
    ) {
        let mut history = History::new(small_table(eviction, admission));
        for (tier, list) in &lists {
            let tier = Tier::ALL[*tier];
            let before = residents(&history.table, tier);
            let restored = history.table.restore(tier, list);
            prop_assert_eq!(restored.blocks + restored.dropped, list.len());
            let after = residents(&history.table, tier);
            prop_assert_eq!(after.len(), before.len() + restored.blocks);
            prop_assert!(after.iter().all(|entry| before.contains(entry) || list.contains(entry)));
            history.check();
        }
        for step in &steps {
            history.take(step);
            history.check();
        }
        history.end(closes);
    }

    /// What was there at any moment is there again, also in another order, and the journal has told
    /// of just that.
    #[test]
    fn what_was_there_is_there_again(
        steps in prop::collection::vec(step(), 1..120),
        shuffled in any::<u64>(),
    ) {
        let mut table = small_table(EvictionKind::default(), None);
        let checksums = Arc::new(Checksums::new());
        (0..64).for_each(|slot| checksums.record(SlotId(slot), 1));
        let kept = [Tier::Host, Tier::Disk];
        let notes = kept.map(|tier| {
            let notes = [(); 3].map(|()| Arc::<Notes>::default());
            table.keep_journal(tier, Journal::new(Arc::clone(&checksums), notes.clone().map(Some)));
            notes
        });
        let mut history = History::new(table);
        let within_an_epoch = |step: &&Step| !matches!(step, Step::Reset);
        steps.iter().filter(within_an_epoch).for_each(|step| history.take(step));
        for (tier, notes) in kept.into_iter().zip(notes) {
            let mut left = residents(&history.table, tier);
            left.sort_by_key(|entry| entry.slot);
            let mut told = BTreeMap::new();
            for (at, note) in notes.iter().enumerate().flat_map(|(at, notes)| notes.take().notes().map(move |note| (at, note))) {
                let slot = match note {
                    Note::Stored(entry) => {
                        told.insert(entry.slot, IndexEntry { generation: 0, ..entry });
                        entry.slot
                    }
                    Note::Removed { slot, block, .. } => {
                        let gone = told.remove(&slot);
                        prop_assert_eq!(gone.map(|gone| gone.block), Some(block));
                        slot
                    }
                    Note::Reset(_) => unreachable!("there was none"),
                };
                prop_assert_eq!(slot.0 as usize % 3, at);
            }
            prop_assert_eq!(told.into_values().collect::<Vec<_>>(), left.clone());
            let mut again = small_table(EvictionKind::default(), None);
            left.sort_by_key(|entry| (u64::from(entry.slot.0) + 1).wrapping_mul(shuffled | 1));
            prop_assert_eq!(again.restore(tier, &left), Restored { blocks: left.len(), dropped: 0 });
            prop_assert_eq!(again.audit(), []);
        }
    }
}

#[test]
fn unwritten_notes_are_bounded_and_the_index_begins_anew() {
    let mut table = small_table(EvictionKind::default(), None);
    let notes = [(); 2].map(|()| Arc::<Notes>::default());
    table.keep_journal(Tier::Object, Journal::of_ranks(notes.clone().map(Some)));
    let churn = |table: &mut Table, blocks: std::ops::Range<u128>| {
        blocks.for_each(|n| _ = fill(table, Tier::Object, &vec![BlockHash::from_u128(n << 64)]));
    };
    let mut told = BTreeMap::new();
    let take = |told: &mut BTreeMap<SlotId, BlockKey>| {
        let mut most = 0;
        for (share, notes) in (0..).zip(&notes) {
            let taken = notes.take();
            if taken.begins_anew.is_some() {
                told.retain(|slot, _| slot.0 % 2 != share);
            }
            let notes: Vec<_> = taken.notes().collect();
            most = most.max(notes.len());
            for note in notes {
                match note {
                    Note::Stored(entry) => drop(told.insert(entry.slot, entry.block)),
                    Note::Removed { slot, .. } => drop(told.remove(&slot)),
                    Note::Reset(_) => unreachable!("there was none"),
                }
            }
        }
        most
    };
    churn(&mut table, 1..100);
    assert!(take(&mut told) > 0);
    // The writer hangs.
    churn(&mut table, 100..30_000);
    assert_eq!(take(&mut told), 0, "they are too many to be kept");
    churn(&mut table, 30_000..30_010);
    while table.renew_indices(Tier::Object, &mut Budget::of_a_hold()) {}
    take(&mut told);
    let held = |table: &Table| -> BTreeMap<_, _> {
        residents(table, Tier::Object).into_iter().map(|entry| (entry.slot, entry.block)).collect()
    };
    assert_eq!(told, held(&table));
    churn(&mut table, 40_000..40_100);
    take(&mut told);
    assert_eq!(told, held(&table), "and then all is as before");
}

#[test]
fn of_two_that_contradict_each_other_the_later_counts() {
    let hashes = chain(0);
    let key = |depth| Chain::from(&hashes).key(depth);
    let entry = |slot, depth: usize| IndexEntry {
        slot: SlotId(slot),
        generation: 0,
        block: key(depth),
        parent: depth.checked_sub(1).map(|above| key(above).hash),
        checksum: 1,
        tenant: None,
    };
    let mut table = small_table(EvictionKind::default(), None);
    let list = [entry(1, 0), entry(2, 0), entry(3, 2), entry(3, 1), entry(9, 3), entry(99, 2)];
    assert_eq!(table.restore(Tier::Disk, &list), Restored { blocks: 2, dropped: 4 });
    assert_eq!(residents(&table, Tier::Disk), [entry(2, 0), entry(3, 1)]);
    // And a part of it may follow later.
    assert_eq!(
        table.restore(Tier::Disk, &[entry(7, 2), entry(2, 3)]),
        Restored { blocks: 1, dropped: 1 }
    );
    assert_eq!(table.matches(Chain::from(&hashes)).blocks(Tier::Disk), 3);
    assert_eq!(table.audit(), []);
}

#[test]
fn many_pins_hinder_neither_lease_nor_flush_of_a_block() {
    let mut table = small_table(EvictionKind::Lru, None);
    let hashes = vec![BlockHash::from_u128(1)];
    let chain = Chain::from(&hashes);
    assert_eq!(fill(&mut table, Tier::Host, &hashes), 0);
    let leases: Vec<_> = (0..100).map(|_| table.lease(chain, RequestInfo::default())).collect();
    assert!(leases.iter().all(|lease| lease.held().blocks(Tier::Host) == 1));
    table.take_flush(Tier::Host, 8, Trigger::Used, &mut Budget::of_a_hold());
    let tasks = table.take_effects().tasks;
    assert_eq!(tasks.len(), 1, "it goes down");
    let _ = table.land(tasks.into_iter().map(|task| task.ended(Outcome::Arrived)), Duration::ZERO);
    assert_eq!((table.matches(chain).blocks(Tier::Disk), table.has_dirty(Tier::Host)), (1, false));
    for lease in leases {
        assert_eq!(table.evict(Tier::Host, 1), 0, "somebody reads it still");
        table.release(lease);
    }
    assert_eq!((table.evict(Tier::Host, 1), table.counts(Tier::Host).free), (1, 16));
    assert_eq!(table.audit(), []);
}

#[test]
fn all_slots_come_back_after_a_reset_whatever_their_age() {
    for lives in 0..2 * LIVES + 2 {
        let mut table = small_table(EvictionKind::Lru, None);
        let (old, new) = (chain(0), chain(1));
        assert_eq!(fill(&mut table, Tier::Host, &old), 0);
        // Others come and leave meanwhile.
        for _ in 0..lives {
            let pool = &mut table.tier_mut(Tier::Host).pool;
            let frame = pool.take().unwrap();
            pool.give_back(frame);
        }
        for epoch in 1..4 {
            let _ = table.reset(epoch).unwrap();
            assert_eq!(fill(&mut table, Tier::Host, &new), 0);
            assert_eq!(table.matches(Chain::from(&new)).blocks(Tier::Host), new.len());
        }
        while table.sweep(&mut Budget::of_a_hold()) {}
        let counts = table.counts(Tier::Host);
        assert_eq!(
            (counts.resident as usize, counts.forgotten),
            (new.len(), 0),
            "after {lives} lives"
        );
        assert_eq!(counts.free + counts.resident, counts.total);
        assert_eq!(table.audit(), []);
    }
}

#[test]
fn a_withdrawn_tier_seems_absent_until_a_reset() {
    let mut table = small_table(EvictionKind::Lru, None);
    let hashes = chain(0);
    let chain = Chain::from(&hashes);
    assert_eq!(
        (fill(&mut table, Tier::Host, &hashes), fill(&mut table, Tier::Disk, &hashes)),
        (0, 0)
    );
    let early = table.lease(chain, RequestInfo::default());
    let reserved = table.reserve(Tier::Device, chain, RequestInfo::default());
    let _ = table.withdraw(Tier::Host);
    table.end_plan(reserved.transfer);
    let key = chain.key(0);
    assert!(table.lend(Tier::Host, key).is_none() && table.pin_resident(Tier::Host, key).is_none());
    assert!(table.scrub_next(Tier::Host, 0).0.is_none());
    assert_eq!(
        (table.matches(chain).blocks(Tier::Host), table.matches(chain).blocks(Tier::Disk)),
        (0, 7)
    );
    assert_eq!(
        (table.flushes_to(Tier::Host), table.flushes_to(Tier::Disk)),
        (None, Some(Tier::Object))
    );
    let refused = table.reserve(Tier::Host, chain, RequestInfo::default());
    assert_eq!((refused.frames.len(), refused.refused), (0, 7));
    table.end_plan(refused.transfer);
    let mut plan = TransferPlan::copying(Class::Load, Tier::Device, early);
    while !table.trace(&mut plan) {}
    assert!(plan.sources().all(|from| from.tier == Tier::Disk));
    let _ = table.reset(1).unwrap();
    assert_eq!(table.flushes_to(Tier::Host), Some(Tier::Disk));
    assert_eq!(fill(&mut table, Tier::Host, &hashes), 0);
    assert_eq!(table.matches(chain).blocks(Tier::Host), 7);
}
