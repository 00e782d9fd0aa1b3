//! Loads of all cache groups as one transfer.

use std::ops::Range;
use std::sync::Arc;

use kvbm_policies::CheckpointPart;
use kvbm_tiers::Fence;

use super::lease::{GroupLease, HybridLease};
use super::{Checkpoints, FULL, GroupSlots, find, invalid};
use crate::engine_results::{Loaded, Writers};
use crate::error::Result;
use crate::layers::LayerCount;
use crate::lease::Lease;
use crate::manager::Manager;
use crate::transfer::Transfer;

/// How a [`Manager::load_hybrid`] ended.
#[derive(Debug)]
pub struct HybridLoaded {
    /// Everything that was asked for is in the engine's slots. Else no window and no state in them may be used: they are as
    /// of a position up to which something is missing.
    pub is_whole: bool,
    /// Leading blocks that may be asked for next: all that the lease had, where everything came. Else lease so many blocks
    /// of the chain, or fewer, and load what that lease wants; blocks of full attention before these have arrived.
    pub usable: usize,
    /// Who may still write slots of blocks that failed.
    pub writers: Vec<Writers>,
}

impl Manager {
    /// Copies what `lease` holds into the engine's slots, in all cache groups, once `after` has come: the work that used the
    /// slots before. `slots` names each group once: successive blocks that end with the lease's last one, and begin where
    /// [`HybridLease::wanted`] says or later, where the engine has those before.
    ///
    /// Errors are those of [`load_into`](Self::load_into), for slots of each group; and
    /// [`Invalid`](crate::ErrorKind::Invalid) where a group is not named or its slots are of other blocks. Nothing is begun
    /// then.
    pub fn load_hybrid(
        &self,
        lease: HybridLease,
        slots: &[GroupSlots<'_>],
        after: &Fence,
    ) -> Transfer<HybridLoaded> {
        let checkpoints = self.checkpoints();
        let _epoch = checkpoints.in_one_epoch();
        if let Err(error) = checkpoints.check_load(self, &lease, slots) {
            return Transfer::failed(error);
        }
        let HybridLease { blocks, full, groups } = lease;
        let first = find(slots, FULL).map_or(blocks, |given| given.first);
        let mut loads = vec![(FULL, self.load_part(full, first..blocks, 0, slots, (FULL, after)))];
        for GroupLease { number, parts } in groups {
            let Ok(group) = checkpoints.group(number) else { continue };
            let load = |(part, lease): (CheckpointPart, Lease)| {
                let base = part.at - part.kept;
                let first = find(slots, number).map_or(blocks, |given| given.first);
                let wanted = part.wanted.start.max(first)..part.wanted.end;
                (number, group.manager.load_part(lease, wanted, base, slots, (number, after)))
            };
            loads.extend(parts.into_iter().map(load));
        }
        Transfer::joined_groups(loads, move |answers| answer(answers, first, blocks))
    }

    /// Loads the blocks at positions `wanted` of the chain, of which the lease has those from `base` on.
    fn load_part(
        &self,
        lease: Lease,
        wanted: Range<usize>,
        base: usize,
        slots: &[GroupSlots<'_>],
        (group, after): (u8, &Fence),
    ) -> Transfer<Loaded> {
        let Some(given) = find(slots, group).filter(|_| !wanted.is_empty()) else {
            return nothing_to_load(lease, self.engine().map_or(1, |engine| engine.layers().get()));
        };
        let slots = &given.slots[wanted.start - given.first..wanted.end - given.first];
        self.load_into(lease, wanted.start - base..wanted.end - base, slots, after.clone())
    }
}

/// The engine has all of it.
fn nothing_to_load(lease: Lease, layers: u16) -> Transfer<Loaded> {
    let layers = Arc::new(LayerCount::new(layers, 0));
    layers.end(true);
    let writers = Writers::new(&Arc::new(()));
    Transfer::ended(Loaded { lease, arrived: 0, failed: 0, writers }).in_layers(layers)
}

impl Checkpoints {
    fn check_load(&self, manager: &Manager, lease: &HybridLease, slots: &[GroupSlots<'_>]) -> Result<()> {
        self.check(manager, slots)?;
        manager.core().check_lease(&lease.full)?;
        for group in 0..=self.groups.len() as u8 {
            let given = find(slots, group)
                .ok_or_else(|| invalid(format!("name the slots of cache group {group} as well")))?;
            let wanted = lease.wanted(group).unwrap_or(0..lease.blocks);
            if given.end() != lease.blocks || given.first < wanted.start {
                let (first, end, start) = (given.first, given.end(), wanted.start);
                let asked = format!("positions {first} to {end} of cache group {group} are asked for");
                return Err(invalid(format!("{asked}, and the lease has {start} to {}", lease.blocks)));
            }
        }
        Ok(())
    }
}

fn answer(answers: Vec<Result<Loaded>>, first: usize, blocks: usize) -> Result<HybridLoaded> {
    let loaded = answers.into_iter().collect::<Result<Vec<_>>>()?;
    let is_whole = loaded.iter().all(|part| part.failed == 0);
    let of_full = first + loaded.first().map_or(0, |full| full.arrived);
    let usable = if is_whole { blocks } else { of_full.min(blocks.saturating_sub(1)) };
    Ok(HybridLoaded { is_whole, usable, writers: loaded.into_iter().map(|part| part.writers).collect() })
}
