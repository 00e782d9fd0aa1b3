//! Slices that a rank copies out of the memory of those on its host, which say their checksums and take
//! no further part.

use std::sync::Arc;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::{HeadLayout, HeadShare, PeerSeat, PullSource};
use kvbm_tiers::{CopyError, PeerMemory, SlotId};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::coming::{
    ComingSlots, SliceGoal, SlicePlacement, another_life, compare, goals_of, sums_of,
};
use super::{NO_SUCH_SHARES, ReadRank, in_time};
use crate::peers::conversion::Conversion;
use crate::peers::link::PeerFault;
use crate::peers::protocol::{BrokenLink, MAX_SLICES, Member, SlotLife};
use crate::peers::shares;

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
        let sums = sums_of_all(rank, &lives, until).await;
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
    memory: &'a PeerMemory,
    /// Of each slice, if it is there.
    sums: Vec<Option<[u8; 4]>>,
    is_plain: bool,
    conversion: Option<Conversion>,
    their_heads: Option<HeadLayout>,
    /// Only the wanted heads' numbers get another type, and are counted: they are cut out before.
    is_cut_first: bool,
    source: PullSource,
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
        let theirs = &rank.link.holder;
        let is_cut_first = rank.source.give != HeadShare::WHOLE
            && rank.conversion.as_ref().is_some_and(Conversion::changes_types);
        let of =
            if is_cut_first { Conversion::of_given_shares } else { Conversion::of_whole_slices };
        let conversion = of(ours, theirs, rank.source);
        if conversion.is_some() != rank.conversion.is_some() {
            return Err(PeerFault::Ranks(NO_SUCH_SHARES.to_owned()));
        }
        Ok(Self {
            memory,
            sums,
            is_plain: rank.is_plain(),
            conversion,
            their_heads: shares::heads_of(theirs),
            is_cut_first,
            source: *rank.source,
            slice: Vec::new(),
        })
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
        if self.is_cut_first {
            let cut = self.their_heads.as_ref().map(|of| of.cut(self.source.give, &mut self.slice));
            cut.flatten().ok_or_else(|| CopyError::refused(NO_SUCH_SHARES))?;
        }
        let placement = SlicePlacement {
            heads: slots.heads,
            theirs: self.their_heads.as_ref().map(|heads| (heads, self.source.give)),
            conversion: self.conversion.as_ref(),
            into: self.source.into,
        };
        placement.place_all(goal, &mut self.slice, slots, made);
        Ok(())
    }
}
