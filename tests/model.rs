//! The real table and scheduler against a simple model, over random histories in which backends
//! finish their copies in any order, with any outcome, late or never.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvbm::scheduler::Tuning;
use kvbm::table::{Budget, Match};
use kvbm::{
    BlockHash, Chain, Class, Clock, ErrorKind, Lease, RequestInfo, Tier, Transfer, Transferred,
};
use kvbm_policies::AdmissionKind;
use kvbm_tests::follower::Follower;
use kvbm_tests::rig::{DISK, Filled, MEMORY, OBJECT, Rig, Sizes, TIGHT, TestClock, related_chain};
use kvbm_tiers::testing::{ParkedBackend, Pending};
use kvbm_tiers::{Backend, BlockKey, CopyError, CopyErrorKind, SlotId};
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

const SIZES: Sizes = Sizes { tiers: [8, 12, 16, 24], staging: 4 };
const CHAINS: usize = 7;
/// A medium may complete nothing for so long.
const LIMIT: Duration = Duration::from_millis(100);
const TUNING: Tuning = Tuning {
    timeout: LIMIT,
    object_timeout: LIMIT,
    breaker_pause: Duration::from_millis(10),
    ..TIGHT
};

#[derive(Clone, Debug)]
enum Transition {
    /// Reserves device slots for the rest of a chain and fills them.
    Fill {
        chain: usize,
        blocks: usize,
    },
    Publish(usize),
    Abandon(usize),
    /// Of `blocks` blocks of a chain, without its first `skip` ones.
    Lease {
        chain: usize,
        skip: usize,
        blocks: usize,
    },
    Release(usize),
    /// Loads, saves or prefetches, with a lease held before, if there is one, or a new one.
    Bring {
        class: Class,
        to: Tier,
        chain: usize,
        held: Option<usize>,
    },
    DropTicket(usize),
    Finish {
        which: usize,
        outcome: Outcome,
    },
    /// Media complete nothing for longer than they may.
    TimeOut,
    /// A bit of a stored block flips.
    Rot {
        tier: Tier,
        chain: usize,
        depth: usize,
    },
    /// A lease of another manager.
    Misuse {
        class: Class,
        to: Tier,
        chain: usize,
    },
    FlushAll,
    /// New weights.
    Reset,
    /// Too much of what a tier gave was wrong.
    Withdraw(Tier),
    Tick {
        after_ms: u64,
    },
    Evict {
        tier: Tier,
        blocks: usize,
    },
}

#[derive(Clone, Copy, Debug)]
enum Outcome {
    Success,
    Failure,
    Corrupt,
    Unavailable,
    NoSpace,
}

/// What may be found anywhere: blocks that were written before, and nothing else.
#[derive(Clone, Debug, Default)]
struct Model {
    /// What goes from the host tier to disk.
    rule: Option<AdmissionKind>,
    filled: Vec<(usize, usize)>,
    written: BTreeSet<u128>,
}

impl Model {
    /// Nothing of what was there is worth anything, and what is being filled neither.
    fn reset(&mut self) {
        self.written.clear();
        self.filled.iter_mut().for_each(|(_, blocks)| *blocks = 0);
    }

    fn leading_written(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|hash| self.written.contains(&hash.get())).count()
    }
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Transition;

    fn init_state() -> BoxedStrategy<Self> {
        let rule = proptest::option::of(proptest::sample::select(&AdmissionKind::ALL));
        rule.prop_map(|rule| Self { rule, ..Self::default() }).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Transition> {
        let (any, chain) = (0..64usize, 0..CHAINS);
        let stored = prop_oneof![Just(Tier::Disk), Just(Tier::Object)];
        // Blocks that lie in lower tiers only are the interesting ones.
        let tier = prop_oneof![2 => Just(Tier::Device), 2 => Just(Tier::Host), 1 => stored.clone()];
        let target = prop_oneof![
            6 => Just((Class::Load, Tier::Device)),
            4 => Just((Class::Save, Tier::Host)),
            1 => Just((Class::Save, Tier::Disk)),
            1 => Just((Class::Save, Tier::Object)),
            2 => Just((Class::Prefetch, Tier::Host)),
            1 => Just((Class::Prefetch, Tier::Disk)),
        ];
        let outcome = prop_oneof![
            12 => Just(Outcome::Success),
            1 => Just(Outcome::Failure),
            2 => Just(Outcome::Corrupt),
            1 => Just(Outcome::Unavailable),
            1 => Just(Outcome::NoSpace),
        ];
        prop_oneof![
            5 => (chain.clone(), 1..9usize).prop_map(|(chain, blocks)| Transition::Fill { chain, blocks }),
            4 => any.clone().prop_map(Transition::Publish),
            1 => any.clone().prop_map(Transition::Abandon),
            4 => (chain.clone(), prop_oneof![4 => Just(0), 1 => 1..4usize], 1..9usize)
                .prop_map(|(chain, skip, blocks)| Transition::Lease { chain, skip, blocks }),
            3 => any.clone().prop_map(Transition::Release),
            1 => (target.clone(), chain.clone())
                .prop_map(|((class, to), chain)| Transition::Misuse { class, to, chain }),
            8 => (target, chain.clone(), proptest::option::of(any.clone())).prop_map(
                |((class, to), chain, held)| Transition::Bring { class, to, chain, held }
            ),
            2 => any.clone().prop_map(Transition::DropTicket),
            20 => (any.clone(), outcome).prop_map(|(which, outcome)| Transition::Finish { which, outcome }),
            1 => Just(Transition::TimeOut),
            1 => prop_oneof![Just(Tier::Host), Just(Tier::Disk), Just(Tier::Object)].prop_map(Transition::Withdraw),
            1 => (stored, chain, 0..8usize)
                .prop_map(|(tier, chain, depth)| Transition::Rot { tier, chain, depth }),
            2 => Just(Transition::FlushAll),
            1 => Just(Transition::Reset),
            2 => (0..3_000u64).prop_map(|after_ms| Transition::Tick { after_ms }),
            3 => (tier, 1..13usize).prop_map(|(tier, blocks)| Transition::Evict { tier, blocks }),
        ]
        .boxed()
    }

    fn apply(mut state: Self, transition: &Transition) -> Self {
        match *transition {
            Transition::Fill { chain, blocks } => state.filled.push((chain, blocks)),
            Transition::Publish(which) if !state.filled.is_empty() => {
                let (n, blocks) = state.filled.swap_remove(which % state.filled.len());
                state.written.extend(related_chain(n).iter().take(blocks).map(|hash| hash.get()));
            }
            Transition::Abandon(which) if !state.filled.is_empty() => {
                state.filled.swap_remove(which % state.filled.len());
            }
            Transition::Reset => state.reset(),
            _ => {}
        }
        state
    }
}

/// A lease, and what it promises.
struct Held {
    lease: Lease,
    chain: Vec<BlockHash>,
    promised: Match,
    epoch: u64,
    /// Blocks quarantined in each tier by then. Quarantine alone may break the promise.
    quarantined: [u64; Tier::COUNT],
}

struct Waiting {
    ticket: Transfer<Transferred>,
    chain: Vec<BlockHash>,
    to: Tier,
    epoch: u64,
    /// Blocks quarantined in each tier when its lease was taken.
    quarantined: [u64; Tier::COUNT],
}

struct System {
    rig: Rig,
    /// Another manager.
    stranger: Rig,
    backends: [Arc<ParkedBackend>; 3],
    /// With their chains and epochs.
    filled: Vec<(Filled, Vec<BlockHash>, u64)>,
    epoch: u64,
    follower: Follower,
    leases: Vec<Held>,
    tickets: Vec<Waiting>,
    rotten: HashSet<(Tier, BlockKey)>,
}

impl System {
    fn new(rule: Option<AdmissionKind>) -> Self {
        let mut backends = None;
        let rig = Rig::with(TestClock::simulated(), rule, SIZES, TUNING, |places| {
            let parked =
                |routes: [_; 2]| ParkedBackend::new(places.all(), routes.to_vec()).map(Arc::new);
            let parked =
                [MEMORY, DISK, OBJECT].map(|routes| parked(routes).expect("tiers of one geometry"));
            let [memory, disk, object] = backends.insert(parked).clone();
            vec![memory as Arc<dyn Backend>, places.verified(disk), places.verified(object)]
        });
        let follower = Follower::of(&rig.core);
        Self {
            rig,
            follower,
            stranger: Rig::new(SIZES, TUNING, |_| Vec::new()),
            backends: backends.expect("made with the rig"),
            filled: Vec::new(),
            epoch: 0,
            leases: Vec::new(),
            tickets: Vec::new(),
            rotten: HashSet::new(),
        }
    }

    fn take(&mut self, transition: &Transition) {
        match *transition {
            Transition::Fill { chain: n, blocks } => {
                let hashes: Vec<_> = related_chain(n).into_iter().take(blocks).collect();
                self.filled.push((self.rig.fill(Chain::from(&hashes)), hashes, self.epoch));
            }
            Transition::Publish(which) => self.publish(which),
            Transition::Abandon(which) => {
                if let Some((filled, ..)) = pick(&mut self.filled, which) {
                    self.rig.abandon(filled);
                }
            }
            Transition::Lease { chain: n, skip, blocks } => {
                let hashes: Vec<_> = related_chain(n).into_iter().skip(skip).take(blocks).collect();
                let lease = self.rig.core.lease(Chain::from(&hashes), RequestInfo::default());
                self.hold(lease, hashes, self.epoch, self.quarantined());
            }
            Transition::Release(which) => drop(pick(&mut self.leases, which)),
            Transition::Bring { class, to, chain, held } => self.transfer(class, to, chain, held),
            Transition::DropTicket(which) => drop(pick(&mut self.tickets, which)),
            Transition::Finish { which, outcome } => self.finish(which, outcome),
            Transition::TimeOut => self.time_out(),
            Transition::Rot { tier, chain, depth } => self.rot(tier, chain, depth),
            Transition::Misuse { class, to, chain: n } => {
                let hashes = related_chain(n);
                let foreign =
                    self.stranger.core.lease(Chain::from(&hashes), RequestInfo::default());
                let refused = self.rig.core.transfer(class, to, foreign).wait().unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Invalid);
            }
            Transition::FlushAll => {
                let _ = self.rig.core.drain(Duration::ZERO);
            }
            Transition::Reset => {
                self.epoch += 1;
                self.rig.core.reset(self.epoch).expect("a greater epoch");
            }
            Transition::Withdraw(tier) => self.withdraw(tier),
            Transition::Tick { after_ms } => self.tick(after_ms),
            Transition::Evict { tier, blocks } => {
                self.rig.core.table().evict(tier, blocks);
            }
        }
    }

    /// What waits there for its end is told that nothing comes.
    fn withdraw(&self, tier: Tier) {
        self.rig.core.withdraw(tier);
        let (chains, table) = ((0..CHAINS).map(related_chain), self.rig.core.table());
        assert!(
            chains.into_iter().all(|hashes| table.matches(Chain::from(&hashes)).blocks(tier) == 0)
        );
    }

    fn publish(&mut self, which: usize) {
        let Some((filled, chain, epoch)) = pick(&mut self.filled, which) else { return };
        let ticket = self.rig.publish(filled, Chain::from(&chain));
        let quarantined = self.quarantined();
        self.tickets.push(Waiting { ticket, chain, to: Tier::Device, epoch, quarantined });
    }

    fn hold(
        &mut self,
        lease: Lease,
        chain: Vec<BlockHash>,
        epoch: u64,
        quarantined: [u64; Tier::COUNT],
    ) {
        let promised = lease.held();
        self.leases.push(Held { lease, chain, promised, epoch, quarantined });
    }

    fn transfer(&mut self, class: Class, to: Tier, n: usize, held: Option<usize>) {
        let held = held.and_then(|which| pick(&mut self.leases, which));
        let (lease, chain, epoch, quarantined) = held.map_or_else(
            || {
                let hashes = related_chain(n);
                (
                    self.rig.core.lease(Chain::from(&hashes), RequestInfo::default()),
                    hashes,
                    self.epoch,
                    self.quarantined(),
                )
            },
            |held| (held.lease, held.chain, held.epoch, held.quarantined),
        );
        let ticket = self.rig.core.transfer(class, to, lease);
        if epoch < self.epoch {
            assert_eq!(ticket.wait().unwrap_err().kind(), ErrorKind::Stale);
            return;
        }
        self.tickets.push(Waiting { ticket, chain, to, epoch, quarantined });
    }

    fn parked(&self) -> Vec<(usize, Pending)> {
        let all = self.backends.iter().enumerate();
        all.flat_map(|(index, backend)| backend.pending().into_iter().map(move |p| (index, p)))
            .collect()
    }

    fn finish(&self, which: usize, outcome: Outcome) {
        let parked = self.parked();
        if parked.is_empty() {
            return;
        }
        let (backend, Pending { id, op }) = parked[which % parked.len()];
        let fail = |kind| Err(CopyError::new(kind, "as the test says"));
        let result = match outcome {
            Outcome::Success => Ok(()),
            Outcome::Corrupt if op.from.tier > Tier::Host => fail(CopyErrorKind::Corrupt),
            Outcome::Unavailable => fail(CopyErrorKind::Unavailable),
            Outcome::NoSpace if op.to.tier > Tier::Host => fail(CopyErrorKind::NoSpace),
            Outcome::Failure | Outcome::Corrupt | Outcome::NoSpace => fail(CopyErrorKind::Io),
        };
        assert!(self.backends[backend].finish(id, result));
    }

    fn time_out(&self) {
        self.rig.clock.pass(LIMIT + Duration::from_millis(1));
        self.rig.core.tick();
    }

    fn tick(&self, after_ms: u64) {
        self.rig.clock.advance_to(self.rig.clock.now_ms() + after_ms);
        self.rig.clock.pass(Duration::from_millis(after_ms % 30));
        self.rig.core.tick();
    }

    /// Flips a bit where the medium may do so: in a block without a reader.
    fn rot(&mut self, tier: Tier, n: usize, depth: usize) {
        let hashes = related_chain(n);
        let key = self.key(&hashes, depth.min(hashes.len() - 1));
        let reads = self.parked().iter().any(|(_, pending)| pending.op.block == key);
        if let Some(slot) = self.slot(tier, key).filter(|_| !reads) {
            let store =
                if tier == Tier::Disk { &self.rig.places.disk } else { &self.rig.places.object };
            store.flip_bit(slot, depth);
            self.rotten.insert((tier, key));
        }
    }

    /// The present name of a block.
    fn key(&self, chain: &[BlockHash], block: usize) -> BlockKey {
        self.rig.core.table().enter(Chain::from(chain)).key(block)
    }

    fn slot(&self, tier: Tier, key: BlockKey) -> Option<SlotId> {
        let loan = self.rig.core.table().lend(tier, key)?;
        let slot = loan.slot();
        self.rig.core.table().return_loan(tier, loan);
        Some(slot)
    }

    fn quarantined(&self) -> [u64; Tier::COUNT] {
        Tier::ALL.map(|tier| {
            let stats = self.rig.core.table().stats(tier);
            stats.quarantined + stats.unreadable
        })
    }

    fn check(&mut self, model: &Model, quarantined_before: [u64; Tier::COUNT]) {
        assert_eq!(self.rig.core.table().audit(), []);
        self.check_blocks(model);
        let chains: Vec<_> = (0..CHAINS).map(related_chain).collect();
        self.follower.check(&self.rig.core, chains.iter().map(Chain::from));
        self.check_copies();
        self.check_leases();
        self.collect(quarantined_before);
        if self.parked().is_empty() && self.filled.is_empty() {
            assert_eq!(self.tickets.len(), 0, "nothing is under way, and a ticket has no answer");
        }
    }

    /// What can be read is what was written.
    fn check_blocks(&mut self, model: &Model) {
        for n in 0..CHAINS {
            let hashes = related_chain(n);
            let chain = self.rig.core.table().enter(Chain::from(&hashes));
            let held = self.rig.core.table().matches(chain);
            for tier in Tier::ALL {
                assert!(
                    held.blocks(tier) <= model.leading_written(&hashes),
                    "{tier} has what was never written"
                );
                for key in (0..held.blocks(tier)).map(|i| chain.key(i)) {
                    let is_intact = self.rig.is_intact(tier, key).expect("a block of the match");
                    let is_rotten = self.rotten.contains(&(tier, key));
                    assert!(is_intact || is_rotten, "wrong bytes for {key:?} in {tier}");
                    if is_intact {
                        self.rotten.remove(&(tier, key));
                    }
                }
            }
        }
    }

    /// Nothing else has a slot handle to a slot that a copy writes.
    fn check_copies(&self) {
        let parked = self.parked();
        let mut written = HashSet::new();
        for (_, Pending { op, .. }) in &parked {
            assert!(written.insert((op.to.tier, op.to.slot)), "two copies write {}", op.to);
        }
        for (_, Pending { op, .. }) in &parked {
            assert!(
                !written.contains(&(op.from.tier, op.from.slot)),
                "{} is read and written",
                op.from
            );
        }
        let mut occupied = HashMap::new();
        let chains = (0..CHAINS).map(related_chain);
        let keys = chains.flat_map(|hashes| (0..hashes.len()).map(move |i| (hashes.clone(), i)));
        for key in keys.map(|(hashes, i)| self.key(&hashes, i)).collect::<BTreeSet<_>>() {
            for tier in Tier::ALL {
                let Some(slot) = self.slot(tier, key) else { continue };
                assert!(!written.contains(&(tier, slot)), "a copy writes a resident block");
                assert_eq!(occupied.insert((tier, slot), key), None, "two blocks in one slot");
            }
        }
    }

    fn check_leases(&mut self) {
        let quarantined = self.quarantined();
        let epoch = self.epoch;
        for held in self.leases.iter().filter(|held| held.epoch == epoch) {
            let now = self.rig.core.table().matches(Chain::from(&held.chain));
            for tier in Tier::ALL {
                let is_broken = quarantined[tier.index()] > held.quarantined[tier.index()];
                let promised = held.promised.blocks(tier);
                let is_broken = is_broken || self.rig.core.table().is_withdrawn(tier);
                assert!(is_broken || now.blocks(tier) >= promised, "a leased block left {tier}");
            }
        }
    }

    /// Takes the answers that have come. They claim no more than what is there.
    fn collect(&mut self, quarantined_before: [u64; Tier::COUNT]) {
        let mut waiting = Vec::new();
        for mut request in std::mem::take(&mut self.tickets) {
            let mut context = Context::from_waker(Waker::noop());
            let Poll::Ready(answer) = Pin::new(&mut request.ticket).poll(&mut context) else {
                waiting.push(request);
                continue;
            };
            let Waiting { chain, to, epoch, quarantined, .. } = request;
            let transferred = answer.expect("the core is there");
            if epoch < self.epoch {
                let held = transferred.lease.held().longest();
                assert_eq!((transferred.blocks, transferred.copied, held), (0, 0, 0), "it landed");
            }
            let there = self.rig.core.table().matches(Chain::from(&chain));
            assert!(transferred.blocks.max(transferred.copied) <= chain.len(), "{transferred:?}");
            if self.quarantined()[to.index()] == quarantined_before[to.index()] {
                assert!(
                    transferred.blocks <= there.blocks(to),
                    "{to} has {there:?}, not {transferred:?}"
                );
            }
            if chain.len() % 2 == 0 {
                self.hold(transferred.lease, chain, epoch, quarantined);
            }
        }
        self.tickets = waiting;
    }

    /// Lets everything end, overdue or not. Then every slot is free.
    fn end(mut self, model: &Model) {
        for (filled, ..) in std::mem::take(&mut self.filled) {
            self.rig.abandon(filled);
        }
        while !self.parked().is_empty() {
            self.finish(0, Outcome::Success);
        }
        let quarantined = self.quarantined();
        self.check(model, quarantined);
        self.leases.clear();
        let is_withdrawn = |&tier: &Tier| self.rig.core.table().is_withdrawn(tier);
        if Tier::ALL.iter().any(is_withdrawn) {
            self.rig.core.reset(self.epoch + 1).expect("a greater epoch");
            assert!(!Tier::ALL.iter().any(is_withdrawn));
        }
        let mut table = self.rig.core.table();
        while table.sweep(&mut Budget::of_a_hold()) {}
        for tier in Tier::ALL {
            table.block_flushes(tier, true);
        }
        for tier in Tier::ALL {
            table.evict(tier, SIZES.tiers[tier.index()] as usize);
            let counts = table.counts(tier);
            let left = counts.resident + counts.filling + counts.forgotten;
            assert_eq!(left, 0, "{tier} cannot be emptied: {counts:?}");
            assert_eq!(counts.free, counts.total, "{tier}: {counts:?}");
        }
        assert!(table.is_empty());
        drop(table);
        let staging = self.rig.core.staging();
        assert_eq!(
            (staging.idle, staging.lost),
            (SIZES.staging as usize, 0),
            "staging slots leaked"
        );
    }
}

fn pick<T>(from: &mut Vec<T>, which: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(which % from.len()))
}

struct Manager;

impl StateMachineTest for Manager {
    type SystemUnderTest = System;
    type Reference = Model;

    fn init_test(model: &Model) -> System {
        System::new(model.rule)
    }

    fn apply(mut system: System, model: &Model, transition: Transition) -> System {
        let quarantined = system.quarantined();
        system.take(&transition);
        system.check(model, quarantined);
        system
    }

    fn teardown(system: System, model: Model) {
        system.end(&model);
    }
}

/// `PROPTEST_CASES` asks for more.
fn config() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig { cases: 4 * usual.cases, failure_persistence: None, ..usual }
}

prop_state_machine! {
    #![proptest_config(config())]

    #[test]
    fn no_history_breaks_a_promise(sequential 1..150 => Manager);
}
