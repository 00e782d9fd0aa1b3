//! The blocks of a simulated tier.

use std::iter::successors;

use crate::seam::{BlockId, Forest, Standing};
use crate::tier_policies::TierPolicies;

/// Blocks and what is above each, whichever tier holds them.
pub(crate) trait ChainSource {
    /// The block before `block`; `None` at a root.
    fn parent(&self, block: BlockId) -> Option<BlockId>;
    /// Blocks of the path that ends at `block`, itself included.
    fn depth(&self, block: BlockId) -> u32;
    /// Names the content of `block`.
    fn key(&self, block: BlockId) -> u64;

    /// `deepest` and its ancestors, from the deepest up.
    fn path(&self, deepest: BlockId) -> impl Iterator<Item = BlockId> {
        successors(Some(deepest), |&block| self.parent(block))
    }
}

/// Which blocks are resident: always whole paths from a root on.
#[derive(Debug, Default)]
pub(crate) struct SimulatedTier {
    /// By block: how many of its children are resident; `None` where it is not itself.
    children: Vec<Option<u32>>,
    resident: u32,
}

impl SimulatedTier {
    /// How many blocks are resident.
    pub(crate) fn resident(&self) -> u32 {
        self.resident
    }

    pub(crate) fn holds(&self, block: BlockId) -> bool {
        self.children.get(block.0 as usize).is_some_and(Option::is_some)
    }

    /// The deepest resident block of the path that ends at `deepest`.
    pub(crate) fn deepest_resident(
        &self,
        chains: &impl ChainSource,
        deepest: BlockId,
    ) -> Option<BlockId> {
        chains.path(deepest).find(|&block| self.holds(block))
    }

    /// Makes the path that ends at `deepest` resident. Returns how many of its blocks were not.
    pub(crate) fn insert_path(&mut self, chains: &impl ChainSource, deepest: BlockId) -> u32 {
        let before = self.resident;
        let mut children = 0;
        for block in chains.path(deepest) {
            // Its ancestors are there as well: the tier is prefix-closed.
            if let Some(present) = self.children_mut(block) {
                *present += children;
                break;
            }
            *self.children_mut(block) = Some(children);
            self.resident += 1;
            children = 1;
        }
        self.resident - before
    }

    /// Lets leaves go, as `policies` say, until no more than `capacity` blocks are resident.
    pub(crate) fn evict_down_to(
        &mut self,
        capacity: u32,
        chains: &impl ChainSource,
        policies: &mut TierPolicies,
    ) {
        while self.resident > capacity {
            let victim = policies.victim(&PolicyView { tier: self, chains });
            let victim = victim.expect("nothing is busy, so every leaf is evictable");
            policies.removed(victim, chains.key(victim), self.remove(chains, victim));
        }
    }

    /// Returns the parent where this made it a leaf.
    pub(crate) fn remove(&mut self, chains: &impl ChainSource, leaf: BlockId) -> Option<BlockId> {
        assert_eq!(self.children_mut(leaf).take(), Some(0), "victims are leaves");
        self.resident -= 1;
        let parent = chains.parent(leaf)?;
        let siblings = self.children_mut(parent).as_mut().expect("a tier is prefix-closed");
        *siblings -= 1;
        (*siblings == 0).then_some(parent)
    }

    fn children_mut(&mut self, block: BlockId) -> &mut Option<u32> {
        let at = block.0 as usize;
        if self.children.len() <= at {
            self.children.resize(at + 1, None);
        }
        &mut self.children[at]
    }
}

/// A tier as its policy sees it. No block is ever busy.
#[derive(Debug)]
pub(crate) struct PolicyView<'t, C> {
    pub(crate) tier: &'t SimulatedTier,
    pub(crate) chains: &'t C,
}

impl<C: ChainSource> Forest for PolicyView<'_, C> {
    fn standing(&self, block: BlockId) -> Standing {
        match self.tier.children.get(block.0 as usize) {
            Some(Some(1..)) => Standing::Interior,
            _ => Standing::Evictable,
        }
    }

    fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.chains.parent(block)
    }

    fn key(&self, block: BlockId) -> u64 {
        self.chains.key(block)
    }
}
