//! Slots that slices come into, and how they come over a connection.

use std::collections::VecDeque;
use std::ops::Range;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::{HeadLayout, HeadShare, PullSource, PulledBlock, PulledSlot};
use kvbm_tiers::sealed::{ArrivingBlock, HostSeal, OtherSeal, SEAL_BYTES};
use kvbm_tiers::{CopyError, CopyErrorKind, CopyOp};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use crate::peers::conversion::Conversion;
use crate::peers::link::PeerLink;
use crate::peers::protocol::{BrokenLink, MAX_SLICES, SlotLife, ToHolder, ToReader, receive, send};
use crate::peers::sealed::{self, NOT_CONVERTED, SliceSeals};

/// Bytes that one request asks for, and how many requests are under way at once.
const SLICE_BYTES: usize = 4 << 20;
const SLICE_READS: usize = 2;

/// Slots that slices come into, from the ranks that have them.
pub(super) struct ComingSlots {
    /// Slots to which the present rank has not yet given its part.
    pub(super) left: VecDeque<PulledSlot>,
    /// Slots that have what this rank and all before it gave.
    pub(super) came: VecDeque<PulledSlot>,
    pub(super) heads: Option<HeadLayout>,
    pub(super) seals: SliceSeals,
    /// For a slice whose numbers get a type of another size.
    pub(super) made: Vec<u8>,
    /// Numbers that were too large for their new type, of what was placed.
    pub(super) saturated: u64,
}

impl ComingSlots {
    /// Sees to it that slices can be sealed here without a wait: all of an order are one tenant's.
    pub(super) async fn prepare(&self) -> Result<(), CopyError> {
        match self.seals.own().zip(self.left.front()) {
            Some((seal, first)) => sealed::prepare(seal, first.op().owner).await,
            None => Ok(()),
        }
    }

    /// Another rank is to give what it has of those that have all that came before.
    pub(super) fn begin(&mut self) {
        self.left.append(&mut self.came);
    }

    /// Whether each slot is made of this number of slots there.
    pub(super) fn are_made_of(&self, slots: usize) -> bool {
        let mut slots_here = self.left.iter().chain(&self.came);
        slots_here.all(|slot| slot.pulled().from.len() == slots)
    }

    /// The next slot has come or failed as far as this rank goes.
    fn next(&mut self, came: Result<(), CopyError>) {
        let Some(slot) = self.left.pop_front() else { return };
        match came {
            Ok(()) => self.came.push_back(slot),
            Err(error) => slot.end(Err(error)),
        }
    }

    /// All ranks gave what they have.
    pub(super) fn end(self) {
        if let Some(slot) = self.came.front() {
            slot.saturated(self.saturated);
        }
        self.came.into_iter().for_each(|slot| slot.end(Ok(())));
    }

    pub(super) fn fail(self, error: &CopyError) {
        let slots = self.left.into_iter().chain(self.came);
        slots.for_each(|slot| slot.end(Err(error.clone())));
    }

    /// What became of each that is left, as far as this rank goes.
    pub(super) fn next_all(&mut self, came: Vec<Result<(), CopyError>>) {
        came.into_iter().for_each(|came| self.next(came));
    }

    fn seal_bytes(&self) -> usize {
        if self.seals.own().is_some() { SEAL_BYTES } else { 0 }
    }
}

/// Requests for slices, some of them ahead of what has come.
struct SliceRequests {
    lives: Vec<SlotLife>,
    /// The share of the heads of each.
    give: HeadShare,
    at_once: usize,
    asked: usize,
    came: usize,
}

impl SliceRequests {
    fn new(lives: Vec<SlotLife>, give: HeadShare, slice_bytes: usize) -> Self {
        let at_once = (SLICE_BYTES / slice_bytes.max(1)).clamp(1, MAX_SLICES);
        Self { lives, give, at_once, asked: 0, came: 0 }
    }

    /// Asks for what is to be on its way. Returns which slice comes next.
    async fn next(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
    ) -> Result<Option<usize>, BrokenLink> {
        let all = self.lives.len();
        while self.asked - self.came <= (SLICE_READS - 1) * self.at_once && self.asked < all {
            let next = self.asked..all.min(self.asked + self.at_once);
            self.asked = next.end;
            send(stream, &ToHolder::Slices(self.give, self.lives[next].to_vec())).await?;
        }
        let next = self.came;
        self.came += 1;
        Ok((next < all).then_some(next))
    }
}

/// Asks a rank for slices, and takes them into slots as they are, or a share of their heads.
pub(super) async fn take(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    source: &PullSource,
    slots: &mut ComingSlots,
) -> Result<(), BrokenLink> {
    let Some(first) = slots.left.front_mut() else { return Ok(()) };
    let is_whole = source.into == HeadShare::WHOLE;
    let slot_bytes = first.bytes().len();
    let seal_bytes = slots.seal_bytes();
    if seal_bytes > 0 && !source.has_all_heads() {
        return Err(BrokenLink::Unexpected(NOT_CONVERTED));
    }
    let (_, shares) = source.into.get();
    let bytes = (slot_bytes - seal_bytes) / usize::from(shares);
    let lives = slots.left.iter().map(|slot| SlotLife::of(slot.op().from)).collect();
    let mut requests = SliceRequests::new(lives, source.give, bytes);
    let placement =
        SlicePlacement { heads: slots.heads, theirs: None, conversion: None, into: source.into };
    // What does not come straight into its slot.
    let mut part = Vec::new();
    while requests.next(stream).await?.is_some() {
        let ComingSlots { left, seals, .. } = &mut *slots;
        let Some(slot) = left.front_mut() else { return Ok(()) };
        let came = match receive(stream).await? {
            ToReader::Slice(Some(crc)) if is_whole && seal_bytes == 0 => {
                stream.read_exact(slot.bytes()).await?;
                compare(slot.written(), crc)
            }
            ToReader::Slice(Some(crc)) => {
                read_part(stream, &mut part, bytes).await?;
                compare(Some(checksum(&part)), crc).and_then(|()| match seals.own() {
                    Some(seal) => take_in(slot, (seal, None), crc, &mut part),
                    None => placement.place(slot, 0, &part),
                })
            }
            ToReader::SealedSlice(crc, key) => {
                read_part(stream, &mut part, bytes + SEAL_BYTES).await?;
                compare(Some(checksum(&part)), crc).and_then(|()| {
                    if !is_whole {
                        return Err(CopyError::refused(NOT_CONVERTED));
                    }
                    let (seal, other) = seals.opening(key.as_ref())?;
                    take_in(slot, (seal, Some(other)), crc, &mut part)
                })
            }
            other => Err(not_given(other)?),
        };
        slots.next(came);
    }
    Ok(())
}

/// Asks a rank for slices, and makes slots of them. `bytes`: of what it gives of a slice.
pub(super) async fn take_converted(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    source: &PullSource,
    (conversion, bytes): (&Conversion, usize),
    slots: &mut ComingSlots,
) -> Result<(), BrokenLink> {
    if slots.seal_bytes() > 0 {
        return Err(BrokenLink::Unexpected(NOT_CONVERTED));
    }
    let (lives, goals) = goals_of(&slots.left);
    let mut requests = SliceRequests::new(lives, source.give, bytes);
    let placement = SlicePlacement {
        heads: None,
        theirs: None,
        conversion: Some(conversion),
        into: source.into,
    };
    let mut made = vec![Ok(()); slots.left.len()];
    let mut slice = Vec::new();
    while let Some(next) = requests.next(stream).await? {
        let came = match receive(stream).await? {
            ToReader::Slice(Some(crc)) => {
                read_part(stream, &mut slice, bytes).await?;
                compare(Some(checksum(&slice)), crc)
            }
            ToReader::SealedSlice(..) => return Err(BrokenLink::Unexpected(NOT_CONVERTED)),
            other => Err(not_given(other)?),
        };
        match came {
            Ok(()) => placement.place_all(&goals[next], &mut slice, slots, &mut made),
            Err(why) => goals[next].fail(&mut made, &why),
        }
    }
    slots.next_all(made);
    Ok(())
}

/// Where a slice goes.
pub(super) struct SliceGoal {
    /// The slots that a part of it goes into.
    pub(super) slots: Range<usize>,
    /// How many slices go into each before it.
    nth: usize,
}

impl SliceGoal {
    pub(super) fn fail(&self, made: &mut [Result<(), CopyError>], why: &CopyError) {
        let right = made[self.slots.clone()].iter_mut().filter(|made| made.is_ok());
        right.for_each(|made| *made = Err(why.clone()));
    }
}

/// How what a rank gives of a slice goes into slots.
pub(super) struct SlicePlacement<'a> {
    /// How heads lie in slices here.
    pub(super) heads: Option<HeadLayout>,
    /// How they lie in slices there, and what is given of these, where whole ones come.
    pub(super) theirs: Option<(&'a HeadLayout, HeadShare)>,
    /// `None`: slices lie there as they do here.
    pub(super) conversion: Option<&'a Conversion>,
    /// The share of the heads of ours that is given.
    pub(super) into: HeadShare,
}

impl SlicePlacement<'_> {
    /// Into all slots that are made of it, but for those that have failed. Its numbers get our type
    /// before, if they have another.
    pub(super) fn place_all(
        &self,
        goal: &SliceGoal,
        slice: &mut [u8],
        slots: &mut ComingSlots,
        made: &mut [Result<(), CopyError>],
    ) {
        if made[goal.slots.clone()].iter().all(Result::is_err) {
            return;
        }
        let (slice, saturated) = match self.conversion {
            Some(conversion) => conversion.convert_numbers(slice, &mut slots.made),
            None => (&*slice, 0),
        };
        slots.saturated += saturated;
        for at in goal.slots.clone() {
            if made[at].is_ok() {
                made[at] = self.place(&mut slots.left[at], goal.nth, slice);
            }
        }
    }

    /// A slot is written with the last slice of the last rank.
    fn place(&self, slot: &mut PulledSlot, nth: usize, slice: &[u8]) -> Result<(), CopyError> {
        let PulledBlock { from, position, .. } = slot.pulled();
        let is_last = self.into.is_last() && nth + 1 == from.len();
        let position = *position as usize;
        let bytes = slot.bytes();
        let put = match (self.conversion, &self.heads, self.theirs) {
            (Some(conversion), ..) => {
                conversion.put(conversion.part_at(position, nth), slice, bytes)
            }
            (None, Some(heads), Some(theirs)) => heads.put_share(self.into, theirs, slice, bytes),
            (None, Some(heads), None) => heads.put(self.into, slice, bytes),
            (None, None, _) => None,
        };
        put.ok_or_else(|| CopyError::refused("a slice is not what its layout says"))?;
        if is_last {
            slot.written();
        }
        Ok(())
    }
}

/// The slices that slots are made of, each once, and where they go.
pub(super) fn goals_of(slots: &VecDeque<PulledSlot>) -> (Vec<SlotLife>, Vec<SliceGoal>) {
    let (mut lives, mut goals) = (Vec::new(), Vec::<SliceGoal>::new());
    for (at, slot) in slots.iter().enumerate() {
        for (nth, from) in slot.pulled().from.iter().enumerate() {
            let life = SlotLife::of(*from);
            let is_next =
                |goal: &&mut SliceGoal| nth == 0 && goal.nth == 0 && lives.last() == Some(&life);
            match goals.last_mut().filter(is_next) {
                Some(goal) => goal.slots.end = at + 1,
                None => {
                    lives.push(life);
                    goals.push(SliceGoal { slots: at..at + 1, nth });
                }
            }
        }
    }
    (lives, goals)
}

async fn read_part(
    stream: &mut (impl AsyncRead + Unpin),
    part: &mut Vec<u8>,
    bytes: usize,
) -> Result<(), BrokenLink> {
    part.resize(bytes, 0);
    stream.read_exact(part).await?;
    Ok(())
}

/// Has the other rank say the checksums of slices, of those that are there.
pub(super) async fn sums_of(
    link: &mut PeerLink,
    lives: &[SlotLife],
) -> Result<Vec<Option<[u8; 4]>>, BrokenLink> {
    match link.exchange(&ToHolder::SliceSums(lives.to_vec())).await? {
        ToReader::SliceSums(sums) if sums.len() == lives.len() => Ok(sums),
        _ => Err(BrokenLink::Unexpected("no answer to a request for checksums")),
    }
}

/// Why a slice does not come. An error: nothing comes any more.
fn not_given(answer: ToReader) -> Result<CopyError, BrokenLink> {
    match answer {
        ToReader::Slice(None) => Ok(another_life()),
        ToReader::Refused(why) => Err(BrokenLink::refused(&why)),
        _ => Err(BrokenLink::Unexpected("no answer to a request for slices")),
    }
}

/// Puts a slice into its slot as slices lie here: `other` opens it, if it came sealed.
fn take_in(
    slot: &mut PulledSlot,
    (seal, other): (&HostSeal, Option<&OtherSeal>),
    crc: [u8; 4],
    arrived: &mut [u8],
) -> Result<(), CopyError> {
    let CopyOp { block: name, owner, .. } = *slot.op();
    let block = ArrivingBlock { name, owner, crc: u32::from_le_bytes(crc) };
    seal.take_in(other, block, arrived, slot.bytes())?;
    // Of what lies there: an index may tell it to others.
    slot.written();
    Ok(())
}

/// Whether what came has the checksum that came with it.
pub(super) fn compare(crc: Option<u32>, sent: [u8; 4]) -> Result<(), CopyError> {
    let wrong = || CopyError::new(CopyErrorKind::Corrupt, "it is not what its checksum says");
    (crc == Some(u32::from_le_bytes(sent))).then_some(()).ok_or_else(wrong)
}

pub(super) fn another_life() -> CopyError {
    CopyError::new(CopyErrorKind::Unavailable, "its slot holds something else by now")
}

#[cfg(test)]
mod tests;
