//! Slices that a rank copies out of the memory of those on its host, which say their checksums and take
//! no further part.

use std::sync::Arc;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::PeerSeat;
use kvbm_tiers::{CopyError, PeerMemory, SlotId};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::ReadRank;
use super::coming::{ComingSlots, SliceGoal, another_life, compare, goals_of};
use super::whole::{WholeSlices, sums_of_all};
use crate::peers::link::PeerFault;
use crate::peers::protocol::{BrokenLink, Member};

/// Copies slices into slots, as they are, or what is wanted of them. The other ranks may write their
/// slots meanwhile, once the lease is over: then they are not what their checksums say.
///
/// What all ranks give of a slot comes before any of the next, while it is in the caches.
pub(super) async fn take(
    ranks: &mut [ReadRank<'_>],
    memories: &[Arc<PeerMemory>],
    ours: &Member,
    slots: &mut ComingSlots,
    until: Instant,
) -> Result<(), (PeerSeat, PeerFault)> {
    let (lives, goals) = goals_of(&slots.left);
    let mut copies = Vec::with_capacity(ranks.len());
    for (rank, memory) in ranks.iter_mut().zip(memories) {
        let sums = sums_of_all(&mut rank.link, &lives, until).await;
        let sums = sums.map_err(|why| (rank.source.seat, why))?;
        let of_rank = SliceCopies::of(rank, memory, ours, sums);
        copies.push(of_rank.map_err(|why| (rank.source.seat, why))?);
    }
    let mut made = vec![Ok(()); slots.left.len()];
    for (at, (life, goal)) in lives.iter().zip(&goals).enumerate() {
        let (from, _) = life.get();
        for copies in &mut copies {
            if let Err(why) = copies.copy(at, from, goal, slots, &mut made) {
                goal.fail(&mut made, &why);
            }
        }
        // What comes from then on would be late.
        if Instant::now() >= until {
            return Err((ranks[0].source.seat, BrokenLink::Late.into()));
        }
        // Others have this thread too.
        yield_now().await;
    }
    slots.next_all(made);
    Ok(())
}

/// Copies from one rank.
struct SliceCopies<'a> {
    memory: &'a PeerMemory,
    /// Of each slice, if it is there.
    sums: Vec<Option<[u8; 4]>>,
    is_plain: bool,
    whole: WholeSlices,
    /// What does not come straight into its slot.
    slice: Vec<u8>,
}

impl<'a> SliceCopies<'a> {
    fn of(
        rank: &ReadRank<'_>,
        memory: &'a PeerMemory,
        ours: &Member,
        sums: Vec<Option<[u8; 4]>>,
    ) -> Result<Self, PeerFault> {
        let whole = WholeSlices::of(rank, ours)?;
        Ok(Self { memory, sums, is_plain: rank.is_plain(), whole, slice: Vec::new() })
    }

    /// Copies a slice, and puts what is wanted of it where it goes, if it is what its checksum says.
    fn copy(
        &mut self,
        at: usize,
        from: SlotId,
        goal: &SliceGoal,
        slots: &mut ComingSlots,
        made: &mut [Result<(), CopyError>],
    ) -> Result<(), CopyError> {
        let sum = self.sums[at].ok_or_else(another_life)?;
        if self.is_plain {
            for at in goal.slots.clone() {
                compare(Some(slots.left[at].copy_from(self.memory, from)?), sum)?;
            }
            return Ok(());
        }
        self.memory.copy_out(from, &mut self.slice)?;
        compare(Some(checksum(&self.slice)), sum)?;
        self.whole.place(goal, &mut self.slice, slots, made);
        Ok(())
    }
}
