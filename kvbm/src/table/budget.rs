//! What one hold of the table's lock may do.
//!
//! A loop that counts what it changes is no bound where most of what it looks at stays as it is, and the other way round. So
//! every call that loops under the lock pays for both from one budget. When that is spent the call says that there is more,
//! and its caller goes on with a fresh one once others have had the table.

/// What is left of a hold.
#[derive(Debug)]
#[must_use = "a loop without it may take as long as the table is large"]
pub struct Budget {
    looks: usize,
}

/// Looks of a hold, a cache miss or two each: some 300 µs.
const HOLD: usize = 4_096;
/// A block that takes a slot, leaves one or goes into a queue costs as much as so many looks.
const CHANGE: usize = 16;

impl Budget {
    /// Of a whole hold.
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

    /// Pays for so many looks, as far as there is enough.
    pub(super) const fn pay(&mut self, looks: usize) -> bool {
        let can_pay = self.looks > 0;
        self.looks = self.looks.saturating_sub(looks);
        can_pay
    }

    /// Pays for changes that are made together.
    pub(super) const fn pay_changes(&mut self, changes: usize) {
        self.looks = self.looks.saturating_sub(changes.saturating_mul(CHANGE));
    }

    pub(super) const fn looks_left(&self) -> usize {
        self.looks
    }

    /// A budget of as many looks as there are changes left, where each look may lead to a change. It is all of this one.
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

/// Counts that a record, a slot or an entry of a queue is read or written: tests hold this against the budget, since a loop
/// that forgets to pay would not be found out by what was paid.
#[inline]
pub(super) fn touched() {
    #[cfg(test)]
    TOUCHED.with(|touched| touched.set(touched.get() + 1));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvbm_policies::admission::WriteBack;
    use kvbm_policies::{EvictionKind, Hints, Trigger};
    use kvbm_tiers::{BlockKey, FramePool, IndexEntry, SlotId, Tier};

    use super::*;
    use crate::hash::{BlockHash, Chain};
    use crate::table::{
        Effects, Pins, Reply, RequestInfo, Table, TierSet, TierSpec, TransferCursor, TransferPlan,
    };
    use crate::task::{Class, Defect, Outcome};

    /// Records, slots and entries that a hold may touch, however it spends its budget: a change touches a block, its
    /// parent and its neighbours in several tiers. The tables below have several times as many blocks.
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

    fn chain(of: u32, blocks: u32) -> Vec<BlockHash> {
        let hash = |at: u32| u128::from(of) << 32 | u128::from(at + 1);
        (0..blocks)
            .map(|at| BlockHash::from_u128(hash(at).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C)))
            .collect()
    }

    /// Does what one hold does.
    fn hold<T>(work: impl FnOnce(&mut Budget) -> T) -> T {
        TOUCHED.set(0);
        let done = work(&mut Budget::of_a_hold());
        assert!(TOUCHED.get() <= MOST, "a hold touched {} records, slots and entries", TOUCHED.get());
        done
    }

    /// Does in holds what follows from a change.
    fn settle(table: &mut Table, mut effects: Effects) -> Effects {
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

    fn plan(table: &mut Table, tier: Tier, hashes: &[BlockHash], info: RequestInfo) -> TransferPlan {
        let mut plan = table.plan_filling(tier, Chain::from(hashes), info);
        while !hold(|_| table.extend(&mut plan)) {}
        plan
    }

    /// Returns how many blocks of the chain the tier has then.
    fn save_for(table: &mut Table, tier: Tier, hashes: &[BlockHash], info: RequestInfo) -> usize {
        let mut plan = plan(table, tier, hashes, info);
        let mut reserved = table.reserved(&mut plan);
        let mut first = 0;
        while !reserved.frames.is_empty() {
            let step = reserved.frames.len().min(64);
            let effects = hold(|_| table.fill(reserved.transfer, first, reserved.frames.drain(..step)));
            drop(settle(table, effects));
            first += step;
        }
        table.end_plan(reserved.transfer, None);
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
    fn an_outage_of_the_disk_costs_no_long_hold_and_heals() {
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
            let effects = hold(|_| table.land(tasks.iter().map(|task| task.ended(failed)), Duration::ZERO));
            drop(settle(&mut table, effects));
        }
        hold(|_| table.end_pauses(Tier::Host));
        flush_all(&mut table);
        assert_eq!(table.counts(Tier::Disk).resident, SLOTS);
        assert_eq!(table.audit(), []);
    }

    fn flush_all(table: &mut Table) {
        while hold(|hold| table.revive_flushes(Tier::Host, hold)) {}
        while table.has_dirty(Tier::Host) {
            hold(|hold| table.take_flush(Tier::Host, 64, Trigger::Used, hold));
            let tasks = table.take_effects().tasks;
            assert!(!tasks.is_empty(), "nothing goes down");
            let landed = tasks.iter().map(|task| task.ended(Outcome::Arrived));
            let effects = hold(|_| table.land(landed, Duration::ZERO));
            drop(settle(table, effects));
        }
    }

    #[test]
    fn no_search_for_room_passes_over_all_leaves_that_wait_for_the_disk() {
        for eviction in EvictionKind::ALL {
            let mut table =
                Table::new([spec(Tier::Host, eviction, Some(Tier::Disk)), spec(Tier::Disk, eviction, None)]);
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
        let info = RequestInfo { hints: Hints { tenant: Some(7), ..Hints::default() }, request: None };
        let prompts = SLOTS / 10;
        // The first blocks of all prompts have neighbouring numbers.
        for blocks in [1, 10] {
            (0..prompts).for_each(|n| _ = save_for(&mut table, Tier::Host, &chain(n, blocks), info));
        }
        flush_all(&mut table);
        let coming = plan(&mut table, Tier::Host, &chain(prompts, 5_000), info);
        table.begin_forgetting(7);
        let mut next = Some(TransferCursor::default());
        while let Some(from) = next {
            next = hold(|hold| table.end_forgotten(from, hold));
            let effects = table.take_effects();
            drop(settle(&mut table, effects));
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
    fn a_bad_block_is_dropped_without_a_look_at_what_follows_it_elsewhere() {
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
    fn a_full_last_tier_weighs_a_long_prompt_in_bounded_holds() {
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
    fn a_chain_waits_in_bounded_holds_for_room_in_its_own_directory() {
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
        // All that leaves first lies in the second directory.
        let order = (1..slots).step_by(2).chain((0..slots).step_by(2));
        table.restore(Tier::Disk, &order.map(entry).collect::<Vec<_>>());
        let grown = [&chain(0, 1)[..], &chain(slots, 3)].concat();
        assert_eq!(save(&mut table, Tier::Disk, &grown), 4);
        assert_eq!(table.audit(), []);
    }

    #[test]
    fn a_long_load_stays_in_a_full_host_all_of_it() {
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
    fn what_a_long_transfer_leaves_is_given_up_in_bounded_holds() {
        let mut table = Table::new([spec(Tier::Host, EvictionKind::Lru, None)]);
        let hashes = chain(0, SLOTS - 1_000);
        let mut first = plan(&mut table, Tier::Host, &hashes, RequestInfo::default());
        let reserved = table.reserved(&mut first);
        // Another one hangs on its last block.
        let longer = [&hashes[..], &chain(1, 1_000)].concat();
        let mut second = plan(&mut table, Tier::Host, &longer, RequestInfo::default());
        let behind = table.reserved(&mut second);
        let effects = hold(|_| table.cancel(reserved.transfer));
        assert!(effects.has_more, "it is too long for one hold");
        drop(settle(&mut table, effects));
        assert!(table.is_empty(), "{} records are left", table.len());
        for mut reserved in [reserved, behind] {
            let all = reserved.frames.drain(..);
            let effects = table.abandon(reserved.transfer, 0, all);
            drop(settle(&mut table, effects));
            table.end_plan(reserved.transfer, None);
            drop(table.take_effects());
        }
        assert_eq!(table.counts(Tier::Host).free, SLOTS);
        assert_eq!(save(&mut table, Tier::Host, &hashes), hashes.len(), "and then it comes all the same");
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
            ended += settle(&mut table, effects).ended.len();
        }
        assert_eq!(ended, 1, "its caller is answered");
    }

    #[test]
    fn nothing_that_a_reset_left_is_looked_at_for_longer_than_a_hold() {
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

    #[test]
    fn what_comes_before_a_leaf_is_looked_for_in_bounded_holds() {
        let mut table = Table::new([
            TierSpec {
                admission: Some(Box::new(WriteBack)),
                ..spec(Tier::Host, EvictionKind::Lru, Some(Tier::Disk))
            },
            spec(Tier::Disk, EvictionKind::Lru, None),
        ]);
        let hashes = chain(0, SLOTS);
        save(&mut table, Tier::Host, &hashes);
        let mut holds = 0;
        while table.matches(Chain::from(&hashes)).blocks(Tier::Disk) == 0 {
            hold(|hold| table.make_headroom(Tier::Host, 64, 256, hold));
            let tasks = table.take_effects().tasks;
            let effects = table.land(tasks.iter().map(|task| task.ended(Outcome::Arrived)), Duration::ZERO);
            drop(settle(&mut table, effects));
            holds += 1;
            assert!(holds < 1_000, "the beginning of the chain is not found");
        }
    }
}
