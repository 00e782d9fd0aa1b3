//! Workers of one model whose blocks are not the same bytes: they have more or fewer tokens, their
//! axes another order, or their numbers another type. What comes from such a peer is made what it would
//! be here, once it is verified.

use std::ops::Range;

use kvbm_tiers::numbers::{HalfType, halves_to_halves};
use kvbm_tiers::ranks::{HeadShare, PullSource};
use kvbm_tiers::transform::{Transform, View};

use super::fp8::Fp8Conversion;
use super::numbers::NumberTypes;
use super::protocol::Member;
use super::scales::ScaledRows;
use super::shares::share_of;
use crate::names::fingerprint::KvLayout;

/// Blocks of a peer, made into ours.
#[derive(Debug)]
pub(super) struct Conversion {
    /// Blocks of the peer that make one of ours; or else 1.
    joined: usize,
    /// Blocks of ours that one of the peer's makes; or else 1.
    cut: usize,
    /// How each of the joined ones goes into ours, or each of ours comes out of the peer's.
    parts: Vec<Vec<Transform>>,
    /// Before that, while all lies as it does there.
    numbers: Option<NumberConversion>,
}

/// How numbers get another type.
#[derive(Debug)]
enum NumberConversion {
    /// From this type of 16 bits to the other one.
    Halves(HalfType),
    Fp8(Fp8Conversion),
}

impl Conversion {
    /// `None`: the bytes of `theirs` are the same as those of `ours`, but for how heads are split over
    /// ranks, or cannot be made so.
    pub(super) fn between(ours: &Member, theirs: &Member) -> Option<Self> {
        if ours.ranks == theirs.ranks {
            return Self::of_shares(ours, HeadShare::WHOLE, theirs, HeadShare::WHOLE);
        }
        // As ranks convert the heads that two of them share. Leaders use only the numbers of blocks.
        let [few, many] = [ours.ranks.min(theirs.ranks), ours.ranks.max(theirs.ranks)];
        let part = HeadShare::new(0, many.checked_div(few)?)?;
        let is_cut = ours.ranks == many;
        let [into, give] = if is_cut { [HeadShare::WHOLE, part] } else { [part, HeadShare::WHOLE] };
        Self::of_shares(ours, into, &share_of(theirs, give)?, HeadShare::WHOLE)
    }

    /// Of what one rank there sends: the share of its heads that is wanted.
    pub(super) fn of_given_shares(
        ours: &Member,
        theirs: &Member,
        source: &PullSource,
    ) -> Option<Self> {
        Self::of_shares(ours, source.into, &share_of(theirs, source.give)?, HeadShare::WHOLE)
    }

    /// Of that rank's whole slices, from which the share is taken here.
    pub(super) fn of_whole_slices(
        ours: &Member,
        theirs: &Member,
        source: &PullSource,
    ) -> Option<Self> {
        Self::of_shares(ours, source.into, theirs, source.give)
    }

    /// Whether blocks there have another type, other tokens or another order.
    pub(super) fn is_needed(ours: &Member, theirs: &Member) -> bool {
        let [ours, theirs] = [ours, theirs].map(|member| &member.fingerprint);
        let [layout, their_layout] = [ours, theirs].map(|of| of.layouts.first());
        let has_other_order = layout.zip(their_layout).is_some_and(|(a, b)| a.order != b.order);
        NumberTypes::between(&theirs.dtype, &ours.dtype).is_some()
            || ours.block_tokens != theirs.block_tokens
            || has_other_order
    }

    /// From a share (`given`) of the heads there to a share of ours.
    fn of_shares(
        ours: &Member,
        share: HeadShare,
        theirs: &Member,
        given: HeadShare,
    ) -> Option<Self> {
        let both = [ours, theirs];
        let [dtype, their_dtype] = both.map(|member| &*member.fingerprint.dtype);
        let types = NumberTypes::between(their_dtype, dtype);
        let has_groups = both.iter().any(|member| !member.groups.is_empty());
        if has_groups || !Self::is_needed(ours, theirs) {
            return None;
        }
        let [tokens, their_tokens] = both.map(|member| member.fingerprint.block_tokens);
        let (joined, cut) = ratio(tokens, their_tokens)?;
        let [their_number, number] = types.map_or([1, 1], NumberTypes::bytes);
        let there = BlockLayout::of(theirs, their_number)?;
        let numbers = match types {
            Some(types) => Some(NumberConversion::new(types, both, &there)?),
            None => None,
        };
        let ours = BlockLayout::of(ours, number)?.shared(share)?;
        let theirs = there.resized(their_number, number)?.shared(given)?;
        let parts = (0..joined.max(cut)).map(|part| {
            let (skipped, skipped_there) = if cut > 1 { (0, part) } else { (part, 0) };
            theirs.transforms([skipped_there, skipped], tokens.min(their_tokens), &ours)
        });
        Some(Self { joined, cut, parts: parts.collect::<Option<_>>()?, numbers })
    }

    /// Whether numbers may come out rounded.
    pub(super) const fn changes_types(&self) -> bool {
        self.numbers.is_some()
    }

    /// Leading blocks of the peer's chain that `ours` of ours have whole.
    pub(super) const fn whole_there(&self, ours: usize) -> usize {
        ours * self.joined / self.cut
    }

    /// Leading blocks of the peer's chain without which `ours` of ours are not whole.
    pub(super) const fn needed_there(&self, ours: usize) -> usize {
        (ours * self.joined).div_ceil(self.cut)
    }

    /// Leading blocks of ours that as many of the peer's make.
    pub(super) const fn whole_here(&self, theirs: usize) -> usize {
        theirs * self.cut / self.joined
    }

    /// How many of the peer's blocks one of ours is made of, or has a part of.
    pub(super) const fn sources(&self) -> usize {
        self.joined
    }

    /// The peer's blocks that the one of ours at a position is made of.
    pub(super) const fn sources_of(&self, at: usize) -> Range<usize> {
        let first = at * self.joined / self.cut;
        first..first + self.joined
    }

    /// The part that goes into the block of ours at a position, from the `nth` of those that it is made
    /// of.
    pub(super) const fn part_at(&self, at: usize, nth: usize) -> usize {
        if self.cut > 1 { at % self.cut } else { nth }
    }

    /// What becomes of a block of the peer's: the position of each of ours, and the part that comes
    /// from it.
    pub(super) fn parts_of(&self, block: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (joined, cut) = (self.joined, self.cut);
        (0..cut)
            .map(move |n| ((block * cut + n) / joined, if cut > 1 { n } else { block % joined }))
    }

    /// Whether a block of ours is whole with this part.
    pub(super) const fn is_last(&self, part: usize) -> bool {
        self.cut > 1 || part + 1 == self.joined
    }

    /// Makes the numbers of a peer's block ours, in place or in `made`; returns where they are, and how
    /// many were too large for that, and are the largest there is.
    pub(super) fn convert_numbers<'a>(
        &self,
        block: &'a mut [u8],
        made: &'a mut Vec<u8>,
    ) -> (&'a [u8], u64) {
        match &self.numbers {
            None => (block, 0),
            Some(NumberConversion::Halves(from)) => {
                let too_large = halves_to_halves(block, *from) as u64;
                (block, too_large)
            }
            Some(NumberConversion::Fp8(conversion)) => {
                made.resize(conversion.made_bytes(block.len()), 0);
                let too_large = conversion.convert(block, made);
                (made, too_large)
            }
        }
    }

    /// Puts a part of a peer's block into ours. `None`: one of them has another size.
    pub(super) fn put(&self, part: usize, theirs: &[u8], ours: &mut [u8]) -> Option<()> {
        let transforms = self.parts.get(part)?;
        transforms.iter().try_for_each(|one| one.apply(theirs, ours, &[(0, 0)]).ok())
    }
}

impl NumberConversion {
    /// Of blocks that lie as they do `there`. `None`: the worker whose numbers are FP8 does not give
    /// their scales; or they are of heads, and its ranks have some of these each. All ranks say the
    /// same of themselves.
    fn new(types: NumberTypes, [ours, theirs]: [&Member; 2], there: &BlockLayout) -> Option<Self> {
        let of_fp8 = match types {
            NumberTypes::Halves(from) => return Some(Self::Halves(from)),
            NumberTypes::FromFp8(_) => theirs,
            NumberTypes::ToFp8(_) => ours,
        };
        let scales = &of_fp8.fingerprint.scales;
        let rows = ScaledRows::of(there, types.bytes()[0], scales.len())?;
        if of_fp8.ranks > 0 && rows.are_of_heads {
            return None;
        }
        Some(Self::Fp8(Fp8Conversion::new(types, scales, rows)?))
    }
}

/// At most this many blocks make one, or are made of one.
const MAX_RATIO: u64 = 1 << 10;

/// How many of the peer's blocks make one of ours, and how many one of the peer's makes.
fn ratio(ours: u64, theirs: u64) -> Option<(usize, usize)> {
    let [few, many] = [ours.min(theirs), ours.max(theirs)];
    if few == 0 || many / few > MAX_RATIO {
        return None;
    }
    if ours.is_multiple_of(theirs) {
        return Some((usize::try_from(ours / theirs).ok()?, 1));
    }
    let cut = theirs.is_multiple_of(ours).then_some(theirs / ours)?;
    Some((1, usize::try_from(cut).ok()?))
}

/// How a block lies in the host tier: dense, in the order of its axes.
pub(super) struct BlockLayout {
    bytes: usize,
    /// Of what no axis goes into.
    pub(super) row_bytes: usize,
    /// Of keys and of values, which are the same two axes unless the order says so.
    pub(super) keys: Axes,
    values: Axes,
    /// Whether the two have orders of their own.
    is_split: bool,
    /// The first of its heads that its axes count.
    first_head: usize,
}

/// From the outermost on.
pub(super) type Axes = Vec<Axis>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Axis {
    pub(super) name: String,
    pub(super) extent: usize,
    /// Bytes from one to the next.
    pub(super) stride: usize,
}

impl BlockLayout {
    /// Of numbers of that many bytes, which rows have whole. `None`: its fingerprint does not say how a
    /// block's bytes lie, or not of all of them.
    fn of(member: &Member, number_bytes: usize) -> Option<Self> {
        let [layout] = &member.fingerprint.layouts[..] else { return None };
        let is_ordered = layout.strides.is_sorted_by(|outer, inner| outer >= inner);
        let mut row_bytes = usize::try_from(*layout.strides.last()?).ok().filter(|&row| row > 0)?;
        let bytes = usize::try_from(member.block_bytes).ok().filter(|_| is_ordered)?;
        let orders = layout.orders();
        let mut extents = extents(layout, &orders.keys)?;
        if !row_bytes.is_multiple_of(number_bytes) {
            // The innermost axis goes into numbers, whatever it is called.
            let is_one = orders.keys.last() == orders.values.last();
            let (_, extent) = extents.last_mut().filter(|_| is_one)?;
            let numbers = row_bytes.checked_mul(*extent)? / number_bytes;
            (row_bytes, *extent) = (number_bytes, numbers);
        }
        let axes =
            |order: &[&str]| dense(order, &extents, row_bytes).filter(|(_, all)| *all == bytes);
        let ((keys, _), (values, _)) = (axes(&orders.keys)?, axes(&orders.values)?);
        let tokens = usize::try_from(member.fingerprint.block_tokens).ok()?;
        let has_tokens = keys.iter().any(|axis| axis.name == "token" && axis.extent == tokens);
        let is_split = orders.keys != orders.values;
        has_tokens.then_some(Self { bytes, row_bytes, keys, values, is_split, first_head: 0 })
    }

    /// Where a share of its heads lies in it. `None`: it has no such share.
    fn shared(mut self, share: HeadShare) -> Option<Self> {
        if share == HeadShare::WHOLE {
            return Some(self);
        }
        let (index, of) = share.get();
        for axes in [&mut self.keys, &mut self.values] {
            let heads = axes.iter_mut().find(|axis| axis.name == "head")?;
            if !heads.extent.is_multiple_of(of.into()) {
                return None;
            }
            heads.extent /= usize::from(of);
            self.first_head = heads.extent * usize::from(index);
        }
        Some(self)
    }

    /// The same layout of numbers that have `to` bytes instead of `from`.
    fn resized(mut self, from: usize, to: usize) -> Option<Self> {
        let axes = self.keys.iter_mut().chain(&mut self.values);
        let strides = axes.map(|axis| &mut axis.stride);
        for bytes in strides.chain([&mut self.bytes, &mut self.row_bytes]) {
            *bytes = (*bytes / from).checked_mul(to)?;
        }
        Some(self)
    }

    /// All of it, or first its keys and then its values where these are ordered otherwise.
    pub(super) fn planes(&self) -> Option<Vec<BlockPlane>> {
        if !self.is_split {
            return Some(vec![BlockPlane { axes: self.keys.clone(), offset: 0 }]);
        }
        let plane = |at: usize| {
            let (axes, stride) = without_kv([&self.keys, &self.values][at])?;
            Some(BlockPlane { axes, offset: at * stride })
        };
        [0, 1].into_iter().map(plane).collect()
    }

    /// Copies `tokens` tokens of a block of this layout to one of another, behind as many times so
    /// many tokens as are `skipped` in either.
    fn transforms(&self, skipped: [usize; 2], tokens: u64, to: &Self) -> Option<Vec<Transform>> {
        if self.row_bytes != to.row_bytes {
            return None;
        }
        let tokens = usize::try_from(tokens).ok()?;
        let first = skipped.map(|times| times * tokens);
        let one = |[from_axes, to_axes]: [&Axes; 2], offsets: [usize; 2]| {
            let axes = paired(from_axes, to_axes, tokens)?;
            let paired = PairedAxes { axes, row_bytes: self.row_bytes };
            let stride =
                |axes: &Axes, name| axes.iter().find(|axis| axis.name == name).map(|of| of.stride);
            let before_heads = |layout: &Self, axes| match layout.first_head {
                0 => Some(0),
                first => Some(first * stride(axes, "head")?),
            };
            let from = offsets[0] + first[0] * stride(from_axes, "token")?;
            let to_first = offsets[1] + first[1] * stride(to_axes, "token")?;
            let offsets =
                [from + before_heads(self, from_axes)?, to_first + before_heads(to, to_axes)?];
            paired.transform([self.bytes, to.bytes], offsets)
        };
        if !self.is_split
            && !to.is_split
            && let Some(whole) = one([&self.keys, &to.keys], [0, 0])
        {
            return Some(vec![whole]);
        }
        // Then there are as few axes as a transform has.
        let plane = |axes: [&Axes; 2], at: usize| {
            let [(from, from_stride), (to, to_stride)] =
                [without_kv(axes[0])?, without_kv(axes[1])?];
            one([&from, &to], [at * from_stride, at * to_stride])
        };
        Some(vec![plane([&self.keys, &to.keys], 0)?, plane([&self.values, &to.values], 1)?])
    }
}

/// What lies in one order.
pub(super) struct BlockPlane {
    pub(super) axes: Axes,
    /// Bytes before it.
    pub(super) offset: usize,
}

/// Bytes from keys to values, and the other axes.
fn without_kv(axes: &Axes) -> Option<(Axes, usize)> {
    let kv = axes.iter().position(|axis| axis.name == "kv" && axis.extent == 2)?;
    let mut others = axes.clone();
    let kv = others.remove(kv);
    Some((others, kv.stride))
}

/// How long each axis is. Layers come first, and need not be said.
fn extents<'a>(layout: &KvLayout, order: &[&'a str]) -> Option<Vec<(&'a str, usize)>> {
    let layers = (!order.contains(&"layer")).then_some(("layer", u64::from(layout.layers)));
    if order.len() != layout.shape.len() {
        return None;
    }
    let named = order.iter().copied().zip(layout.shape.iter().copied());
    let extent = |(name, extent)| Some((name, usize::try_from(extent).ok()?));
    layers.into_iter().chain(named).map(extent).collect()
}

/// The axes of a dense array in this order, of rows of `row_bytes`, and how many bytes it has.
fn dense(order: &[&str], extents: &[(&str, usize)], row_bytes: usize) -> Option<(Axes, usize)> {
    let outermost = extents.first().filter(|_| !order.contains(&"layer")).map(|(name, _)| *name);
    let mut stride = row_bytes;
    let mut axes = Axes::new();
    for name in outermost.into_iter().chain(order.iter().copied()).rev() {
        let extent = extents.iter().find(|(named, _)| *named == name)?.1;
        if extent == 0 || axes.iter().any(|axis| axis.name == name) {
            return None;
        }
        axes.push(Axis { name: name.to_owned(), extent, stride });
        stride = stride.checked_mul(extent)?;
    }
    axes.reverse();
    (axes.len() == extents.len()).then_some((axes, stride))
}

/// Axes that two layouts have in common: how many there are along each, and both strides.
struct PairedAxes {
    axes: Vec<(usize, [usize; 2])>,
    row_bytes: usize,
}

/// `None`: they have not the same axes, or not as long ones.
fn paired(from: &Axes, to: &Axes, tokens: usize) -> Option<Vec<(usize, [usize; 2])>> {
    if from.len() != to.len() {
        return None;
    }
    let pair = |to: &Axis| {
        let from = from.iter().find(|axis| axis.name == to.name)?;
        let extent = if to.name == "token" { tokens } else { to.extent };
        let is_alike = to.name == "token" || from.extent == to.extent;
        is_alike.then_some((extent, [from.stride, to.stride]))
    };
    to.iter().map(pair).collect()
}

impl PairedAxes {
    /// In the longest rows, and with as few axes as there can be.
    fn transform(mut self, bytes: [usize; 2], offsets: [usize; 2]) -> Option<Transform> {
        self.axes.retain(|(extent, _)| *extent > 1);
        while let Some(at) =
            self.axes.iter().position(|(_, strides)| *strides == [self.row_bytes; 2])
        {
            self.row_bytes *= self.axes.remove(at).0;
        }
        while let Some((outer, inner)) = self.one_behind_the_other() {
            self.axes[inner].0 *= self.axes[outer].0;
            self.axes.remove(outer);
        }
        if self.axes.len() > 4 {
            return None;
        }
        let view = |side: usize| {
            let mut axes = [(1, 0); 4];
            let innermost = &mut axes[4 - self.axes.len()..];
            for (axis, (extent, strides)) in innermost.iter_mut().zip(&self.axes) {
                *axis = (*extent, strides[side]);
            }
            View::strided(bytes[side], offsets[side], axes, self.row_bytes).ok()
        };
        Transform::new(view(0)?, view(1)?).ok()
    }

    /// Two axes that are one on both sides.
    fn one_behind_the_other(&self) -> Option<(usize, usize)> {
        let is_behind = |&(outer, inner): &(usize, usize)| {
            let ((_, strides), (extent, inside)) = (self.axes[outer], self.axes[inner]);
            outer != inner && strides == inside.map(|stride| stride * extent)
        };
        let all = 0..self.axes.len();
        all.clone().flat_map(|outer| all.clone().map(move |inner| (outer, inner))).find(is_behind)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::hint::black_box;
    use std::time::Duration;

    use half::{bf16, f16};
    use kvbm_tiers::clock::now;
    use serde_json::json;

    use kvbm_tiers::ranks::PeerSeat;

    use super::super::greeting::difference;
    use super::super::greeting::tests::member;
    use super::super::shares::heads_of;
    use super::*;

    /// How many there are of everything but tokens.
    const EXTENTS: [(&str, usize); 5] =
        [("layer", 3), ("kv", 2), ("head", 8), ("channel", 5), ("byte", 2)];
    const ORDERS: [&str; 7] = [
        "kv,token,head,channel,byte",
        "kv,head,token,channel,byte",
        "layer,kv,head,token,channel,byte",
        "head,layer,token,kv,channel,byte",
        "layer,head,kv(channel,token|token,channel),byte",
        "kv(head,token|token,head),channel,byte",
        "layer,head,token,channel,kv,byte",
    ];

    fn extent(name: &str, tokens: usize) -> usize {
        let known = EXTENTS.iter().find(|(known, _)| *known == name);
        known.map_or(tokens, |(_, extent)| *extent)
    }

    fn worker(order: &str, tokens: usize) -> Member {
        worker_of(&EXTENTS, order, tokens)
    }

    fn worker_of(extents: &[(&str, usize)], order: &str, tokens: usize) -> Member {
        let mut member = member(&format!("{order} {tokens}"), tokens as u64);
        let layers = extents[0].1 as u32;
        let mut layout = KvLayout { layers, order: order.to_owned(), ..KvLayout::default() };
        let extent = |name: &&str| {
            let known = extents.iter().find(|(known, _)| known == name);
            known.map_or(tokens, |(_, extent)| *extent) as u64
        };
        layout.shape = layout.orders().keys.iter().map(extent).collect();
        let inside = |axis: usize| layout.shape[axis + 1..].iter().product();
        layout.strides = (0..layout.shape.len()).map(inside).collect();
        member.fingerprint.block_tokens = tokens as u64;
        member.block_bytes = extents.iter().map(|(_, extent)| *extent as u64).product();
        member.block_bytes *= tokens as u64;
        member.fingerprint.layouts = vec![layout];
        member
    }

    /// A block from its definition: its axes are the digits of an address, and each byte says where
    /// in the model it is.
    fn block(of: &Member, at: usize) -> Vec<u8> {
        let tokens = of.fingerprint.block_tokens as usize;
        let orders = of.fingerprint.layouts[0].orders();
        let mut bytes = vec![0; of.block_bytes as usize];
        let world = usize::from(of.ranks.max(1));
        let heads = extent("head", 0) / world;
        let first_head = heads * of.rank.map_or(0, usize::from);
        let long = |name: &str| if name == "head" { heads } else { extent(name, tokens) };
        let names = EXTENTS.iter().map(|(name, _)| *name).chain(["token"]);
        let all: Vec<_> = names.map(|name| (name, long(name))).collect();
        for n in 0..bytes.len() {
            let mut rest = n;
            let digits: Vec<_> = all
                .iter()
                .map(|&(name, extent)| {
                    let digit = rest % extent;
                    rest /= extent;
                    (name, digit)
                })
                .collect();
            let digit = |wanted: &str| digits.iter().find(|(name, _)| *name == wanted).unwrap().1;
            let order = if digit("kv") == 0 { &orders.keys } else { &orders.values };
            let outermost = (!order.contains(&"layer")).then_some("layer");
            let axes = outermost.into_iter().chain(order.iter().copied());
            let address = axes.fold(0, |address, axis| address * long(axis) + digit(axis));
            let place = digits.iter().fold(0_u64, |place, &(name, digit)| {
                let first = match name {
                    "token" => at * tokens,
                    "head" => first_head,
                    _ => 0,
                };
                place * 131 + (first + digit) as u64
            });
            bytes[address] = (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
        }
        bytes
    }

    #[test]
    fn blocks_of_any_form_become_those_of_any_other() {
        for (ours, theirs) in ORDERS.iter().flat_map(|a| ORDERS.iter().map(move |b| (a, b))) {
            for (tokens, there) in [16, 32, 64].iter().flat_map(|a| [16, 32, 64].map(|b| (*a, b))) {
                let [ours, theirs] = [worker(ours, tokens), worker(theirs, there)];
                let Some(conversion) = Conversion::between(&ours, &theirs) else {
                    assert_eq!(ours.fingerprint, theirs.fingerprint);
                    continue;
                };
                let mut whole = Vec::new();
                let mut made = vec![0; ours.block_bytes as usize];
                for at in 0..128 / there {
                    for (position, part) in conversion.parts_of(at) {
                        conversion.put(part, &block(&theirs, at), &mut made).unwrap();
                        if conversion.is_last(part) {
                            whole.push(position);
                            assert!(
                                made == block(&ours, position),
                                "{} {}",
                                ours.name,
                                theirs.name
                            );
                        }
                    }
                }
                assert_eq!(whole, (0..128 / tokens).collect::<Vec<_>>());
            }
        }
    }

    /// Heads inside of tokens, and outside, and layers inside of both.
    pub(in crate::peers) const RANK_ORDERS: [&str; 3] =
        [ORDERS[0], ORDERS[1], "head,token,layer,kv,channel,byte"];
    /// Tokens.
    pub(in crate::peers) const PROMPT: usize = 128;

    /// A rank of a worker, and its slices of a prompt.
    pub(in crate::peers) struct RankSlices {
        pub(in crate::peers) member: Member,
        pub(in crate::peers) slices: Vec<Vec<u8>>,
    }

    pub(in crate::peers) fn ranks_of(order: &str, tokens: usize, world: u16) -> Vec<RankSlices> {
        let slices_of = |rank| {
            let mut extents = EXTENTS;
            extents[2].1 /= usize::from(world);
            let mut member = worker_of(&extents, order, tokens);
            (member.ranks, member.rank) = (world, Some(rank));
            member.incarnation = 100 * u64::from(world) + u64::from(rank);
            member.fingerprint.ranks.tensor_world = world.into();
            let slices = (0..PROMPT / tokens).map(|at| block(&member, at)).collect();
            RankSlices { member, slices }
        };
        (0..world).map(slices_of).collect()
    }

    /// Every rank's slices, made of those of the ranks there that have its heads.
    fn assert_ranks_become(ours: &[RankSlices], theirs: &[RankSlices]) {
        let (many, few) = (ours.len().max(theirs.len()), ours.len().min(theirs.len()));
        let of = (many / few) as u16;
        for (rank, own) in ours.iter().enumerate() {
            let mut made: Vec<_> = own.slices.iter().map(|slice| vec![0; slice.len()]).collect();
            let mut of_whole = made.clone();
            let there = if ours.len() >= theirs.len() {
                let give = HeadShare::new(rank as u16 % of, of).unwrap();
                vec![(rank / usize::from(of), give, HeadShare::WHOLE)]
            } else {
                let into = |n| HeadShare::new(n, of).unwrap();
                let first = rank * usize::from(of);
                (0..of).map(|n| (first + usize::from(n), HeadShare::WHOLE, into(n))).collect()
            };
            for (rank, give, into) in there {
                let theirs = &theirs[rank];
                let seat = PeerSeat { port: 1, incarnation: 1 };
                let source = PullSource { seat, give, into };
                assert_eq!(difference(&own.member, &theirs.member, false), None);
                let [of_given_shares, of_whole_slices] =
                    [Conversion::of_given_shares, Conversion::of_whole_slices]
                        .map(|of| of(&own.member, &theirs.member, &source).expect("other forms"));
                for (at, (made, of_whole)) in made.iter_mut().zip(&mut of_whole).enumerate() {
                    for (nth, from) in of_given_shares.sources_of(at).enumerate() {
                        let mut slice = theirs.slices[from].clone();
                        let part = of_given_shares.part_at(at, nth);
                        of_whole_slices.put(part, &slice, of_whole).unwrap();
                        if give != HeadShare::WHOLE {
                            heads_of(&theirs.member).unwrap().cut(give, &mut slice).unwrap();
                        }
                        of_given_shares.put(part, &slice, made).unwrap();
                    }
                }
            }
            let is_right = [&made, &of_whole].into_iter().all(|made| *made == own.slices);
            assert!(is_right, "{:?} of {:?}", own.member, theirs[0].member);
        }
    }

    #[test]
    fn slices_of_any_ranks_become_those_of_any_others() {
        let forms =
            RANK_ORDERS.iter().flat_map(|order| [16, 32, 64].map(|tokens| (*order, tokens)));
        let forms: Vec<_> = forms.collect();
        let workers: Vec<_> = forms
            .iter()
            .map(|(order, tokens)| [1, 2, 4, 8].map(|world| ranks_of(order, *tokens, world)))
            .collect();
        let pairs = (0..forms.len()).flat_map(|a| (0..forms.len()).map(move |b| (a, b)));
        for (ours, theirs) in pairs.filter(|(a, b)| a != b) {
            for (ours, theirs) in
                workers[ours].iter().flat_map(|a| workers[theirs].iter().map(move |b| (a, b)))
            {
                assert_ranks_become(ours, theirs);
            }
        }
    }

    /// A share splits the head axis, which gives one axis more than a transform takes.
    #[test]
    fn shares_that_cannot_convert_are_refused_where_whole_blocks_can() {
        let worker = |world: u16, order| {
            let heads = 8 / usize::from(world);
            let extents =
                [("layer", 2), ("kv", 2), ("head", heads), ("row", 3), ("column", 5), ("byte", 2)];
            let mut member = worker_of(&extents, order, 16);
            (member.ranks, member.incarnation) = (world, world.into());
            member.fingerprint.ranks.tensor_world = world.into();
            member
        };
        let two = worker(2, "layer,kv,head,token,row,column,byte");
        let [two_there, four] =
            [2, 4].map(|world| worker(world, "layer,kv,head,column,row,token,byte"));
        let two_there = Member { incarnation: 7, ..two_there };
        assert_eq!(difference(&two, &two_there, false), None);
        let why = difference(&two, &four, false).unwrap();
        assert!(why.contains("shares of heads cannot be converted"), "{why}");
        assert_eq!(difference(&two_there, &four, false), None);
    }

    #[test]
    fn leaders_count_blocks_as_their_ranks_make_them() {
        let leader = |order, tokens, world| {
            let member = ranks_of(order, tokens, world).remove(0).member;
            Member { rank: None, ..member }
        };
        for (world, there) in [(2, 2), (2, 4), (4, 1)] {
            let ours = leader(RANK_ORDERS[0], 64, world);
            let theirs = leader(RANK_ORDERS[1], 16, there);
            assert_eq!(difference(&ours, &theirs, false), None);
            let conversion = Conversion::between(&ours, &theirs).unwrap();
            assert_eq!((conversion.whole_there(3), conversion.whole_here(13)), (12, 3));
        }
    }

    /// A worker whose numbers have this type; `of`: its share of the heads, where it is a rank.
    fn typed(order: &str, tokens: usize, of: Option<HeadShare>, dtype: &str) -> Member {
        let (rank, world) = of.unwrap_or(HeadShare::WHOLE).get();
        let mut extents = EXTENTS;
        extents[2].1 /= usize::from(world);
        let is_fp8 = dtype.starts_with("fp8");
        extents[4].1 = if is_fp8 { 1 } else { 2 };
        let mut member = worker_of(&extents, order, tokens);
        member.incarnation = dtype.bytes().map(u64::from).sum();
        member.fingerprint.dtype = dtype.to_owned();
        member.fingerprint.ranks.tensor_world = world.into();
        if is_fp8 {
            member.fingerprint.scales = (1_u8..=6).map(|n| f32::from(n) / 100.0).collect();
        }
        (member.ranks, member.rank) = (of.map_or(0, |_| world), of.map(|_| rank));
        member
    }

    /// What blocks of a worker there become here, and how many of their numbers are too large.
    fn made_of(conversion: &Conversion, theirs: &[Vec<u8>], ours: &mut [Vec<u8>]) -> u64 {
        let (mut too_large, mut buffer) = (0, Vec::new());
        for (at, block) in theirs.iter().enumerate() {
            let mut block = block.clone();
            let (numbers, count) = conversion.convert_numbers(&mut block, &mut buffer);
            too_large += count;
            for (position, part) in conversion.parts_of(at) {
                conversion.put(part, numbers, &mut ours[position]).unwrap();
            }
        }
        too_large
    }

    /// All of a prompt's blocks, of zeros.
    fn blocks_of(member: &Member) -> Vec<Vec<u8>> {
        let blocks = PROMPT / member.fingerprint.block_tokens as usize;
        vec![vec![0; member.block_bytes as usize]; blocks]
    }

    fn cut_up(whole: &Member, blocks: &[Vec<u8>], share: HeadShare) -> Vec<Vec<u8>> {
        let heads = heads_of(whole).unwrap();
        let cut = |block: &Vec<u8>| {
            let mut slice = block.clone();
            heads.cut(share, &mut slice).unwrap();
            slice
        };
        blocks.iter().map(cut).collect()
    }

    /// What workers without ranks make of whole blocks, ranks make of slices, whatever they read.
    fn assert_typed_ranks_become(
        ours: impl Fn(Option<HeadShare>) -> Member,
        world: u16,
        theirs: impl Fn(Option<HeadShare>) -> Member,
        there: u16,
    ) {
        let [whole, their_whole] = [ours(None), theirs(None)];
        let mut random = fastrand::Rng::with_seed(1);
        let mut given = blocks_of(&their_whole);
        given.iter_mut().for_each(|block| random.fill(block));
        let mut expected = blocks_of(&whole);
        let too_large =
            made_of(&Conversion::between(&whole, &their_whole).unwrap(), &given, &mut expected);
        let (mut count, of) = (0, world.max(there) / world.min(there));
        let share = |n| HeadShare::new(n, of).unwrap();
        for rank in 0..world {
            let own = ours(HeadShare::new(rank, world));
            let sources: Vec<_> = if world >= there {
                vec![(rank / of, share(rank % of), HeadShare::WHOLE)]
            } else {
                (0..of).map(|n| (rank * of + n, HeadShare::WHOLE, share(n))).collect()
            };
            let mut made = blocks_of(&own);
            for (rank, give, into) in sources {
                let from = theirs(HeadShare::new(rank, there));
                assert_eq!(difference(&own, &from, true), None);
                assert!(difference(&own, &from, false).unwrap().contains("dtype"));
                let source = PullSource { seat: PeerSeat { port: 1, incarnation: 1 }, give, into };
                let conversion = Conversion::of_given_shares(&own, &from, &source).unwrap();
                let mut slices = cut_up(&their_whole, &given, HeadShare::new(rank, there).unwrap());
                if give != HeadShare::WHOLE {
                    slices = cut_up(&from, &slices, give);
                }
                count += made_of(&conversion, &slices, &mut made);
            }
            let right = cut_up(&whole, &expected, HeadShare::new(rank, world).unwrap());
            assert!(made == right, "{own:?} of {their_whole:?}");
        }
        assert_eq!(count, too_large);
    }

    #[test]
    fn slices_of_any_type_become_those_of_any_other() {
        let types = ["bf16", "fp16", "fp8_e4m3"];
        let pairs = types.iter().flat_map(|a| types.iter().map(move |b| (*a, *b)));
        let forms = [(16, 64), (32, 32), (64, 16)];
        let worlds = [(2, 2), (2, 4), (4, 2), (8, 1)];
        for (dtype, their_dtype) in pairs.filter(|(a, b)| a != b) {
            for ((tokens, their_tokens), (world, there)) in
                forms.iter().flat_map(|a| worlds.iter().map(move |b| (*a, *b)))
            {
                let ours = |of| typed(RANK_ORDERS[0], tokens, of, dtype);
                let theirs = |of| typed(RANK_ORDERS[1], their_tokens, of, their_dtype);
                assert_typed_ranks_become(ours, world, theirs, there);
            }
        }
    }

    /// All ranks say the same of themselves, and would have heads with other scales each.
    #[test]
    fn scales_of_heads_do_not_convert_with_ranks() {
        let scaled = |world: u16| {
            let mut member = typed(RANK_ORDERS[0], 16, HeadShare::new(0, world), "fp8_e4m3");
            member.fingerprint.scales = vec![0.5; 6 * 8 / usize::from(world)];
            member
        };
        let plain = typed(RANK_ORDERS[0], 16, HeadShare::new(0, 2), "bf16");
        for world in [1, 2, 4] {
            assert!(difference(&plain, &scaled(world), true).unwrap().contains("dtype"));
            assert!(difference(&scaled(world), &plain, true).unwrap().contains("dtype"));
        }
    }

    /// Of a block of numbers in a row.
    pub(in crate::peers) fn fp8_rows(numbers: usize, number_bytes: usize) -> ScaledRows {
        let extents =
            [("layer", 1), ("kv", 1), ("head", 1), ("channel", 1), ("byte", number_bytes)];
        let layout = BlockLayout::of(&worker_of(&extents, ORDERS[0], numbers), number_bytes);
        ScaledRows::of(&layout.unwrap(), number_bytes, 1).unwrap()
    }

    /// Number `n` of a block, by its axes.
    fn scale_of(of: &Member, n: usize, scales: usize) -> usize {
        let [layer, kv, head] = ["layer", "kv", "head"].map(|name| digit(of, n, name));
        let each = 2 * layer + kv;
        if scales == 6 { each } else { 8 * each + head }
    }

    /// Where the number at an address of a block is along an axis. Keys come first in it, or values: by
    /// the orders of both.
    fn digit(of: &Member, address: usize, name: &str) -> usize {
        let layout = &of.fingerprint.layouts[0];
        let tokens = of.fingerprint.block_tokens as usize;
        let orders = layout.orders();
        let along = |order: &[&str]| {
            let mut names = order.to_vec();
            if !names.contains(&"layer") {
                names.insert(0, "layer");
            }
            let (mut rest, mut found) = (address, 0);
            for along in names.iter().rev().filter(|along| **along != "byte") {
                let extent = extent(along, tokens);
                if *along == name {
                    found = rest % extent;
                }
                rest /= extent;
            }
            found
        };
        if name != "kv" && digit(of, address, "kv") == 1 {
            along(&orders.values)
        } else {
            along(&orders.keys)
        }
    }

    #[test]
    fn each_number_has_the_scale_of_its_place() {
        for (order, number_bytes) in ORDERS.iter().flat_map(|order| [(order, 1), (order, 2)]) {
            let mut extents = EXTENTS;
            extents[4].1 = number_bytes;
            let of = worker_of(&extents, order, 16);
            let layout = BlockLayout::of(&of, number_bytes).unwrap();
            for scales in [6, 48] {
                let rows = ScaledRows::of(&layout, number_bytes, scales).unwrap();
                let mut found = vec![None; of.block_bytes as usize / number_bytes];
                rows.each(|first, count, scale| {
                    for of in &mut found[first..first + count] {
                        assert_eq!(of.replace(scale), None, "twice");
                    }
                });
                let expected = (0..found.len()).map(|n| Some(scale_of(&of, n, scales)));
                assert!(found.iter().copied().eq(expected), "{order} {scales}");
            }
            assert!(ScaledRows::of(&layout, number_bytes, 12).is_none());
        }
    }

    #[test]
    fn prefixes_are_as_long_as_their_tokens() {
        let between = |ours, theirs| {
            Conversion::between(&worker(ORDERS[0], ours), &worker(ORDERS[0], theirs)).unwrap()
        };
        let (joins, cuts) = (between(64, 16), between(16, 64));
        assert_eq!(
            (joins.whole_there(3), joins.needed_there(3), joins.whole_here(13)),
            (12, 12, 3)
        );
        assert_eq!((cuts.whole_there(7), cuts.needed_there(7), cuts.whole_here(2)), (1, 2, 8));
    }

    #[test]
    fn what_cannot_become_the_other_is_none() {
        let ours = worker(ORDERS[0], 32);
        let unlike: [&dyn Fn(&mut Member); 9] = [
            &|of| of.fingerprint.block_tokens = 24,
            &|of| of.fingerprint.layouts[0].order = "kv,slot,head,channel,byte".to_owned(),
            &|of| of.fingerprint.layouts[0].order = "kv,token,head,number,byte".to_owned(),
            &|of| of.fingerprint.layouts[0].shape[2] = 3,
            &|of| of.fingerprint.layouts[0].strides.swap(0, 1),
            &|of| of.fingerprint.layouts.clear(),
            &|of| of.block_bytes += 2,
            &|of| of.ranks = 1,
            &|of| of.groups = "state".to_owned(),
        ];
        assert!(Conversion::between(&ours, &worker(ORDERS[0], 16)).is_some());
        // What another worker says costs no more than that.
        let becomes =
            |tokens: usize| Conversion::between(&ours, &worker(ORDERS[0], tokens)).is_some();
        assert_eq!([becomes(32 << 10), becomes(32 << 11)], [true, false]);
        for spoil in unlike {
            let mut theirs = worker(ORDERS[0], 16);
            spoil(&mut theirs);
            assert!(Conversion::between(&ours, &theirs).is_none(), "{theirs:?}");
            assert!(Conversion::between(&theirs, &ours).is_none(), "{theirs:?}");
        }
    }

    /// A quarter of the layers of Llama 3 8B: a block of 16 tokens has 512 KiB.
    const LLAMA: [(&str, usize); 5] =
        [("layer", 8), ("kv", 2), ("head", 8), ("channel", 128), ("byte", 2)];
    const MEASURED_BYTES: usize = 64 << 20;
    const ROUNDS: usize = 7;

    /// Of memcpy of as many numbers of 16 bits, in turns; a block is converted as it comes, from the
    /// caches of this thread.
    fn measured(there: &Member, here: &Member) -> f64 {
        let conversion = Conversion::between(here, there).unwrap();
        let [bytes, our_bytes] = [there, here].map(|member| member.block_bytes as usize);
        // Numbers as keys and values are, from -4 to 4.
        let mut random = fastrand::Rng::with_seed(1);
        let number = |_| {
            let number = 8.0 * random.f32() - 4.0;
            match &*there.fingerprint.dtype {
                "fp8_e4m3" => vec![random.u8(..)],
                "fp16" => f16::from_f32(number).to_le_bytes().to_vec(),
                _ => bf16::from_f32(number).to_le_bytes().to_vec(),
            }
        };
        let mut source: Vec<_> = (0..MEASURED_BYTES / 2).flat_map(number).collect();
        let numbers = source.len();
        // As much is copied either way.
        source.resize(MEASURED_BYTES, 0);
        let (mut made, copied) = (vec![0; MEASURED_BYTES], MEASURED_BYTES / (numbers / bytes));
        let mut ratios: Vec<_> = (0..ROUNDS)
            .map(|_| {
                let began = now();
                made.chunks_mut(copied).zip(source.chunks(copied)).for_each(|(to, from)| {
                    to.copy_from_slice(black_box(from));
                });
                let plain = began.elapsed();
                let (mut block, mut other) = (vec![0; bytes], Vec::new());
                let mut converted = Duration::ZERO;
                for (at, from) in source[..numbers].chunks(bytes).enumerate() {
                    block.copy_from_slice(from);
                    let began = now();
                    let (theirs, _) = conversion.convert_numbers(&mut block, &mut other);
                    for (position, part) in conversion.parts_of(at) {
                        let ours = &mut made[position * our_bytes..][..our_bytes];
                        conversion.put(part, black_box(theirs), ours).unwrap();
                    }
                    converted += began.elapsed();
                }
                plain.div_duration_f64(converted)
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        ratios[ROUNDS / 2]
    }

    /// Says what `tests/peers.sh` shows.
    #[test]
    #[ignore = "it measures: tests/peers.sh has it"]
    fn how_fast_blocks_become_others() {
        let columns = "layer,head,kv(channel,token|token,channel),byte";
        let of = |order, tokens| worker_of(&LLAMA, order, tokens);
        let (nhd, hnd) = (ORDERS[0], ORDERS[1]);
        let of_type = |dtype: &str| {
            let mut extents = LLAMA;
            extents[4].1 = if dtype == "fp8_e4m3" { 1 } else { 2 };
            let mut member = worker_of(&extents, nhd, 32);
            member.fingerprint.dtype = dtype.to_owned();
            member.fingerprint.scales = vec![0.03; 16];
            member
        };
        let figures = [
            ("32 to 64 tokens", of(nhd, 32), of(nhd, 64)),
            ("64 to 32 tokens", of(nhd, 64), of(nhd, 32)),
            ("32 to 64 tokens, heads outside", of(hnd, 32), of(hnd, 64)),
            ("32 to 64 tokens, keys as columns", of(columns, 32), of(columns, 64)),
            ("NHD to HND", of(nhd, 32), of(hnd, 32)),
            ("HND to NHD", of(hnd, 32), of(nhd, 32)),
            ("other order of layers", of(nhd, 32), of("kv,token,layer,head,channel,byte", 32)),
            ("bf16 to fp16", of_type("bf16"), of_type("fp16")),
            ("fp16 to bf16", of_type("fp16"), of_type("bf16")),
            ("fp8_e4m3 to bf16", of_type("fp8_e4m3"), of_type("bf16")),
            ("fp8_e4m3 to fp16", of_type("fp8_e4m3"), of_type("fp16")),
            ("bf16 to fp8_e4m3", of_type("bf16"), of_type("fp8_e4m3")),
            ("fp16 to fp8_e4m3", of_type("fp16"), of_type("fp8_e4m3")),
        ];
        for (name, there, here) in figures {
            let of_memcpy = (100.0 * measured(&there, &here)).round() / 100.0;
            println!(
                "figures {}",
                json!({ "conversion": { "what": name, "of_memcpy": of_memcpy } })
            );
        }
    }
}
