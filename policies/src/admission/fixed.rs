//! Rules that write everything.

use super::{Admission, Candidates, Moment};
use crate::eviction::Forest;

/// Writes every block as soon as it is used: what is lost with the upper tier is in the lower one.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteThrough;

impl Admission for WriteThrough {
    fn admit(&mut self, candidates: Candidates, _moment: Moment, _now_ms: u64, _forest: &dyn Forest) -> u32 {
        candidates.blocks
    }
}

/// Writes every block when it is about to leave the upper tier.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteBack;

impl Admission for WriteBack {
    fn admit(&mut self, candidates: Candidates, moment: Moment, _now_ms: u64, _forest: &dyn Forest) -> u32 {
        match moment {
            Moment::Used => 0,
            Moment::Leaving => candidates.blocks,
        }
    }
}
