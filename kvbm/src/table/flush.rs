//! Which dirty blocks to copy to the tier below next.
//!
//! Blocks queue in the order of their publication, which is root-first along every chain. A block whose
//! ancestors the lower tier has lost takes them along, so that nothing is ever written as an orphan. A flush that
//! fails is tried again while the block is there; until then the block may leave, and is counted if it does.

use kvbm_policies::Trigger;
use kvbm_tiers::{SlotId, Tier};

use super::index::RecordId;
use super::tier::Dirty;
use super::transfers::Parent;
use super::{Pins, RequestContext, RequestInfo, Table};

/// Blocks looked at in one step: a fraction of a millisecond.
const STEP: usize = 4_096;
/// Blocks passed on the way up to what the tier below has.
const MAX_PATH: usize = 2_048;
/// Blocks sent down together.
const MAX_SENT: usize = 256;
/// Questions to a rule in one step.
const MAX_ASKED: usize = 256;

/// Successive blocks to copy down together.
#[derive(Default)]
pub(super) struct Group {
    pub(super) blocks: Vec<RecordId>,
    /// Of the request that brought the last of them.
    pub(super) info: RequestInfo,
    /// It only tries whether the tier below is well again: its first block will do.
    pub(super) is_probe: bool,
}

impl Table {
    /// Blocks of `tier` that wait to be flushed (an upper bound: some may have left meanwhile).
    pub fn dirty(&self, tier: Tier) -> usize {
        self.tiers[tier.index()].as_ref().map_or(0, |held| held.dirty.len())
    }

    /// Whether any block of `tier` waits to be flushed, or for another try.
    pub fn has_dirty(&self, tier: Tier) -> bool {
        let held = self.tiers[tier.index()].as_ref().filter(|held| held.flush_to.is_some());
        held.is_some_and(|held| !held.dirty.is_empty() || !held.retries.is_empty())
    }

    /// Counts the blocks of `tier` that the tier below is to have and lacks, from slot `from` on, and says where the
    /// next step goes on: `None` after the last one.
    pub fn unflushed(&self, tier: Tier, from: u32) -> (usize, Option<u32>) {
        let Some(held) = &self.tiers[tier.index()] else { return (0, None) };
        let Some(to) = held.flush_to else { return (0, None) };
        let is_missing = |slot: &u32| {
            let at = held.at(SlotId(*slot));
            let is_wanted = !at.is_quarantined() && !held.is_forgotten(SlotId(*slot));
            at.is_queued() && is_wanted && !self.records.at(at.record).resident().has(to)
        };
        let (slots, next) = held.step(from, STEP);
        (slots.filter(is_missing).count(), next)
    }

    /// Says whether the tier below `tier` cannot be written now. While that is so, blocks may leave without it.
    pub fn block_flushes(&mut self, tier: Tier, blocked: bool) {
        let Some(held) = &mut self.tiers[tier.index()] else { return };
        if std::mem::replace(&mut held.is_flush_blocked, blocked) && !blocked {
            // It is well again: what failed need not wait out its pause.
            held.revive_flushes(u64::MAX);
        }
    }

    /// Has failed flushes of `tier` tried again: those whose pause is over, or `all`.
    pub fn revive_flushes(&mut self, tier: Tier, all: bool) {
        let now_ms = if all { u64::MAX } else { self.now_ms };
        if let Some(held) = &mut self.tiers[tier.index()] {
            held.revive_flushes(now_ms);
        }
    }

    /// Whether the blocks that wait in `tier` should be flushed now: one waits longer than `interval_ms`,
    /// they are more than `watermark` blocks, or somebody found no room because of them.
    pub fn flush_is_due(&self, tier: Tier, interval_ms: u64, watermark: usize) -> bool {
        let Some(held) = &self.tiers[tier.index()] else { return false };
        let Some(oldest) = held.dirty.front() else { return false };
        held.pressed || held.dirty.len() > watermark || oldest.since_ms + interval_ms <= self.now_ms
    }

    /// Sends the next `blocks` dirty blocks of `tier` down, ancestors included, as far as they are admitted below, or
    /// as far as one step goes. The tasks are among the [effects](Self::take_effects).
    pub fn take_flush(&mut self, tier: Tier, blocks: usize, trigger: Trigger) {
        self.take_group(tier, blocks, trigger, Group::default());
    }

    /// Sends one block down, to see whether the tier below is well again.
    pub fn take_probe(&mut self, tier: Tier, trigger: Trigger) {
        self.take_group(tier, 1, trigger, Group { is_probe: true, ..Group::default() });
    }

    fn take_group(&mut self, tier: Tier, blocks: usize, trigger: Trigger, mut group: Group) {
        let Some(to) = self.flushes_to(tier) else { return };
        let (mut taken, mut looked_at) = (0, 0);
        while taken < blocks && looked_at < STEP {
            // Entries of blocks that left or went down by another way stay in the queue until their turn.
            let Some(next) = self.tier_mut(tier).next_dirty() else { break };
            looked_at += 1;
            if !self.awaits_flush(tier, to, next) {
                continue;
            }
            taken += 1;
            let continues = group.blocks.last().copied() == self.records.at(next.record).parent();
            if group.blocks.is_empty() || !continues {
                if !self.launch_admitted(tier, to, &mut group, trigger) {
                    self.tier_mut(tier).queue_first(next);
                    return;
                }
                match self.missing_path(to, next.record) {
                    Ok(path) => {
                        looked_at += path.len();
                        group.blocks = path;
                    }
                    Err(above) => {
                        // What comes first is looked for in the next round, and goes down before.
                        let slot = self.records.at(above).slot(tier);
                        self.tier_mut(tier).queue_first(next);
                        self.tier_mut(tier).queue_first(Dirty { slot, record: above, ..next });
                        looked_at += MAX_PATH;
                        continue;
                    }
                }
            } else {
                group.blocks.push(next.record);
            }
            group.info = next.info;
            if group.blocks.len() > MAX_SENT {
                return self.launch_first(tier, to, &mut group, (next, trigger));
            }
        }
        if self.launch_admitted(tier, to, &mut group, trigger) && self.tier(tier).dirty.is_empty() {
            self.tier_mut(tier).pressed = false;
        }
    }

    /// Sends the first blocks of a long group down, and leaves the others to the next step.
    fn launch_first(&mut self, tier: Tier, to: Tier, group: &mut Group, (last, trigger): (Dirty, Trigger)) {
        group.blocks.truncate(MAX_SENT);
        let before = self.transfers.tasks_planned();
        let is_launched = self.launch_admitted(tier, to, group, trigger);
        // A rule that refuses the beginning is not asked about what comes behind it.
        if !is_launched || self.transfers.tasks_planned() > before {
            self.tier_mut(tier).queue_first(last);
        }
    }

    /// [`launch`](Self::launch), as far as the tier's rule admits. What it refuses now is asked about again.
    fn launch_admitted(&mut self, tier: Tier, to: Tier, group: &mut Group, trigger: Trigger) -> bool {
        if self.tier(tier).policies.has_admission() {
            let path = std::mem::take(&mut group.blocks);
            group.blocks = self.admitted_above(tier, path, (trigger, group.info));
        }
        let info = group.info;
        let left = self.launch(tier, to, group);
        self.requeue(tier, &left, info);
        left.is_empty()
    }

    /// What is admitted of a path. Where everything is to be asked about as if it left, a block that is
    /// refused does not keep those above it from being asked about.
    fn admitted_above(
        &mut self,
        tier: Tier,
        mut path: Vec<RecordId>,
        (trigger, info): (Trigger, RequestInfo),
    ) -> Vec<RecordId> {
        for _ in 0..MAX_ASKED {
            if path.is_empty() {
                return path;
            }
            let admitted = self.admitted(tier, &path, trigger);
            if admitted > 0 || trigger == Trigger::Used {
                path.truncate(admitted);
                return path;
            }
            path.pop();
        }
        // A rule may refuse a prompt of thousands of blocks one by one: the rest is asked about in its turn.
        if let Some(&next) = path.last() {
            let slot = self.records.at(next).slot(tier);
            self.want_flush_again(tier, slot, info);
        }
        Vec::new()
    }

    /// Whether a queue entry still stands for a block that the lower tier lacks and does not await.
    fn awaits_flush(&self, tier: Tier, to: Tier, entry: Dirty) -> bool {
        let known = self.records.at(entry.record);
        self.is_missing_below(tier, to, entry)
            && !self.tier(tier).at(entry.slot).skips_flush()
            && !known.filling().has(to)
    }

    /// Whether a queue entry still stands for a block that the lower tier lacks.
    fn is_missing_below(&self, tier: Tier, to: Tier, entry: Dirty) -> bool {
        let known = self.records.at(entry.record);
        self.tier(tier).at(entry.slot).record == entry.record
            && known.resident().has(tier)
            && known.slot(tier) == entry.slot
            && !known.resident().has(to)
    }

    /// `record` and those of its ancestors that `to` neither has nor awaits, root first. If they are too many for one
    /// step: the ancestor up to which they were looked at.
    pub(super) fn missing_path(&self, to: Tier, record: RecordId) -> Result<Vec<RecordId>, RecordId> {
        let ancestors = std::iter::successors(Some(record), |&r| self.records.at(r).parent());
        let missing = ancestors.take_while(|&r| !self.records.at(r).has_or_awaits(to));
        let mut path: Vec<_> = missing.take(MAX_PATH + 1).collect();
        if path.len() > MAX_PATH {
            return Err(path[MAX_PATH]);
        }
        path.reverse();
        Ok(path)
    }

    /// The beginning of that path, however long it is.
    pub(super) fn missing_beginning(&self, to: Tier, mut record: RecordId) -> Vec<RecordId> {
        loop {
            match self.missing_path(to, record) {
                Ok(path) => return path,
                Err(above) => record = above,
            }
        }
    }

    /// Sends a group of successive blocks down. Returns those that find no room below now.
    pub(super) fn launch(&mut self, tier: Tier, to: Tier, group: &mut Group) -> Vec<RecordId> {
        let next = Group { is_probe: group.is_probe, ..Group::default() };
        let Group { blocks: mut group, info, is_probe } = std::mem::replace(group, next);
        // A medium that may still hang is tried with one block: each costs a slot until it ends.
        let rest = if is_probe && group.len() > 1 { group.split_off(1) } else { Vec::new() };
        let Some((&first, &last)) = group.first().zip(group.last()) else { return Vec::new() };
        let context = RequestContext { info: self.named(info), path: self.records.depth(last) };
        // The deepest source is pinned first: claiming slots below must not make room out of it above.
        let (source, deepest) = self.source_of(tier, last);
        if !self.tier_mut(source).at_mut(deepest).pin() {
            return Vec::new();
        }
        let mut pins = Pins::of_nothing(context, self.namespace());
        pins.hold(source, deepest, 0);
        let above = self.records.at(first).parent();
        let Some(parent) = self.pin_parent(to, above) else {
            self.release(pins);
            return [group, rest].concat();
        };
        let mut admitted = group.len();
        if !matches!(parent, Parent::Awaited(_)) {
            let keys: Vec<_> = group.iter().map(|&record| self.records.at(record).key()).collect();
            admitted = self.admit_new(to, above, &keys, context);
        }
        let (taken, declined) = group.split_at(admitted);
        declined.iter().for_each(|&record| self.skip_flush_above(to, record));
        let placed = self.send_down((source, to), taken, (parent, pins), is_probe);
        self.tier_mut(tier).refund(group.len() + rest.len() - placed);
        [&taken[placed..], &rest].concat()
    }

    /// The fastest tier below the device from which all blocks down to `deepest` can be read.
    fn source_of(&self, tier: Tier, deepest: RecordId) -> (Tier, SlotId) {
        let known = self.records.at(deepest);
        // DRAM is read in passing; reading the disk for the object store would take from loads.
        let source = if known.resident().has(Tier::Host) { Tier::Host } else { tier };
        (source, known.slot(source))
    }

    fn requeue(&mut self, tier: Tier, records: &[RecordId], info: RequestInfo) {
        let since_ms = self.now_ms;
        for &record in records.iter().rev() {
            let slot = self.records.at(record).slot(tier);
            self.tier_mut(tier).queue_first(Dirty { slot, record, since_ms, info });
        }
    }
}
