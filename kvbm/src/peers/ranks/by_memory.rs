//! Slices that a rank copies out of the memory of one on its host, which says their checksums and takes
//! no further part.

use std::sync::Arc;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::{HeadLayout, HeadShare, PullSource};
use kvbm_tiers::{CopyError, PeerMemory, SlotId};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::coming::{
    ComingSlots, SliceGoal, SlicePlacement, another_life, expect, goals_of, sums_of,
};
use super::in_time;
use crate::peers::conversion::Conversion;
use crate::peers::link::{PeerFault, PeerLink};
use crate::peers::protocol::{BrokenLink, MAX_SLICES};
use crate::peers::shares;

/// What is asked for the checksums of at once.
const SUMMED_BYTES: usize = 16 << 20;

/// Copies slices into slots, as they are, or what is wanted of them. The other rank may write its
/// slots meanwhile, once the lease is over: then they are not what their checksums say.
pub(super) async fn take(
    link: &mut PeerLink,
    memory: &Arc<PeerMemory>,
    (source, conversion): (&PullSource, Option<&Conversion>),
    slots: &mut ComingSlots,
    until: Instant,
) -> Result<(), PeerFault> {
    let at_once = (SUMMED_BYTES / memory.geometry().block_bytes()).clamp(1, MAX_SLICES);
    let mut copies = SliceCopies {
        memory,
        their_heads: shares::heads_of(&link.holder),
        source,
        placement: SlicePlacement { heads: slots.heads, conversion, into: source.into },
        slice: Vec::new(),
    };
    let (lives, goals) = goals_of(&slots.left);
    let mut made = vec![Ok(()); slots.left.len()];
    for (lives, goals) in lives.chunks(at_once).zip(goals.chunks(at_once)) {
        let sums = in_time(until, sums_of(link, lives)).await?;
        for ((life, sum), goal) in lives.iter().zip(sums).zip(goals) {
            let (slot, _) = life.get();
            let sum = sum.ok_or_else(another_life);
            let came = sum.and_then(|sum| copies.copy(slot, sum, goal, slots, &mut made));
            if let Err(why) = came {
                goal.fail(&mut made, &why);
            }
            // From then on its slots may hold other blocks: what differs is late, not damaged.
            if Instant::now() >= until {
                return Err(BrokenLink::Late.into());
            }
            // Others have this thread too.
            yield_now().await;
        }
    }
    slots.all(made);
    Ok(())
}

struct SliceCopies<'a> {
    memory: &'a Arc<PeerMemory>,
    their_heads: Option<HeadLayout>,
    source: &'a PullSource,
    placement: SlicePlacement<'a>,
    /// What does not come straight into its slot.
    slice: Vec<u8>,
}

impl SliceCopies<'_> {
    /// Copies a slice, and puts what is wanted of it where it goes, if it is what its checksum says.
    fn copy(
        &mut self,
        from: SlotId,
        sum: [u8; 4],
        goal: &SliceGoal,
        slots: &mut ComingSlots,
        made: &mut [Result<(), CopyError>],
    ) -> Result<(), CopyError> {
        if self.source.has_all_heads() && self.placement.conversion.is_none() {
            let slot = &mut slots.left[goal.slots.start];
            return expect(slot.copy_of(self.memory, from), sum);
        }
        self.memory.copy_out(from, &mut self.slice)?;
        expect(Some(checksum(&self.slice)), sum)?;
        if self.source.give != HeadShare::WHOLE {
            let cut =
                self.their_heads.and_then(|heads| heads.cut(self.source.give, &mut self.slice));
            cut.ok_or_else(|| CopyError::refused("its heads make no such shares"))?;
        }
        self.placement.place_all(goal, &self.slice, slots, made);
        Ok(())
    }
}
