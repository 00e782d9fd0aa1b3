//! The few blocks with which a large part of all requests begin.

use std::collections::HashMap;

/// A block is hot if one request in this number uses it.
// Without these apart, conversation was off by tens of points: its first block is in every request.
const SHARE: u32 = 50;
/// Uses below which nothing is hot.
const LEAST_USES: u32 = 16;
/// Blocks of a path that may be hot, from its root on. Of longer shared prefixes a sample takes
/// enough.
pub(super) const DEEPEST: usize = 32;
/// After this number of requests half of the counts is forgotten.
const WINDOW: u32 = 8_192;

/// Counts the uses of the blocks that are hot, and of those next to them.
///
/// A block is used whenever one below it is, so hot blocks are the heads of paths: a request costs
/// a look-up for each hot block that it begins with, and one more. At most some 25,000 blocks are
/// counted at a time, typically a few hundred.
#[derive(Debug, Default)]
pub(crate) struct HotBlocks {
    uses: HashMap<u64, u32>,
    requests: u32,
}

impl HotBlocks {
    /// Counts a request. Returns how many of its first blocks are hot.
    pub(crate) fn head(&mut self, path: impl IntoIterator<Item = u64>) -> usize {
        self.requests += 1;
        if self.requests >= WINDOW {
            self.forget_half();
        }
        let least = LEAST_USES.max(self.requests / SHARE);
        let is_hot = |key: &u64| {
            let uses = self.uses.entry(*key).or_default();
            *uses += 1;
            *uses >= least
        };
        // The first block that is not hot is counted as well: so it may become hot.
        path.into_iter().take(DEEPEST).take_while(is_hot).count()
    }

    fn forget_half(&mut self) {
        self.requests /= 2;
        // What is half as frequent as a hot block keeps its count; all others would only fill the
        // table.
        let least = self.requests / SHARE / 2;
        self.uses.retain(|_, uses| {
            *uses /= 2;
            *uses > least
        });
    }
}
