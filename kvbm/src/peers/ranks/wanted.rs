//! Slots that are made of slices of several ranks, or of what is wanted of a slice.
//!
//! What all ranks give of a slot comes before any of the next. Each block is put together in a
//! buffer, which stays in the caches unless blocks are large. The whole block then goes to its slot
//! past the caches. Written row by row, the slot would be fetched from memory first, and once more
//! for its checksum.

use futures::future::join_all;
use kvbm_tiers::CopyError;
use kvbm_tiers::ranks::{HeadLayout, HeadShare, PeerSeat, PullSource, PulledBlock};
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::by_connection::ConnectionSlices;
use super::by_memory::MemorySlices;
use super::by_nixl::NixlSlices;
use super::coming::{ComingSlots, SliceGoal};
use super::reader::{NO_SUCH_SHARES, ReadRank};
use crate::peers::conversion::Conversion;
use crate::peers::link::PeerFault;
use crate::peers::protocol::{BrokenLink, Member};
use crate::peers::shares;

/// Slices of one rank, in the order in which slots want them.
pub(super) enum ComingSlices<'a> {
    Memory(MemorySlices),
    Nixl(NixlSlices<'a>),
    Connection(ConnectionSlices<'a>),
}

impl ComingSlices<'_> {
    /// Asks for the first ones, before any is taken.
    async fn begin(&mut self, until: Instant) -> Result<(), PeerFault> {
        let begin = async {
            match self {
                Self::Memory(_) => Ok(()),
                Self::Nixl(slices) => {
                    slices.begin().await;
                    Ok(())
                }
                Self::Connection(slices) => slices.begin().await,
            }
        };
        Ok(timeout_at(until, begin).await.unwrap_or(Err(BrokenLink::Late))?)
    }

    /// The inner error: this one does not come.
    async fn next(&mut self, until: Instant) -> Result<Result<&mut [u8], CopyError>, PeerFault> {
        match self {
            // What comes from then on would be late.
            Self::Memory(_) if Instant::now() >= until => Err(BrokenLink::Late.into()),
            Self::Memory(slices) => Ok(slices.next()),
            Self::Nixl(slices) => slices.next(until).await,
            Self::Connection(slices) => {
                let next = timeout_at(until, slices.next()).await;
                Ok(next.unwrap_or(Err(BrokenLink::Late))?)
            }
        }
    }

    /// Stops. Reads by NIXL that are under way have until `until`, and `GRACE` at least.
    pub(super) async fn end(self, until: Instant) {
        if let Self::Nixl(slices) = self {
            slices.end(until).await;
        }
    }
}

/// A rank that gives a part of each slot.
pub(super) struct GivingRank<'a> {
    pub(super) seat: PeerSeat,
    pub(super) slices: ComingSlices<'a>,
    pub(super) parts: SliceParts,
}

/// Brings the slots that are left. Those that it does not get to stay left.
pub(super) async fn take(
    ranks: &mut [GivingRank<'_>],
    goals: Vec<SliceGoal>,
    slots: &mut ComingSlots,
    until: Instant,
) -> Result<(), (PeerSeat, PeerFault)> {
    // At all ranks: they give at once.
    let beginning = ranks.iter_mut().map(async |GivingRank { seat, slices, .. }| {
        slices.begin(until).await.map_err(|why| (*seat, why))
    });
    join_all(beginning).await.into_iter().collect::<Result<(), _>>()?;
    let mut whole = JoinedBlocks::of(slots.block_bytes());
    for goal in goals {
        whole.begin(&goal);
        for GivingRank { seat, slices, parts } in &mut *ranks {
            match slices.next(until).await.map_err(|why| (*seat, why))? {
                Ok(slice) => parts.place(slice, &goal, slots, &mut whole),
                Err(why) => whole.fail(&why),
            }
        }
        whole.end(&goal, slots);
        // Others have this thread too.
        yield_now().await;
    }
    Ok(())
}

/// Blocks that are put together at once: one, or all that are made of one slice.
struct JoinedBlocks {
    block_bytes: usize,
    bytes: Vec<u8>,
    came: Vec<Result<(), CopyError>>,
    /// Numbers of theirs that were too large.
    saturated: u64,
}

impl JoinedBlocks {
    const fn of(block_bytes: usize) -> Self {
        Self { block_bytes, bytes: Vec::new(), came: Vec::new(), saturated: 0 }
    }

    /// The first slice of a block starts an empty one.
    fn begin(&mut self, goal: &SliceGoal) {
        if goal.nth == 0 {
            self.bytes.resize(goal.slots * self.block_bytes, 0);
            self.came = vec![Ok(()); goal.slots];
            self.saturated = 0;
        }
    }

    fn fail(&mut self, why: &CopyError) {
        let right = self.came.iter_mut().filter(|came| came.is_ok());
        right.for_each(|came| *came = Err(why.clone()));
    }

    /// The last slice of a block completes it.
    fn end(&mut self, goal: &SliceGoal, slots: &mut ComingSlots) {
        let of = |slot: &PulledBlock| slot.from.len();
        if slots.left.front().is_some_and(|slot| goal.nth + 1 < of(slot.pulled())) {
            return;
        }
        let blocks = self.bytes.chunks(self.block_bytes.max(1));
        let mut has_come = false;
        for (came, block) in self.came.drain(..).zip(blocks) {
            let Some(slot) = slots.left.front_mut() else { break };
            let filled = came.and_then(|()| slot.fill(block));
            has_come |= filled.is_ok();
            slots.next(filled);
        }
        // A block that failed is counted when it comes again.
        slots.saturated += if has_come { self.saturated } else { 0 };
    }
}

/// What is wanted of the slices of a rank, and where it goes in ours.
pub(super) struct SliceParts {
    /// How heads lie in slices here.
    heads: Option<HeadLayout>,
    /// Where whole slices come: how heads lie in slices there.
    theirs: Option<HeadLayout>,
    /// Which share of their heads is wanted.
    give: HeadShare,
    /// `None`: slices lie there as they do here.
    conversion: Option<Conversion>,
    /// Which share of our heads the rank gives.
    into: HeadShare,
    /// Where numbers get another type, the wanted heads are cut out first, so that no others are
    /// converted or counted.
    is_cut: bool,
    cut: Vec<u8>,
    /// For a slice whose numbers get a type of another size.
    made: Vec<u8>,
}

impl SliceParts {
    /// The rank gives what is wanted, and no more.
    pub(super) fn of_shares(rank: &mut ReadRank<'_>, ours: &Member) -> Self {
        let conversion = rank.conversion.take();
        Self::of(rank, ours, None, conversion, false)
    }

    /// Whole slices come. `None`: shares of their heads cannot be made ours.
    pub(super) fn of_whole(rank: &ReadRank<'_>, ours: &Member) -> Option<Self> {
        let (theirs, source) = (&rank.link.holder, rank.source);
        let changes_types = rank.conversion.as_ref().is_some_and(Conversion::changes_types);
        let is_cut = changes_types && source.give != HeadShare::WHOLE;
        let of = if is_cut { Conversion::of_given_shares } else { Conversion::of_whole_slices };
        let conversion = of(ours, theirs, source);
        let is_as_met = conversion.is_some() == rank.conversion.is_some();
        is_as_met.then(|| Self::of(rank, ours, shares::heads_of(theirs), conversion, is_cut))
    }

    fn of(
        rank: &ReadRank<'_>,
        ours: &Member,
        theirs: Option<HeadLayout>,
        conversion: Option<Conversion>,
        is_cut: bool,
    ) -> Self {
        let PullSource { give, into, .. } = *rank.source;
        let heads = shares::heads_of(ours);
        let (cut, made) = (Vec::new(), Vec::new());
        Self { heads, theirs, give, conversion, into, is_cut, cut, made }
    }

    /// Puts what is wanted of a slice into all blocks that are made of it, but for those that have
    /// failed. Its numbers get our type before, if they have another.
    fn place(
        &mut self,
        slice: &mut [u8],
        goal: &SliceGoal,
        slots: &ComingSlots,
        whole: &mut JoinedBlocks,
    ) {
        if whole.came.iter().all(Result::is_err) {
            return;
        }
        let refused = || CopyError::refused(NO_SUCH_SHARES);
        let Self { cut, made, .. } = self;
        let slice = match &self.theirs {
            Some(heads) if self.is_cut => {
                cut.clear();
                cut.extend_from_slice(slice);
                match heads.cut(self.give, cut) {
                    Some(()) => &mut **cut,
                    None => return whole.fail(&refused()),
                }
            }
            _ => slice,
        };
        let (slice, saturated) = match &self.conversion {
            Some(conversion) => conversion.convert_numbers(slice, made),
            None => (&*slice, 0),
        };
        whole.saturated += saturated;
        let blocks = whole.bytes.chunks_mut(whole.block_bytes.max(1));
        for ((slot, came), block) in slots.left.iter().zip(&mut whole.came).zip(blocks) {
            let put = match (&self.conversion, &self.heads, &self.theirs) {
                (Some(conversion), ..) => {
                    let position = slot.pulled().position as usize;
                    conversion.put(conversion.part_at(position, goal.nth), slice, block)
                }
                (None, Some(heads), Some(theirs)) => {
                    heads.put_share(self.into, theirs, self.give, slice, block)
                }
                (None, Some(heads), None) => heads.put(self.into, slice, block),
                (None, None, _) => None,
            };
            if put.is_none() && came.is_ok() {
                *came = Err(refused());
            }
        }
    }
}

#[cfg(test)]
mod tests;
