//! What an admission rule is asked, and what it is told.

use std::fmt;

use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Ended, Forest, Upkeep};

/// Blocks one below another that the lower tier lacks, while it holds everything above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidates {
    /// The deepest of them.
    pub last: BlockId,
    /// How many they are.
    pub blocks: u32,
    /// Blocks of the path that ends at the deepest, from the root on.
    pub depth: u32,
}

/// Why the question comes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// A request has just used the candidates. Those not admitted are asked about again.
    Used,
    /// The last candidate, a leaf, is about to leave the upper tier: now or never.
    Leaving,
}

/// The rule by which blocks go from an upper tier to the one below. Its blocks are those of the
/// upper tier.
///
/// Called under the lock of the tiers' owner, like an [`Eviction`](crate::Eviction) policy, and
/// should answer in microseconds. What is known of the blocks' return it borrows from the upper
/// tier's [`ReuseModel`].
pub trait Admission: Send + fmt::Debug {
    /// Whether it goes by what the upper tier's reuse model knows.
    fn needs_reuse(&self) -> bool {
        false
    }

    /// A request used a path of the upper tier, as in [`Eviction::touch`](crate::Eviction::touch).
    fn touch(&mut self, _access: &Access, _forest: &dyn Forest) {}

    /// A request has ended.
    fn finished(&mut self, _ended: &Ended) {}

    /// Adds to `work` what another thread is to do for it, besides the reuse model's.
    fn upkeep(&mut self, _work: &mut Vec<Upkeep>) {}

    /// How many of the candidates to write, from the first one on. The caller writes them.
    fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        now_ms: u64,
        forest: &dyn Forest,
        reuse: &ReuseModel,
    ) -> u32;

    /// This number of the blocks just admitted was not written: the lower tier had no room for
    /// them.
    fn refund(&mut self, _blocks: u32) {}
}
