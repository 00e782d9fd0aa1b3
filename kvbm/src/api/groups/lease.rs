//! The match of a hybrid model: the longest prefix whose last block has a checkpoint in every
//! group.

use std::ops::Range;
use std::sync::Arc;

use kvbm_policies::CheckpointPart;

use super::{CheckpointGroups, GroupTable, NamedCheckpoint, checkpoint_names};
use crate::api::lease::Lease;
use crate::api::manager::Manager;
use crate::names::hash::{BlockHash, Chain};
use crate::scheduler::Core;
use crate::table::RequestInfo;

/// The deepest blocks that are each looked at for a checkpoint; before them only those on the grid.
/// Prompts and turns end anywhere, and a request that continues one finds its end among the last
/// blocks.
const EACH: usize = 256;

/// The checkpoints at the end of the leading blocks of a chain, in every cache group beside full
/// attention.
pub(crate) struct CheckpointLeases {
    /// Blocks that all groups can give back.
    pub(crate) blocks: usize,
    /// By group, from group 1 on.
    pub(super) groups: Vec<GroupLease>,
}

/// The checkpoints that together have a group's window.
pub(super) struct GroupLease {
    pub(super) number: u8,
    pub(super) parts: Vec<(CheckpointPart, Lease)>,
}

impl CheckpointLeases {
    /// Positions of the blocks that a group has for the engine; `None`: there is no such group.
    pub(crate) fn wanted(&self, group: u8) -> Option<Range<usize>> {
        let Some(place) = usize::from(group).checked_sub(1) else { return Some(0..self.blocks) };
        let parts = &self.groups.get(place)?.parts;
        // The deepest part is the first.
        Some(parts.last().map_or(0..0, |(part, _)| part.wanted.start..self.blocks))
    }
}

impl Manager {
    /// Pins the leading blocks of `chain` in every tier that holds any. It counts as their use by
    /// an unknown request.
    pub fn lease<'a>(&self, chain: impl Into<Chain<'a>>) -> Lease {
        self.lease_for(RequestInfo::default(), chain)
    }

    /// [`lease`](Self::lease), for a request that the engine names or describes. All use of the
    /// lease counts as that request's. If it [has asked before](RequestInfo::has_asked), it uses
    /// the chain as it is now, and neither metrics nor the curve of hit rates count it as another
    /// request.
    ///
    /// Of a hybrid model it also pins the checkpoints at the end of the longest prefix that has one
    /// in every group: see [`Lease::usable`]. It looks for them at each of the last 256 held
    /// blocks, and before these on the grid (`hybrid.checkpoint_blocks`).
    pub fn lease_for<'a>(&self, info: RequestInfo, chain: impl Into<Chain<'a>>) -> Lease {
        self.checkpoints().lease_with(self.core(), chain.into(), info)
    }
}

impl CheckpointGroups {
    /// Leases in the table of full attention, and the checkpoints at the end of what all groups
    /// have.
    pub(crate) fn lease_with(
        &self,
        full: &Arc<Core>,
        chain: Chain<'_>,
        info: RequestInfo,
    ) -> Lease {
        if self.is_empty() {
            return full.lease(chain, info);
        }
        let _epoch = self.in_one_epoch();
        let lease = full.lease(chain, info);
        let most = lease.held().worth_loading().min(chain.len());
        let found = self.deepest(&chain.hashes[..most], info);
        let (blocks, groups) = found.unwrap_or_else(|| (0, self.no_leases()));
        if !info.has_asked {
            full.metrics().out_of_reach(most - blocks);
        }
        lease.with_checkpoints(CheckpointLeases { blocks, groups })
    }

    /// The blocks that the groups keep at a position of a chain: of each group, its checkpoints by
    /// their names.
    pub(crate) fn checkpoints_at(
        &self,
        hashes: &[BlockHash],
        at: usize,
    ) -> impl Iterator<Item = NamedCheckpoint> {
        self.groups.iter().flat_map(move |group| {
            self.grid().cover(at, group.window).map(move |part| {
                let hash = hashes[part.at - 1];
                let names = checkpoint_names(hash, part.kept);
                NamedCheckpoint { group: group.number, hash, names }
            })
        })
    }

    /// The deepest position at which every group has a checkpoint.
    fn deepest(&self, hashes: &[BlockHash], info: RequestInfo) -> Option<(usize, Vec<GroupLease>)> {
        let all = |at| self.groups.iter().all(|group| self.is_whole(group, hashes, at));
        let lease = |at| {
            self.groups
                .iter()
                .map(|group| self.lease(group, hashes, at, info))
                .collect::<Option<_>>()
        };
        // What was seen may be gone before it is pinned.
        self.candidates(hashes.len()).filter(|&at| all(at)).find_map(|at| Some((at, lease(at)?)))
    }

    fn no_leases(&self) -> Vec<GroupLease> {
        self.groups
            .iter()
            .map(|group| GroupLease { number: group.number, parts: Vec::new() })
            .collect()
    }

    fn candidates(&self, most: usize) -> impl Iterator<Item = usize> {
        let (grid, near) = (self.grid(), most.saturating_sub(EACH));
        let on_grid =
            std::iter::successors(Some(grid.before(near + 1)), move |&at| Some(grid.before(at)));
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
    ) -> Option<GroupLease> {
        let lease = |part: CheckpointPart| {
            let names = checkpoint_names(hashes[part.at - 1], part.kept);
            let lease = group.manager.core().lease(group.chain(&names), info);
            (lease.held().longest() == part.kept).then_some((part, lease))
        };
        let parts = self.grid().cover(at, group.window).map(lease).collect::<Option<_>>()?;
        Some(GroupLease { number: group.number, parts })
    }
}
