//! What is wanted of the slices of a rank that come whole, out of its memory.

use kvbm_tiers::ranks::{HeadLayout, PullSource};
use tokio::time::Instant;

use super::coming::{SlicePlacement, sums_of};
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
}

impl WholeSlices {
    pub(super) fn of(rank: &ReadRank<'_>, ours: &Member) -> Result<Self, PeerFault> {
        let theirs = &rank.link.holder;
        let conversion = Conversion::of_whole_slices(ours, theirs, rank.source);
        if conversion.is_some() != rank.conversion.is_some() {
            return Err(PeerFault::Ranks(NO_SUCH_SHARES.to_owned()));
        }
        Ok(Self { conversion, their_heads: shares::heads_of(theirs), source: *rank.source })
    }

    /// `heads`: how they lie in slices here.
    pub(super) fn placement(&self, heads: Option<HeadLayout>) -> SlicePlacement<'_> {
        SlicePlacement {
            heads,
            theirs: self.their_heads.as_ref().map(|heads| (heads, self.source.give)),
            conversion: self.conversion.as_ref(),
            into: self.source.into,
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
