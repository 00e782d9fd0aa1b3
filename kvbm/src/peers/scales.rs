//! Which numbers of a block have which scale, where each layer's keys and values have one, or each
//! head of these.

use super::conversion::{BlockLayout, BlockPlane};

/// Numbers that lie one behind the other and have one scale, and where such rows are.
#[derive(Debug)]
pub(super) struct ScaledRows {
    planes: Vec<Plane>,
}

/// All of a block, or its keys or values where these are ordered otherwise.
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
    /// Of blocks whose numbers have `number_bytes`. `None`: there are not as many scales as there are
    /// layers' keys and values, or heads of these.
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
        Some(Self { planes: layout.planes()?.into_iter().enumerate().map(plane).collect() })
    }

    /// Tells of each row where it begins, how long it is, and the number of its scale.
    pub(super) fn each(&self, mut tell: impl FnMut(usize, usize, usize)) {
        for Plane { offset, scale, row, axes } in &self.planes {
            walk(axes, *offset, *scale, &mut |first, scale| tell(first, *row, scale));
        }
    }
}

/// The axes that do not become part of the row, as those do that continue it with its scale.
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
