//! Rearranging the bytes of blocks: engines order heads and tokens, layers and blocks in different
//! ways, and split heads over ranks. What goes where is said here once; [`Transform::apply`] does
//! it on the CPU and is the reference for the kernel that does it on a GPU.
//!
//! The innermost unit is a *row*: the values of one head of one token, in whatever type (it is
//! never looked at). NHD and HND differ in the order of [`LayoutAxis::Token`] and
//! [`LayoutAxis::Head`]; an engine's *layer-first* tensors have [`LayoutAxis::Layer`] outside
//! [`LayoutAxis::Block`], blocks that lie whole have it inside.

use std::ops::Range;

use crate::error::SetupError;

/// What a KV cache extends over, apart from the values of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayoutAxis {
    /// Blocks, by their slot numbers.
    Block,
    /// Layers of the model.
    Layer,
    /// Keys, then values.
    Kv,
    /// Tokens of a block.
    Token,
    /// Attention heads.
    Head,
}

use LayoutAxis::{Block, Head, Kv, Layer, Token};

/// The axes within a block, in the order of a [`Transform`]'s arrays.
const INNER: [LayoutAxis; 4] = [Layer, Kv, Token, Head];

/// How many there are of everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Slots.
    pub blocks: usize,
    /// Layers.
    pub layers: usize,
    /// 2 for keys and values; 1 where they are one (latent attention).
    pub kv: usize,
    /// Tokens of a block.
    pub tokens: usize,
    /// Heads of a rank.
    pub heads: usize,
    /// Bytes of one head of one token.
    pub row_bytes: usize,
}

impl Shape {
    const fn extent(&self, axis: LayoutAxis) -> usize {
        match axis {
            Block => self.blocks,
            Layer => self.layers,
            Kv => self.kv,
            Token => self.tokens,
            Head => self.heads,
        }
    }
}

/// A dense array of rows: its axes from the outermost to the innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    order: [LayoutAxis; 5],
    bytes: usize,
}

impl Layout {
    /// Blocks whole, one after the other; tokens outside heads.
    pub const BLOCKS_NHD: [LayoutAxis; 5] = [Block, Layer, Kv, Token, Head];
    /// Blocks whole, one after the other; heads outside tokens.
    pub const BLOCKS_HND: [LayoutAxis; 5] = [Block, Layer, Kv, Head, Token];
    /// A tensor per layer, keys before values; tokens outside heads.
    pub const LAYERS_NHD: [LayoutAxis; 5] = [Layer, Kv, Block, Token, Head];
    /// A tensor per layer, keys before values; heads outside tokens.
    pub const LAYERS_HND: [LayoutAxis; 5] = [Layer, Kv, Block, Head, Token];

    /// `shape` in this order.
    ///
    /// # Errors
    /// `Invalid`: an axis is missing, of extent 0 or above 2³², or it all exceeds the address
    /// space.
    pub fn new(shape: Shape, order: [LayoutAxis; 5]) -> Result<Self, SetupError> {
        let all = [Block, Layer, Kv, Token, Head];
        if let Some(missing) = all.into_iter().find(|axis| !order.contains(axis)) {
            return Err(SetupError::invalid(format!("a layout without the axis {missing:?}")));
        }
        let mut bytes = Some(shape.row_bytes);
        for axis in all {
            let extent = u32::try_from(shape.extent(axis)).unwrap_or(0) as usize;
            bytes = bytes.and_then(|bytes| bytes.checked_mul(extent));
        }
        match bytes.filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok()) {
            Some(bytes) => Ok(Self { shape, order, bytes }),
            None => Err(SetupError::invalid(format!("{shape:?} is empty or too large"))),
        }
    }

    /// How many there are of everything.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes of the whole array.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// All of it.
    pub fn whole(&self) -> View {
        self.view(0..self.shape.heads)
    }

    /// The heads that one rank of a tensor-parallel group has.
    ///
    /// # Errors
    /// `Invalid`: there are no such heads.
    pub fn heads(&self, heads: Range<usize>) -> Result<View, SetupError> {
        if heads.is_empty() || heads.end > self.shape.heads {
            return Err(SetupError::invalid(format!("heads {heads:?} of {}", self.shape.heads)));
        }
        Ok(self.view(heads))
    }

    fn view(&self, heads: Range<usize>) -> View {
        let extents =
            INNER.map(|axis| if axis == Head { heads.len() } else { self.shape.extent(axis) });
        View {
            offset: heads.start * self.stride(Head),
            blocks: self.shape.blocks,
            block_stride: self.stride(Block),
            extents,
            strides: INNER.map(|axis| self.stride(axis)),
            row_bytes: self.shape.row_bytes,
            bytes: self.bytes,
        }
    }

    /// Bytes from one index of an axis to the next: what all axes inside it take.
    fn stride(&self, axis: LayoutAxis) -> usize {
        let inside = self.order.iter().rev().take_while(|&&other| other != axis);
        inside.fold(self.shape.row_bytes, |bytes, &axis| bytes * self.shape.extent(axis))
    }
}

/// A layout, or some heads of it, as strides in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    offset: usize,
    blocks: usize,
    block_stride: usize,
    extents: [usize; INNER.len()],
    strides: [usize; INNER.len()],
    row_bytes: usize,
    bytes: usize,
}

/// Copies blocks from one layout to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transform {
    /// Where blocks come from.
    from: View,
    /// Where they go.
    to: View,
}

impl Transform {
    /// Between views of one shape; the numbers of blocks may differ.
    ///
    /// # Errors
    /// `Invalid`: layers, keys and values, tokens, heads or rows are not as many.
    pub fn new(from: View, to: View) -> Result<Self, SetupError> {
        if (from.extents, from.row_bytes) != (to.extents, to.row_bytes) {
            let message = format!(
                "blocks of {:?} (layers, keys and values, tokens, heads) rows of {} bytes do not become {:?} of {}",
                from.extents, from.row_bytes, to.extents, to.row_bytes
            );
            return Err(SetupError::invalid(message));
        }
        Ok(Self { from, to })
    }

    /// Bytes that are copied per block.
    pub fn block_bytes(&self) -> usize {
        self.from.extents.iter().product::<usize>() * self.from.row_bytes
    }

    /// Bytes of the arrays that blocks come from and go to.
    pub const fn array_bytes(&self) -> (usize, usize) {
        (self.from.bytes, self.to.bytes)
    }

    /// The same copy in the longest rows: axes that lie innermost and dense at both ends become
    /// part of the row.
    #[must_use]
    pub fn with_long_rows(mut self) -> Self {
        while let Some(axis) = (0..INNER.len()).find(|&axis| self.is_dense(axis)) {
            let row_bytes = self.from.row_bytes * self.from.extents[axis];
            for view in [&mut self.from, &mut self.to] {
                view.row_bytes = row_bytes;
                view.extents[axis] = 1;
            }
        }
        self
    }

    fn is_dense(&self, axis: usize) -> bool {
        let row = self.from.row_bytes;
        self.from.extents[axis] > 1
            && self.from.strides[axis] == row
            && self.to.strides[axis] == row
    }

    /// Copies the blocks `(source, destination)` on the CPU, row by row.
    ///
    /// # Errors
    /// `Invalid`: an array is not as large as its layout, or there is no such block.
    pub fn apply(
        &self,
        from: &[u8],
        to: &mut [u8],
        blocks: &[(u32, u32)],
    ) -> Result<(), SetupError> {
        if from.len() != self.from.bytes || to.len() != self.to.bytes {
            let message =
                format!("arrays of {} and {} bytes are not of these layouts", from.len(), to.len());
            return Err(SetupError::invalid(message));
        }
        self.check(blocks)?;
        let row = self.from.row_bytes;
        for &(source, destination) in blocks {
            let (from, to) =
                (&from[self.from.start(source)..], &mut to[self.to.start(destination)..]);
            self.each_row(|source, destination| {
                to[destination..destination + row].copy_from_slice(&from[source..source + row]);
            });
        }
        Ok(())
    }

    /// That all these blocks exist.
    ///
    /// # Errors
    /// `Invalid`: one does not.
    pub fn check(&self, blocks: &[(u32, u32)]) -> Result<(), SetupError> {
        let exists = |&(from, to): &(u32, u32)| {
            (from as usize) < self.from.blocks && (to as usize) < self.to.blocks
        };
        match blocks.iter().find(|pair| !exists(pair)) {
            Some(pair) => Err(SetupError::invalid(format!("{pair:?}: no such blocks"))),
            None => Ok(()),
        }
    }

    /// Tells of each row of a block where it starts on both sides, behind the block's own start.
    fn each_row(&self, mut copy: impl FnMut(usize, usize)) {
        let [outer, second, third, inner] = self.from.extents;
        let at = |view: &View, [a, b, c]: [usize; 3]| {
            a * view.strides[0] + b * view.strides[1] + c * view.strides[2]
        };
        for a in 0..outer {
            for b in 0..second {
                for c in 0..third {
                    let (mut from, mut to) = (at(&self.from, [a, b, c]), at(&self.to, [a, b, c]));
                    for _ in 0..inner {
                        copy(from, to);
                        from += self.from.strides[3];
                        to += self.to.strides[3];
                    }
                }
            }
        }
    }

    /// What the kernel is told.
    #[cfg(feature = "cuda")]
    pub(crate) fn plan(&self) -> TransformPlan {
        let wide = |numbers: [usize; INNER.len()]| numbers.map(|number| number as u64);
        TransformPlan {
            extents: self.from.extents.map(|extent| extent as u32),
            rows: self.from.extents.iter().product::<usize>() as u32,
            row_bytes: self.from.row_bytes as u64,
            from_offset: self.from.offset as u64,
            to_offset: self.to.offset as u64,
            from_block: self.from.block_stride as u64,
            to_block: self.to.block_stride as u64,
            from_strides: wide(self.from.strides),
            to_strides: wide(self.to.strides),
        }
    }
}

/// A transform as the kernel reads it: `struct Plan` of `kernels.cu`.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct TransformPlan {
    pub(crate) extents: [u32; INNER.len()],
    pub(crate) row_bytes: u64,
    pub(crate) from_offset: u64,
    pub(crate) to_offset: u64,
    pub(crate) from_block: u64,
    pub(crate) to_block: u64,
    pub(crate) from_strides: [u64; INNER.len()],
    pub(crate) to_strides: [u64; INNER.len()],
    pub(crate) rows: u32,
}

impl View {
    /// Rows that lie anywhere in `bytes` bytes, the first one at `offset`. Each of four axes has
    /// a number of rows, and the bytes from one to the next.
    ///
    /// # Errors
    /// `Invalid`: there are none, or they do not all lie in these bytes.
    pub fn strided(
        bytes: usize,
        offset: usize,
        axes: [(usize, usize); INNER.len()],
        row_bytes: usize,
    ) -> Result<Self, SetupError> {
        let last = axes.iter().try_fold(offset, |at, &(extent, stride)| {
            at.checked_add(extent.checked_sub(1)?.checked_mul(stride)?)
        });
        let end = last.and_then(|last| last.checked_add(row_bytes));
        if row_bytes == 0 || end.is_none_or(|end| end > bytes) {
            let message = format!(
                "rows of {row_bytes} bytes from {offset} on, {axes:?} (how many, and bytes from one to \
                 the next), are none or do not lie in {bytes} bytes"
            );
            return Err(SetupError::invalid(message));
        }
        let (extents, strides) = (axes.map(|(extent, _)| extent), axes.map(|(_, stride)| stride));
        Ok(Self { offset, blocks: 1, block_stride: 0, extents, strides, row_bytes, bytes })
    }

    /// Where a block's first row starts.
    const fn start(&self, block: u32) -> usize {
        self.offset + block as usize * self.block_stride
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::error::SetupErrorKind;

    fn some_shape() -> impl Strategy<Value = Shape> {
        (1_usize..4, 1_usize..4, 1_usize..3, 1_usize..5, 1_usize..7, 1_usize..10).prop_map(
            |(blocks, layers, kv, tokens, heads, row_bytes)| Shape {
                blocks,
                layers,
                kv,
                tokens,
                heads,
                row_bytes,
            },
        )
    }

    fn some_order() -> impl Strategy<Value = [LayoutAxis; 5]> {
        Just([Block, Layer, Kv, Token, Head]).prop_shuffle()
    }

    fn noise(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
    }

    fn each(blocks: usize) -> Vec<(u32, u32)> {
        (0..blocks as u32).map(|block| (block, block)).collect()
    }

    fn transformed(from: View, to: View, bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![0; to.bytes];
        Transform::new(from, to).unwrap().apply(bytes, &mut out, &each(from.blocks)).unwrap();
        out
    }

    /// Where a row starts, straight from the definition: the axes are the digits of its number.
    fn address(layout: &Layout, index: impl Fn(LayoutAxis) -> usize) -> usize {
        let number =
            layout.order.iter().fold(0, |n, &axis| n * layout.shape.extent(axis) + index(axis));
        number * layout.shape.row_bytes
    }

    proptest! {
        #[test]
        fn every_row_goes_where_its_indices_say(shape in some_shape(), a in some_order(), b in some_order()) {
            let (a, b) = (Layout::new(shape, a).unwrap(), Layout::new(shape, b).unwrap());
            let bytes = noise(a.bytes());
            let out = transformed(a.whole(), b.whole(), &bytes);
            let axes = [Block, Layer, Kv, Token, Head];
            for row in 0..axes.map(|axis| shape.extent(axis)).iter().product() {
                let digit = |axis| {
                    let inside = axes.into_iter().skip_while(|&other| other != axis).skip(1);
                    row / inside.map(|axis| shape.extent(axis)).product::<usize>() % shape.extent(axis)
                };
                let (from, to) = (address(&a, digit), address(&b, digit));
                prop_assert_eq!(&bytes[from..from + shape.row_bytes], &out[to..to + shape.row_bytes]);
            }
        }

        #[test]
        fn there_and_back_is_where_it_was(shape in some_shape(), a in some_order(), b in some_order()) {
            let (a, b) = (Layout::new(shape, a).unwrap(), Layout::new(shape, b).unwrap());
            let bytes = noise(a.bytes());
            let there = transformed(a.whole(), b.whole(), &bytes);
            prop_assert_eq!(transformed(b.whole(), a.whole(), &there), bytes);
        }

        #[test]
        fn what_is_split_over_ranks_merges_to_what_it_was(
            shape in some_shape(), ranks in 1_usize..4, a in some_order(), b in some_order()
        ) {
            let whole = Layout::new(Shape { heads: shape.heads * ranks, ..shape }, a).unwrap();
            let part = Layout::new(shape, b).unwrap();
            let bytes = noise(whole.bytes());
            let mut merged = vec![0; whole.bytes()];
            for rank in 0..ranks {
                let ours = whole.heads(rank * shape.heads..(rank + 1) * shape.heads).unwrap();
                let split = transformed(ours, part.whole(), &bytes);
                let merge = Transform::new(part.whole(), ours).unwrap();
                merge.apply(&split, &mut merged, &each(shape.blocks)).unwrap();
            }
            prop_assert_eq!(merged, bytes);
        }

        #[test]
        fn long_rows_change_nothing(
            shape in some_shape(), a in some_order(), b in some_order(), from: Index, to: Index
        ) {
            let (a, b) = (Layout::new(shape, a).unwrap(), Layout::new(shape, b).unwrap());
            let bytes = noise(a.bytes());
            let pair = [(from.index(shape.blocks) as u32, to.index(shape.blocks) as u32)];
            let short = Transform::new(a.whole(), b.whole()).unwrap();
            let outcomes = [short, short.with_long_rows()].map(|transform| {
                let mut out = vec![0; b.bytes()];
                transform.apply(&bytes, &mut out, &pair).unwrap();
                (transform.block_bytes(), out)
            });
            prop_assert_eq!(&outcomes[0], &outcomes[1]);
        }
    }

    const SHAPE: Shape =
        Shape { blocks: 3, layers: 2, kv: 2, tokens: 16, heads: 8, row_bytes: 256 };

    #[test]
    fn one_order_inside_makes_one_row_of_a_tensor() {
        let [blocks, layers] = [Layout::BLOCKS_NHD, Layout::LAYERS_NHD]
            .map(|order| Layout::new(SHAPE, order).unwrap().whole());
        let transform = Transform::new(blocks, layers).unwrap().with_long_rows();
        assert_eq!(
            (transform.from.extents, transform.from.row_bytes),
            ([2, 2, 1, 1], 16 * 8 * 256)
        );
    }

    #[test]
    fn a_row_of_heads_moves_as_nhd_becomes_hnd() {
        let shape = Shape { blocks: 1, layers: 1, kv: 1, tokens: 2, heads: 3, row_bytes: 1 };
        let [nhd, hnd] = [Layout::BLOCKS_NHD, Layout::BLOCKS_HND]
            .map(|order| Layout::new(shape, order).unwrap().whole());
        assert_eq!(transformed(nhd, hnd, &[0, 1, 2, 10, 11, 12]), [0, 10, 1, 11, 2, 12]);
    }

    #[test]
    fn rows_that_lie_anywhere_are_where_their_strides_say() {
        let from = View::strided(24, 1, [(1, 0), (1, 0), (2, 12), (3, 4)], 2).unwrap();
        let to = View::strided(12, 0, [(1, 0), (1, 0), (2, 2), (3, 4)], 2).unwrap();
        let bytes: Vec<_> = (0..24).collect();
        let expected = [1, 2, 13, 14, 5, 6, 17, 18, 9, 10, 21, 22];
        assert_eq!(transformed(from, to, &bytes), expected);
        for (bytes, offset, axes, row) in [
            (22, 1, [(1, 0), (1, 0), (2, 12), (3, 4)], 2),
            (24, 2, [(1, 0), (1, 0), (2, 12), (3, 4)], 3),
            (24, 0, [(0, 0), (1, 0), (1, 0), (1, 0)], 2),
            (24, 0, [(1, 0), (1, 0), (1, 0), (1, 0)], 0),
            (24, 0, [(1, 0), (1, 0), (1, 0), (usize::MAX, 2)], 1),
        ] {
            let error = View::strided(bytes, offset, axes, row).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::Invalid, "{bytes} {offset} {axes:?} {row}");
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let layout = Layout::new(SHAPE, Layout::BLOCKS_NHD).unwrap();
        let fewer = Layout::new(Shape { heads: 4, ..SHAPE }, Layout::BLOCKS_NHD).unwrap();
        let transform = Transform::new(layout.whole(), layout.whole()).unwrap();
        let bytes = noise(layout.bytes());
        let errors = [
            Layout::new(Shape { tokens: 0, ..SHAPE }, Layout::BLOCKS_NHD).map(|_| ()),
            Layout::new(Shape { row_bytes: usize::MAX, ..SHAPE }, Layout::BLOCKS_NHD).map(|_| ()),
            Layout::new(SHAPE, [Block, Layer, Kv, Token, Token]).map(|_| ()),
            layout.heads(4..9).map(|_| ()),
            layout.heads(4..4).map(|_| ()),
            Transform::new(layout.whole(), fewer.whole()).map(|_| ()),
            transform.apply(&bytes[1..], &mut bytes.clone(), &[]),
            transform.apply(&bytes, &mut bytes.clone(), &[(0, 3)]),
        ];
        for error in errors {
            assert_eq!(error.unwrap_err().kind(), SetupErrorKind::Invalid);
        }
    }
}
