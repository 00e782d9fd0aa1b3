//! Runs: blocks of one chain on their way into one tier.
//!
//! Copies of a run end in any order, publication follows the chain: a block becomes resident when its copy
//! is done and its parent is resident. A run whose parent is itself on the way waits for that run. A block
//! that fails takes the rest of its run, and every run that waits for one of them, with it.

use std::collections::HashMap;

use kvbm_tiers::{BlockKey, Frame, SlotId, Tier};

use super::index::RecordId;
use super::tier::Dirty;
use super::{Grip, MissReason, Table, Usage, Visit};

/// Names a run for the whole life of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunId {
    place: u32,
    life: u32,
}

/// What a run's first unpublished block hangs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    /// The block is a root.
    Root,
    /// Its parent is resident in this slot, and pinned by the run.
    Resident(SlotId),
    /// Its parent is on the way in another run.
    Awaited(RecordId),
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) record: RecordId,
    pub(super) slot: SlotId,
    pub(super) filled: Option<Frame>,
}

#[derive(Debug)]
pub(super) struct Run {
    pub(super) tier: Tier,
    pub(super) anchor: Anchor,
    pub(super) entries: Vec<Entry>,
    /// Leading entries that are resident.
    pub(super) published: usize,
    /// Entries from here on have failed.
    pub(super) alive: usize,
    /// Its owner is gone: it closes itself when its last block is published or has failed.
    pub(super) detached: bool,
    /// Who brings it.
    visit: Visit,
}

impl Run {
    fn next_ready(&mut self) -> Option<(RecordId, Frame)> {
        if matches!(self.anchor, Anchor::Awaited(_)) || self.published == self.alive {
            return None;
        }
        let entry = &mut self.entries[self.published];
        let frame = entry.filled.take()?;
        self.published += 1;
        Some((entry.record, frame))
    }

    /// Entries that are neither published nor failed.
    pub(super) fn pending(&self) -> &[Entry] {
        &self.entries[self.published..self.alive]
    }
}

/// All runs, and who waits for whom.
#[derive(Debug, Default)]
pub(super) struct Runs {
    places: Vec<(u32, Option<Run>)>,
    free: Vec<u32>,
    waiting: HashMap<(Tier, RecordId), Vec<RunId>>,
}

impl Runs {
    pub(super) fn open(&mut self, run: Run) -> RunId {
        let awaited = match run.anchor {
            Anchor::Awaited(parent) => Some((run.tier, parent)),
            _ => None,
        };
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            self.places.len() as u32 - 1
        });
        let (life, held) = &mut self.places[place as usize];
        *held = Some(run);
        let id = RunId { place, life: *life };
        if let Some(key) = awaited {
            self.waiting.entry(key).or_default().push(id);
        }
        id
    }

    pub(super) fn at_mut(&mut self, id: RunId) -> Option<&mut Run> {
        let (life, run) = self.places.get_mut(id.place as usize)?;
        run.as_mut().filter(|_| *life == id.life)
    }

    fn close(&mut self, id: RunId) -> Option<Run> {
        self.at_mut(id)?;
        let (life, run) = &mut self.places[id.place as usize];
        *life = life.wrapping_add(1);
        self.free.push(id.place);
        run.take()
    }

    /// The runs that wait for `parent`, which is settled now, one way or the other.
    fn take_waiting_for(&mut self, tier: Tier, parent: RecordId) -> Vec<RunId> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        self.waiting.remove(&(tier, parent)).unwrap_or_default()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (RunId, &Run)> {
        let places = (0u32..).zip(&self.places);
        places.filter_map(|(place, (life, run))| Some((RunId { place, life: *life }, run.as_ref()?)))
    }
}

impl Table {
    /// Reserves slots for successive blocks below `parent`, as many as find room. Answers also how many of them
    /// the tier declined.
    pub(super) fn reserve_run(
        &mut self,
        tier: Tier,
        parent: Option<RecordId>,
        keys: &[BlockKey],
        visit: Visit,
    ) -> (Option<(RunId, Vec<Frame>)>, usize) {
        debug_assert!(
            visit.usage.request.is_some(),
            "a policy could not tell the parts of this use together"
        );
        if keys.is_empty() {
            return (None, 0);
        }
        let Some(anchor) = self.drop_anchor(tier, parent) else { return (None, 0) };
        let welcome = match anchor {
            Anchor::Awaited(_) => keys.len(),
            _ => self.welcome(tier, parent, keys, visit),
        };
        let (keys, declined) = (&keys[..welcome], keys.len() - welcome);
        let mut entries = Vec::with_capacity(keys.len());
        let mut frames = Vec::with_capacity(keys.len());
        let mut above = parent;
        for &key in keys {
            let Some(frame) = self.claim(tier) else { break };
            let Some(record) = self.intern(key, above) else {
                self.tier_mut(tier).pool.give_back(frame);
                break;
            };
            // A chain that names a block twice, or under another parent than before, is no chain.
            let known = self.records.at(record);
            if known.parent() != above || known.resident().has(tier) || known.filling().has(tier) {
                self.tier_mut(tier).pool.give_back(frame);
                break;
            }
            self.records.at_mut(record).begin(tier, frame.slot());
            entries.push(Entry { record, slot: frame.slot(), filled: None });
            frames.push(frame);
            above = Some(record);
        }
        if entries.is_empty() {
            self.weigh_anchor(tier, anchor);
            return (None, declined);
        }
        let alive = entries.len();
        let run = Run { tier, anchor, entries, published: 0, alive, detached: false, visit };
        (Some((self.runs.open(run), frames)), declined)
    }

    /// Holds on to the block that a run will hang on; `None` if it cannot be pinned.
    fn drop_anchor(&mut self, tier: Tier, parent: Option<RecordId>) -> Option<Anchor> {
        let Some(parent) = parent else { return Some(Anchor::Root) };
        let record = self.records.at(parent);
        if record.filling().has(tier) {
            return Some(Anchor::Awaited(parent));
        }
        let slot = record.slot(tier);
        self.tier_mut(tier).at_mut(slot).pin().then_some(Anchor::Resident(slot))
    }

    fn weigh_anchor(&mut self, tier: Tier, anchor: Anchor) {
        if let Anchor::Resident(slot) = anchor {
            self.unpin(tier, slot);
        }
    }

    /// The copy of a run's `entry`-th block is done: takes its title back and publishes what can be.
    pub fn filled(&mut self, run: RunId, entry: usize, frame: Frame) {
        match self.runs.at_mut(run) {
            Some(open) if entry < open.alive => {
                debug_assert_eq!(
                    open.entries[entry].slot,
                    frame.slot(),
                    "a title came back to the wrong entry"
                );
                open.entries[entry].filled = Some(frame);
                self.publish_ready(run);
            }
            _ => self.tier_mut(frame.tier()).pool.give_back(frame),
        }
    }

    /// The copy failed: the block and everything behind it will not come.
    pub fn failed(&mut self, run: RunId, entry: usize, frame: Frame) {
        self.abort(run, entry);
        self.tier_mut(frame.tier()).pool.give_back(frame);
    }

    /// The copy is overdue: the block and everything behind it will not come. The order keeps the title, since the
    /// medium may still touch the slot of `tier`, until [`came_back`](Self::came_back).
    pub fn overdue(&mut self, run: RunId, entry: usize, tier: Tier) {
        self.abort(run, entry);
        self.tier_mut(tier).lost += 1;
    }

    /// An overdue copy has ended after all: its slot is free.
    pub fn came_back(&mut self, frame: Frame) {
        let held = self.tier_mut(frame.tier());
        held.lost -= 1;
        held.pool.give_back(frame);
    }

    /// Ends a run all of whose titles came back. Answers how many of its blocks were published. If `grip`
    /// is given, it holds the tier's part of the chain from now on: `before` blocks and the published ones.
    ///
    /// A run that still waits for an ancestor stays behind, and closes itself later.
    pub fn close(&mut self, id: RunId, grip: Option<(&mut Grip, usize)>) -> usize {
        if let Some(waiting) = self.runs.at_mut(id).filter(|run| !run.pending().is_empty()) {
            waiting.detached = true;
            return waiting.published;
        }
        let Some(run) = self.runs.close(id) else { return 0 };
        match (grip, run.anchor) {
            (Some((grip, before)), Anchor::Resident(slot)) => {
                self.release_tier(grip, run.tier);
                grip.hold(run.tier, slot, before + run.published);
            }
            _ => self.weigh_anchor(run.tier, run.anchor),
        }
        run.published
    }

    fn close_if_detached(&mut self, id: RunId) {
        if self.runs.at_mut(id).is_some_and(|run| run.detached && run.pending().is_empty()) {
            self.close(id, None);
        }
    }

    /// Whether blocks are on their way into `tier`, or their ends not dealt with yet.
    pub fn awaits_blocks(&self, tier: Tier) -> bool {
        self.runs.iter().any(|(_, run)| run.tier == tier)
    }

    /// Publishes what is ready of a run, then of the runs that waited for it.
    fn publish_ready(&mut self, id: RunId) {
        let mut ready = vec![id];
        while let Some(id) = ready.pop() {
            let Some(run) = self.runs.at_mut(id) else { continue };
            let (tier, anchor, before, usage) = (run.tier, run.anchor, run.published, run.visit.usage);
            while let Some((record, frame)) = self.runs.at_mut(id).and_then(Run::next_ready) {
                self.publish(record, frame, usage);
                ready.extend(self.anchor_waiting(tier, record));
            }
            self.advance_anchor(id, tier, anchor, before);
            self.close_if_detached(id);
        }
    }

    fn publish(&mut self, record: RecordId, frame: Frame, usage: Usage) {
        let tier = frame.tier();
        self.records.at_mut(record).publish(tier);
        self.note_residence(record);
        if let Some(parent) = self.records.at(record).parent() {
            let parent = self.records.at(parent).slot(tier);
            self.tier_mut(tier).at_mut(parent).children += 1;
        }
        let since_ms = self.now_ms;
        let resident = self.records.at(record).resident();
        let held = self.tier_mut(tier);
        let slot = held.pool.deposit(frame);
        held.settle(slot, record);
        if held.flush_to.is_some_and(|below| !resident.has(below)) {
            held.queue(Dirty { slot, record, since_ms, usage });
        }
        self.cleanse_above(tier, record);
        self.tell(tier, record);
    }

    /// `record` reached `tier`: where another tier waited for that before evicting it, it is clean now.
    fn cleanse_above(&mut self, tier: Tier, record: RecordId) {
        let known = *self.records.at(record);
        for above in self.tiers.iter_mut().flatten().filter(|above| above.flush_to == Some(tier)) {
            if known.resident().has(above.tier) {
                above.flush_succeeded();
                above.reconsider(known.slot(above.tier));
            }
        }
    }

    /// Lets the runs that waited for `parent` hang on it.
    fn anchor_waiting(&mut self, tier: Tier, parent: RecordId) -> Vec<RunId> {
        let waiting = self.runs.take_waiting_for(tier, parent);
        for &id in &waiting {
            let anchor = self.drop_anchor(tier, Some(parent));
            match (self.runs.at_mut(id), anchor) {
                (Some(run), Some(anchor)) => run.anchor = anchor,
                (Some(run), None) => {
                    run.anchor = Anchor::Root;
                    self.abort(id, 0);
                }
                (None, Some(anchor)) => self.weigh_anchor(tier, anchor),
                (None, None) => {}
            }
        }
        waiting
    }

    /// Moves a run's pin to the last block that it published, and reports the use.
    fn advance_anchor(&mut self, id: RunId, tier: Tier, old: Anchor, before: usize) {
        let now_ms = self.now_ms;
        let Some(run) = self.runs.at_mut(id) else { return };
        let inserted = run.published - before;
        let Some(last) = run.published.checked_sub(1).filter(|_| inserted > 0) else { return };
        let (slot, record) = (run.entries[last].slot, run.entries[last].record);
        run.anchor = Anchor::Resident(slot);
        let visit = run.visit;
        let depth = self.records.at(record).depth();
        let (held, records) = self.tier_and_records(tier);
        let pinned = held.at_mut(slot).pin();
        debug_assert!(pinned, "a block that was just published has no pins yet");
        let access = visit.access(now_ms, slot, depth, inserted as u32);
        held.touch(&access, records);
        self.weigh_anchor(tier, old);
    }

    /// Fails a run from its `from`-th entry on, and every run that waits for one of these blocks.
    pub(super) fn abort(&mut self, id: RunId, from: usize) {
        let mut doomed = vec![(id, from)];
        while let Some((id, from)) = doomed.pop() {
            let Some(run) = self.runs.at_mut(id) else { continue };
            let tier = run.tier;
            let dead = from.max(run.published)..run.alive;
            run.alive = run.alive.min(dead.start);
            for entry in dead {
                let Some(run) = self.runs.at_mut(id) else { break };
                let (record, filled) = (run.entries[entry].record, run.entries[entry].filled.take());
                if let Some(frame) = filled {
                    self.tier_mut(tier).pool.give_back(frame);
                }
                doomed.extend(self.cut_waiting(tier, record));
                self.tell(tier, record);
                self.records.at_mut(record).leave(tier);
                self.retry_above(tier, record);
                self.forget_if_nowhere(record, MissReason::IoError, tier);
            }
            self.close_if_detached(id);
        }
    }

    /// The runs that waited for `parent`, which will not come.
    fn cut_waiting(&mut self, tier: Tier, parent: RecordId) -> Vec<(RunId, usize)> {
        let waiting = self.runs.take_waiting_for(tier, parent);
        for &id in &waiting {
            if let Some(run) = self.runs.at_mut(id) {
                run.anchor = Anchor::Root;
            }
        }
        waiting.into_iter().map(|id| (id, 0)).collect()
    }

    /// Asks to be told through [`take_settled`](Self::take_settled) when a block that is on its way into
    /// `tier` has arrived or failed. False if it is not on its way.
    pub fn watch(&mut self, tier: Tier, key: BlockKey) -> bool {
        let Some(record) = self.find(key).filter(|&r| self.records.at(r).filling().has(tier)) else {
            return false;
        };
        self.watched.insert((tier, record));
        true
    }

    fn tell(&mut self, tier: Tier, record: RecordId) {
        if !self.watched.is_empty() && self.watched.remove(&(tier, record)) {
            self.settled.push((tier, self.records.at(record).key()));
        }
    }

    /// Watched blocks that arrived or failed since the last call.
    pub fn take_settled(&mut self) -> Vec<(Tier, BlockKey)> {
        std::mem::take(&mut self.settled)
    }
}
