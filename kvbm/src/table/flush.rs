//! Which dirty blocks to copy to the tier below next.
//!
//! Blocks queue in the order of their publication, which is root-first along every chain. A block whose
//! ancestors the lower tier has lost takes them along, so that nothing is ever written as an orphan. A flush that
//! fails is tried again while the block is there; until then the block may leave, and is counted if it does.

use std::collections::HashSet;

use kvbm_policies::Moment;
use kvbm_tiers::{BlockKey, Frame, SlotId, SlotRef, Tier};

use super::index::RecordId;
use super::run::RunId;
use super::tier::Dirty;
use super::{Grip, Table, Usage, Visit};

/// A run of blocks to copy down, its sources pinned and its destinations reserved.
#[derive(Debug)]
pub struct FlushRun {
    /// The run in the lower tier.
    pub run: RunId,
    /// The block before it; it may be on the way in another run.
    pub behind: Option<BlockKey>,
    /// Holds the sources.
    pub grip: Grip,
    /// What to copy, root first, and the titles to the destinations.
    pub copies: Vec<(BlockKey, SlotRef, Frame)>,
}

/// Successive blocks to copy down together.
#[derive(Default)]
pub(super) struct Group {
    pub(super) blocks: Vec<RecordId>,
    /// Of the request that brought the last of them.
    pub(super) usage: Usage,
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

    /// Blocks of `tier` that the tier below is to have and lacks. Linear in those that wait.
    pub fn unflushed(&self, tier: Tier) -> usize {
        let Some(held) = &self.tiers[tier.index()] else { return 0 };
        let Some(to) = held.flush_to else { return 0 };
        let waiting = held.dirty.iter().chain(held.retries.values());
        // Slots and records are used again, so an old entry may look as if it stood for the block that is there now.
        let missing =
            waiting.filter(|&&entry| self.is_missing_below(tier, to, entry)).map(|entry| entry.slot);
        missing.collect::<HashSet<_>>().len()
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

    /// Reserves the way down for the next `blocks` dirty blocks of `tier`, ancestors included, as far as they are
    /// admitted below.
    pub fn take_flush(&mut self, tier: Tier, blocks: usize, moment: Moment) -> Vec<FlushRun> {
        self.take_group(tier, blocks, moment, Group::default())
    }

    /// The way down for one block, to see whether the tier below is well again.
    pub fn take_probe(&mut self, tier: Tier, moment: Moment) -> Vec<FlushRun> {
        self.take_group(tier, 1, moment, Group { is_probe: true, ..Group::default() })
    }

    fn take_group(&mut self, tier: Tier, blocks: usize, moment: Moment, mut group: Group) -> Vec<FlushRun> {
        let Some(to) = self.tiers[tier.index()].as_ref().and_then(|held| held.flush_to) else {
            return Vec::new();
        };
        let mut runs = Vec::new();
        let mut taken = 0;
        while taken < blocks {
            let Some(next) = self.tier_mut(tier).next_dirty() else { break };
            if !self.awaits_flush(tier, to, next) {
                continue;
            }
            taken += 1;
            if group.blocks.is_empty()
                || group.blocks.last().copied() != self.records.at(next.record).parent()
            {
                if !self.launch_admitted(tier, to, &mut group, moment, &mut runs) {
                    self.tier_mut(tier).queue_first(next);
                    return runs;
                }
                group.blocks = self.missing_path(to, next.record);
            } else {
                group.blocks.push(next.record);
            }
            group.usage = next.usage;
        }
        if self.launch_admitted(tier, to, &mut group, moment, &mut runs) && self.tier(tier).dirty.is_empty() {
            self.tier_mut(tier).pressed = false;
        }
        runs
    }

    /// [`launch`](Self::launch), as far as the tier's rule admits. What it refuses now is asked about again.
    fn launch_admitted(
        &mut self,
        tier: Tier,
        to: Tier,
        group: &mut Group,
        moment: Moment,
        runs: &mut Vec<FlushRun>,
    ) -> bool {
        if let Some(&last) = group.blocks.last().filter(|_| self.tier(tier).admission.is_some()) {
            group.blocks = self.admitted_above(tier, to, last, moment);
        }
        let usage = group.usage;
        let left = self.launch(tier, to, group, runs);
        self.requeue(tier, &left, usage);
        left.is_empty()
    }

    /// What is admitted of the path to `last`. Where everything is to be asked about as if it left, a block that is
    /// refused does not keep those above it from being asked about.
    fn admitted_above(&mut self, tier: Tier, to: Tier, last: RecordId, moment: Moment) -> Vec<RecordId> {
        let mut path = self.missing_path(to, last);
        while let Some(&last) = path.last() {
            let admitted = self.admitted(tier, to, last, moment);
            if !admitted.is_empty() || moment == Moment::Used {
                return admitted;
            }
            path.pop();
        }
        path
    }

    /// Whether a queue entry still stands for a block that the lower tier lacks and does not await.
    fn awaits_flush(&self, tier: Tier, to: Tier, entry: Dirty) -> bool {
        let known = self.records.at(entry.record);
        self.is_missing_below(tier, to, entry)
            && !self.tier(tier).at(entry.slot).is_waived()
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

    /// `record` and those of its ancestors that `to` neither has nor awaits, root first.
    pub(super) fn missing_path(&self, to: Tier, record: RecordId) -> Vec<RecordId> {
        let is_missing = |r: &RecordId| {
            let known = self.records.at(*r);
            !known.resident().has(to) && !known.filling().has(to)
        };
        let ancestors = std::iter::successors(Some(record), |&r| self.records.at(r).parent());
        let mut path: Vec<_> = ancestors.take_while(is_missing).collect();
        path.reverse();
        path
    }

    /// Turns a group of successive blocks into a run. Answers those that find no room below now.
    pub(super) fn launch(
        &mut self,
        tier: Tier,
        to: Tier,
        group: &mut Group,
        runs: &mut Vec<FlushRun>,
    ) -> Vec<RecordId> {
        let next = Group { is_probe: group.is_probe, ..Group::default() };
        let Group { blocks: mut group, usage, is_probe } = std::mem::replace(group, next);
        let rest = if is_probe && group.len() > 1 { group.split_off(1) } else { Vec::new() };
        let Some((&first, &last)) = group.first().zip(group.last()) else { return Vec::new() };
        let visit = Visit { usage: self.named(usage), path: self.records.at(last).depth() };
        // The deepest source is pinned first: claiming slots below must not make room out of it above.
        let (source, deepest) = self.source_of(tier, last);
        if !self.tier_mut(source).at_mut(deepest).pin() {
            return Vec::new();
        }
        let mut grip = Grip::of_nothing(visit);
        grip.hold(source, deepest, 0);
        let keys: Vec<_> = group.iter().map(|&record| self.records.at(record).key()).collect();
        let parent = self.records.at(first).parent();
        let (reserved, declined) = self.reserve_run(to, parent, &keys, visit);
        let placed = reserved.as_ref().map_or(0, |(_, frames)| frames.len());
        self.tier_mut(tier).refund(group.len() + rest.len() - placed);
        let (group, declined) = group.split_at(group.len() - declined);
        declined.iter().for_each(|&record| self.waive_above(to, record));
        match reserved {
            Some((run, frames)) => {
                let sources = group.iter().map(|&r| self.slot_ref(source, self.records.at(r).slot(source)));
                let sources: Vec<_> = sources.collect();
                let copies = keys.into_iter().zip(sources).zip(frames);
                let copies = copies.map(|((key, from), to)| (key, from, to)).collect();
                let behind = parent.map(|parent| self.records.at(parent).key());
                runs.push(FlushRun { run, behind, grip, copies });
            }
            None => self.release(grip),
        }
        [&group[placed..], &rest].concat()
    }

    /// The fastest tier below the device from which all blocks down to `deepest` can be read.
    fn source_of(&self, tier: Tier, deepest: RecordId) -> (Tier, SlotId) {
        let known = self.records.at(deepest);
        let source = if known.resident().has(Tier::Host) { Tier::Host } else { tier };
        (source, known.slot(source))
    }

    fn requeue(&mut self, tier: Tier, records: &[RecordId], usage: Usage) {
        let since_ms = self.now_ms;
        for &record in records.iter().rev() {
            let slot = self.records.at(record).slot(tier);
            self.tier_mut(tier).queue_first(Dirty { slot, record, since_ms, usage });
        }
    }
}
