//! Which dirty blocks to copy to the tier below next.
//!
//! Blocks queue in the order of their publication, which is root-first along every chain. A block
//! whose ancestors the lower tier has lost takes them along, so that no orphan is ever written. A
//! failed flush is retried while the block is there; until then the block may leave, and is counted
//! if it does.

use kvbm_policies::Trigger;
use kvbm_tiers::{Route, SlotId, Tier};

use super::budget::Budget;
use super::flush_queue::DirtyBlock;
use super::index::RecordId;
use super::transfers::TransferParent;
use super::{Pins, RequestContext, RequestInfo, Table};

/// Blocks sent down together.
const MAX_SENT: usize = 256;

/// Successive blocks to copy down together.
#[derive(Default)]
pub(super) struct FlushGroup {
    pub(super) blocks: Vec<RecordId>,
    /// The request that brought the last of them.
    pub(super) info: RequestInfo,
    /// It only tests whether the tier below is well again: its first block is enough.
    pub(super) is_probe: bool,
}

/// How a step of flushing ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushStep {
    /// It looked at as many as asked, or no more wait, or the tier below has no room.
    Done,
    /// The hold was too short: the next one goes on.
    HasMore,
}

impl FlushStep {
    /// What could not be sent down waits for room, unless the hold ended.
    const fn without_room(budget: &Budget) -> Self {
        if budget.is_spent() { Self::HasMore } else { Self::Done }
    }
}

impl Table {
    /// Blocks of `tier` that wait to be flushed.
    pub fn dirty(&self, tier: Tier) -> usize {
        self.tiers[tier.index()].as_ref().map_or(0, |held| held.flushes.waiting())
    }

    /// Whether any block of `tier` waits to be flushed, or for a retry.
    pub fn has_dirty(&self, tier: Tier) -> bool {
        let held = self.flushes_to(tier).and(self.tiers[tier.index()].as_ref());
        held.is_some_and(|held| !held.flushes.is_empty())
    }

    /// Counts the blocks of `tier` that the tier below should have and lacks, from slot `from` on.
    /// Says where the next step goes on: `None` after the last one.
    pub fn unflushed(&self, tier: Tier, from: u32, budget: &mut Budget) -> (usize, Option<u32>) {
        let held = self.tiers[tier.index()].as_ref().filter(|held| !held.is_withdrawn);
        let Some((held, to)) = held.and_then(|held| Some((held, held.flush_to?))) else {
            return (0, None);
        };
        let is_missing = |slot: &u32| {
            let at = held.at(SlotId(*slot));
            let is_wanted = !at.is_quarantined() && !held.is_forgotten(SlotId(*slot));
            held.flushes.has(SlotId(*slot))
                && is_wanted
                && !self.records.at(at.record).resident().has(to)
        };
        let (slots, next) = held.step(from, budget);
        (slots.filter(is_missing).count(), next)
    }

    /// Says whether the tier below `tier` cannot be written now. While so, blocks may leave
    /// unflushed.
    pub fn block_flushes(&mut self, tier: Tier, blocked: bool) {
        let blocked = blocked || self.flushes_to(tier).is_none();
        let Some(held) = &mut self.tiers[tier.index()] else { return };
        if std::mem::replace(&mut held.is_flush_blocked, blocked) && !blocked {
            // It is well again: failed flushes need not wait out their pause.
            held.flushes.make_due();
        }
    }

    /// From here on no failed flush of `tier` waits out its pause:
    /// [`revive_flushes`](Self::revive_flushes) retries them all.
    pub fn end_pauses(&mut self, tier: Tier) {
        self.tiers[tier.index()].iter_mut().for_each(|held| held.flushes.make_due());
    }

    /// Retries failed flushes of `tier` whose pause is over. Returns whether there are more.
    pub fn revive_flushes(&mut self, tier: Tier, budget: &mut Budget) -> bool {
        let now_ms = self.now_ms;
        self.tiers[tier.index()].as_mut().is_some_and(|held| held.revive_flushes(now_ms, budget))
    }

    /// Whether the blocks that wait in `tier` should be flushed now: one waits longer than
    /// `interval_ms`, there are more than `watermark`, or a new block found no room because of
    /// them.
    pub fn flush_is_due(&self, tier: Tier, interval_ms: u64, watermark: usize) -> bool {
        let Some(held) = self.flushes_to(tier).and(self.tiers[tier.index()].as_ref()) else {
            return false;
        };
        let Some(oldest) = held.flushes.first() else { return false };
        held.pressed
            || held.flushes.waiting() > watermark
            || oldest.since_ms + interval_ms <= self.now_ms
    }

    /// Sends the next `blocks` dirty blocks of `tier` down, ancestors included, as far as the tier
    /// below admits them and the hold goes. The tasks are among the [effects](Self::take_effects).
    pub fn take_flush(
        &mut self,
        tier: Tier,
        blocks: usize,
        trigger: Trigger,
        budget: &mut Budget,
    ) -> FlushStep {
        self.take_group(tier, blocks, FlushGroup::default(), trigger, budget)
    }

    /// Sends one block down, to test whether the tier below is well again.
    pub fn take_probe(&mut self, tier: Tier, trigger: Trigger, budget: &mut Budget) -> FlushStep {
        self.take_group(
            tier,
            1,
            FlushGroup { is_probe: true, ..FlushGroup::default() },
            trigger,
            budget,
        )
    }

    fn take_group(
        &mut self,
        tier: Tier,
        blocks: usize,
        mut group: FlushGroup,
        trigger: Trigger,
        budget: &mut Budget,
    ) -> FlushStep {
        let Some(to) = self.flushes_to(tier) else { return FlushStep::Done };
        let route = Route { from: tier, to };
        let (mut taken, mut step) = (0, FlushStep::Done);
        while taken < blocks {
            if !budget.look() {
                step = FlushStep::HasMore;
                break;
            }
            // Entries of blocks that went down another way stay queued until their turn.
            let Some(next) = self.tier_mut(tier).flushes.pop_first() else { break };
            if !self.awaits_flush(tier, to, next) {
                continue;
            }
            taken += 1;
            let continues = group.blocks.last().copied() == self.records.at(next.record).parent();
            if group.blocks.is_empty() || !continues {
                if !self.launch_admitted(route, &mut group, trigger, budget) {
                    self.tier_mut(tier).flushes.push_first(next);
                    return FlushStep::without_room(budget);
                }
                if !self.awaits_flush(tier, to, next) {
                    // It was among the ancestors of what was just sent.
                    continue;
                }
                match self.missing_path(to, next.record, self.turned_away(tier), budget) {
                    // Else a long prompt would be asked about once for each of its blocks.
                    Ok(path) if path.is_empty() => {
                        self.turn_away_follower(route, next.record);
                        budget.change();
                        continue;
                    }
                    Ok(path) => group.blocks = path,
                    Err(above) => {
                        // The next hold looks for the first of them, which goes down before.
                        let slot = self.records.at(above).slot(tier);
                        let held = self.tier_mut(tier);
                        held.flushes.push_first(next);
                        // Even one that was put off or declined: else blocks that wait for it come
                        // up again and again until its time.
                        held.flushes.remove(slot);
                        held.at_mut(slot).want_flush();
                        held.flushes.push_first(DirtyBlock { slot, record: above, ..next });
                        return FlushStep::HasMore;
                    }
                }
            } else {
                group.blocks.push(next.record);
            }
            group.info = next.info;
            if group.blocks.len() > MAX_SENT {
                return self.launch_first(route, &mut group, next, trigger, budget);
            }
        }
        let is_launched = self.launch_admitted(route, &mut group, trigger, budget);
        if is_launched && self.tier(tier).flushes.waiting() == 0 {
            self.tier_mut(tier).pressed = false;
        }
        if is_launched { step } else { FlushStep::without_room(budget) }
    }

    /// Sends the first blocks of a long group down, and leaves the rest to the next hold.
    fn launch_first(
        &mut self,
        route: Route,
        group: &mut FlushGroup,
        last: DirtyBlock,
        trigger: Trigger,
        budget: &mut Budget,
    ) -> FlushStep {
        group.blocks.truncate(MAX_SENT);
        let is_launched = self.launch_admitted(route, group, trigger, budget);
        // If the beginning was turned away, so is this.
        self.tier_mut(route.from).flushes.push_first(last);
        if is_launched { FlushStep::HasMore } else { FlushStep::without_room(budget) }
    }

    /// [`launch`](Self::launch), as far as the tier's rule admits. It is asked again about what it
    /// refuses now.
    fn launch_admitted(
        &mut self,
        route: Route,
        group: &mut FlushGroup,
        trigger: Trigger,
        budget: &mut Budget,
    ) -> bool {
        let tier = route.from;
        if self.tier(tier).policies.has_admission() {
            let path = std::mem::take(&mut group.blocks);
            let (asked, last) = (path.len(), path.last().copied());
            group.blocks = self.admitted_above(tier, path, trigger, group.info, budget);
            if let Some(last) = last.filter(|_| group.blocks.len() < asked) {
                self.turn_away(tier, last);
            }
        }
        let info = group.info;
        let left = self.launch(route, group, budget);
        self.requeue(tier, &left, info);
        left.is_empty()
    }

    /// What is admitted of a path. If every block is asked about as if it left, the rule is still
    /// asked about those above a refused one.
    fn admitted_above(
        &mut self,
        tier: Tier,
        mut path: Vec<RecordId>,
        trigger: Trigger,
        info: RequestInfo,
        budget: &mut Budget,
    ) -> Vec<RecordId> {
        while !path.is_empty() {
            let admitted = self.admitted(tier, &path, trigger, budget);
            if admitted > 0 || trigger == Trigger::Used {
                path.truncate(admitted);
                return path;
            }
            path.pop();
            if budget.is_spent() {
                break;
            }
        }
        // A rule may refuse a prompt of thousands of blocks one by one: the rest waits its turn.
        if let Some(&next) = path.last() {
            let slot = self.records.at(next).slot(tier);
            self.want_flush_again(tier, slot, info);
        }
        Vec::new()
    }

    /// Whether the lower tier still lacks a block that waited, and does not await it.
    fn awaits_flush(&self, tier: Tier, to: Tier, waited: DirtyBlock) -> bool {
        let held = self.tier(tier).at(waited.slot);
        debug_assert_eq!(held.record, waited.record, "a block left before its place in the queue");
        !held.skips_flush() && !self.records.at(waited.record).has_or_awaits(to)
    }

    /// `record` and its ancestors that `to` neither has nor awaits, root first; none if `turned_away`
    /// is one of these ancestors. If they are too many for the hold: the last one
    /// that was looked at.
    pub(super) fn missing_path(
        &self,
        to: Tier,
        record: RecordId,
        turned_away: Option<RecordId>,
        budget: &mut Budget,
    ) -> Result<Vec<RecordId>, RecordId> {
        let (mut path, mut next) = (Vec::new(), Some(record));
        while let Some(missing) = next.filter(|&next| !self.records.at(next).has_or_awaits(to)) {
            if !path.is_empty() && turned_away == next {
                return Ok(Vec::new());
            }
            // Sending them has its cost too.
            if path.len() > budget.looks_left() / 2 || !budget.look() {
                return Err(missing);
            }
            path.push(missing);
            next = self.records.at(missing).parent();
        }
        path.reverse();
        Ok(path)
    }

    /// The block that was [turned away](Self::turn_away) last, if it is still there.
    fn turned_away(&self, tier: Tier) -> Option<RecordId> {
        let held = self.tier(tier);
        let block = held.turned_away?;
        let there = held.pool.resident_ref(block.slot).filter(|&there| there == block)?;
        let record = held.at(there.slot).record;
        // A slot that is quarantined keeps its block while that is read, but not its record.
        self.lies_in(block, record).then_some(record)
    }

    /// A rule refused a block, or the tier below declined it. What waits behind it in its chain is
    /// turned away with it, unasked.
    fn turn_away(&mut self, tier: Tier, record: RecordId) {
        let slot = self.records.at(record).slot(tier);
        self.tier_mut(tier).turned_away = Some(self.slot_ref(tier, slot));
    }

    /// The same for a block that hangs on one that was turned away.
    fn turn_away_follower(&mut self, Route { from, to }: Route, record: RecordId) {
        if !self.tier(from).policies.has_admission() {
            // No rule is asked about it when it leaves: it may leave now.
            self.skip_flush_above(to, record);
        }
        self.turn_away(from, record);
    }

    /// Sends a group of successive blocks down. Returns those without room below now, or for which
    /// the hold was too short.
    pub(super) fn launch(
        &mut self,
        Route { from: tier, to }: Route,
        group: &mut FlushGroup,
        budget: &mut Budget,
    ) -> Vec<RecordId> {
        let next = FlushGroup { is_probe: group.is_probe, ..FlushGroup::default() };
        let FlushGroup { blocks: mut group, info, is_probe } = std::mem::replace(group, next);
        // A medium that may still hang is tested with one block: each costs a slot until it ends.
        let rest = if is_probe && group.len() > 1 { group.split_off(1) } else { Vec::new() };
        let Some((&first, &last)) = group.first().zip(group.last()) else { return Vec::new() };
        let context = RequestContext { info: self.named(info), path: self.records.depth(last) };
        // The deepest source is pinned first: claiming slots below must not evict it above.
        let (source, deepest) = self.source_of(tier, last);
        self.tier_mut(source).pin(deepest);
        let mut pins = Pins::of_nothing(context, self.namespace());
        pins.hold(source, deepest, 0);
        let above = self.records.at(first).parent();
        let parent = self.pin_parent(to, above);
        let (mut admitted, mut has_more) = (group.len(), false);
        if !matches!(parent, TransferParent::Awaited(_)) {
            let keys: Vec<_> = group.iter().map(|&record| self.records.at(record).key()).collect();
            let admission = self.admit_new(to, above, &keys, context, budget);
            admitted = admission.blocks;
            has_more = admission.has_more;
        }
        let (taken, declined) = group.split_at(admitted);
        declined.iter().for_each(|&record| self.skip_flush_above(to, record));
        if let Some(&last) = declined.last() {
            self.turn_away(tier, last);
        }
        if has_more {
            // The next hold has more room.
            self.unpin_parent(to, parent);
            self.release(pins);
            self.tier_mut(tier).policies.refund((group.len() + rest.len()) as u32);
            return [taken, &rest].concat();
        }
        let placed =
            self.send_down(Route { from: source, to }, taken, parent, pins, is_probe, budget);
        self.tier_mut(tier).policies.refund((group.len() + rest.len() - placed) as u32);
        [&taken[placed..], &rest].concat()
    }

    /// The fastest tier below the device from which all blocks down to `deepest` can be read.
    fn source_of(&self, tier: Tier, deepest: RecordId) -> (Tier, SlotId) {
        let known = self.records.at(deepest);
        // Reading DRAM is cheap; reading the disk for the object store would slow loads.
        let is_in_host = known.resident().has(Tier::Host) && self.is_in_use(Tier::Host);
        let source = if is_in_host { Tier::Host } else { tier };
        (source, known.slot(source))
    }

    fn requeue(&mut self, tier: Tier, records: &[RecordId], info: RequestInfo) {
        let since_ms = self.now_ms;
        for &record in records.iter().rev() {
            let slot = self.records.at(record).slot(tier);
            self.tier_mut(tier).flushes.push_first(DirtyBlock { slot, record, since_ms, info });
        }
    }
}
