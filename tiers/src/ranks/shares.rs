//! Shares of a slice's heads. Workers that split a model over other numbers of ranks need parts of
//! each other's slices: a rank of two has the heads of two ranks of four.

use serde::{Deserialize, Serialize};

use crate::transform::{Layout, Shape, Transform, View};

/// How heads lie in a slice: all heads, one after the other, and that several times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout(Layout);

/// One of equal shares of the heads, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadShare {
    index: u16,
    of: u16,
}

impl HeadShare {
    /// All heads.
    pub const WHOLE: Self = Self { index: 0, of: 1 };

    /// The `index`-th of `of` shares. `None`: there is no such share.
    pub fn new(index: u16, of: u16) -> Option<Self> {
        (index < of).then_some(Self { index, of })
    }

    /// Which one it is, and how many there are.
    pub const fn get(self) -> (u16, u16) {
        (self.index, self.of)
    }
}

impl HeadLayout {
    /// Of a slice of `block_bytes` in which all heads come `outer` times. `None`: they do not lie so
    /// in as many bytes.
    pub fn new(outer: usize, heads: usize, block_bytes: usize) -> Option<Self> {
        let times = outer.checked_mul(heads).filter(|&times| times > 0)?;
        let row_bytes = block_bytes.is_multiple_of(times).then_some(block_bytes / times)?;
        // What lies outside heads, and inside, moves with them, whatever it is.
        let shape = Shape { blocks: 1, layers: outer, kv: 1, tokens: 1, heads, row_bytes };
        Layout::new(shape, Layout::BLOCKS_NHD).ok().map(Self)
    }

    /// How many there are.
    pub const fn heads(&self) -> usize {
        self.0.shape().heads
    }

    /// Whether the heads make `of` equal shares.
    pub const fn has_shares(&self, of: u16) -> bool {
        of > 0 && self.heads().is_multiple_of(of as usize)
    }

    /// Leaves of a slice one share of its heads, as a slice of that rank would have them. `None`:
    /// it has no such share.
    pub fn cut(&self, share: HeadShare, slice: &mut Vec<u8>) -> Option<()> {
        let (of_whole, part) = self.views(share)?;
        let mut cut = vec![0; part.bytes()];
        move_heads(of_whole, part.whole(), slice, &mut cut)?;
        *slice = cut;
        Some(())
    }

    /// Puts what [`cut`](Self::cut) made where it lies in the whole slice. `None`: it is none of
    /// that size.
    pub fn put(&self, share: HeadShare, part: &[u8], slice: &mut [u8]) -> Option<()> {
        let (of_whole, of_part) = self.views(share)?;
        move_heads(of_part.whole(), of_whole, part, slice)
    }

    /// Puts a share of a slice that lies as `theirs` where a share of a slice lies that lies as this.
    /// `None`: one of them has no such share, or the two are not of one size.
    pub fn put_share(
        &self,
        share: HeadShare,
        theirs: &Self,
        given: HeadShare,
        from: &[u8],
        slice: &mut [u8],
    ) -> Option<()> {
        move_heads(theirs.views(given)?.0, self.views(share)?.0, from, slice)
    }

    /// The heads of a share in the whole slice, and by themselves.
    fn views(&self, HeadShare { index, of }: HeadShare) -> Option<(View, Layout)> {
        if !self.has_shares(of) {
            return None;
        }
        let heads = self.0.shape().heads / usize::from(of);
        let first = heads * usize::from(index);
        let part = Layout::new(Shape { heads, ..*self.0.shape() }, Layout::BLOCKS_NHD).ok()?;
        Some((self.0.heads(first..first + heads).ok()?, part))
    }
}

fn move_heads(from: View, to: View, source: &[u8], destination: &mut [u8]) -> Option<()> {
    let transform = Transform::new(from, to).ok()?.with_long_rows();
    transform.apply(source, destination, &[(0, 0)]).ok()
}

/// A rank of another worker, and which heads of its slices go where in ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShareSource {
    pub(super) rank: u16,
    /// The share of its heads.
    pub(super) give: HeadShare,
    /// The share of ours that they are.
    pub(super) into: HeadShare,
}

/// Where a rank of `world` finds its heads at a worker of `there` ranks. `None`: neither number
/// divides the other.
pub(super) fn sources(rank: u16, world: u16, there: u16) -> Option<Vec<ShareSource>> {
    if world == 0 || there == 0 || rank >= world {
        return None;
    }
    if world.is_multiple_of(there) {
        let of = world / there;
        let give = HeadShare::new(rank % of, of)?;
        return Some(vec![ShareSource { rank: rank / of, give, into: HeadShare::WHOLE }]);
    }
    let of = there.is_multiple_of(world).then(|| there / world)?;
    let source = |index| {
        let (give, into) = (HeadShare::WHOLE, HeadShare::new(index, of)?);
        Some(ShareSource { rank: rank * of + index, give, into })
    };
    (0..of).map(source).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_share_is_the_heads_of_that_rank() {
        // Two tokens of four heads of one byte.
        let layout = HeadLayout::new(2, 4, 8).unwrap();
        let mut slice = vec![0, 1, 2, 3, 10, 11, 12, 13];
        layout.cut(HeadShare::new(1, 2).unwrap(), &mut slice).unwrap();
        assert_eq!(slice, [2, 3, 12, 13]);
        let mut whole = vec![0; 8];
        layout.put(HeadShare::new(1, 2).unwrap(), &slice, &mut whole).unwrap();
        assert_eq!(whole, [0, 0, 2, 3, 0, 0, 12, 13]);
    }

    #[test]
    fn what_does_not_divide_has_no_shares() {
        assert_eq!(HeadLayout::new(2, 4, 9), None);
        assert_eq!(HeadLayout::new(0, 4, 8), None);
        assert_eq!(HeadLayout::new(usize::MAX, 4, 8), None);
        let layout = HeadLayout::new(2, 4, 8).unwrap();
        assert!(!layout.has_shares(3) && !layout.has_shares(0) && layout.has_shares(4));
        assert_eq!(HeadShare::new(2, 2), None);
        assert_eq!(layout.cut(HeadShare { index: 0, of: 3 }, &mut vec![0; 8]), None);
        assert_eq!(layout.cut(HeadShare { index: 2, of: 2 }, &mut vec![0; 8]), None, "as sent");
        assert_eq!(layout.cut(HeadShare::WHOLE, &mut vec![0; 9]), None);
        assert_eq!(layout.put(HeadShare::WHOLE, &[0; 7], &mut [0; 8]), None);
    }

    proptest! {
        /// Slices of `n` ranks, cut and joined into those of `m`: each is what that rank computes.
        #[test]
        fn slices_of_any_number_of_ranks_become_those_of_another(
            n in 0..4_u32, m in 0..4_u32, outer in 1..6_usize, head_bytes in 1..9_usize, more in 1..3_usize,
        ) {
            let (n, m, heads) = (1 << n, 1 << m, 8 * more);
            let whole: Vec<u8> = (0..outer * heads * head_bytes).map(|at| (at * 7 % 251) as u8).collect();
            let all = HeadLayout::new(outer, heads, whole.len()).unwrap();
            let slice = |rank, world| {
                let mut slice = whole.clone();
                all.cut(HeadShare::new(rank, world).unwrap(), &mut slice).unwrap();
                slice
            };
            for rank in 0..m {
                let expected = slice(rank, m);
                let [mut joined, mut at_once] = [(); 2].map(|()| vec![0; expected.len()]);
                let ours = HeadLayout::new(outer, heads / usize::from(m), expected.len()).unwrap();
                for source in sources(rank, m, n).unwrap() {
                    let mut part = slice(source.rank, n);
                    let theirs = HeadLayout::new(outer, heads / usize::from(n), part.len()).unwrap();
                    ours.put_share(source.into, &theirs, source.give, &part, &mut at_once).unwrap();
                    theirs.cut(source.give, &mut part).unwrap();
                    ours.put(source.into, &part, &mut joined).unwrap();
                }
                prop_assert_eq!(&at_once, &expected);
                prop_assert_eq!(joined, expected);
            }
        }
    }
}
