//! Random histories of a small table, with every invariant checked after every step.

use kvbm_policies::admission::{Edge, Side};
use kvbm_policies::eviction::EvictionKind;
use kvbm_policies::{AdmissionKind, Hints, Moment};
use kvbm_tiers::{BlockKey, Frame, FramePool, Tier};
use proptest::prelude::*;

use super::{Defect, FlushRun, Grip, Match, MissReason, RunId, Table, TierSpec, Usage};
use crate::hash::{BlockHash, Chain};

const SLOTS: [(Tier, u32, Option<Tier>); 4] = [
    (Tier::Device, 12, None),
    (Tier::Host, 16, Some(Tier::Disk)),
    (Tier::Disk, 24, Some(Tier::Object)),
    (Tier::Object, 64, None),
];

fn small_table(eviction: EvictionKind, admission: Option<AdmissionKind>) -> Table {
    Table::new(SLOTS.map(|(tier, slots, flush_to)| TierSpec {
        pool: FramePool::new(tier, slots),
        policy: eviction.build(slots),
        flush_to,
        admission: admission.map(|kind| {
            kind.build(&Edge {
                upper: Side { capacity: slots, eviction },
                lower: Side { capacity: 2 * slots, eviction },
            })
        }),
    }))
}

/// Chain number `n`: four families that share their first three blocks, in members of different length.
fn chain(n: u8) -> Vec<BlockHash> {
    let (family, member) = (u128::from(n % 4), u128::from(n / 4 % 3));
    let shared = (0..3).map(|i| 1000 * family + i + 1);
    let own = (0..4 + member).map(|i| 1000 * family + 100 * (member + 1) + i);
    shared.chain(own).map(|h| BlockHash::from_u128(h * 0x1_0000_0001_0000_0001)).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Reserve { tier: usize, chain: u8 },
    Finish { which: usize, entry: usize, outcome: u8 },
    Lease(u8),
    Release(usize),
    Quarantine { tier: usize, chain: u8, depth: usize },
    Flush { tier: usize, blocks: usize },
    Headroom { tier: usize, slots: usize },
    Block { tier: usize, blocked: bool },
    Evict { tier: usize, blocks: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let finish = (0..64usize, 0..16usize, 0..12u8);
    prop_oneof![
        4 => (0..2usize, 0..12u8).prop_map(|(tier, chain)| Step::Reserve { tier, chain }),
        12 => finish.prop_map(|(which, entry, outcome)| Step::Finish { which, entry, outcome }),
        3 => (0..12u8).prop_map(Step::Lease),
        3 => (0..16usize).prop_map(Step::Release),
        1 => (0..4usize, 0..12u8, 0..9usize)
            .prop_map(|(tier, chain, depth)| Step::Quarantine { tier, chain, depth }),
        4 => (1..3usize, 1..9usize).prop_map(|(tier, blocks)| Step::Flush { tier, blocks }),
        2 => (1..3usize, 1..9usize).prop_map(|(tier, slots)| Step::Headroom { tier, slots }),
        1 => (1..3usize, any::<bool>()).prop_map(|(tier, blocked)| Step::Block { tier, blocked }),
        1 => (0..4usize, 1..5usize).prop_map(|(tier, blocks)| Step::Evict { tier, blocks }),
    ]
}

/// Titles that are out, as a scheduler would hold them.
struct Work {
    run: RunId,
    frames: Vec<(usize, Frame)>,
    grip: Option<Grip>,
}

struct History {
    table: Table,
    works: Vec<Work>,
    grips: Vec<(Grip, Vec<BlockHash>)>,
    /// Titles that overdue copies keep.
    overdue: Vec<Frame>,
}

impl History {
    fn take(&mut self, step: &Step) {
        match *step {
            Step::Reserve { tier, chain: n } => self.reserve(Tier::ALL[tier], n),
            Step::Finish { which, entry, outcome } => self.finish(which, entry, outcome),
            Step::Lease(n) => {
                let hashes = chain(n);
                let grip = self.table.lease(Chain::from(&hashes), Usage::default());
                self.grips.push((grip, hashes));
            }
            Step::Release(which) if !self.grips.is_empty() => {
                let (grip, _) = self.grips.swap_remove(which % self.grips.len());
                self.table.release(grip);
            }
            Step::Quarantine { tier, chain: n, depth } => {
                let hashes = chain(n);
                let key = Chain::from(&hashes).key(depth.min(hashes.len() - 1));
                let defect = if depth % 2 == 0 { Defect::Corrupt } else { Defect::Unreadable };
                quarantine(&mut self.table, Tier::ALL[tier], key, defect);
            }
            Step::Flush { tier, blocks } => {
                let runs = self.table.take_flush(Tier::ALL[tier], blocks, Moment::Used);
                self.start(runs);
            }
            Step::Headroom { tier, slots } => {
                let runs = self.table.make_headroom(Tier::ALL[tier], slots, 4);
                self.start(runs);
            }
            Step::Block { tier, blocked } => {
                self.table.block_flushes(Tier::ALL[tier], blocked);
            }
            Step::Evict { tier, blocks } => {
                self.table.evict(Tier::ALL[tier], blocks);
            }
            Step::Release(_) => {}
        }
    }

    fn reserve(&mut self, tier: Tier, n: u8) {
        let hashes = chain(n);
        if let Some((run, frames)) = self.table.reserve(tier, Chain::from(&hashes), Usage::default()).run {
            self.works.push(Work { run, frames: frames.into_iter().enumerate().collect(), grip: None });
        }
    }

    fn start(&mut self, runs: Vec<FlushRun>) {
        for FlushRun { run, grip, copies, .. } in runs {
            let frames = copies.into_iter().map(|(_, _, frame)| frame).enumerate().collect();
            self.works.push(Work { run, frames, grip: Some(grip) });
        }
    }

    fn finish(&mut self, which: usize, entry: usize, outcome: u8) {
        if self.works.is_empty() {
            return;
        }
        let which = which % self.works.len();
        let work = &mut self.works[which];
        let (entry, frame) = work.frames.swap_remove(entry % work.frames.len());
        match outcome {
            0 => self.table.failed(work.run, entry, frame),
            1 if self.overdue.len() < 4 => {
                self.table.overdue(work.run, entry, frame.tier());
                self.overdue.push(frame);
            }
            2 if !self.overdue.is_empty() => {
                self.table.came_back(self.overdue.remove(0));
                self.table.filled(work.run, entry, frame);
            }
            _ => self.table.filled(work.run, entry, frame),
        }
        if self.works[which].frames.is_empty() {
            let work = self.works.swap_remove(which);
            self.table.close(work.run, None);
            work.grip.into_iter().for_each(|grip| self.table.release(grip));
        }
    }

    fn check(&self) {
        assert_eq!(self.table.audit(), []);
        for n in 0..12 {
            let hashes = chain(n);
            assert_eq!(self.table.matches(Chain::from(&hashes)), self.linear_match(Chain::from(&hashes)));
        }
    }

    /// The match by asking for every block.
    fn linear_match(&self, chain: Chain<'_>) -> Match {
        let held = |tier: Tier, i: usize| {
            let record = self.table.find(chain.key(i));
            record.is_some_and(|record| self.table.records.at(record).resident().has(tier))
        };
        let blocks = |tier| (0..chain.len()).take_while(|&i| held(tier, i)).count() as u32;
        Match::new(Tier::ALL.map(blocks))
    }

    /// Lets everything end; then every slot can be emptied again.
    fn end(mut self) {
        while !self.works.is_empty() {
            self.finish(0, 0, 9);
        }
        let lost: u32 = Tier::ALL.iter().map(|&tier| self.table.counts(tier).lost).sum();
        assert_eq!(lost as usize, self.overdue.len());
        self.overdue.drain(..).for_each(|frame| self.table.came_back(frame));
        for (grip, _) in std::mem::take(&mut self.grips) {
            self.table.release(grip);
        }
        self.check();
        for tier in Tier::ALL {
            self.table.block_flushes(tier, true);
        }
        for (tier, slots, _) in SLOTS {
            self.table.evict(tier, slots as usize);
            let counts = self.table.counts(tier);
            assert_eq!((counts.resident, counts.filling), (0, 0), "{tier} cannot be emptied: {counts:?}");
            assert_eq!(counts.free, counts.total);
        }
        assert!(self.table.is_empty());
        assert_eq!(self.table.audit(), []);
    }
}

/// Drops a block where it is resident.
fn quarantine(table: &mut Table, tier: Tier, key: BlockKey, defect: Defect) {
    if let Some((found, grip)) = table.pin_resident(tier, key) {
        table.release(grip);
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
    ) {
        let mut history = History { table: small_table(eviction, admission), works: Vec::new(), grips: Vec::new(), overdue: Vec::new() };
        for step in &steps {
            history.take(step);
            history.check();
        }
        history.end();
    }
}

#[test]
fn a_full_tier_declines_what_is_worth_less_than_what_it_has() {
    let mut table = small_table(EvictionKind::Hazard, None);
    let tier = Tier::Object;
    for n in 0..12 {
        fill(&mut table, tier, &chain(n));
    }
    assert_eq!(table.counts(tier).free, 0);
    let before = table.counts(tier).resident;
    let parting = Usage { hints: Hints { will_not_return: true, ..Hints::default() }, request: None };
    let newcomers: Vec<_> = (0..5).map(|i| BlockHash::from_u128((900 + i) << 64)).collect();
    let reserved = table.reserve(tier, Chain::from(&newcomers), parting);
    assert!(reserved.run.is_none(), "{reserved:?}");
    assert_eq!((reserved.declined, reserved.refused), (newcomers.len(), 0));
    assert_eq!(table.counts(tier).resident, before);
    let miss = table.miss(Chain::from(&newcomers), &Match::default());
    assert_eq!(miss.map(|miss| miss.reason), Some(MissReason::Admission));
    assert_eq!(table.audit(), []);
}

#[test]
fn a_leased_chain_survives_pressure() {
    let mut table = small_table(EvictionKind::default(), None);
    let held = chain(8);
    fill(&mut table, Tier::Device, &held);
    let grip = table.lease(Chain::from(&held), Usage::default());
    for n in [1, 5, 9, 2, 6, 10] {
        fill(&mut table, Tier::Device, &chain(n));
    }
    assert_eq!(table.matches(Chain::from(&held)).blocks(Tier::Device), held.len());
    table.release(grip);
    assert_eq!(fill(&mut table, Tier::Device, &chain(11)), 0);
}

fn fill(table: &mut Table, tier: Tier, hashes: &Vec<BlockHash>) -> usize {
    let reserved = table.reserve(tier, Chain::from(hashes), Usage::default());
    if let Some((run, frames)) = reserved.run {
        (0..).zip(frames).for_each(|(entry, frame)| table.filled(run, entry, frame));
        table.close(run, None);
    }
    reserved.refused
}

/// A lease pins the deepest block; when that is quarantined, somebody may still be reading what lies above.
#[test]
fn readers_of_a_quarantined_chain_keep_its_ancestors() {
    let mut table = small_table(EvictionKind::default(), None);
    let held = chain(8);
    fill(&mut table, Tier::Device, &held);
    let grip = table.lease(Chain::from(&held), Usage::default());
    for depth in [6, 4] {
        quarantine(&mut table, Tier::Device, Chain::from(&held).key(depth), Defect::Corrupt);
        assert_eq!(table.evict(Tier::Device, 12), 0);
        assert_eq!(table.matches(Chain::from(&held)).blocks(Tier::Device), depth);
    }
    let free = table.counts(Tier::Device).free;
    assert_eq!(free as usize, 12 - held.len(), "a slot that is being read was freed");
    table.release(grip);
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
