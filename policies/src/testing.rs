//! Tiers of simple shapes, for tests of policies. A block is named by its number.

use crate::seam::{BlockId, Forest, Standing};

/// Blocks without parents or children, any of which may go.
pub(crate) struct Loose;

impl Forest for Loose {
    fn standing(&self, _block: BlockId) -> Standing {
        Standing::Evictable
    }

    fn parent(&self, _block: BlockId) -> Option<BlockId> {
        None
    }

    fn key(&self, block: BlockId) -> u64 {
        block.0.into()
    }
}

/// One path from block 0 on, all of whose blocks stand alike.
pub(crate) struct Line(pub(crate) Standing);

impl Forest for Line {
    fn standing(&self, _block: BlockId) -> Standing {
        self.0
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        block.0.checked_sub(1).map(BlockId)
    }

    fn key(&self, block: BlockId) -> u64 {
        block.0.into()
    }
}
