//! Saves from an engine's slots: of all cache groups, as one transfer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use kvbm_tiers::{Fence, Tier};

use super::{
    CheckpointGroups, FULL, GroupFollower, GroupSlots, GroupTable, checkpoint_names, find,
};
use crate::api::manager::Manager;
use crate::api::transfer::{Saved, Transfer};
use crate::error::{Error, Result};
use crate::names::hash::{BlockHash, Chain};
use crate::scheduler::{Core, JoinedTransfer, SaveFrom};
use crate::table::RequestInfo;

/// What a request has computed, and where it lies.
#[derive(Clone, Debug)]
pub struct SaveRequest<'a> {
    /// The request.
    pub info: RequestInfo,
    /// The chain of its full blocks up to here, or further.
    pub chain: Chain<'a>,
    /// Where the blocks are, successive ones of each cache group. Group 0 must be among them, and
    /// its blocks before the first must be in the tiers or on their way: so save a chain from its
    /// root, or a prefill's chunks in order. Of a window, name what is still there, up to the last
    /// block of the chain; of a state, the same, often the last one alone.
    pub slots: &'a [GroupSlots<'a>],
    /// The chain ends with a prompt or a turn: a checkpoint is worth its room here, even off the
    /// grid.
    pub is_end: bool,
    /// Raised when the slots are written.
    pub ready: Fence,
}

/// What became of a cache group's checkpoints. Counts are in blocks, but for the first two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointsSaved {
    /// Number of the group.
    pub group: u8,
    /// Checkpoints that could be made of the named slots.
    pub checkpoints: usize,
    /// Those of them that are there now, along with the block that they hang on.
    pub whole: usize,
    /// Copied by this save.
    pub copied: usize,
    /// Already there, or on their way.
    pub duplicates: usize,
    /// Not worth their room.
    pub declined: usize,
    /// Found no room or no queue space, or the medium is left alone for now.
    pub refused: usize,
    /// Failed, and those behind them.
    pub failed: usize,
}

/// A checkpoint that is to be made.
#[derive(Clone, Copy)]
struct PlannedCheckpoint {
    group: u8,
    at: usize,
    hash: BlockHash,
    kept: usize,
}

/// The checkpoints of a save. When all its copies have ended, those that hang on no block leave,
/// even if no one asks for the answer.
struct SavedCheckpoints {
    full: Weak<Core>,
    followers: Vec<GroupFollower>,
    planned: Vec<PlannedCheckpoint>,
    /// Those that hang on no block have left.
    is_tidy: AtomicBool,
}

impl SavedCheckpoints {
    /// Once, when all copies have ended.
    fn tidy(&self) {
        let Some(full) = self.full.upgrade().filter(|_| !self.is_tidy.swap(true, Ordering::AcqRel))
        else {
            return;
        };
        for planned in &self.planned {
            self.followers[usize::from(planned.group) - 1].let_go_orphan(&full, planned.hash);
        }
    }
}

impl Drop for SavedCheckpoints {
    fn drop(&mut self) {
        self.tidy();
    }
}

impl<'a> SaveRequest<'a> {
    /// For an unknown request in the middle of its prompt, whose slots are written already.
    pub fn of(chain: impl Into<Chain<'a>>, slots: &'a [GroupSlots<'a>]) -> Self {
        let (info, chain) = (RequestInfo::default(), chain.into());
        Self { info, chain, slots, is_end: false, ready: Fence::Done }
    }

    /// Of one cache group.
    fn part<'b>(
        &self,
        chain: Chain<'b>,
        GroupSlots { first, slots, .. }: GroupSlots<'b>,
        joined: Option<&Arc<JoinedTransfer>>,
    ) -> SaveFrom<'b> {
        let (info, ready) = (self.info, self.ready.clone());
        SaveFrom { info, chain, first, slots, ready, part_of: joined.cloned() }
    }
}

impl Manager {
    /// Copies what a request has computed to the uppermost tier, once its slots are
    /// [ready](SaveRequest::ready): blocks of full attention, and checkpoints of other cache
    /// groups. Checkpoints are on the grid (`hybrid.checkpoint_blocks`) and, if the chain
    /// [ends](SaveRequest::is_end), at its end, where all blocks that they keep are named. What is
    /// there already is not copied again.
    ///
    /// The slots must not change until the answer. It is an error of kind
    /// [`Invalid`](crate::ErrorKind::Invalid) if there is no engine's memory, a slot does not
    /// exist, a group is missing or named twice, or the chain is shorter; and of kind
    /// [`Closed`](crate::ErrorKind::Closed) after [`close`](Self::close). Nothing is begun then. If
    /// `ready` is not raised within `transfer.timeout_ms` (`DYN_KVBM_TRANSFER_TIMEOUT_MS`), or
    /// cannot be raised any more, all its blocks count as failed.
    pub fn save_from(&self, save: &SaveRequest<'_>) -> Transfer<Saved> {
        let checkpoints = self.checkpoints();
        let full = match checkpoints.check_save(self, save) {
            Ok(full) => full,
            Err(error) => return Transfer::failed(error),
        };
        if checkpoints.is_empty() {
            return self.begin_save(save.part(save.chain, full, None));
        }
        let _epoch = checkpoints.in_one_epoch();
        let planned = checkpoints.plan(save);
        let saved = Arc::new(SavedCheckpoints {
            full: Arc::downgrade(self.core()),
            followers: checkpoints.groups.iter().map(GroupTable::follower).collect(),
            planned: planned.clone(),
            is_tidy: AtomicBool::new(false),
        });
        let joined = JoinedTransfer::keeping(self.core(), Arc::clone(&saved));
        let mut parts = vec![self.begin_save(save.part(save.chain, full, Some(&joined)))];
        joined.name(parts[0].id());
        parts.extend(planned.iter().map(|planned| checkpoints.save(planned, save, &joined)));
        let groups: Vec<u8> =
            save.slots.iter().map(|given| given.group).filter(|&group| group != FULL).collect();
        Transfer::joined(parts, move |answers| {
            let told = answer(answers, &planned, &groups);
            // Their leases have ended. Not when the last part lets go of this: who has the answer
            // must find it so.
            saved.tidy();
            told
        })
    }

    /// The part of one cache group.
    fn begin_save(&self, save: SaveFrom<'_>) -> Transfer<Saved> {
        let given = GroupSlots::full(save.first, save.slots);
        let checked = self
            .engine()
            .and_then(|engine| engine.check(given.slots))
            .and_then(|()| given.check_within(save.chain.len()))
            .and_then(|()| self.uppermost());
        match checked {
            Ok(to) => self.core().save_from(to, save),
            Err(error) => Transfer::failed(error),
        }
    }

    fn uppermost(&self) -> Result<Tier> {
        self.below_device().ok_or_else(|| {
            Error::invalid("there is no tier to save to: set host.capacity, or a lower tier")
        })
    }
}

impl CheckpointGroups {
    /// The slots of a save of a model without other groups, which must be within its chain.
    pub(crate) fn check_plain<'a>(&self, save: &SaveRequest<'a>) -> Result<GroupSlots<'a>> {
        let given = Self::plain(save.slots)?;
        given.check_within(save.chain.len())?;
        if self.is_empty() {
            return Ok(given);
        }
        Err(Error::invalid("layers are saved of a model without other cache groups"))
    }

    fn check_save<'a>(&self, manager: &Manager, save: &SaveRequest<'a>) -> Result<GroupSlots<'a>> {
        if self.is_empty() {
            return Self::plain(save.slots);
        }
        self.check(manager, save.slots)?;
        if let Some(given) = save.slots.iter().find(|given| given.end() > save.chain.len()) {
            let (group, end, blocks) = (given.group, given.end(), save.chain.len());
            return Err(Error::invalid(format!(
                "the slots of cache group {group} go on to position {end}, of {blocks}"
            )));
        }
        find(save.slots, FULL)
            .ok_or_else(|| Error::invalid("name the slots of cache group 0 as well"))
    }

    fn plan(&self, save: &SaveRequest<'_>) -> Vec<PlannedCheckpoint> {
        let of_group = |given: &GroupSlots<'_>| {
            let Ok(group) = self.group(given.group) else { return Vec::new() };
            let is_end = save.is_end && given.end() == save.chain.len();
            let at = self.grid().within(given.first..given.end(), group.window, is_end);
            let planned = |at| PlannedCheckpoint {
                group: given.group,
                at,
                hash: save.chain.hashes[at - 1],
                kept: self.grid().kept_at(at, group.window),
            };
            at.map(planned).collect()
        };
        save.slots.iter().flat_map(of_group).collect()
    }
}

impl CheckpointGroups {
    fn save(
        &self,
        planned: &PlannedCheckpoint,
        save: &SaveRequest<'_>,
        joined: &Arc<JoinedTransfer>,
    ) -> Transfer<Saved> {
        let given = find(save.slots, planned.group);
        let (Ok(group), Some(given)) = (self.group(planned.group), given) else {
            return Transfer::failed(Error::invalid(format!(
                "there is no cache group {}",
                planned.group
            )));
        };
        let names = checkpoint_names(planned.hash, planned.kept);
        let slots = &given.slots[planned.at - planned.kept - given.first..planned.at - given.first];
        let given = GroupSlots { first: 0, slots, ..given };
        group.manager.begin_save(save.part(group.chain(&names), given, Some(joined)))
    }
}

fn answer(
    mut answers: Vec<Result<Saved>>,
    planned: &[PlannedCheckpoint],
    groups: &[u8],
) -> Result<Saved> {
    let checkpoints = answers.split_off(1);
    let full = answers.pop().unwrap_or_else(|| Err(Error::closed()))?;
    let held = full.lease.held().longest();
    let count = |group: u8| {
        let mut count = CheckpointsSaved { group, ..CheckpointsSaved::default() };
        let of_group =
            planned.iter().zip(&checkpoints).filter(|(planned, _)| planned.group == group);
        for (planned, saved) in of_group {
            count.add(saved.as_ref().map_err(Clone::clone)?, planned, held);
        }
        Ok(count)
    };
    let checkpoints = groups.iter().map(|&group| count(group)).collect::<Result<_>>()?;
    Ok(Saved { checkpoints, ..full })
}

impl CheckpointsSaved {
    fn add(&mut self, saved: &Saved, planned: &PlannedCheckpoint, held: usize) {
        self.checkpoints += 1;
        let is_whole = saved.lease.held().longest() == planned.kept && planned.at <= held;
        self.whole += usize::from(is_whole);
        self.copied += saved.copied;
        self.duplicates += saved.duplicates;
        self.declined += saved.declined;
        self.refused += saved.refused;
        self.failed += saved.failed;
    }
}
