//! Rules that write everything.

use super::rule::{Admission, Candidates, Trigger};
use crate::reuse::ReuseModel;
use crate::seam::Forest;

/// Writes every block as soon as it is used: what is lost with the upper tier is in the lower one.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteThrough;

impl Admission for WriteThrough {
    fn admit(
        &mut self,
        candidates: Candidates,
        _trigger: Trigger,
        _now_ms: u64,
        _forest: &dyn Forest,
        _reuse: &ReuseModel,
    ) -> u32 {
        // Also when they leave: a last chance for blocks that had no room or budget when they were
        // used.
        candidates.blocks
    }
}

/// Writes every block when it is about to leave the upper tier.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteBack;

impl Admission for WriteBack {
    fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        _now_ms: u64,
        _forest: &dyn Forest,
        _reuse: &ReuseModel,
    ) -> u32 {
        match trigger {
            Trigger::Used => 0,
            Trigger::Leaving => candidates.blocks,
        }
    }
}
