//! Saves of all cache groups as one transfer.

use std::sync::{Arc, Weak};

use kvbm_tiers::{Fence, SlotId};

use super::group::{GroupFollower, GroupTable};
use super::{CheckpointGroups, FULL, GroupSlots, find, invalid};
use crate::engine_results::Saved;
use crate::error::{Error, Result};
use crate::hash::{BlockHash, Chain};
use crate::manager::Manager;
use crate::scheduler::{Core, JoinedTransfer, SaveFrom};
use crate::table::RequestInfo;
use crate::transfer::Transfer;

/// What a request has computed, in all cache groups.
#[derive(Clone, Debug)]
pub struct HybridSave<'a> {
    /// Whose it is.
    pub info: RequestInfo,
    /// The chain of its full blocks up to here.
    pub chain: &'a [BlockHash],
    /// Where the blocks are. Group 0 must be among them, as [`Manager::save_from`] takes it. Of a window, name what is
    /// still there, with the last block of the chain as the last; of a state, the same, often the last one alone.
    pub slots: &'a [GroupSlots<'a>],
    /// The chain ends with a prompt or a turn: a checkpoint is worth its room here, wherever the grid is.
    pub is_end: bool,
    /// When the slots are written.
    pub ready: Fence,
}

/// How a [`Manager::save_hybrid`] ended.
#[derive(Debug)]
pub struct HybridSaved {
    /// The blocks of full attention.
    pub full: Saved,
    /// By cache group that was named.
    pub groups: Vec<CheckpointsSaved>,
}

/// What became of a cache group's checkpoints. Counts are in blocks, but for the first two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointsSaved {
    /// Number of the group.
    pub group: u8,
    /// Checkpoints that could be made of the slots that were named.
    pub checkpoints: usize,
    /// Those of them that are there now, with the block that they hang on.
    pub whole: usize,
    /// Copied by this save.
    pub copied: usize,
    /// There before, or on their way.
    pub duplicates: usize,
    /// Not worth the room that they would take.
    pub declined: usize,
    /// Found no room or no queue space, or the medium is left alone for now.
    pub refused: usize,
    /// Failed, with those behind them.
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

/// The checkpoints of a save. When nothing of it is under way any more, those leave that hang on no block, whether anybody
/// asks for the answer or not.
struct SavedCheckpoints {
    full: Weak<Core>,
    followers: Vec<GroupFollower>,
    planned: Vec<PlannedCheckpoint>,
}

impl Drop for SavedCheckpoints {
    fn drop(&mut self) {
        let Some(full) = self.full.upgrade() else { return };
        for planned in &self.planned {
            let hash = planned.hash;
            if full.matches(Chain::from(std::slice::from_ref(&hash))).longest() == 0 {
                self.followers[usize::from(planned.group) - 1].let_go(&[(hash, None)]);
            }
        }
    }
}

/// What the saves of all groups have in common.
struct SavePart<'a> {
    save: &'a HybridSave<'a>,
    joined: &'a Arc<JoinedTransfer>,
}

impl SavePart<'_> {
    fn of<'b>(&self, chain: Chain<'b>, (first, slots): (usize, &'b [SlotId])) -> SaveFrom<'b> {
        let (info, ready) = (self.save.info, self.save.ready.clone());
        SaveFrom { info, chain, first, slots, ready, part_of: Some(Arc::clone(self.joined)) }
    }
}

impl Manager {
    /// Copies what a request has computed to the uppermost tier, in all cache groups, once `ready` has come: of full
    /// attention the blocks, as [`save_from`](Self::save_from) does; of the others checkpoints, on the grid
    /// (`hybrid.checkpoint_blocks`) and, where `is_end`, at the end of the chain, as far as all blocks that they keep are
    /// named. What is there already is not copied again.
    ///
    /// Errors are those of [`save_from`](Self::save_from), for slots of each group. Nothing is begun then.
    pub fn save_hybrid(&self, save: &HybridSave<'_>) -> Transfer<HybridSaved> {
        let checkpoints = self.checkpoints();
        let full = match checkpoints.check_save(self, save) {
            Ok(full) => full,
            Err(error) => return Transfer::failed(error),
        };
        let _epoch = checkpoints.in_one_epoch();
        let planned = checkpoints.plan(save);
        let saved = Arc::new(SavedCheckpoints {
            full: Arc::downgrade(self.core()),
            followers: checkpoints.groups.iter().map(GroupTable::follower).collect(),
            planned: planned.clone(),
        });
        let joined = JoinedTransfer::keeping(self.core(), Arc::clone(&saved));
        let part = SavePart { save, joined: &joined };
        let mut parts = vec![self.begin_save(part.of(save.chain.into(), (full.first, full.slots)))];
        joined.name(parts[0].id());
        parts.extend(planned.iter().map(|planned| checkpoints.save(planned, &part)));
        let groups: Vec<u8> =
            save.slots.iter().map(|given| given.group).filter(|&group| group != FULL).collect();
        Transfer::joined(parts, move |answers| {
            let told = answer(answers, &planned, &groups);
            // Their leases have ended.
            drop(saved);
            told
        })
    }
}

impl CheckpointGroups {
    fn check_save<'a>(&self, manager: &Manager, save: &HybridSave<'a>) -> Result<GroupSlots<'a>> {
        self.check(manager, save.slots)?;
        if let Some(given) = save.slots.iter().find(|given| given.end() > save.chain.len()) {
            let (group, end, blocks) = (given.group, given.end(), save.chain.len());
            return Err(invalid(format!(
                "the slots of cache group {group} go on to position {end}, of {blocks}"
            )));
        }
        find(save.slots, FULL).ok_or_else(|| invalid("name the slots of cache group 0 as well".to_owned()))
    }

    fn plan(&self, save: &HybridSave<'_>) -> Vec<PlannedCheckpoint> {
        let of_group = |given: &GroupSlots<'_>| {
            let Ok(group) = self.group(given.group) else { return Vec::new() };
            let is_end = save.is_end && given.end() == save.chain.len();
            let at = self.grid().within(given.first..given.end(), group.window, is_end);
            let planned = |at| PlannedCheckpoint {
                group: given.group,
                at,
                hash: save.chain[at - 1],
                kept: self.grid().kept_at(at, group.window),
            };
            at.map(planned).collect()
        };
        save.slots.iter().flat_map(of_group).collect()
    }
}

impl CheckpointGroups {
    fn save(&self, planned: &PlannedCheckpoint, part: &SavePart<'_>) -> Transfer<Saved> {
        let given = find(part.save.slots, planned.group);
        let (Ok(group), Some(given)) = (self.group(planned.group), given) else {
            return Transfer::failed(invalid(format!("there is no cache group {}", planned.group)));
        };
        let names = GroupTable::names(planned.hash, planned.kept);
        let slots = &given.slots[planned.at - planned.kept - given.first..planned.at - given.first];
        group.manager.begin_save(part.of(group.chain(&names), (0, slots)))
    }
}

fn answer(
    mut answers: Vec<Result<Saved>>,
    planned: &[PlannedCheckpoint],
    groups: &[u8],
) -> Result<HybridSaved> {
    let checkpoints = answers.split_off(1);
    let full = answers.pop().unwrap_or_else(|| Err(Error::closed()))?;
    let held = full.lease.held().longest();
    let count = |group: u8| {
        let mut count = CheckpointsSaved { group, ..CheckpointsSaved::default() };
        let of_group = planned.iter().zip(&checkpoints).filter(|(planned, _)| planned.group == group);
        for (planned, saved) in of_group {
            count.add(saved.as_ref().map_err(Clone::clone)?, planned, held);
        }
        Ok(count)
    };
    let groups = groups.iter().map(|&group| count(group)).collect::<Result<_>>()?;
    Ok(HybridSaved { full, groups })
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
