//! Sets of tiers.

use kvbm_tiers::Tier;

// Records, index buckets and this have four bits for tiers: a fifth would overflow into the next
// field.
const _: () = assert!(Tier::COUNT == 4, "a tier more needs wider records and buckets");

/// A set of tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierSet(u8);

impl TierSet {
    /// Whether it has `tier`.
    pub const fn has(self, tier: Tier) -> bool {
        self.0 >> tier.index() & 1 == 1
    }

    /// The set with `tier` in it.
    #[must_use]
    pub const fn with(self, tier: Tier) -> Self {
        Self(self.0 | bit(tier))
    }

    pub(super) const fn bits(self) -> u8 {
        self.0
    }

    /// The set with these bits; higher ones are ignored.
    pub(super) const fn from_bits(bits: u8) -> Self {
        Self(bits & 0xF)
    }

    pub(super) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

pub(super) const fn bit(tier: Tier) -> u8 {
    1 << tier.index()
}
