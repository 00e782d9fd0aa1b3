//! The request and tenant in whose name a block goes down when it leaves.

use crate::seam::{Hints, RequestId};

/// Whose use of a block was the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastUse {
    /// The request, if it had a name.
    pub request: Option<RequestId>,
    /// What was said about it.
    pub hints: Hints,
}
