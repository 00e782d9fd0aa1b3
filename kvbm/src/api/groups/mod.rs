//! Hybrid models: some layers keep every block, others only the last ones (a sliding window) or a
//! state.
//!
//! Layers that are kept alike are a *cache group*, with a block size and slots of its own in the
//! engine. Group 0, full attention, carries the chain; the rest of this crate is about it. Each
//! other group hangs *checkpoints* on the chain: its last blocks as of some position. A match ends
//! where all groups have a checkpoint.
//!
//! | file | holds |
//! |---|---|
//! | `opening` | the groups that an engine has, what each gets of the tiers, and what each counts |
//! | `lease` | the match: the deepest position with a checkpoint in every group |
//! | `save`, `load` | one transfer for all groups |
//!
//! A group has a table, tiers and background work of its own, so its blocks follow the same rules.
//! A checkpoint is a little chain there, which ends with the block of its position: it is there if
//! that block is, and one pin keeps it. [`kvbm_policies::checkpoints`] decides where and how much;
//! docs/adr/0008-checkpoints.md says why.

mod lease;
mod load;
mod opening;
mod save;

use std::sync::{Arc, Weak};

use kvbm_policies::CheckpointGrid;
use kvbm_tiers::{SlotId, Tier};

use crate::api::engine_memory::check_distinct;
use crate::api::manager::Manager;
use crate::error::{Error, Result};
use crate::names::epoch::NewEpoch;
use crate::names::fingerprint::digest;
use crate::names::hash::{BlockHash, Chain};
use crate::peers::HostBytes;
use crate::scheduler::Core;
use crate::sync::{RwLock, RwLockReadGuard};
use crate::table::LeftBlock;

pub(crate) use self::lease::CheckpointLeases;
pub(crate) use self::opening::described;
pub use self::opening::{CacheGroup, GroupKind};
pub use self::save::{CheckpointsSaved, SaveRequest};

/// Number of the group of full attention.
const FULL: u8 = 0;

/// Successive blocks of a cache group, and the engine's slots of them.
#[derive(Clone, Copy, Debug)]
pub struct GroupSlots<'a> {
    /// 0 for full attention; the first of [`Options::groups`](crate::Options::groups) is 1.
    pub group: u8,
    /// Position on the chain of the block in the first of `slots`.
    pub first: usize,
    /// The engine's slots. For a state, the slot at position p holds it as of the end of that
    /// block.
    pub slots: &'a [SlotId],
}

impl<'a> GroupSlots<'a> {
    /// Slots of full attention, the only group of a plain model.
    pub const fn full(first: usize, slots: &'a [SlotId]) -> Self {
        Self { group: FULL, first, slots }
    }

    pub(crate) const fn end(&self) -> usize {
        self.first.saturating_add(self.slots.len())
    }

    /// # Errors
    /// `Invalid`: the chain, of `blocks` blocks, ends before.
    fn check_within(&self, blocks: usize) -> Result<()> {
        if self.first.checked_add(self.slots.len()).is_some_and(|end| end <= blocks) {
            return Ok(());
        }
        let (first, wanted) = (self.first, self.slots.len());
        Err(Error::invalid(format!(
            "{wanted} blocks from position {first} on, of {blocks}: name one slot for each block"
        )))
    }
}

/// A manager's groups other than full attention: none, unless its model is hybrid.
#[derive(Default)]
pub(crate) struct CheckpointGroups {
    grid: Option<CheckpointGrid>,
    groups: Vec<GroupTable>,
    /// A reset comes before or after a call about several groups: a checkpoint of old weights must
    /// not get the name of a new one.
    resets: RwLock<()>,
}

impl CheckpointGroups {
    fn new(grid: CheckpointGrid, groups: Vec<GroupTable>) -> Self {
        Self { grid: Some(grid), groups, resets: RwLock::new(()) }
    }

    /// Whether the model is plain.
    pub(crate) const fn is_empty(&self) -> bool {
        self.groups.is_empty()
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

    /// Begins another epoch in all groups, that of full attention last: no match can join its new
    /// blocks to old checkpoints.
    pub(crate) fn reset_with(&self, full: &Arc<Core>, epoch: NewEpoch<'_>) -> Result<()> {
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
            Error::invalid(format!(
                "there is no cache group {number}: there are {groups} beside group 0"
            ))
        })
    }

    /// The slots that a call names for a plain model, which are of full attention.
    fn plain<'a>(slots: &[GroupSlots<'a>]) -> Result<GroupSlots<'a>> {
        match slots {
            [given] if given.group == FULL => Ok(*given),
            _ => Err(Error::invalid("the model has cache group 0 alone: name its slots")),
        }
    }

    /// Checks that each group is named once at most, and that its slots exist.
    fn check(&self, manager: &Manager, slots: &[GroupSlots<'_>]) -> Result<()> {
        let full = manager.engine()?;
        for (place, given) in slots.iter().enumerate() {
            let memory = if given.group == FULL {
                full
            } else {
                self.group(given.group)?.manager.engine()?
            };
            memory.check(given.slots)?;
            check_distinct(given.slots)?;
            if slots[..place].iter().any(|other| other.group == given.group) {
                return Err(Error::invalid(format!("cache group {} is named twice", given.group)));
            }
        }
        Ok(())
    }
}

impl Manager {
    /// The manager that holds the blocks of a cache group.
    pub(super) fn manager_of(&self, group: u8) -> Option<&Self> {
        if group == FULL {
            Some(self)
        } else {
            Some(&self.checkpoints().group(group).ok()?.manager)
        }
    }
}

/// A checkpoint of a group.
#[derive(Clone, Debug)]
pub(crate) struct NamedCheckpoint {
    /// The group's number.
    pub(crate) group: u8,
    /// The block that it hangs on.
    pub(crate) hash: BlockHash,
    /// The blocks that it keeps, root first.
    pub(crate) names: Vec<BlockHash>,
}

/// What peers need to know of a cache group.
pub(crate) struct GroupTier<'a> {
    pub(crate) number: u8,
    /// Blocks that it looks back over.
    pub(crate) window: usize,
    pub(crate) core: &'a Arc<Core>,
    pub(crate) host: HostBytes,
}

impl CheckpointGroups {
    /// The host tiers of the groups; `None`: one has none.
    pub(crate) fn host_tiers(&self) -> Option<Vec<GroupTier<'_>>> {
        self.groups
            .iter()
            .map(|group| {
                let (core, host) = (group.manager.core(), group.manager.host_bytes()?);
                let (number, window) = (group.number, group.window);
                Some(GroupTier { number, window, core, host })
            })
            .collect()
    }

    /// Lets a checkpoint go if its block is nowhere.
    pub(crate) fn let_go_orphan(&self, full: &Core, checkpoint: &NamedCheckpoint) {
        if let Ok(group) = self.group(checkpoint.group) {
            group.follower().let_go_orphan(full, checkpoint.hash);
        }
    }
}

/// The blocks of a checkpoint that hangs on a block, root first. The last one has the name of that
/// block, so that a look for it costs no digest; the others' names are their own, so that no two
/// checkpoints share a block.
pub(crate) fn checkpoint_names(at: BlockHash, kept: usize) -> Vec<BlockHash> {
    (1..kept).rev().map(|back| name(at, back)).chain([at]).collect()
}

fn find<'a>(slots: &[GroupSlots<'a>], group: u8) -> Option<GroupSlots<'a>> {
    slots.iter().copied().find(|given| given.group == group)
}

/// A cache group beside full attention.
pub(super) struct GroupTable {
    pub(super) number: u8,
    /// Blocks that it looks back over; 1 for a state.
    pub(super) window: usize,
    /// Holds its blocks.
    pub(super) manager: Manager,
}

impl GroupTable {
    pub(super) const fn chain<'a>(&self, names: &'a [BlockHash]) -> Chain<'a> {
        Chain::of_group(self.number, names)
    }

    /// Whether any tier has the checkpoint at a block. (Tiers are prefix-closed.)
    pub(super) fn has(&self, at: &BlockHash) -> bool {
        self.manager.core().matches(self.chain(std::slice::from_ref(at))).longest() > 0
    }

    pub(super) fn follower(&self) -> GroupFollower {
        GroupFollower { number: self.number, core: Arc::downgrade(self.manager.core()) }
    }
}

/// The block `back` blocks before the last one of a checkpoint.
fn name(at: BlockHash, back: usize) -> BlockHash {
    let (at, back) = (at.get().to_le_bytes(), (back as u64).to_le_bytes());
    BlockHash::from_u128(digest(&[b"kvbm checkpoint 1".as_slice(), &at, &back].concat()))
}

/// Makes a group's checkpoints leave no later than the blocks that they hang on.
pub(super) struct GroupFollower {
    number: u8,
    // Weak: transfers that a medium keeps must not keep a closed manager alive.
    core: Weak<Core>,
}

impl GroupFollower {
    pub(super) fn blocks_left(&self, left: &[LeftBlock]) {
        for left in left {
            self.let_go(left.hash, Some(left.tier).filter(|_| !left.is_gone));
        }
    }

    /// Lets the checkpoint at a block go if the block is nowhere.
    pub(super) fn let_go_orphan(&self, full: &Core, hash: BlockHash) {
        if full.matches(Chain::from(std::slice::from_ref(&hash))).longest() == 0 {
            self.let_go(hash, None);
        }
    }

    /// With a tier named, drops from it what the tier below has: the block went down, and its
    /// checkpoint is found there. With none, drops it from all: the block is nowhere, so its
    /// checkpoint cannot be found.
    fn let_go(&self, hash: BlockHash, from: Option<Tier>) {
        let Some(core) = self.core.upgrade() else { return };
        let last = Chain::of_group(self.number, std::slice::from_ref(&hash));
        for tier in Tier::ALL.into_iter().filter(|&tier| from.is_none_or(|from| from == tier)) {
            core.let_go(tier, last, from.is_none());
        }
    }
}
