//! Slices that a rank copies out of the memory of those on its host, which say their checksums and take
//! no further part.

use std::sync::Arc;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::{HeadLayout, PeerSeat};
use kvbm_tiers::{CopyError, PeerMemory, SlotId};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::coming::{
    ComingSlots, SliceGoal, SlicePlacement, another_life, expect, goals_of, sums_of,
};
use super::{ReadRank, in_time};
use crate::peers::link::PeerFault;
use crate::peers::protocol::{BrokenLink, MAX_SLICES, SlotLife};
use crate::peers::shares;

/// Copies slices into slots, as they are, or what is wanted of them. The other ranks may write their
/// slots meanwhile, once the lease is over: then they are not what their checksums say.
///
/// What all ranks give of a slot comes before any of the next, while it is in the caches.
pub(super) async fn take(
    ranks: &mut [ReadRank<'_>],
    slots: &mut ComingSlots,
    until: Instant,
) -> Result<(), (PeerSeat, PeerFault)> {
    let (lives, goals) = goals_of(&slots.left);
    let mut sums = Vec::with_capacity(ranks.len());
    for rank in &mut *ranks {
        let told = sums_of_all(rank, &lives, until).await;
        sums.push(told.map_err(|why| (rank.source.seat, why))?);
    }
    let their_heads: Vec<_> =
        ranks.iter().map(|rank| shares::heads_of(&rank.link.holder)).collect();
    let from_ranks = ranks
        .iter()
        .zip(&their_heads)
        .filter_map(|(rank, theirs)| SliceCopies::of(rank, theirs.as_ref(), slots));
    let mut from_ranks: Vec<_> = from_ranks.collect();
    let mut made = vec![Ok(()); slots.left.len()];
    for (at, (life, goal)) in lives.iter().zip(&goals).enumerate() {
        let (from, _) = life.get();
        for (copies, sums) in from_ranks.iter_mut().zip(&sums) {
            let sum = sums[at].ok_or_else(another_life);
            let came = sum.and_then(|sum| copies.copy(from, sum, goal, slots, &mut made));
            if let Err(why) = came {
                goal.fail(&mut made, &why);
            }
        }
        // From then on their slots may hold other blocks: what differs is late, not damaged.
        if Instant::now() >= until {
            return Err((ranks[0].source.seat, BrokenLink::Late.into()));
        }
        // Others have this thread too.
        yield_now().await;
    }
    slots.all(made);
    Ok(())
}

async fn sums_of_all(
    rank: &mut ReadRank<'_>,
    lives: &[SlotLife],
    until: Instant,
) -> Result<Vec<Option<[u8; 4]>>, PeerFault> {
    let mut sums = Vec::with_capacity(lives.len());
    for lives in lives.chunks(MAX_SLICES) {
        sums.extend(in_time(until, sums_of(&mut rank.link, lives)).await?);
    }
    Ok(sums)
}

/// Copies from one rank.
struct SliceCopies<'a> {
    memory: Arc<PeerMemory>,
    is_plain: bool,
    placement: SlicePlacement<'a>,
    /// What does not come straight into its slot.
    slice: Vec<u8>,
}

impl<'a> SliceCopies<'a> {
    /// `None`: its memory is not mapped.
    fn of(
        rank: &'a ReadRank<'_>,
        their_heads: Option<&'a HeadLayout>,
        slots: &ComingSlots,
    ) -> Option<Self> {
        let placement = SlicePlacement {
            heads: slots.heads,
            theirs: their_heads.map(|heads| (heads, rank.source.give)),
            conversion: rank.conversion.as_ref(),
            into: rank.source.into,
        };
        let memory = Arc::clone(rank.link.memory.as_ref()?);
        Some(Self { memory, is_plain: rank.is_plain(), placement, slice: Vec::new() })
    }

    /// Copies a slice, and puts what is wanted of it where it goes, if it is what its checksum says.
    fn copy(
        &mut self,
        from: SlotId,
        sum: [u8; 4],
        goal: &SliceGoal,
        slots: &mut ComingSlots,
        made: &mut [Result<(), CopyError>],
    ) -> Result<(), CopyError> {
        if self.is_plain {
            let slot = &mut slots.left[goal.slots.start];
            return expect(slot.copy_of(&self.memory, from), sum);
        }
        self.memory.copy_out(from, &mut self.slice)?;
        expect(Some(checksum(&self.slice)), sum)?;
        self.placement.place_all(goal, &self.slice, slots, made);
        Ok(())
    }
}
