//! Loads into an engine's slots: of all cache groups, as one transfer.

use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, Weak};

use kvbm_policies::CheckpointPart;
use kvbm_tiers::ranks::{Leader, RankLoad};
use kvbm_tiers::{Fence, LayerCount};

use super::lease::{CheckpointLeases, GroupLease};
use super::{CheckpointGroups, FULL, GroupSlots, find};
use crate::api::engine_memory::EngineMemory;
use crate::api::lease::{AnyLease, Lease};
use crate::api::manager::Manager;
use crate::api::transfer::{Loaded, Transfer, Writers};
use crate::error::{Error, Result};
use crate::peers::{EngineSlots, FollowRequest, Peers};
use crate::scheduler::{JoinedTransfer, LoadInto};
use crate::task::WithMedia;

/// What the loads of all groups share.
struct LoadPart<'a> {
    slots: &'a [GroupSlots<'a>],
    after: &'a Fence,
    /// Dropped when no medium uses a slot of any group any more.
    with_media: WithMedia,
    joined: &'a Arc<JoinedTransfer>,
}

impl Manager {
    /// Copies what `lease` holds into the engine's slots, once the fence `after` is raised: the end
    /// of work that used the slots before. Blocks leased at a peer pass through the host tier,
    /// and stay there; those from a neighbour's memory come straight to slots that the CPU can
    /// write, and are in no tier here until the engine saves them. `slots` are of successive blocks
    /// of the chain. For a plain model they are any that the lease has; blocks that no tier holds
    /// count as failed, as do those behind one that cannot be read. For a hybrid model each cache
    /// group is named once; its blocks end with the last [usable](Lease::usable) one and begin
    /// where [`Lease::wanted`] says, or later if the engine has the ones before.
    ///
    /// Nothing else may use the slots until the answer, nor those of failed blocks until its
    /// [`Writers`](crate::Writers) are gone. It is an error of kind
    /// [`Invalid`](crate::ErrorKind::Invalid) if there is no engine's memory, a slot does not exist
    /// or is named twice, a group is missing or its slots are of other blocks, or the lease is of
    /// another manager; of kind [`Stale`](crate::ErrorKind::Stale) if it is from before a
    /// [`reset`](Self::reset), and of kind [`Closed`](crate::ErrorKind::Closed) after
    /// [`close`](Self::close). Nothing is begun then. If some groups had begun, the blocks of the
    /// others count as failed, and the answer tells about the slots. `after` works as `ready` of
    /// [`SaveRequest`](crate::SaveRequest) does.
    pub fn load_into(
        &self,
        lease: impl Into<AnyLease>,
        slots: &[GroupSlots<'_>],
        after: &Fence,
    ) -> Transfer<Loaded> {
        match lease.into() {
            AnyLease::Here(lease) => self.load_here(lease, slots, after),
            AnyLease::AtPeer(lease) => match self.slots_for_peer(slots, after) {
                Ok((peers, slots)) => {
                    peers.load_into(Transfer::ended(*lease), slots, &Arc::default())
                }
                Err(error) => Transfer::failed(error),
            },
        }
    }

    fn slots_for_peer(
        &self,
        slots: &[GroupSlots<'_>],
        after: &Fence,
    ) -> Result<(&Peers, EngineSlots)> {
        let (peers, engine) = (self.own_peers()?, self.engine()?.clone());
        self.check_plain()?;
        let GroupSlots { first, slots, .. } = CheckpointGroups::plain(slots)?;
        Ok((peers, EngineSlots::new(engine, first, slots, after.clone())?))
    }

    /// Brings what a peer has of a chain into the engine's slots, as [`load_into`](Self::load_into)
    /// does, and goes on while it comes to have more, as [`Peers::follow`](crate::Peers::follow)
    /// does. `slots` are of successive blocks of the chain. What does not come counts as failed, and
    /// the answer's [`fault`](Loaded::fault) says why; it is an error only where nothing was begun,
    /// as with `load_into`.
    pub fn follow_into(
        &self,
        asked: FollowRequest,
        slots: &[GroupSlots<'_>],
        after: &Fence,
    ) -> Transfer<Loaded> {
        match self.slots_for_peer(slots, after) {
            Ok((peers, slots)) => peers.follow_into(asked, slots),
            Err(error) => Transfer::failed(error),
        }
    }

    /// # Errors
    /// `Invalid`: the model is hybrid.
    pub(crate) fn check_plain(&self) -> Result<()> {
        if self.checkpoints().is_empty() {
            return Ok(());
        }
        let message = "with several cache groups, pull what a peer has (Peers::pull), and load the lease that it gives";
        Err(Error::invalid(message))
    }

    fn load_here(
        &self,
        mut lease: Lease,
        slots: &[GroupSlots<'_>],
        after: &Fence,
    ) -> Transfer<Loaded> {
        let checkpoints = self.checkpoints();
        if checkpoints.is_empty() {
            return match CheckpointGroups::plain(slots) {
                Ok(given) => self.begin_load(lease, given, after.clone(), Arc::new(()), None),
                Err(error) => Transfer::failed(error),
            };
        }
        let _epoch = checkpoints.in_one_epoch();
        if let Err(error) = checkpoints.check_load(self, &lease, slots) {
            return Transfer::failed(error);
        }
        let Some(CheckpointLeases { blocks, groups }) = lease.take_checkpoints() else {
            return Transfer::failed(of_full_alone());
        };
        let (nothing, full) = (lease.of_nothing(), lease);
        let first = find(slots, FULL).map_or(blocks, |given| given.first);
        let joined = JoinedTransfer::of(self.core());
        let with_media: WithMedia = Arc::new(());
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
        Transfer::joined_groups(loads, move |answers| {
            answer(answers, first..blocks, nothing, writers)
        })
    }

    /// Loads the blocks at positions `wanted` of the chain, of which the lease has those from
    /// `base` on.
    fn load_part(
        &self,
        lease: Lease,
        wanted: Range<usize>,
        base: usize,
        common: &LoadPart<'_>,
        group: u8,
    ) -> Transfer<Loaded> {
        // The part of full attention names the whole, even if nothing is wanted of it.
        let is_begun = group == FULL || !wanted.is_empty();
        let Some(given) = find(common.slots, group).filter(|_| is_begun) else {
            let layers = self.engine().map_or(NonZeroU16::MIN, EngineMemory::layers);
            return nothing_to_load(lease, layers);
        };
        let slots = &given.slots[wanted.start - given.first..wanted.end - given.first];
        let wanted = GroupSlots { group, first: wanted.start - base, slots };
        let with_media = Arc::clone(&common.with_media);
        let part_of = Some(Arc::clone(common.joined));
        self.begin_load(lease, wanted, common.after.clone(), with_media, part_of)
    }

    /// The part of one cache group. Positions are those in the chain of the lease.
    fn begin_load(
        &self,
        lease: Lease,
        wanted: GroupSlots<'_>,
        after: Fence,
        with_media: WithMedia,
        part_of: Option<Arc<JoinedTransfer>>,
    ) -> Transfer<Loaded> {
        match self.check_begin(&lease, &wanted) {
            Ok(layers) => {
                let (blocks, slots) = (wanted.first..wanted.end(), wanted.slots);
                let layers = Arc::new(LayerCount::new(layers, slots.len()));
                let in_ranks = None;
                let load =
                    LoadInto { lease, blocks, slots, after, layers, in_ranks, with_media, part_of };
                self.core().load_into(load)
            }
            Err(error) => Transfer::failed(error),
        }
    }

    /// Layers of the engine's blocks, if such a load may begin.
    fn check_begin(&self, lease: &Lease, wanted: &GroupSlots<'_>) -> Result<NonZeroU16> {
        let engine = self.engine()?;
        engine.check_load(wanted.slots)?;
        self.core().check_lease(lease)?;
        wanted.check_within(usize::MAX)?;
        Ok(engine.layers())
    }

    /// [`load_into`](Self::load_into) in ranks whose engines begin with a layer before the last one
    /// is there. Each of them waits for [its slice](crate::Rank::slice_of) of the load that is
    /// named; the transfer is the whole, and hears of layers at its end. Nothing uses the slots
    /// before: ranks wait for no fence.
    ///
    /// # Errors
    /// Those of [`load_into`](Self::load_into); nothing is begun then.
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid), too: there are no ranks, or the model is
    /// hybrid.
    pub fn load_in_ranks(
        &self,
        lease: Lease,
        slots: &[GroupSlots<'_>],
    ) -> Result<(RankLoad, Transfer<Loaded>)> {
        if !self.checkpoints().is_empty() {
            let message = "with several cache groups a load is awaited as a whole: use load_into";
            return Err(Error::invalid(message));
        }
        let leader = self.leader()?;
        let wanted = CheckpointGroups::plain(slots)?;
        let layers = self.check_begin(&lease, &wanted)?;
        let (blocks, slots) = (wanted.first..wanted.end(), wanted.slots);
        let load = leader.upgrade().ok_or_else(Error::closed)?.name_load(layers, slots.len());
        let layers = Arc::new(LayerCount::new(layers, slots.len()));
        let end = EndInRanks { leader: Weak::clone(leader), load, layers: Arc::clone(&layers) };
        let transfer = self.core().load_into(LoadInto {
            lease,
            blocks,
            slots,
            after: Fence::Done,
            layers,
            in_ranks: Some(load),
            with_media: Arc::new(end),
            part_of: None,
        });
        Ok((load, transfer))
    }
}

/// Tells ranks how a load ended, once its caller was told and no medium uses its slots any more:
/// with the table unlocked, as all `Effects`.
struct EndInRanks {
    leader: Weak<Leader>,
    load: RankLoad,
    layers: Arc<LayerCount>,
}

impl Drop for EndInRanks {
    fn drop(&mut self) {
        if let Some(leader) = self.leader.upgrade() {
            leader.end_load(self.load, self.layers.ended().unwrap_or(0));
        }
    }
}

/// The engine has all of it.
fn nothing_to_load(lease: Lease, layers: NonZeroU16) -> Transfer<Loaded> {
    let layers = Arc::new(LayerCount::new(layers, 0));
    layers.end(0);
    Transfer::ended(Loaded::new(0..0, 0, lease, Writers::none())).in_layers(layers)
}

impl CheckpointGroups {
    fn check_load(&self, manager: &Manager, lease: &Lease, slots: &[GroupSlots<'_>]) -> Result<()> {
        self.check(manager, slots)?;
        manager.core().check_lease(lease)?;
        if !lease.has_checkpoints() {
            return Err(of_full_alone());
        }
        for group in 0..=self.groups.len() as u8 {
            let given = find(slots, group).ok_or_else(|| {
                Error::invalid(format!("name the slots of cache group {group} as well"))
            })?;
            let blocks = lease.usable();
            let start = lease.wanted(group).map_or(blocks, |wanted| wanted.start);
            if given.end() != blocks || given.first < start {
                let (first, end) = (given.first, given.end());
                let asked =
                    format!("positions {first} to {end} of cache group {group} are asked for");
                return Err(Error::invalid(format!(
                    "{asked}, and the lease has {start} to {blocks}"
                )));
            }
        }
        Ok(())
    }
}

/// The answers of transfers have such leases.
fn of_full_alone() -> Error {
    Error::invalid("the lease is of full attention alone: lease the chain again")
}

/// A part that was not begun, or whose manager has gone, counts as failed: others may still use the
/// engine's slots.
fn answer(
    answers: Vec<Result<Loaded>>,
    wanted: Range<usize>,
    nothing: Lease,
    writers: Writers,
) -> Result<Loaded> {
    if let Some(Err(error)) = answers.first().filter(|_| answers.iter().all(Result::is_err)) {
        return Err(error.clone());
    }
    let is_whole = answers.iter().all(|part| part.as_ref().is_ok_and(|part| part.failed == 0));
    let of_full = answers.into_iter().next().and_then(Result::ok);
    let (arrived, lease) = of_full.map_or((0, nothing), |full| (full.arrived, full.lease));
    let Range { start, end } = wanted;
    let usable = if is_whole { end } else { (start + arrived).min(end.saturating_sub(1)) };
    Ok(Loaded { is_whole, usable, ..Loaded::new(start..end, arrived, lease, writers) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use crate::error::Error;
    use crate::table::{NamespaceId, Pins, RequestContext, SharedTable, Table};

    fn nothing() -> Lease {
        let table = Arc::new(SharedTable::new(Table::new([]), Arc::new(ManualClock::default())));
        Lease::new(table, Pins::of_nothing(RequestContext::default(), NamespaceId::default()))
    }

    fn loaded(arrived: usize, failed: usize) -> Loaded {
        Loaded::new(0..arrived + failed, arrived, nothing(), Writers::none())
    }

    /// A group closes while another's medium still writes.
    #[test]
    fn the_writers_of_one_group_outlive_the_error_of_another() {
        let medium: WithMedia = Arc::new(());
        let writers = Writers::new(&medium);
        for answers in [
            vec![Err(Error::closed()), Ok(loaded(0, 2))],
            vec![Ok(loaded(3, 1)), Err(Error::closed())],
        ] {
            let of_full = answers[0].as_ref().map_or(0, |full| full.arrived);
            let told = answer(answers, 4..8, nothing(), writers.clone()).expect("it was begun");
            assert_eq!((told.is_whole, told.usable), (false, 4 + of_full));
            assert!(!told.writers.are_gone());
        }
        drop(medium);
        assert!(writers.are_gone());
        let none = vec![Err(Error::closed()), Err(Error::stale())];
        assert!(answer(none, 4..8, nothing(), writers).is_err(), "nothing was begun");
    }
}
