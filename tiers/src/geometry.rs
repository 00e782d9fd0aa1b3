//! How a region is cut into slots, and where the pieces of a block lie, if not in one: an engine's
//! KV cache is a tensor per layer, with keys and values apart, and a block is a piece of each.
//! Plain arithmetic on addresses, which need not be the CPU's.

use std::ops::Range;

use crate::copy::SlotId;
use crate::error::SetupError;

/// Slots start at multiples of this many bytes, in memory and on disk: a page, and enough for
/// `O_DIRECT`.
pub const ALIGNMENT: usize = 4096;

/// The most slots a region can have: a slot's number fits into 30 bits.
pub const MAX_SLOTS: u32 = (1 << 30) - 8;

/// Equal slots, `stride` bytes apart: `block_bytes` rounded up to [`ALIGNMENT`], or more. The bytes
/// between belong to the slot before them and mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    slots: u32,
    block_bytes: usize,
    stride: usize,
}

impl Geometry {
    /// `slots` slots for blocks of `block_bytes` bytes.
    ///
    /// # Errors
    /// `Invalid`: either is zero, or the region would not fit into the address space.
    pub fn new(slots: u32, block_bytes: usize) -> Result<Self, SetupError> {
        let invalid = |message: String| Err(SetupError::invalid(message));
        if slots == 0 || slots > MAX_SLOTS {
            return invalid(format!("a tier of {slots} blocks: choose between 1 and {MAX_SLOTS}"));
        }
        if block_bytes == 0 {
            return invalid(
                "block_bytes is 0: set the bytes of one KV block, all layers together".into(),
            );
        }
        let stride = block_bytes.checked_next_multiple_of(ALIGNMENT);
        let Some(stride) = stride.filter(|&stride| fits(stride, slots)) else {
            return invalid(format!(
                "{slots} blocks of {block_bytes} bytes exceed the address space"
            ));
        };
        Ok(Self { slots, block_bytes, stride })
    }

    /// The same slots, each with room for `bytes` bytes behind its block, as for a seal.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_room(self, bytes: usize) -> Result<Self, SetupError> {
        let Self { slots, block_bytes, .. } = self;
        let roomy = Self::new(slots, block_bytes.saturating_add(bytes))?;
        Ok(Self { block_bytes, ..roomy })
    }

    /// Number of slots.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of one block.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes from one slot to the next, a multiple of [`ALIGNMENT`].
    pub const fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes of the whole region.
    pub const fn bytes(&self) -> usize {
        self.stride * self.slots as usize
    }

    /// Where `slot` starts, in bytes from the region's start; `None`: there is no such slot.
    pub const fn offset(&self, slot: SlotId) -> Option<usize> {
        if slot.0 < self.slots { Some(slot.0 as usize * self.stride) } else { None }
    }
}

fn fits(stride: usize, slots: u32) -> bool {
    stride.checked_mul(slots as usize).is_some_and(|bytes| isize::try_from(bytes).is_ok())
}

/// An array that holds a piece of every slot's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Address of the piece of slot 0.
    pub base: usize,
    /// Bytes from the piece of one slot to that of the next.
    pub stride: usize,
    /// Bytes of a piece.
    pub bytes: usize,
}

/// A run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Address of the first byte.
    pub address: usize,
    /// Number of bytes, above 0.
    pub bytes: usize,
}

/// Where each slot's block lies: its bytes are those of its pieces, in the order of the parts. No
/// two pieces overlap, of whichever slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentMap {
    slots: u32,
    block_bytes: usize,
    parts: Box<[Part]>,
    /// Of each part: where in a block its piece begins.
    offsets: Box<[usize]>,
}

impl SegmentMap {
    /// Blocks of `slots` slots in these parts. Parts that follow each other in every slot are
    /// joined.
    ///
    /// # Errors
    /// `Invalid`: no slot or too many, no part, a piece without bytes or larger than its stride,
    /// parts that overlap (as far as can be told without looking at each piece: parts of different
    /// strides must not be interleaved) or exceed the address space.
    pub fn new(slots: u32, parts: &[Part]) -> Result<Self, SetupError> {
        check_slots(slots)?;
        check_apart(slots, parts)?;
        let parts = joined(parts);
        if parts.is_empty() {
            return Err(SetupError::invalid("no parts: name the tensors that hold the blocks"));
        }
        Ok(Self::of_parts(slots, parts))
    }

    fn of_parts(slots: u32, parts: Box<[Part]>) -> Self {
        let mut offsets = Vec::with_capacity(parts.len());
        let mut block_bytes = 0;
        for part in &parts {
            offsets.push(block_bytes);
            block_bytes += part.bytes;
        }
        Self { slots, block_bytes, parts, offsets: offsets.into() }
    }

    /// Blocks that lie whole, one after the other as `geometry` says, from address `base` on.
    ///
    /// # Errors
    /// `Invalid`: they exceed the address space.
    pub fn contiguous(base: usize, geometry: Geometry) -> Result<Self, SetupError> {
        let part = Part { base, stride: geometry.stride(), bytes: geometry.block_bytes() };
        Self::new(geometry.slots(), &[part])
    }

    /// Number of slots.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of one block, all pieces together.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The parts, joined where that was possible.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Of each part: where in a block its piece begins.
    #[cfg(feature = "cuda")]
    pub(crate) fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// The pieces of a slot's block, in order; `None`: there is no such slot.
    pub fn segments(&self, slot: SlotId) -> Option<impl Iterator<Item = Segment> + Clone + '_> {
        self.cut(slot, 0..self.block_bytes)
    }

    /// The pieces of these bytes of a slot's block, in order; `None`: there is no such slot, or the
    /// block is shorter.
    pub fn cut(
        &self,
        slot: SlotId,
        bytes: Range<usize>,
    ) -> Option<impl Iterator<Item = Segment> + Clone + '_> {
        if slot.0 >= self.slots || bytes.end > self.block_bytes {
            return None;
        }
        // A layer is a piece or two of dozens: those before it are not looked at.
        let first = self.offsets.partition_point(|&offset| offset <= bytes.start).saturating_sub(1);
        let parts = self.parts[first..].iter().zip(&self.offsets[first..]);
        let within = parts.take_while(move |&(_, &offset)| offset < bytes.end);
        Some(within.map(move |(part, &offset)| {
            let (from, to) = (bytes.start.max(offset), bytes.end.min(offset + part.bytes));
            let address = part.base + slot.0 as usize * part.stride + (from - offset);
            Segment { address, bytes: to - from }
        }))
    }
}

impl Part {
    /// Bytes from its first to its last, of `slots` slots.
    #[cfg(feature = "cuda")]
    pub(crate) const fn extent_bytes(&self, slots: usize) -> usize {
        self.stride * (slots - 1) + self.bytes
    }

    /// From its first to its last byte: `[start, end)`.
    fn extent(&self, slots: u32) -> Result<(usize, usize), SetupError> {
        if self.bytes == 0 || self.bytes > self.stride {
            let message =
                format!("a part with pieces of {} bytes, {} apart", self.bytes, self.stride);
            return Err(SetupError::invalid(message));
        }
        let last = self.stride.checked_mul(slots as usize - 1);
        let end = last.and_then(|last| self.base.checked_add(last)?.checked_add(self.bytes));
        end.map(|end| (self.base, end))
            .ok_or_else(|| SetupError::invalid("a part exceeds the address space"))
    }

    /// Whether the pieces of two parts of one stride lie apart, though the parts are interleaved.
    fn interleaves(&self, other: &Self) -> bool {
        if self.stride != other.stride {
            return false;
        }
        let gap = other.base.abs_diff(self.base) % self.stride;
        let (first, second) = if other.base >= self.base { (self, other) } else { (other, self) };
        gap >= first.bytes && gap + second.bytes <= self.stride
    }
}

fn check_slots(slots: u32) -> Result<(), SetupError> {
    if slots == 0 || slots > MAX_SLOTS {
        return Err(SetupError::invalid(format!(
            "a tier of {slots} blocks: choose between 1 and {MAX_SLOTS}"
        )));
    }
    Ok(())
}

fn check_apart(slots: u32, parts: &[Part]) -> Result<(), SetupError> {
    let mut extents = Vec::with_capacity(parts.len());
    for part in parts {
        extents.push((part.extent(slots)?, *part));
    }
    extents.sort_unstable_by_key(|&((start, _), _)| start);
    for (place, ((_, end), part)) in extents.iter().enumerate() {
        let reached = extents[place + 1..].iter().take_while(|((start, _), _)| start < end);
        for (_, other) in reached {
            if !part.interleaves(other) {
                return Err(SetupError::invalid(format!("parts overlap: {part:?} and {other:?}")));
            }
        }
    }
    Ok(())
}

fn joined(parts: &[Part]) -> Box<[Part]> {
    let mut joined: Vec<Part> = Vec::with_capacity(parts.len());
    for part in parts {
        match joined.last_mut() {
            Some(last) if last.stride == part.stride && last.base + last.bytes == part.base => {
                last.bytes += part.bytes;
            }
            _ => joined.push(*part),
        }
    }
    joined.into()
}

/// Bytes that lie together at both ends of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Piece {
    /// Address of the first source byte.
    pub from: usize,
    /// Address of the first destination byte.
    pub to: usize,
    /// Number of bytes, above 0.
    pub bytes: usize,
}

/// What a copy of a block comes down to: cuts both ends wherever one of them is cut. Ends with the
/// shorter.
pub fn pieces(
    from: impl Iterator<Item = Segment>,
    to: impl Iterator<Item = Segment>,
) -> impl Iterator<Item = Piece> {
    let (mut from, mut to) = (from.peekable(), to.peekable());
    std::iter::from_fn(move || {
        let (source, target) = (from.peek_mut()?, to.peek_mut()?);
        let bytes = source.bytes.min(target.bytes);
        let piece = Piece { from: source.address, to: target.address, bytes };
        for segment in [source, target] {
            segment.address += bytes;
            segment.bytes -= bytes;
        }
        from.next_if(|rest| rest.bytes == 0);
        to.next_if(|rest| rest.bytes == 0);
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::error::SetupErrorKind;

    #[test]
    fn slots_are_page_aligned_and_bounded() {
        let geometry = Geometry::new(3, 5000).unwrap();
        assert_eq!((geometry.stride(), geometry.bytes()), (8192, 3 * 8192));
        assert_eq!(geometry.offset(SlotId(2)), Some(2 * 8192));
        assert_eq!(geometry.offset(SlotId(3)), None);
    }

    #[test]
    fn room_behind_a_block_is_no_part_of_it() {
        let geometry = Geometry::new(3, 8192).unwrap().with_room(1).unwrap();
        assert_eq!((geometry.block_bytes(), geometry.stride()), (8192, 3 * 4096));
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for (slots, bytes) in
            [(0, 4096), (1, 0), (u32::MAX, 1), (1, usize::MAX), (MAX_SLOTS, 1 << 40)]
        {
            assert_eq!(Geometry::new(slots, bytes).unwrap_err().kind(), SetupErrorKind::Invalid);
        }
    }

    /// Keys and values of `layers` layers as an engine lays them out: each layer a tensor `[2,
    /// slots, bytes]`.
    fn tensors(layers: usize, slots: u32, bytes: usize) -> Vec<Part> {
        let tensor = 2 * slots as usize * bytes;
        let halves = (0..layers)
            .flat_map(|layer| [layer * (tensor + 64), layer * (tensor + 64) + tensor / 2]);
        halves.map(|base| Part { base: 4096 + base, stride: bytes, bytes }).collect()
    }

    fn some_parts() -> impl Strategy<Value = Vec<Part>> {
        let part = (0_usize..400, 1_usize..40, 1_usize..40);
        let part = part.prop_map(|(base, stride, bytes)| Part { base, stride, bytes });
        proptest::collection::vec(part, 1..5)
    }

    fn every_byte(map: &SegmentMap) -> Vec<usize> {
        let slots = (0..map.slots()).filter_map(|slot| map.segments(SlotId(slot)));
        slots.flatten().flat_map(|Segment { address, bytes }| address..address + bytes).collect()
    }

    proptest! {
        #[test]
        fn a_map_that_is_accepted_names_no_byte_twice(slots in 1_u32..6, parts in some_parts()) {
            if let Ok(map) = SegmentMap::new(slots, &parts) {
                let bytes = every_byte(&map);
                prop_assert_eq!(bytes.len(), slots as usize * map.block_bytes());
                prop_assert_eq!(bytes.iter().collect::<HashSet<_>>().len(), bytes.len());
            }
        }

        #[test]
        fn the_cuts_of_a_block_are_its_bytes_in_order(slots in 1_u32..6, parts in some_parts(), cut in 1_usize..9) {
            if let Ok(map) = SegmentMap::new(slots, &parts) {
                let slot = SlotId(slots - 1);
                let bytes = |cut| map.cut(slot, cut).unwrap().flat_map(|s| s.address..s.address + s.bytes);
                let whole: Vec<_> = bytes(0..map.block_bytes()).collect();
                let starts = (0..map.block_bytes()).step_by(cut);
                let cuts: Vec<_> = starts.flat_map(|at| bytes(at..map.block_bytes().min(at + cut))).collect();
                prop_assert_eq!(whole, cuts);
                prop_assert!(map.cut(slot, 0..map.block_bytes() + 1).is_none());
            }
        }

        #[test]
        fn joining_parts_changes_no_address(slots in 1_u32..6, cuts in proptest::collection::vec(1_usize..9, 1..6)) {
            let stride = cuts.iter().sum::<usize>() + 3;
            let mut base = 100;
            let mut parts = Vec::new();
            for bytes in cuts {
                parts.push(Part { base, stride, bytes });
                base += bytes;
            }
            let whole = SegmentMap::new(slots, &parts).unwrap();
            prop_assert_eq!(whole.parts().len(), 1);
            let unjoined = SegmentMap::of_parts(slots, parts.into());
            prop_assert_eq!(every_byte(&whole), every_byte(&unjoined));
        }

        #[test]
        fn pieces_are_the_bytes_of_both_ends_in_order(
            left in proptest::collection::vec(1_usize..9, 1..8), right in proptest::collection::vec(1_usize..9, 1..8)
        ) {
            let segments = |cuts: &[usize]| {
                let mut next = 0;
                let segments = cuts.iter().map(|&bytes| {
                    next += 2 * bytes;
                    Segment { address: next - bytes, bytes }
                });
                segments.collect::<Vec<_>>()
            };
            let bytes = |segments: &[Segment]| -> Vec<usize> {
                segments.iter().flat_map(|s| s.address..s.address + s.bytes).collect()
            };
            let (left, right) = (segments(&left), segments(&right));
            let pieces: Vec<_> = pieces(left.iter().copied(), right.iter().copied()).collect();
            let from: Vec<_> = pieces.iter().map(|p| Segment { address: p.from, bytes: p.bytes }).collect();
            let to: Vec<_> = pieces.iter().map(|p| Segment { address: p.to, bytes: p.bytes }).collect();
            let shorter = bytes(&left).len().min(bytes(&right).len());
            prop_assert_eq!(&bytes(&from)[..], &bytes(&left)[..shorter]);
            prop_assert_eq!(&bytes(&to)[..], &bytes(&right)[..shorter]);
            prop_assert!(pieces.len() < left.len() + right.len());
        }
    }

    #[test]
    fn an_engines_block_is_a_piece_of_each_tensor() {
        let map = SegmentMap::new(10, &tensors(3, 10, 256)).unwrap();
        assert_eq!(map.block_bytes(), 6 * 256);
        let segments: Vec<_> = map.segments(SlotId(7)).unwrap().collect();
        assert_eq!(segments[0], Segment { address: 4096 + 7 * 256, bytes: 256 });
        assert_eq!(segments[1], Segment { address: 4096 + 2560 + 7 * 256, bytes: 256 });
        assert_eq!(segments[2], Segment { address: 4096 + 5120 + 64 + 7 * 256, bytes: 256 });
        assert!(map.segments(SlotId(10)).is_none());
    }

    #[test]
    fn tensors_that_hold_blocks_outermost_are_interleaved_parts() {
        // Keys and values of slot 0, then those of slot 1, with a gap between keys and values.
        let part = |base| Part { base, stride: 100, bytes: 30 };
        let map = SegmentMap::new(5, &[part(0), part(50)]).unwrap();
        assert_eq!(map.parts().len(), 2);
        assert_eq!(
            map.segments(SlotId(1)).unwrap().nth(1),
            Some(Segment { address: 150, bytes: 30 })
        );
    }

    #[test]
    fn what_cannot_be_is_an_error() {
        let part = |base, stride, bytes| Part { base, stride, bytes };
        let wrong: [(u32, &[Part]); 8] = [
            (0, &[part(0, 8, 8)]),
            (1, &[]),
            (1, &[part(0, 8, 0)]),
            (1, &[part(0, 8, 9)]),
            (2, &[part(0, 8, 8), part(15, 8, 8)]),
            (2, &[part(0, 100, 8), part(50, 90, 8)]),
            (3, &[part(usize::MAX - 10, 8, 8)]),
            (3, &[part(0, usize::MAX / 2, 8)]),
        ];
        for (slots, parts) in wrong {
            let error = SegmentMap::new(slots, parts).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::Invalid, "{parts:?}");
        }
    }

    #[test]
    fn whole_blocks_are_one_part() {
        let geometry = Geometry::new(3, 5000).unwrap();
        let map = SegmentMap::contiguous(1 << 21, geometry).unwrap();
        let segments: Vec<_> = map.segments(SlotId(2)).unwrap().collect();
        assert_eq!(segments, [Segment { address: (1 << 21) + 2 * 8192, bytes: 5000 }]);
    }
}
