//! Loads of all cache groups as one transfer.

use std::ops::Range;
use std::sync::Arc;

use kvbm_policies::CheckpointPart;
use kvbm_tiers::Fence;

use super::lease::{GroupLease, HybridLease};
use super::{CheckpointGroups, FULL, GroupSlots, find, invalid};
use crate::engine_results::{Loaded, Writers};
use crate::error::Result;
use crate::layers::LayerCount;
use crate::lease::Lease;
use crate::manager::Manager;
use crate::scheduler::JoinedTransfer;
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

/// What the loads of all groups have in common.
struct LoadPart<'a> {
    slots: &'a [GroupSlots<'a>],
    after: &'a Fence,
    /// Goes when no medium has a slot of any group any more.
    with_media: Arc<()>,
    joined: &'a Arc<JoinedTransfer>,
}

impl Manager {
    /// Copies what `lease` holds into the engine's slots, in all cache groups, once `after` has come: the work that used the
    /// slots before. `slots` names each group once: successive blocks that end with the lease's last one, and begin where
    /// [`HybridLease::wanted`] says or later, where the engine has those before.
    ///
    /// Errors are those of [`load_into`](Self::load_into), for slots of each group; and
    /// [`Invalid`](crate::ErrorKind::Invalid) where a group is not named or its slots are of other blocks. Nothing is begun
    /// then. Where some groups had begun, what the others miss is failed, and the answer tells of the slots.
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
        let joined = JoinedTransfer::of(self.core());
        let with_media = Arc::new(());
        let writers = Writers::new(&with_media);
        let common = LoadPart { slots, after, with_media, joined: &joined };
        let mut loads = vec![(FULL, self.load_part(full, first..blocks, 0, &common, FULL))];
        joined.name(loads[0].1.id());
        for GroupLease { number, parts } in groups {
            let Ok(group) = checkpoints.group(number) else { continue };
            let load = |(part, lease): (CheckpointPart, Lease)| {
                let base = part.at - part.kept;
                let first = find(slots, number).map_or(blocks, |given| given.first);
                let wanted = part.wanted.start.max(first)..part.wanted.end;
                (number, group.manager.load_part(lease, wanted, base, &common, number))
            };
            loads.extend(parts.into_iter().map(load));
        }
        Transfer::joined_groups(loads, move |answers| answer(answers, (first, blocks), writers))
    }

    /// Loads the blocks at positions `wanted` of the chain, of which the lease has those from `base` on.
    fn load_part(
        &self,
        lease: Lease,
        wanted: Range<usize>,
        base: usize,
        common: &LoadPart<'_>,
        group: u8,
    ) -> Transfer<Loaded> {
        // That of full attention gives the whole its name, also where nothing is wanted of it.
        let is_begun = group == FULL || !wanted.is_empty();
        let Some(given) = find(common.slots, group).filter(|_| is_begun) else {
            return nothing_to_load(lease, self.engine().map_or(1, |engine| engine.layers().get()));
        };
        let slots = &given.slots[wanted.start - given.first..wanted.end - given.first];
        let wanted = wanted.start - base..wanted.end - base;
        let part = (Arc::clone(&common.with_media), Some(Arc::clone(common.joined)));
        self.begin_load(lease, (wanted, slots), common.after.clone(), part)
    }
}

/// The engine has all of it.
fn nothing_to_load(lease: Lease, layers: u16) -> Transfer<Loaded> {
    let layers = Arc::new(LayerCount::new(layers, 0));
    layers.end(true);
    let writers = Writers::new(&Arc::new(()));
    Transfer::ended(Loaded { lease, arrived: 0, failed: 0, writers }).in_layers(layers)
}

impl CheckpointGroups {
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

/// A part that was not begun, or whose manager has gone, is as one that failed: others may have the engine's slots still.
fn answer(
    answers: Vec<Result<Loaded>>,
    (first, blocks): (usize, usize),
    writers: Writers,
) -> Result<HybridLoaded> {
    let is_whole = answers.iter().all(|part| part.as_ref().is_ok_and(|part| part.failed == 0));
    let of_full = answers.first().and_then(|full| full.as_ref().ok()).map_or(0, |full| full.arrived);
    if answers.iter().all(Result::is_err) {
        answers.into_iter().collect::<Result<Vec<_>>>()?;
    }
    let usable = if is_whole { blocks } else { (first + of_full).min(blocks.saturating_sub(1)) };
    Ok(HybridLoaded { is_whole, usable, writers: vec![writers] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use crate::error::Error;
    use crate::table::{NamespaceId, Pins, RequestContext, SharedTable, Table};

    fn loaded(arrived: usize, failed: usize) -> Loaded {
        let table = Arc::new(SharedTable::new(Table::new([]), Arc::new(ManualClock::default())));
        let nothing = Pins::of_nothing(RequestContext::default(), NamespaceId::default());
        let writers = Writers::new(&Arc::new(()));
        Loaded { lease: Lease::new(table, nothing), arrived, failed, writers }
    }

    /// A group that closes while another's medium writes still.
    #[test]
    fn the_writers_of_one_group_outlive_the_error_of_another() {
        let medium = Arc::new(());
        let writers = Writers::new(&medium);
        for answers in
            [vec![Err(Error::closed()), Ok(loaded(0, 2))], vec![Ok(loaded(3, 1)), Err(Error::closed())]]
        {
            let of_full = answers[0].as_ref().map_or(0, |full| full.arrived);
            let told = answer(answers, (4, 8), writers.clone()).expect("something was begun");
            assert_eq!((told.is_whole, told.usable), (false, 4 + of_full));
            assert!(!told.writers.iter().all(Writers::are_gone));
        }
        drop(medium);
        assert!(writers.are_gone());
        let none = vec![Err(Error::closed()), Err(Error::stale())];
        assert!(answer(none, (4, 8), writers).is_err(), "nothing was begun");
    }
}
