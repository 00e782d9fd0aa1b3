//! What one hold of the table's lock may do.
//!
//! A bound on changes does not bound a loop that mostly looks, nor the other way round. So every
//! call that loops under the lock pays for both from one budget. When that is spent, the call says
//! that there is more, and its caller goes on with a fresh budget once others have had the table.

/// What is left of a hold.
#[derive(Debug)]
#[must_use = "a loop without it may take as long as the table is large"]
pub struct Budget {
    looks: usize,
}

/// Looks in a hold, a cache miss or two each: some 300 µs.
const HOLD: usize = 4_096;
/// Looks that a change costs: a block takes a slot, leaves one or goes into a queue.
const CHANGE: usize = 16;

impl Budget {
    /// The budget of a whole hold.
    pub const fn of_a_hold() -> Self {
        Self { looks: HOLD }
    }

    /// Pays for a look. False: it is spent.
    pub const fn look(&mut self) -> bool {
        self.pay(1)
    }

    /// Pays for a change. False: it is spent. The last change may cost more than was left.
    pub const fn change(&mut self) -> bool {
        self.pay(CHANGE)
    }

    /// Whether nothing is left.
    pub const fn is_spent(&self) -> bool {
        self.looks == 0
    }

    /// Pays for `looks` looks, if there is enough.
    pub(super) const fn pay(&mut self, looks: usize) -> bool {
        let can_pay = self.looks > 0;
        self.looks = self.looks.saturating_sub(looks);
        can_pay
    }

    /// Pays for changes made together.
    pub(super) const fn pay_changes(&mut self, changes: usize) {
        self.looks = self.looks.saturating_sub(changes.saturating_mul(CHANGE));
    }

    pub(super) const fn looks_left(&self) -> usize {
        self.looks
    }

    /// A budget of as many looks as there are changes left, for looks that may each lead to a
    /// change. It takes all of this one.
    pub(super) const fn changes_as_looks(&mut self) -> Self {
        let looks = self.looks.div_ceil(CHANGE);
        self.looks = 0;
        Self { looks }
    }
}

#[cfg(test)]
thread_local! {
    static TOUCHED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Counts each read or write of a record, a slot or an entry of a queue. Tests compare this with
/// the budget: what was paid would not show a loop that forgets to pay.
#[inline]
pub(super) fn touched() {
    #[cfg(test)]
    TOUCHED.with(|touched| touched.set(touched.get() + 1));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use kvbm_policies::admission::WriteBack;
    use kvbm_policies::{
        Access, Admission, BlockId, Candidates, Eviction, EvictionKind, Forest, Hints, ReuseModel,
        Trigger,
    };
    use kvbm_tiers::{BlockKey, FramePool, IndexEntry, SlotId, Tier};

    use super::super::testing::chain;
    use super::*;
    use crate::names::hash::{BlockHash, Chain};
    use crate::table::{
        Effects, Pins, Reply, RequestInfo, Table, TierSet, TierSpec, TransferCursor, TransferPlan,
    };
    use crate::task::{Class, Defect, Outcome};

    /// Records, slots and entries that a hold may touch, however it spends its budget: a change
    /// touches a block, its parent and its neighbours in several tiers. The tables below have
    /// several times as many blocks.
    const MOST: usize = 4 * HOLD;
    const SLOTS: u32 = 20_000;

    fn spec(tier: Tier, eviction: EvictionKind, flush_to: Option<Tier>) -> TierSpec {
        TierSpec {
            pool: FramePool::new(tier, SLOTS),
            policy: eviction.build(SLOTS),
            flush_to,
            admission: None,
        }
    }

    fn host_above_disk() -> Table {
        let (host, disk) = (Tier::Host, Tier::Disk);
        Table::new([spec(host, EvictionKind::Lru, Some(disk)), spec(disk, EvictionKind::Lru, None)])
    }

    /// Does what one hold does.
    fn hold<T>(work: impl FnOnce(&mut Budget) -> T) -> T {
        TOUCHED.set(0);
        let done = work(&mut Budget::of_a_hold());
        assert!(
            TOUCHED.get() <= MOST,
            "a hold touched {} records, slots and entries",
            TOUCHED.get()
        );
        done
    }

    /// Does, in holds, what follows from a change.
    fn publish_all(table: &mut Table, mut effects: Effects) -> Effects {
        let mut all = Effects::default();
        loop {
            all.tasks.append(&mut effects.tasks);
            all.ended.append(&mut effects.ended);
            if !effects.has_more {
                return all;
            }
            effects = hold(|_| table.publish_more());
        }
    }

    fn plan(
        table: &mut Table,
        tier: Tier,
        hashes: &[BlockHash],
        info: RequestInfo,
    ) -> TransferPlan {
        let mut plan = table.plan_filling(tier, Chain::from(hashes), info);
        while !hold(|_| table.extend(&mut plan)) {}
        plan
    }

    /// Returns how many blocks of the chain the tier then has.
    fn save_for(table: &mut Table, tier: Tier, hashes: &[BlockHash], info: RequestInfo) -> usize {
        let mut plan = plan(table, tier, hashes, info);
        let mut reserved = table.reserved(&mut plan);
        let mut first = 0;
        while !reserved.frames.is_empty() {
            let step = reserved.frames.len().min(64);
            let effects =
                hold(|_| table.fill(reserved.transfer, first, reserved.frames.drain(..step)));
            drop(publish_all(table, effects));
            first += step;
        }
        table.end_plan(reserved.transfer);
        drop(table.take_effects());
        table.matches(Chain::from(hashes)).blocks(tier)
    }

    fn save(table: &mut Table, tier: Tier, hashes: &[BlockHash]) -> usize {
        save_for(table, tier, hashes, RequestInfo::default())
    }

    fn lease(table: &mut Table, hashes: &[BlockHash]) -> Pins {
        table.lease(Chain::from(hashes), RequestInfo::default())
    }

    #[test]
    fn a_disk_outage_costs_no_long_hold_and_heals() {
        let mut table = host_above_disk();
        table.block_flushes(Tier::Host, true);
        for n in 0..4 * SLOTS / 64 {
            assert_eq!(save(&mut table, Tier::Host, &chain(n, 64)), 64);
        }
        let resident = table.counts(Tier::Host).resident as usize;
        assert_eq!(table.dirty(Tier::Host), resident, "each block waits once, and none that left");
        hold(|_| table.block_flushes(Tier::Host, false));
        flush_all(&mut table);
        assert_eq!(table.counts(Tier::Disk).resident as usize, resident);
        assert_eq!(table.audit(), []);
    }

    #[test]
    fn flushes_that_failed_are_tried_again_in_bounded_holds() {
        let mut table = host_above_disk();
        (0..SLOTS / 50).for_each(|n| _ = save(&mut table, Tier::Host, &chain(n, 50)));
        while table.dirty(Tier::Host) > 0 {
            hold(|hold| table.take_flush(Tier::Host, 64, Trigger::Used, hold));
            let failed = Outcome::Failed { halfway: false, defect: None };
            let tasks = table.take_effects().tasks;
            let effects =
                hold(|_| table.land(tasks.iter().map(|task| task.ended(failed)), Duration::ZERO));
            drop(publish_all(&mut table, effects));
        }
        hold(|_| table.end_pauses(Tier::Host));
        flush_all(&mut table);
        assert_eq!(table.counts(Tier::Disk).resident, SLOTS);
        assert_eq!(table.audit(), []);
    }

    /// Keeps what it has: of the blocks that are shown to it, the last one leaves first.
    #[derive(Debug, Default)]
    struct KeepsAll {
        last_shown: Option<BlockId>,
    }

    impl Eviction for KeepsAll {
        fn touch(&mut self, access: &Access, _: &dyn Forest, _: &ReuseModel) {
            self.last_shown = Some(access.deepest).filter(|block| block.0 >= SLOTS);
        }

        fn removed(&mut self, _: BlockId, exposed: Option<BlockId>, _: &ReuseModel) {
            self.last_shown = exposed.filter(|block| block.0 >= SLOTS);
        }

        fn victim(&mut self, _: &dyn Forest, _: &ReuseModel) -> Option<BlockId> {
            self.last_shown
        }

        fn released(&mut self, _: BlockId, _: &ReuseModel) {}

        fn may_decline(&self) -> bool {
            true
        }
    }

    /// Flushes until no block of the host waits; returns the holds that it took.
    fn holds_to_flush(table: &mut Table, trigger: Trigger) -> usize {
        let mut holds = 0;
        while table.dirty(Tier::Host) > 0 {
            holds += 1;
            assert!(holds < 10_000, "{} blocks wait without end", table.dirty(Tier::Host));
            hold(|hold| table.take_flush(Tier::Host, 64, trigger, hold));
        }
        holds
    }

    #[test]
    fn a_full_disk_leaves_no_long_prompt_waiting() {
        let mut table = Table::new([
            spec(Tier::Host, EvictionKind::Lru, Some(Tier::Disk)),
            TierSpec {
                policy: Box::<KeepsAll>::default(),
                ..spec(Tier::Disk, EvictionKind::Lru, None)
            },
        ]);
        (0..SLOTS / 50).for_each(|n| _ = save(&mut table, Tier::Disk, &chain(n, 50)));
        assert_eq!(save(&mut table, Tier::Host, &chain(SLOTS, 6_000)), 6_000);
        let holds = holds_to_flush(&mut table, Trigger::Used);
        assert!(holds < 200, "{holds} holds to be turned away");
        assert_eq!(table.counts(Tier::Disk).resident, SLOTS, "nothing left for it");
        // The prompt goes on: it is asked about again, once.
        assert_eq!(save(&mut table, Tier::Host, &chain(SLOTS, 6_300)), 6_300);
        let holds = holds_to_flush(&mut table, Trigger::Used);
        assert!(holds < 200, "{holds} holds to be turned away again");
        assert_eq!(table.evict(Tier::Host, 6_300), 6_300, "what is not wanted below may leave");
        assert_eq!(save(&mut table, Tier::Host, &chain(SLOTS + 1, 300)), 300);
        assert!(
            holds_to_flush(&mut table, Trigger::Used) < 20,
            "what was turned away last is gone"
        );
        assert_eq!(table.audit(), []);
    }

    #[test]
    fn what_the_disk_declines_leaves_a_host_that_needs_room() {
        let host = TierSpec {
            admission: Some(Box::new(WriteBack)),
            ..spec(Tier::Host, EvictionKind::Lru, Some(Tier::Disk))
        };
        let disk = TierSpec {
            policy: Box::<KeepsAll>::default(),
            ..spec(Tier::Disk, EvictionKind::Lru, None)
        };
        let mut table = Table::new([host, disk]);
        (0..SLOTS / 50).for_each(|n| _ = save(&mut table, Tier::Disk, &chain(n, 50)));
        for n in 0..SLOTS / 200 {
            assert_eq!(save(&mut table, Tier::Host, &chain(SLOTS + n, 200)), 200);
        }
        let mut holds = 0;
        while hold(|hold| table.make_headroom(Tier::Host, 500, 64, hold)) {
            holds += 1;
            assert!(holds < 2_000, "{} are free", table.counts(Tier::Host).free);
        }
        assert!(table.counts(Tier::Host).free >= 500, "{} are free", table.counts(Tier::Host).free);
    }

    #[test]
    fn what_was_just_sent_is_not_taken_for_turned_away() {
        let mut table = host_above_disk();
        let fail = |table: &mut Table| {
            hold(|hold| table.take_flush(Tier::Host, 64, Trigger::Used, hold));
            let failed = Outcome::Failed { halfway: false, defect: None };
            let tasks = table.take_effects().tasks;
            let effects =
                hold(|_| table.land(tasks.iter().map(|task| task.ended(failed)), Duration::ZERO));
            drop(publish_all(table, effects));
        };
        assert_eq!(save(&mut table, Tier::Host, &chain(0, 2)), 2);
        fail(&mut table);
        // The third block waits before those that it hangs on.
        assert_eq!(save(&mut table, Tier::Host, &chain(0, 3)), 3);
        table.end_pauses(Tier::Host);
        while hold(|hold| table.revive_flushes(Tier::Host, hold)) {}
        fail(&mut table);
        assert_eq!(save(&mut table, Tier::Host, &chain(0, 5)), 5);
        table.end_pauses(Tier::Host);
        flush_all(&mut table);
        assert_eq!(table.counts(Tier::Disk).resident, 5);
        assert_eq!(table.audit(), []);
    }

    #[derive(Debug)]
    struct RefusesAll;

    impl Admission for RefusesAll {
        fn admit(
            &mut self,
            _: Candidates,
            _: Trigger,
            _: u64,
            _: &dyn Forest,
            _: &ReuseModel,
        ) -> u32 {
            0
        }
    }

    #[test]
    fn a_long_prompt_is_refused_in_few_holds() {
        for trigger in [Trigger::Used, Trigger::Leaving] {
            let host = TierSpec {
                admission: Some(Box::new(RefusesAll)),
                ..spec(Tier::Host, EvictionKind::Lru, Some(Tier::Disk))
            };
            let mut table = Table::new([host, spec(Tier::Disk, EvictionKind::Lru, None)]);
            assert_eq!(save(&mut table, Tier::Host, &chain(SLOTS, 6_000)), 6_000);
            let holds = holds_to_flush(&mut table, trigger);
            assert!(holds < 200, "{trigger:?}: {holds} holds to be refused");
            assert_eq!(table.counts(Tier::Disk).resident, 0);
        }
    }

    fn flush_all(table: &mut Table) {
        while hold(|hold| table.revive_flushes(Tier::Host, hold)) {}
        while table.has_dirty(Tier::Host) {
            hold(|hold| table.take_flush(Tier::Host, 64, Trigger::Used, hold));
            let tasks = table.take_effects().tasks;
            assert!(!tasks.is_empty(), "nothing goes down");
            let landed = tasks.iter().map(|task| task.ended(Outcome::Arrived));
            let effects = hold(|_| table.land(landed, Duration::ZERO));
            drop(publish_all(table, effects));
        }
    }

    #[test]
    fn no_search_for_room_passes_all_leaves_that_wait() {
        for eviction in EvictionKind::ALL {
            let mut table = Table::new([
                spec(Tier::Host, eviction, Some(Tier::Disk)),
                spec(Tier::Disk, eviction, None),
            ]);
            for n in 0..SLOTS {
                assert_eq!(save(&mut table, Tier::Host, &chain(n, 1)), 1, "{eviction}");
            }
            assert_eq!(
                save(&mut table, Tier::Host, &chain(SLOTS, 64)),
                0,
                "{eviction}: all are to be flushed first"
            );
            flush_all(&mut table);
            assert_eq!(save(&mut table, Tier::Host, &chain(SLOTS, 64)), 64, "{eviction}");
        }
    }

    #[test]
    fn a_tenant_is_forgotten_in_bounded_holds() {
        let mut table = host_above_disk();
        let info = RequestInfo {
            hints: Hints { tenant: Some(7), ..Hints::default() },
            request: None,
            ..RequestInfo::default()
        };
        let prompts = SLOTS / 10;
        // The first blocks of all prompts have neighbouring numbers.
        for blocks in [1, 10] {
            (0..prompts)
                .for_each(|n| _ = save_for(&mut table, Tier::Host, &chain(n, blocks), info));
        }
        flush_all(&mut table);
        let coming = plan(&mut table, Tier::Host, &chain(prompts, 5_000), info);
        table.begin_forgetting(7);
        let mut next = Some(TransferCursor::default());
        while let Some(from) = next {
            next = hold(|hold| table.end_forgotten(from, hold));
            let effects = table.take_effects();
            drop(publish_all(&mut table, effects));
        }
        let mut next = Some(0);
        while let Some(from) = next {
            next = hold(|hold| table.drop_forgotten(from, hold));
            while hold(|_| table.drop_more()) {}
            drop(table.take_effects());
        }
        assert_eq!((table.counts(Tier::Host).resident, table.counts(Tier::Disk).resident), (0, 0));
        assert_eq!(table.audit(), []);
        drop(coming);
    }

    #[test]
    fn a_dropped_block_costs_no_look_at_descendants_elsewhere() {
        let mut table = host_above_disk();
        let root = chain(0, 1);
        for n in 1..SLOTS {
            save(&mut table, Tier::Disk, &[&root[..], &chain(n, 1)].concat());
        }
        save(&mut table, Tier::Host, &root);
        let key = table.enter(Chain::from(&root)).key(0);
        assert_eq!(hold(|_| table.quarantine_resident(Tier::Host, key, Defect::Corrupt)), 1);
        assert_eq!(table.matches(Chain::from(&root)).blocks(Tier::Disk), 1);
        assert_eq!(table.audit(), []);
    }

    #[test]
    fn all_of_a_tier_is_evicted_in_bounded_holds() {
        let mut table = Table::new([spec(Tier::Host, EvictionKind::Hazard, None)]);
        (0..SLOTS / 50).for_each(|n| _ = save(&mut table, Tier::Host, &chain(n, 50)));
        let mut evicted = 0;
        while evicted < SLOTS as usize {
            evicted += hold(|hold| table.evict_some(Tier::Host, SLOTS as usize, hold));
        }
        assert!(table.is_empty());
    }

    #[test]
    fn a_full_last_tier_weighs_prompts_in_bounded_holds() {
        let mut table = Table::new([spec(Tier::Host, EvictionKind::Hazard, None)]);
        (0..SLOTS / 50).for_each(|n| _ = save(&mut table, Tier::Host, &chain(n, 50)));
        for n in 0..4 {
            let kept = save(&mut table, Tier::Host, &chain(1_000_000 + n, 4_000));
            let declined = table.stats(Tier::Host).declined;
            assert!(kept == 4_000 || declined > 0, "{kept} were kept, {declined} declined");
        }
        assert_eq!(table.audit(), []);
    }

    #[test]
    fn a_chain_awaits_room_in_its_directory_in_bounded_holds() {
        // One in 32 of a directory's slots may be free while a chain of the other waits: 2,500.
        let slots = 8 * SLOTS;
        let pool = FramePool::sharded(Tier::Disk, slots, 2);
        let policy = EvictionKind::Lru.build(slots);
        let mut table = Table::new([TierSpec { pool, policy, flush_to: None, admission: None }]);
        let key = |slot: u32| Chain::from(&chain(slot, 1)[..]).key(0);
        let entry = |slot: u32| {
            let (slot, block): (_, BlockKey) = (SlotId(slot), key(slot));
            IndexEntry { slot, generation: 0, block, parent: None, checksum: 1, tenant: None }
        };
        // All blocks that leave first lie in the second directory.
        let order = (1..slots).step_by(2).chain((0..slots).step_by(2));
        table.restore(Tier::Disk, &order.map(entry).collect::<Vec<_>>());
        let grown = [&chain(0, 1)[..], &chain(slots, 3)].concat();
        assert_eq!(save(&mut table, Tier::Disk, &grown), 4);
        assert_eq!(table.audit(), []);
    }

    #[test]
    fn a_long_load_stays_whole_in_a_full_host() {
        let tiers = [Tier::Device, Tier::Host, Tier::Disk];
        let mut table = Table::new(tiers.map(|tier| spec(tier, EvictionKind::Lru, None)));
        for n in 0..SLOTS / 50 {
            save(&mut table, Tier::Host, &chain(n, 50));
            save(&mut table, Tier::Device, &chain(n, 50));
        }
        let hashes = chain(SLOTS, 2_000);
        save(&mut table, Tier::Disk, &hashes);
        let mut load = TransferPlan::copying(Class::Load, Tier::Device, lease(&mut table, &hashes));
        while !hold(|_| table.trace(&mut load)) {}
        load.pass_host_from(TierSet::default().with(Tier::Disk));
        while !hold(|_| table.extend(&mut load)) {}
        let tasks = table.take_effects().tasks;
        assert_eq!(tasks.iter().filter(|task| task.via.is_some()).count(), hashes.len());
    }

    #[test]
    fn the_rest_of_a_long_transfer_ends_in_bounded_holds() {
        let mut table = Table::new([spec(Tier::Host, EvictionKind::Lru, None)]);
        let hashes = chain(0, SLOTS - 1_000);
        let mut first = plan(&mut table, Tier::Host, &hashes, RequestInfo::default());
        let reserved = table.reserved(&mut first);
        // Another chain hangs on its last block.
        let longer = [&hashes[..], &chain(1, 1_000)].concat();
        let mut second = plan(&mut table, Tier::Host, &longer, RequestInfo::default());
        let behind = table.reserved(&mut second);
        let effects = hold(|_| table.cancel(reserved.transfer));
        assert!(effects.has_more, "it is too long for one hold");
        drop(publish_all(&mut table, effects));
        assert!(table.is_empty(), "{} records are left", table.len());
        for mut reserved in [reserved, behind] {
            let all = reserved.frames.drain(..);
            let effects = table.abandon(reserved.transfer, 0, all);
            drop(publish_all(&mut table, effects));
            table.end_plan(reserved.transfer);
            drop(table.take_effects());
        }
        assert_eq!(table.counts(Tier::Host).free, SLOTS);
        assert_eq!(
            save(&mut table, Tier::Host, &hashes),
            hashes.len(),
            "and then it comes all the same"
        );
    }

    #[test]
    fn closing_ends_long_transfers_in_bounded_holds() {
        let mut table = host_above_disk();
        let hashes = chain(0, SLOTS);
        save(&mut table, Tier::Host, &hashes);
        let pins = lease(&mut table, &hashes);
        let mut down = TransferPlan::copying(Class::Save, Tier::Disk, pins);
        while !hold(|_| table.trace(&mut down)) {}
        while !hold(|_| table.extend(&mut down)) {}
        table.finish_plan(&mut down, Reply::new(drop), Duration::ZERO);
        let tasks = table.take_effects().tasks;
        assert_eq!(tasks.len(), SLOTS as usize);
        hold(|_| table.close());
        let (mut next, mut ended) = (Some(0), 0);
        while let Some(from) = next {
            next = hold(|hold| table.end_next(from, hold));
            let effects = table.take_effects();
            ended += publish_all(&mut table, effects).ended.len();
        }
        assert_eq!(ended, 1, "its caller is answered");
    }

    #[test]
    fn what_a_reset_left_goes_in_bounded_holds() {
        let mut table = Table::new([spec(Tier::Host, EvictionKind::Lru, None)]);
        let hashes = chain(0, SLOTS);
        save(&mut table, Tier::Host, &hashes);
        let pins = lease(&mut table, &hashes);
        drop(hold(|_| table.forget_all()));
        assert_eq!(save(&mut table, Tier::Host, &chain(1, 200)), 0, "all is still read");
        table.release(pins);
        assert_eq!(save(&mut table, Tier::Host, &chain(1, 200)), 200);
        while hold(|hold| table.sweep(hold)) {}
        assert_eq!(table.counts(Tier::Host).forgotten, 0);
    }

    /// Blocks go down when they leave.
    fn by_write_back(eviction: EvictionKind) -> Table {
        Table::new([
            TierSpec {
                admission: Some(Box::new(WriteBack)),
                ..spec(Tier::Host, eviction, Some(Tier::Disk))
            },
            spec(Tier::Disk, eviction, None),
        ])
    }

    /// Counts what it admitted and has not got back.
    #[derive(Debug)]
    struct CountingRule(Arc<AtomicU32>);

    impl Admission for CountingRule {
        fn admit(
            &mut self,
            candidates: Candidates,
            _trigger: Trigger,
            _now_ms: u64,
            _forest: &dyn Forest,
            _reuse: &ReuseModel,
        ) -> u32 {
            self.0.fetch_add(candidates.blocks, Ordering::Relaxed);
            candidates.blocks
        }

        fn refund(&mut self, blocks: u32) {
            self.0.fetch_sub(blocks, Ordering::Relaxed);
        }
    }

    /// The hold is too short to weigh them against what a full disk has.
    #[test]
    fn what_waits_for_the_next_hold_is_not_charged() {
        let charged = Arc::<AtomicU32>::default();
        let rule = Box::new(CountingRule(Arc::clone(&charged)));
        let mut table = Table::new([
            TierSpec {
                admission: Some(rule),
                ..spec(Tier::Host, EvictionKind::Hazard, Some(Tier::Disk))
            },
            spec(Tier::Disk, EvictionKind::Hazard, None),
        ]);
        (0..SLOTS / 50).for_each(|n| _ = save(&mut table, Tier::Disk, &chain(n, 50)));
        save(&mut table, Tier::Host, &chain(SLOTS, 64));
        let mut was_cut_short = false;
        for looks in 64..512 {
            let mut budget = Budget { looks };
            table.take_flush(Tier::Host, 64, Trigger::Leaving, &mut budget);
            let sent = table.take_effects().tasks.len();
            assert_eq!(charged.load(Ordering::Relaxed) as usize, sent, "of {looks} looks");
            if sent > 0 {
                assert!(was_cut_short, "the first hold was long enough");
                return;
            }
            was_cut_short = true;
        }
        panic!("nothing goes down");
    }

    /// One hold finds the beginning of such a chain, and has hardly any looks left.
    #[test]
    fn headroom_comes_of_chains_that_take_a_whole_hold() {
        for length in (3_800..4_100).step_by(25) {
            let mut table = by_write_back(EvictionKind::Hazard);
            (0..SLOTS / 50).for_each(|n| _ = save(&mut table, Tier::Disk, &chain(n, 50)));
            let hashes = chain(SLOTS, length);
            assert_eq!(save(&mut table, Tier::Host, &hashes), length as usize);
            let is_left = |table: &Table| {
                let held = table.matches(Chain::from(&hashes));
                held.blocks(Tier::Host) < hashes.len() || held.blocks(Tier::Disk) > 0
            };
            for _ in 0..20 {
                hold(|hold| table.make_headroom(Tier::Host, SLOTS as usize, 256, hold));
                let tasks = table.take_effects().tasks;
                let landed = tasks.iter().map(|task| task.ended(Outcome::Arrived));
                let effects = table.land(landed, Duration::ZERO);
                drop(publish_all(&mut table, effects));
            }
            assert!(is_left(&table), "nothing leaves of {length} blocks");
        }
    }

    /// Others send down the block that the search for its ancestors has reached.
    #[test]
    fn a_leaf_behind_flushed_ancestors_is_not_taken_for_refused() {
        let mut table = by_write_back(EvictionKind::Lru);
        let hashes = chain(0, SLOTS);
        save(&mut table, Tier::Host, &hashes);
        assert!(hold(|hold| table.make_headroom(Tier::Host, 64, 256, hold)));
        assert!(!table.has_tasks(), "it is too far up for one hold");
        assert_eq!(save(&mut table, Tier::Disk, &hashes[..SLOTS as usize - 100]), 19_900);
        hold(|hold| table.make_headroom(Tier::Host, 64, 256, hold));
        assert_eq!(table.matches(Chain::from(&hashes)).blocks(Tier::Host), hashes.len());
        assert!(table.has_tasks());
    }

    #[test]
    fn ancestors_of_a_leaf_are_sought_in_bounded_holds() {
        let mut table = by_write_back(EvictionKind::Lru);
        let hashes = chain(0, SLOTS);
        save(&mut table, Tier::Host, &hashes);
        let mut holds = 0;
        while table.matches(Chain::from(&hashes)).blocks(Tier::Disk) == 0 {
            hold(|hold| table.make_headroom(Tier::Host, 64, 256, hold));
            let tasks = table.take_effects().tasks;
            let effects =
                table.land(tasks.iter().map(|task| task.ended(Outcome::Arrived)), Duration::ZERO);
            drop(publish_all(&mut table, effects));
            holds += 1;
            assert!(holds < 1_000, "the beginning of the chain is not found");
        }
    }
}
