//! How soon the blocks of a tier return, learned online from its traffic.
//!
//! | module | holds |
//! |---|---|
//! | `known` | the known blocks: what was used together, when, by whom, how often |
//! | `path` | radix paths: their segments, reuse counts, and blocks that have left and may return |
//! | `uses` | requests' uses |
//! | `factors` | what is known about a segment, in small numbers |
//! | `hazard` | the hazard, how it is learned, the Gittins index and the probability of a return |
//! | `learning` | what it is learned from, and when |

mod factors;
mod hazard;
mod known;
mod learning;
mod path;
#[cfg(test)]
mod tests;
mod uses;

pub(crate) use factors::reuse_bucket;
pub(crate) use hazard::TailRank;
pub(crate) use path::PathId;

use std::fmt;
use std::sync::Arc;

use self::hazard::{FreshRanks, HazardModel};
use self::known::{BlockState, KnownBlocks};
use self::learning::{FitSchedule, LifeRecords};
use self::path::GHOST_MS;
use crate::seam::{Access, BlockId, Ended, Forest, Hints, RequestId, Upkeep};

/// A block is worth the probability that it is used within these milliseconds. The model knows
/// little of blocks unused for longer than [`GHOST_MS`], and few are half that old when they leave.
const RETURN_HORIZON_MS: u64 = GHOST_MS / 2;

/// What does not return counts as such only when it is forgotten. After these milliseconds as many
/// failures have been counted as returns are waited for.
const LEARNING_MS: u64 = 2 * GHOST_MS;

/// What is known of the blocks of one tier: when and by what requests they were used, and how soon
/// blocks of their kind return (a multiplicative hazard, see `docs/policies.md`).
///
/// It is told once what happens in a tier, and the tier's policies borrow it. 8 bytes a block,
/// besides segments and ghosts. It learns only if its [`upkeep`](Self::upkeep) is done.
#[derive(Default)]
pub struct ReuseModel {
    /// No policy asks it: then it is told nothing either.
    is_idle: bool,
    known: KnownBlocks,
    model: Arc<HazardModel>,
    /// By this model.
    fresh_ranks: FreshRanks,
    records: LifeRecords,
    learning: FitSchedule,
    /// Until then tails go by age: a model that knows nothing does worse, by 0.7 points over the
    /// first 100 agentic requests at 1,000 blocks.
    has_learned: bool,
    /// Paths whose tail may rank otherwise since the latest event.
    changed: Vec<PathId>,
    /// When it will have learned enough to call a block worthless, once it has seen a use.
    ready_ms: Option<u64>,
}

impl ReuseModel {
    /// A model that knows nothing and never will.
    pub fn idle() -> Self {
        Self { is_idle: true, ..Self::default() }
    }

    /// A request used the path that ends at `access.deepest`, whose last `access.inserted` blocks
    /// are new.
    pub fn touch(&mut self, access: &Access, forest: &dyn Forest) {
        if self.is_idle {
            return;
        }
        self.changed.clear();
        // From the first use on: an unused tier teaches nothing.
        self.ready_ms.get_or_insert(access.now_ms.saturating_add(LEARNING_MS));
        // Before the use, so that all that it changes is ranked by one model.
        if let Some(model) = self.learning.take_result() {
            self.model = model;
            self.fresh_ranks.clear();
            self.has_learned = true;
        }
        let Some(touched) = self.known.touch(access, forest) else { return };
        self.known.take_closed().for_each(|record| self.records.push(record));
        if touched.is_new {
            self.learning.count_request();
        }
        self.changed.extend(touched.paths);
        self.changed.dedup();
    }

    /// `block`, whose content `key` names (see [`Forest::key`]), left the tier.
    pub fn removed(&mut self, block: BlockId, key: u64) {
        if !self.is_idle {
            self.changed.clear();
            self.changed.extend(self.known.remove(block, key));
        }
    }

    /// A request has ended.
    pub fn finished(&mut self, ended: &Ended) {
        if !self.is_idle {
            self.changed.clear();
            self.changed.extend(self.known.finished(ended));
        }
    }

    /// Takes a bounded step of what is due besides (a fraction of a millisecond), and adds a fit to
    /// `work` when one is ready: that is for another thread, takes milliseconds to a second and
    /// hands its result back on its own; dropping it undone is harmless. Returns whether another
    /// step is due right away.
    pub fn upkeep(&mut self, work: &mut Vec<Upkeep>) -> bool {
        self.learning.step(&self.known, &self.records, &self.model, work)
    }

    /// Resident blocks.
    pub(crate) fn resident(&self) -> usize {
        self.known.resident()
    }

    /// The paths whose tail may rank otherwise since the latest event.
    pub(crate) fn changed(&self) -> &[PathId] {
        &self.changed
    }

    /// The path of a resident block.
    pub(crate) fn path_of(&self, block: BlockId) -> Option<PathId> {
        self.known.path_of(block)
    }

    /// The last resident block of a path.
    pub(crate) fn tail(&self, path: PathId) -> Option<BlockId> {
        self.known.last_block(path)
    }

    /// Where the last resident block of `path` stands among those that may go.
    pub(crate) fn tail_rank(&self, path: PathId) -> Option<TailRank> {
        let BlockState { profile, age_ms, touched, will_not_return } = self.known.tail(path)?;
        Some(match age_ms {
            _ if will_not_return => TailRank::WORTHLESS,
            _ if !self.has_learned => TailRank::by_age(touched),
            0 => TailRank::by_worth(self.fresh_ranks.rank(&self.model, profile)),
            _ => TailRank::by_worth(self.model.gittins(profile, age_ms)),
        })
    }

    /// Whether `rank` was given before anything was learned, and would differ now.
    pub(crate) fn may_rank_better(&self, rank: TailRank) -> bool {
        self.has_learned && rank.is_by_age()
    }

    /// The probability that `block`, the last one of a path of `depth` blocks, is used within the
    /// next [`RETURN_HORIZON_MS`]; 1 where it is not known.
    pub(crate) fn return_chance(&self, block: BlockId, depth: u32) -> f32 {
        // What the model has not seen is no reason to refuse a block.
        let Some(state) = self.known.state(block, depth) else { return 1.0 };
        if state.will_not_return {
            return 0.0;
        }
        self.model.return_chance(state.profile, state.age_ms, RETURN_HORIZON_MS)
    }

    /// Which request used `block` last, the last one of a path of `depth` blocks. `None`: unknown.
    pub fn last_use(&self, block: BlockId, depth: u32) -> Option<LastUse> {
        self.known.last_use(block, depth)
    }

    /// Whether it has seen enough blocks fail to return.
    pub(crate) fn is_ready(&self, now_ms: u64) -> bool {
        self.ready_ms.is_some_and(|ready_ms| ready_ms <= now_ms)
    }
}

impl fmt::Debug for ReuseModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReuseModel")
            .field("requests", &self.learning.requests())
            .finish_non_exhaustive()
    }
}

/// Whose use of a block was the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastUse {
    /// The request, if it had a name.
    pub request: Option<RequestId>,
    /// What was said about it.
    pub hints: Hints,
}
