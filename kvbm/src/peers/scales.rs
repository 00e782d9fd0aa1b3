//! Which numbers of a block have which scale. Each layer's keys and values have one scale each, or
//! one for each head.

use super::conversion::{BlockLayout, BlockPlane};

/// Rows: adjacent numbers with one scale.
#[derive(Debug)]
pub(super) struct ScaledRows {
    planes: Vec<Plane>,
    /// Each head has a scale of its own.
    pub(super) are_of_heads: bool,
}

/// A whole block, or its keys or its values if their orders differ.
#[derive(Debug)]
struct Plane {
    /// In numbers.
    offset: usize,
    scale: usize,
    row: usize,
    axes: Vec<ScaledAxis>,
}

/// From one row to the next along an axis.
#[derive(Clone, Copy, Debug)]
struct ScaledAxis {
    extent: usize,
    /// In numbers.
    stride: usize,
    scales: usize,
}

impl ScaledRows {
    /// For blocks whose numbers have `number_bytes`. `None`: the number of scales is neither that of
    /// layers' keys and values, nor that of their heads.
    pub(super) fn of(layout: &BlockLayout, number_bytes: usize, scales: usize) -> Option<Self> {
        let extent = |name: &str| {
            let named = layout.keys.iter().find(|axis| axis.name == name);
            named.map_or(1, |axis| axis.extent)
        };
        let [layers, kv, heads] = ["layer", "kv", "head"].map(extent);
        let of_heads = [1, heads].into_iter().find(|of| scales == layers * kv * of)?;
        let step = |name: &str| match name {
            "layer" => kv * of_heads,
            "kv" => of_heads,
            "head" if of_heads > 1 => 1,
            _ => 0,
        };
        let numbers = |bytes: usize| bytes / number_bytes;
        let plane = |(at, BlockPlane { axes, offset }): (usize, BlockPlane)| {
            let mut row = numbers(layout.row_bytes);
            let with_steps = axes.iter().map(|axis| ScaledAxis {
                extent: axis.extent,
                stride: numbers(axis.stride),
                scales: step(&axis.name),
            });
            let axes = outside_row(with_steps.collect(), &mut row);
            Plane { offset: numbers(offset), scale: at * of_heads, row, axes }
        };
        let planes = layout.planes()?.into_iter().enumerate().map(plane).collect();
        Some(Self { planes, are_of_heads: of_heads > 1 })
    }

    /// Tells each row's first number, its length, and the index of its scale.
    pub(super) fn each(&self, mut tell: impl FnMut(usize, usize, usize)) {
        for Plane { offset, scale, row, axes } in &self.planes {
            walk(axes, *offset, *scale, &mut |first, scale| tell(first, *row, scale));
        }
    }
}

/// Axes that continue the row under its scale become part of it; the others are returned.
fn outside_row(mut axes: Vec<ScaledAxis>, row: &mut usize) -> Vec<ScaledAxis> {
    let continues = |axis: &ScaledAxis, row| axis.stride == row && axis.scales == 0;
    while let Some(at) = axes.iter().position(|axis| continues(axis, *row)) {
        *row *= axes.remove(at).extent;
    }
    axes
}

fn walk(axes: &[ScaledAxis], at: usize, scale: usize, tell: &mut impl FnMut(usize, usize)) {
    let Some((outer, inside)) = axes.split_first() else { return tell(at, scale) };
    for n in 0..outer.extent {
        walk(inside, at + n * outer.stride, scale + n * outer.scales, tell);
    }
}
