//! What an eviction policy is asked, and what it is told.

use std::fmt;

use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest};

/// An eviction policy of one tier. Victims are leaves, always.
///
/// Calls come in this order for a block: it is part of a path given to [`touch`](Self::touch), any
/// number of times; it may be named by [`victim`](Self::victim) and passed over as busy, then
/// handed back by [`released`](Self::released); [`removed`](Self::removed) ends its life.
///
/// Each call borrows the tier's [`ReuseModel`], which is told of the event before the policy is. It
/// knows nothing unless a policy [needs](Self::needs_reuse) it.
pub trait Eviction: Send + fmt::Debug {
    /// Whether it goes by what the tier's reuse model knows.
    fn needs_reuse(&self) -> bool {
        false
    }

    /// A request used the path that ends at `access.deepest`, whose last `access.inserted` blocks
    /// are new.
    fn touch(&mut self, access: &Access, forest: &dyn Forest, reuse: &ReuseModel);

    /// `block` left the tier (it was a leaf). `exposed` is its parent where that is a leaf from now
    /// on.
    fn removed(&mut self, block: BlockId, exposed: Option<BlockId>, reuse: &ReuseModel);

    /// The leaf to evict next, or `None` when every leaf is busy. The block stays until `removed`.
    fn victim(&mut self, forest: &dyn Forest, reuse: &ReuseModel) -> Option<BlockId>;

    /// `block` is a leaf and no longer busy; `victim` may have passed it over while it was.
    fn released(&mut self, block: BlockId, reuse: &ReuseModel);

    /// A request has ended, of which `reuse` knows more now.
    fn finished(&mut self, _reuse: &ReuseModel) {}

    /// Blocks that are charged to a tenant. Empty where it does not distinguish tenants.
    fn charged_to(&self, _tenant: Option<u32>) -> u32 {
        0
    }

    /// Whether it may turn blocks away. Where room is short, those that are about to come are then
    /// shown to it before: touched under ids that no block of the tier has, perhaps named as
    /// victims among the others, and in any case removed again. Those that were not named come, and
    /// are touched under ids of their own.
    fn may_decline(&self) -> bool {
        false
    }
}
