//! Hybrid models: some of their layers keep every block, others only the last ones (a sliding window) or a state.
//!
//! Layers that are kept alike are a *cache group*, with a block size and slots of its own in the engine. That of full
//! attention, group 0, carries the chain; it is what the rest of this crate is about. Each other one hangs *checkpoints*
//! on the chain: its last blocks as of some position. A match ends where all groups have a checkpoint.
//!
//! | file | holds |
//! |---|---|
//! | `opening` | the groups that an engine has, and what each gets of the tiers |
//! | `group` | one group, and the names of what its checkpoints keep |
//! | `lease` | the match: the deepest position with a checkpoint in every group |
//! | `save`, `load` | one transfer for all groups |
//! | `metrics` | what each group counts, told apart by a label |
//!
//! A group has a table, tiers and background work of its own, so all that holds of blocks holds of its blocks. A
//! checkpoint is a little chain there, which ends with the block of its position: it is there if that block is, and one
//! pin keeps it. Where and how much is [`kvbm_policies::checkpoints`]. Why it is so: docs/adr/0008-checkpoints.md.

mod group;
mod lease;
mod load;
mod metrics;
mod opening;
mod save;

use std::sync::Arc;

use kvbm_policies::CheckpointGrid;
use kvbm_tiers::{SlotId, Tier};

use self::group::GroupTable;
use crate::engine_transfers::check_distinct;
use crate::error::{Error, ErrorKind, Result};
use crate::manager::Manager;
use crate::scheduler::Core;
use crate::sync::{RwLock, RwLockReadGuard};
use crate::table::SlotCounts;

pub use self::lease::HybridLease;
pub use self::load::HybridLoaded;
pub use self::opening::{CacheGroup, GroupKind};
pub use self::save::{CheckpointsSaved, HybridSave, HybridSaved};

/// Number of the group of full attention.
const FULL: u8 = 0;

/// Successive blocks of a cache group, and the engine's slots of them.
#[derive(Clone, Copy, Debug)]
pub struct GroupSlots<'a> {
    /// 0 for full attention; the first of [`Manager::open_hybrid`]'s groups is 1.
    pub group: u8,
    /// Position on the chain of the block in the first of `slots`.
    pub first: usize,
    /// The engine's slots. For a state, the slot at position p has it as of the end of that block.
    pub slots: &'a [SlotId],
}

impl GroupSlots<'_> {
    const fn end(&self) -> usize {
        self.first.saturating_add(self.slots.len())
    }
}

/// The groups of a manager beside full attention: none, unless its model is hybrid.
#[derive(Default)]
pub(crate) struct CheckpointGroups {
    grid: Option<CheckpointGrid>,
    groups: Vec<GroupTable>,
    /// A reset comes before or after what is asked of several groups: a checkpoint of old weights must not get the name
    /// of a new one.
    resets: RwLock<()>,
}

impl CheckpointGroups {
    fn new(grid: CheckpointGrid, groups: Vec<GroupTable>) -> Self {
        Self { grid: Some(grid), groups, resets: RwLock::new(()) }
    }

    fn grid(&self) -> CheckpointGrid {
        self.grid.unwrap_or_else(|| CheckpointGrid::new(1))
    }

    /// Keeps resets away.
    fn in_one_epoch(&self) -> RwLockReadGuard<'_, ()> {
        self.resets.read()
    }

    pub(crate) fn managers(&self) -> impl Iterator<Item = &Manager> {
        self.groups.iter().map(|group| &group.manager)
    }

    pub(crate) fn cores(&self) -> impl Iterator<Item = &Arc<Core>> {
        self.managers().map(Manager::core)
    }

    /// Begins another epoch in all groups, that of full attention last: no match can join its new blocks to old
    /// checkpoints.
    pub(crate) fn reset_with(&self, full: &Arc<Core>, epoch: u64) -> Result<()> {
        let _alone = self.resets.write();
        self.cores().try_for_each(|core| core.reset(epoch))?;
        full.reset(epoch)
    }

    /// Lets checkpoints go with the blocks that they hang on.
    pub(crate) fn follow(&self, full: &Arc<Core>) {
        let groups: Vec<_> = self.groups.iter().map(GroupTable::follower).collect();
        full.tell_left_blocks(move |left| groups.iter().for_each(|group| group.blocks_left(left)));
    }

    fn group(&self, number: u8) -> Result<&GroupTable> {
        let group = usize::from(number).checked_sub(1).and_then(|place| self.groups.get(place));
        group.ok_or_else(|| {
            let groups = self.groups.len();
            invalid(format!("there is no cache group {number}: there are {groups} beside group 0"))
        })
    }

    /// That each group is named once at most, and that its slots are there.
    fn check(&self, manager: &Manager, slots: &[GroupSlots<'_>]) -> Result<()> {
        let full = manager.engine()?;
        for (place, given) in slots.iter().enumerate() {
            let memory =
                if given.group == FULL { full } else { self.group(given.group)?.manager.engine()? };
            memory.check(given.slots)?;
            check_distinct(given.slots)?;
            if slots[..place].iter().any(|other| other.group == given.group) {
                return Err(invalid(format!("cache group {} is named twice", given.group)));
            }
        }
        Ok(())
    }
}

impl Manager {
    /// [`counts`](Self::counts) of a cache group; zeroes if there is none of that number.
    pub fn counts_of(&self, group: u8, tier: Tier) -> SlotCounts {
        self.manager_of(group).map(|manager| manager.counts(tier)).unwrap_or_default()
    }

    /// [`evict`](Self::evict) of a cache group.
    pub fn evict_of(&self, group: u8, tier: Tier, blocks: usize) -> usize {
        self.manager_of(group).map_or(0, |manager| manager.evict(tier, blocks))
    }

    fn manager_of(&self, group: u8) -> Option<&Self> {
        if group == FULL { Some(self) } else { Some(&self.checkpoints().group(group).ok()?.manager) }
    }
}

fn find<'a>(slots: &[GroupSlots<'a>], group: u8) -> Option<GroupSlots<'a>> {
    slots.iter().copied().find(|given| given.group == group)
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}
