//! The match of a hybrid model: the longest prefix whose last block has a checkpoint in every group.

use std::fmt;
use std::ops::Range;

use kvbm_policies::CheckpointPart;

use super::CheckpointGroups;
use super::group::GroupTable;
use crate::hash::{BlockHash, Chain};
use crate::lease::Lease;
use crate::manager::Manager;
use crate::scheduler::Core;
use crate::table::RequestInfo;

/// So many blocks from the deepest on are each looked at for a checkpoint, then those of the grid alone. Prompts and turns
/// end anywhere, and who continues one finds its end among the last blocks that are there.
const EACH: usize = 256;

/// Keeps the leading blocks of a chain where they are, and the checkpoints at the end of them in every cache group, until it
/// is dropped.
pub struct HybridLease {
    pub(super) blocks: usize,
    pub(super) full: Lease,
    /// By group, from group 1 on.
    pub(super) groups: Vec<GroupLease>,
}

/// The checkpoints that together have a group's window.
pub(super) struct GroupLease {
    pub(super) number: u8,
    pub(super) parts: Vec<(CheckpointPart, Lease)>,
}

impl fmt::Debug for HybridLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HybridLease")
            .field("blocks", &self.blocks)
            .field("full", &self.full)
            .finish_non_exhaustive()
    }
}

impl HybridLease {
    /// Leading blocks of the chain that all groups can give back: where the last of them ends, each has a checkpoint.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// What is held of full attention: it may be more than [`blocks`](Self::blocks).
    pub const fn full(&self) -> &Lease {
        &self.full
    }

    /// Positions of the blocks that a group has for the engine; `None`: there is no such group.
    pub fn wanted(&self, group: u8) -> Option<Range<usize>> {
        let Some(place) = usize::from(group).checked_sub(1) else { return Some(0..self.blocks) };
        let parts = &self.groups.get(place)?.parts;
        // The deepest part is the first.
        Some(parts.last().map_or(0..0, |(part, _)| part.wanted.start..self.blocks))
    }
}

impl Manager {
    /// Pins the leading blocks of `chain` that all cache groups can give back, and counts as their use: the longest prefix
    /// whose last block has a checkpoint in every group. Without other groups it is what is
    /// [worth loading](crate::table::Match::worth_loading).
    ///
    /// Checkpoints are looked for at each of the last 256 blocks that are held, and before these on the grid
    /// (`hybrid.checkpoint_blocks`).
    pub fn lease_hybrid<'a>(&self, info: RequestInfo, chain: impl Into<Chain<'a>>) -> HybridLease {
        let chain = chain.into();
        let lease = self.lease_groups(info, chain, Core::lease);
        let most = lease.full.held().worth_loading().min(chain.len());
        self.core().metrics().out_of_reach(most - lease.blocks);
        lease
    }

    /// [`lease_hybrid`](Self::lease_hybrid), for a request that has leased before: one that waits for room asks again and
    /// again. It uses what is there now, and neither metrics nor the curve of hit rates take it for another request.
    pub fn lease_hybrid_again<'a>(&self, info: RequestInfo, chain: impl Into<Chain<'a>>) -> HybridLease {
        self.lease_groups(info, chain.into(), Core::lease_uncounted)
    }

    fn lease_groups(&self, info: RequestInfo, chain: Chain<'_>, lease: LeaseFn) -> HybridLease {
        let checkpoints = self.checkpoints();
        let _epoch = checkpoints.in_one_epoch();
        let full = lease(self.core(), chain, info);
        let most = full.held().worth_loading().min(chain.len());
        let found = checkpoints.deepest(&chain.hashes[..most], info, lease);
        let (blocks, groups) = found.unwrap_or_else(|| (0, checkpoints.no_leases()));
        HybridLease { blocks, full, groups }
    }
}

/// How leases are taken: counted as a request, or not.
type LeaseFn = fn(&Core, Chain<'_>, RequestInfo) -> Lease;

impl CheckpointGroups {
    /// The deepest position at which every group has a checkpoint.
    fn deepest(
        &self,
        hashes: &[BlockHash],
        info: RequestInfo,
        lessor: LeaseFn,
    ) -> Option<(usize, Vec<GroupLease>)> {
        let all = |at| self.groups.iter().all(|group| self.is_whole(group, hashes, at));
        let lease = |at| {
            self.groups.iter().map(|group| self.lease(group, hashes, at, info, lessor)).collect::<Option<_>>()
        };
        // What is seen may be gone when it is to be pinned.
        self.candidates(hashes.len()).filter(|&at| all(at)).find_map(|at| Some((at, lease(at)?)))
    }

    fn no_leases(&self) -> Vec<GroupLease> {
        self.groups.iter().map(|group| GroupLease { number: group.number, parts: Vec::new() }).collect()
    }

    fn candidates(&self, most: usize) -> impl Iterator<Item = usize> {
        let (grid, near) = (self.grid(), most.saturating_sub(EACH));
        let on_grid = std::iter::successors(Some(grid.before(near + 1)), move |&at| Some(grid.before(at)));
        (near + 1..=most).rev().chain(on_grid.take_while(|&at| at > 0))
    }

    fn is_whole(&self, group: &GroupTable, hashes: &[BlockHash], at: usize) -> bool {
        self.grid().cover(at, group.window).all(|part| group.has(&hashes[part.at - 1]))
    }

    fn lease(
        &self,
        group: &GroupTable,
        hashes: &[BlockHash],
        at: usize,
        info: RequestInfo,
        lessor: LeaseFn,
    ) -> Option<GroupLease> {
        let lease = |part: CheckpointPart| {
            let names = GroupTable::names(hashes[part.at - 1], part.kept);
            let lease = lessor(group.manager.core(), group.chain(&names), info);
            (lease.held().longest() == part.kept).then_some((part, lease))
        };
        let parts = self.grid().cover(at, group.window).map(lease).collect::<Option<_>>()?;
        Some(GroupLease { number: group.number, parts })
    }
}
