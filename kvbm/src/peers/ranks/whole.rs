//! What is wanted of the slices of a rank that come whole, out of its memory.

use kvbm_tiers::CopyError;
use kvbm_tiers::ranks::{HeadLayout, HeadShare, PullSource};
use tokio::time::Instant;

use super::coming::{ComingSlots, SliceGoal, SlicePlacement, sums_of};
use super::{NO_SUCH_SHARES, ReadRank, in_time};
use crate::peers::conversion::Conversion;
use crate::peers::link::{PeerFault, PeerLink};
use crate::peers::protocol::{MAX_SLICES, Member, SlotLife};
use crate::peers::shares;

/// How they become a part of ours.
pub(super) struct WholeSlices {
    conversion: Option<Conversion>,
    their_heads: Option<HeadLayout>,
    source: PullSource,
    /// Where numbers get another type, the wanted heads are cut out first: no others are converted,
    /// and none counted.
    cut: Option<Vec<u8>>,
}

impl WholeSlices {
    pub(super) fn of(rank: &ReadRank<'_>, ours: &Member) -> Result<Self, PeerFault> {
        let (theirs, source) = (&rank.link.holder, rank.source);
        let changes_types = rank.conversion.as_ref().is_some_and(Conversion::changes_types);
        let is_cut = changes_types && source.give != HeadShare::WHOLE;
        let of = if is_cut { Conversion::of_given_shares } else { Conversion::of_whole_slices };
        let conversion = of(ours, theirs, source);
        if conversion.is_some() != rank.conversion.is_some() {
            return Err(PeerFault::Ranks(NO_SUCH_SHARES.to_owned()));
        }
        let (their_heads, cut) = (shares::heads_of(theirs), is_cut.then(Vec::new));
        Ok(Self { conversion, their_heads, source: *source, cut })
    }

    /// Puts what is wanted of a slice into all slots that are made of it.
    pub(super) fn place(
        &mut self,
        goal: &SliceGoal,
        slice: &mut [u8],
        slots: &mut ComingSlots,
        made: &mut [Result<(), CopyError>],
    ) {
        let placement = SlicePlacement {
            heads: slots.heads,
            theirs: self.their_heads.as_ref().map(|heads| (heads, self.source.give)),
            conversion: self.conversion.as_ref(),
            into: self.source.into,
        };
        let Some(cut) = &mut self.cut else {
            return placement.place_all(goal, slice, slots, made);
        };
        cut.clear();
        cut.extend_from_slice(slice);
        match self.their_heads.as_ref().and_then(|heads| heads.cut(self.source.give, cut)) {
            Some(()) => placement.place_all(goal, cut, slots, made),
            None => goal.fail(made, &CopyError::refused(NO_SUCH_SHARES)),
        }
    }
}

/// The checksums of slices that are there, of any number.
pub(super) async fn sums_of_all(
    link: &mut PeerLink,
    lives: &[SlotLife],
    until: Instant,
) -> Result<Vec<Option<[u8; 4]>>, PeerFault> {
    let mut sums = Vec::with_capacity(lives.len());
    for lives in lives.chunks(MAX_SLICES) {
        sums.extend(in_time(until, sums_of(link, lives)).await?);
    }
    Ok(sums)
}
