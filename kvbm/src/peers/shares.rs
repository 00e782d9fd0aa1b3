//! Workers of one model that split its heads over other numbers of ranks: whether their blocks are
//! alike but for that, and how heads lie in a rank's slices.

use kvbm_tiers::ranks::{HeadLayout, HeadShare};

use super::protocol::Member;
use crate::names::fingerprint::{AxisOrders, KvLayout, Ranks};

/// How heads lie in the slices of this rank or of this leader's ranks. `None`: its fingerprint does
/// not say it, or they do not lie one by one.
pub(super) fn heads_of(member: &Member) -> Option<HeadLayout> {
    let [layout] = &member.fingerprint.layouts[..] else { return None };
    let axis = head_axis(layout)?;
    // Layers come one after the other, whether they are an axis or not.
    let layers = if layout.orders().keys.contains(&"layer") { 1 } else { u64::from(layout.layers) };
    let product =
        |first: u64, axes: &[u64]| axes.iter().try_fold(first, |all, &of| all.checked_mul(of));
    let outer = product(layers, &layout.shape[..axis])?;
    // Heads have all of a block's bytes: else what lies behind them, padding perhaps, would be cut
    // up with them.
    let element_bytes = *layout.strides.last()?;
    let told = product(outer.checked_mul(element_bytes)?, &layout.shape[axis..])?;
    if told != member.block_bytes {
        return None;
    }
    let [outer, heads, bytes] =
        [outer, layout.shape[axis], member.block_bytes].map(usize::try_from);
    HeadLayout::new(outer.ok()?, heads.ok()?, bytes.ok()?)
}

/// What a member would be if one rank had all heads. `None`: its fingerprint does not say how they
/// are split.
pub(super) fn of_all_ranks(member: &Member) -> Option<Member> {
    let ranks = member.fingerprint.ranks;
    // A rank's heads are those of its number.
    let is_own = [0, member.rank.map_or(0, u32::from)].contains(&ranks.tensor_rank);
    if u32::from(member.ranks) != ranks.tensor_world || !is_own {
        return None;
    }
    let heads = heads_of(member)?.heads() as u64;
    let mut whole = with_heads(member, heads.checked_mul(member.ranks.into())?)?;
    whole.fingerprint.ranks = Ranks { tensor_world: 1, tensor_rank: 0, ..ranks };
    (whole.ranks, whole.rank) = (0, None);
    Some(whole)
}

/// What a rank would be if it had no more than this share of its heads. `None`: its fingerprint does not
/// say where they are, or they make no such shares.
pub(super) fn share_of(member: &Member, share: HeadShare) -> Option<Member> {
    if share == HeadShare::WHOLE {
        return Some(member.clone());
    }
    let ((_, of), heads) = (share.get(), heads_of(member)?);
    heads.has_shares(of).then(|| with_heads(member, heads.heads() as u64 / u64::from(of)))?
}

/// A member with another number of heads, that lie in its blocks as before.
fn with_heads(member: &Member, heads: u64) -> Option<Member> {
    let mut other = member.clone();
    let [layout] = &mut other.fingerprint.layouts[..] else { return None };
    let axis = head_axis(layout)?;
    other.block_bytes = (other.block_bytes / layout.shape[axis]).checked_mul(heads)?;
    layout.shape[axis] = heads;
    // Those of the engine's memory are seen by no one else.
    let mut stride = *layout.strides.last()?;
    for (of, &extent) in layout.strides.iter_mut().zip(&layout.shape).rev() {
        *of = stride;
        stride = stride.checked_mul(extent)?;
    }
    Some(other)
}

/// Whether a rank of `ours` and one of `theirs` have heads in common, whichever of them either is.
pub(super) fn share_heads(ours: &Member, theirs: &Member) -> bool {
    match (ours.rank, theirs.rank) {
        (None, None) => true,
        (Some(a), Some(b)) => {
            let [a, b, of_a, of_b] = [a, b, ours.ranks, theirs.ranks].map(u32::from);
            a * of_b < (b + 1) * of_a && b * of_a < (a + 1) * of_b
        }
        _ => false,
    }
}

/// Which axis counts heads, if the order says so and axes lie in it from the outermost on.
fn head_axis(layout: &KvLayout) -> Option<usize> {
    let is_ordered = layout.strides.is_sorted_by(|outer, inner| outer >= inner);
    let AxisOrders { keys, values } = layout.orders();
    let is_told = keys.len() == layout.shape.len();
    let at = keys.iter().position(|axis| *axis == "head")?;
    // Heads of keys lie as those of values do.
    let is_one = values.get(..=at) == keys.get(..=at);
    (is_ordered && is_told && is_one).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::super::greeting::tests::member;
    use super::*;

    /// A rank of `world` of a model of 8 heads of 4 bytes, 3 layers, 2 tokens a block.
    fn of(world: u16, rank: Option<u16>) -> Member {
        let mut member = member("a", u64::from(world));
        let heads = 8 / u64::from(world);
        member.block_bytes = 3 * 2 * 2 * heads * 4;
        (member.ranks, member.rank) = (world, rank);
        member.fingerprint.ranks = Ranks { tensor_world: world.into(), ..Ranks::default() };
        member.fingerprint.layouts = vec![KvLayout {
            layers: 3,
            order: "kv,token,head,element".to_owned(),
            shape: vec![2, 2, heads, 2],
            strides: vec![1 << 20, heads * 4, 4, 2],
        }];
        member
    }

    #[test]
    fn members_of_one_model_are_alike_whatever_their_ranks() {
        let [two, four] = [of(2, None), of(4, None)].map(|member| of_all_ranks(&member).unwrap());
        assert_eq!(two.fingerprint, four.fingerprint);
        assert_eq!((two.block_bytes, four.block_bytes), (384, 384));
        assert_eq!(heads_of(&of(2, None)), HeadLayout::new(12, 4, 192));
        // As layers of a kind of their own.
        let mut by_layer = of(2, None);
        let layout = &mut by_layer.fingerprint.layouts[0];
        layout.order = "layer, head, byte".to_owned();
        (layout.shape, layout.strides) = (vec![3, 4, 16], vec![64, 16, 1]);
        assert_eq!(heads_of(&by_layer), HeadLayout::new(3, 4, 192));
    }

    #[test]
    fn what_does_not_say_where_heads_are_has_no_shares() {
        let unordered = |member: &mut Member| member.fingerprint.layouts[0].strides.swap(0, 2);
        let unnamed =
            |member: &mut Member| member.fingerprint.layouts[0].order = "bytes".to_owned();
        let several = |member: &mut Member| {
            let layout = member.fingerprint.layouts[0].clone();
            member.fingerprint.layouts.push(layout);
        };
        let other_world = |member: &mut Member| member.fingerprint.ranks.tensor_world = 3;
        let other_rank = |member: &mut Member| member.fingerprint.ranks.tensor_rank = 1;
        // Heads divide it.
        let padded = |member: &mut Member| member.block_bytes += 3 * 2 * 2 * 4 * 4;
        let unknown = |member: &mut Member| member.fingerprint.layouts[0].strides.clear();
        let spoil: [&dyn Fn(&mut Member); 7] =
            [&unordered, &unnamed, &several, &other_world, &other_rank, &padded, &unknown];
        for spoil in spoil {
            let mut member = of(2, None);
            spoil(&mut member);
            assert_eq!(of_all_ranks(&member), None, "{member:?}");
        }
    }

    #[test]
    fn ranks_share_heads_with_those_of_other_numbers() {
        let share = |a, of_a, b, of_b| share_heads(&of(of_a, Some(a)), &of(of_b, Some(b)));
        assert!(share(0, 2, 0, 4) && share(0, 2, 1, 4) && share(1, 2, 2, 4) && share(3, 4, 1, 2));
        assert!(!share(0, 2, 2, 4) && !share(1, 2, 1, 4) && !share(0, 4, 1, 2));
        assert!(share(1, 2, 1, 2) && !share(0, 2, 1, 2));
        assert!(!share_heads(&of(2, None), &of(2, Some(0))));
    }
}
