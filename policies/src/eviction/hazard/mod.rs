//! Multiplicative return hazard, learned online.
//!
//! | module | holds |
//! |---|---|
//! | `segments` | what was used together, when, how often; ghosts |
//! | `factors` | what is known about a segment, in small numbers |
//! | `fit` | the hazard model and how it is learned |
//! | `rank` | the Gittins index |

mod factors;
mod fit;
mod rank;
mod segments;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use self::fit::{Model, Record};
pub(crate) use self::segments::GHOST_MS;
use self::segments::{Segments, StrandId};
use super::{Access, BlockId, Eviction, Forest, RequestId, Standing, Upkeep};

/// Ended records that a fit looks at.
const RECORDS: usize = 32_768;

/// How often all tails are ranked anew while as many blocks come as are resident.
const RERANKS: usize = 16;

/// Evicts the leaf that brings the fewest expected hits for the time that it would be held: see
/// `docs/policies.md`.
///
/// 13 bytes a block, besides segments and ghosts. It learns only if its [`upkeep`](Eviction::upkeep) is done.
pub struct Hazard {
    segments: Segments,
    model: Model,
    /// Every strand whose tail may go, by rank, among entries that no longer hold.
    queue: BinaryHeap<Reverse<(u32, StrandId, u32)>>,
    /// By strand: which of its entries holds.
    entries: Vec<Entry>,
    /// The strand whose tail was ranked last in turn.
    cursor: usize,
    /// How many are due, in units of one for each resident block.
    due: usize,
    records: Vec<Record>,
    oldest_record: usize,
    requests: u64,
    next_fit: u64,
    learning: Option<Arc<OnceLock<Model>>>,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    number: u32,
    queued: bool,
}

impl Entry {
    fn holds(self, number: u32) -> bool {
        self.queued && self.number == number
    }
}

impl Hazard {
    /// A policy for a tier of `capacity` blocks.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            segments: Segments::with_capacity(capacity),
            model: Model::default(),
            queue: BinaryHeap::new(),
            entries: Vec::new(),
            cursor: 0,
            due: 0,
            records: Vec::new(),
            oldest_record: 0,
            requests: 0,
            next_fit: fit_after(0),
            learning: None,
        }
    }

    /// The probability that `block` is used within `within_ms` from the last call on. `None`: it is not
    /// resident.
    pub(crate) fn return_chance(&self, block: BlockId, within_ms: u64) -> Option<f32> {
        let state = self.segments.state(block)?;
        if state.will_not_return {
            return Some(0.0);
        }
        Some(rank::return_chance(&self.model, state.profile, state.age_ms, within_ms))
    }

    /// Ranks the tail of `strand` and puts it into the queue.
    fn enqueue(&mut self, strand: StrandId) {
        let at = strand as usize;
        if self.entries.len() <= at {
            self.entries.resize(at + 1, Entry::default());
        }
        let Some(rank) = self.rank(strand) else { return };
        self.entries[at].number = self.entries[at].number.wrapping_add(1);
        self.entries[at].queued = true;
        self.queue.push(Reverse((rank, strand, self.entries[at].number)));
        if self.queue.len() > 2 * self.entries.len() + 64 {
            let entries = &self.entries;
            self.queue.retain(|&Reverse((_, strand, number))| entries[strand as usize].holds(number));
        }
    }

    /// Orders like the index, which is never negative.
    fn rank(&self, strand: StrandId) -> Option<u32> {
        let tail = self.segments.tail(strand)?;
        if tail.will_not_return {
            return Some(0);
        }
        Some(rank::gittins(&self.model, tail.profile, tail.age_ms).to_bits())
    }

    /// Ranks some more tails anew, in turn, at such a pace that all have been after a sixteenth of the blocks
    /// was replaced.
    fn rerank_some(&mut self) {
        self.due += RERANKS * self.entries.len();
        let resident = self.segments.resident().max(1);
        for _ in 0..(self.due / resident).min(self.entries.len()) {
            self.cursor = (self.cursor + 1) % self.entries.len();
            if self.entries[self.cursor].queued {
                self.enqueue(self.cursor as u32);
            }
        }
        self.due %= resident;
    }

    fn keep_records(&mut self) {
        for record in self.segments.take_closed() {
            if self.records.len() < RECORDS {
                self.records.push(record);
            } else {
                self.records[self.oldest_record] = record;
                self.oldest_record = (self.oldest_record + 1) % RECORDS;
            }
        }
    }

    /// Takes over what was learned elsewhere.
    fn adopt(&mut self) {
        if let Some(model) = self.learning.as_ref().and_then(|learning| learning.get()) {
            self.model = model.clone();
            self.learning = None;
        }
    }
}

/// The number of the request after which to fit next.
fn fit_after(requests: u64) -> u64 {
    requests + (requests / 20).clamp(50, 500)
}

impl Eviction for Hazard {
    fn touch(&mut self, access: &Access, forest: &dyn Forest) {
        self.adopt();
        let Some(touched) = self.segments.touch(access, forest) else { return };
        self.keep_records();
        self.requests += u64::from(touched.is_new);
        let [left, end] = touched.strands;
        self.enqueue(left);
        if end != left {
            self.enqueue(end);
        }
    }

    fn remove(&mut self, block: BlockId, exposed: Option<BlockId>) {
        let removed = self.segments.remove(block);
        let exposed = exposed.and_then(|parent| self.segments.strand(parent));
        if let Some(strand) = exposed {
            let is_same = removed == Some((strand, false));
            if !is_same || !self.entries[strand as usize].queued {
                self.enqueue(strand);
            }
        }
    }

    fn victim(&mut self, forest: &dyn Forest) -> Option<BlockId> {
        self.rerank_some();
        while let Some(&Reverse((_, strand, number))) = self.queue.peek() {
            let entry = &mut self.entries[strand as usize];
            if entry.holds(number) {
                let tail = self.segments.last_block(strand);
                if let Some(block) = tail.filter(|&tail| forest.standing(tail) == Standing::Evictable) {
                    return Some(block);
                }
                entry.queued = false;
            }
            self.queue.pop();
        }
        None
    }

    fn release(&mut self, block: BlockId) {
        if let Some(strand) = self.segments.strand(block)
            && !self.entries[strand as usize].queued
        {
            self.enqueue(strand);
        }
    }

    fn may_decline(&self) -> bool {
        true
    }

    fn finished(&mut self, request: RequestId, output_tokens: u32, now_ms: u64) {
        if let Some(strand) = self.segments.finished(request, output_tokens, now_ms) {
            self.enqueue(strand);
        }
    }

    fn upkeep(&mut self) -> Option<Upkeep> {
        let is_abandoned = |learning: &Arc<_>| Arc::strong_count(learning) == 1;
        if self.requests < self.next_fit
            || self.learning.as_ref().is_some_and(|learning| !is_abandoned(learning))
        {
            return None;
        }
        self.next_fit = fit_after(self.requests);
        let mut records = self.records.clone();
        records.extend(self.segments.returning());
        records.extend(self.segments.open_records());
        let mut model = self.model.clone();
        let learned = Arc::new(OnceLock::new());
        self.learning = Some(Arc::clone(&learned));
        Some(Box::new(move || {
            model.fit(&records);
            // Nobody else writes it, so it cannot be set already.
            let _ = learned.set(model);
        }))
    }
}

impl fmt::Debug for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hazard").field("requests", &self.requests).finish_non_exhaustive()
    }
}
