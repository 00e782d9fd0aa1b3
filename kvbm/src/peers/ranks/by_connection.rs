//! Slices that a rank takes over connections. The rank that gives them cuts out the wanted share of
//! the heads.

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::{HeadShare, PulledSlot};
use kvbm_tiers::sealed::{ArrivingBlock, HostSeal, OtherSeal, SEAL_BYTES};
use kvbm_tiers::{CopyError, CopyOp};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use super::coming::{ComingSlots, another_life, compare};
use crate::peers::protocol::{BrokenLink, MAX_SLICES, SlotLife, ToHolder, ToReader, receive, send};
use crate::peers::sealed::NOT_CONVERTED;
use crate::peers::stream::PeerStream;

/// Bytes that one request asks for, and how many requests are under way at once.
const SLICE_BYTES: usize = 4 << 20;
const SLICE_READS: usize = 2;

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

    /// Asks for what is to be on its way.
    async fn ask(&mut self, stream: &mut (impl AsyncWrite + Unpin)) -> Result<(), BrokenLink> {
        let all = self.lives.len();
        while self.asked - self.came <= (SLICE_READS - 1) * self.at_once && self.asked < all {
            let next = self.asked..all.min(self.asked + self.at_once);
            self.asked = next.end;
            send(stream, &ToHolder::Slices(self.give, self.lives[next].to_vec())).await?;
        }
        Ok(())
    }

    /// Asks for more, and counts the next slice as come.
    async fn next(&mut self, stream: &mut (impl AsyncWrite + Unpin)) -> Result<(), BrokenLink> {
        self.ask(stream).await?;
        self.came += 1;
        Ok(())
    }
}

/// Asks a rank for slices, and takes them into slots as they are.
pub(super) async fn take(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    slots: &mut ComingSlots,
) -> Result<(), BrokenLink> {
    let bytes = slots.block_bytes();
    let mut requests = SliceRequests::new(slots.lives(), HeadShare::WHOLE, bytes);
    // What does not come straight into its slot.
    let mut arrived = Vec::new();
    while !slots.left.is_empty() {
        requests.next(stream).await?;
        let ComingSlots { left, seals, .. } = &mut *slots;
        let Some(slot) = left.front_mut() else { break };
        let came = match (receive(stream).await?, seals.own()) {
            (ToReader::Slice(Some(crc)), None) => {
                stream.read_exact(slot.bytes()).await?;
                compare(slot.written(), crc)
            }
            (ToReader::Slice(Some(crc)), Some(seal)) => {
                read_part(stream, &mut arrived, bytes).await?;
                compare(Some(checksum(&arrived)), crc)
                    .and_then(|()| take_in(slot, seal, None, crc, &mut arrived))
            }
            (ToReader::SealedSlice(crc, key), _) => {
                read_part(stream, &mut arrived, bytes + SEAL_BYTES).await?;
                compare(Some(checksum(&arrived)), crc).and_then(|()| {
                    let (seal, other) = seals.opening(key.as_ref())?;
                    take_in(slot, seal, Some(other), crc, &mut arrived)
                })
            }
            (other, _) => Err(not_given(other)?),
        };
        slots.next(came);
    }
    Ok(())
}

/// What one rank gives of each slice, in the order in which it is asked for.
pub(super) struct ConnectionSlices<'a> {
    stream: &'a mut dyn PeerStream,
    requests: SliceRequests,
    slice: Vec<u8>,
    /// Of what it gives.
    bytes: usize,
}

impl<'a> ConnectionSlices<'a> {
    /// A share of slices of `slice_bytes`.
    pub(super) fn new(
        stream: &'a mut dyn PeerStream,
        lives: Vec<SlotLife>,
        give: HeadShare,
        slice_bytes: u64,
    ) -> Self {
        let (_, shares) = give.get();
        let bytes = slice_bytes as usize / usize::from(shares);
        let requests = SliceRequests::new(lives, give, bytes);
        Self { stream, requests, slice: Vec::new(), bytes }
    }

    /// Asks for the first ones.
    pub(super) async fn begin(&mut self) -> Result<(), BrokenLink> {
        self.requests.ask(&mut self.stream).await
    }

    pub(super) async fn next(&mut self) -> Result<Result<&mut [u8], CopyError>, BrokenLink> {
        self.requests.next(&mut self.stream).await?;
        match receive(&mut self.stream).await? {
            ToReader::Slice(Some(crc)) => {
                read_part(&mut self.stream, &mut self.slice, self.bytes).await?;
                let is_right = compare(Some(checksum(&self.slice)), crc);
                Ok(is_right.map(|()| &mut *self.slice))
            }
            ToReader::SealedSlice(..) => Err(BrokenLink::Unexpected(NOT_CONVERTED)),
            other => Ok(Err(not_given(other)?)),
        }
    }
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
    seal: &HostSeal,
    other: Option<&OtherSeal>,
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
