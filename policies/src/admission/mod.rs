//! Which blocks are copied from a tier to the one below, and when.
//!
//! A lower tier keeps what the upper one will lose. A block can go down at once, when it is about
//! to leave the upper tier, or never; an [`Admission`] decides. It is asked about *candidates*,
//! blocks one below another that the lower tier lacks while it holds all above them, and answers
//! how many of the first of them to write: a lower tier is prefix-closed as every tier is, so
//! nothing else could be kept.
//!
//! | rule | name | writes |
//! |---|---|---|
//! | [`WriteThrough`] | `write_through` | every block as soon as it is used |
//! | [`WriteBack`] | `write_back` | every block when it is about to leave the upper tier |
//! | [`selective`] | `selective` | what is about to leave and likely enough to return |
//! | [`auto`] | `auto` | the one of these that serves best on a sample |
//! | [`budget`] | | a limit of bytes a day, the likeliest to return first |

pub mod auto;
pub mod budget;
#[cfg(test)]
mod properties;
pub mod selective;

pub use auto::Auto;
pub use budget::{Budget, Budgeted};
pub use selective::Selective;

use std::fmt;

use serde::Serialize;

use crate::eviction::EvictionKind;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Ended, Forest, Upkeep};

/// Blocks one below another that the lower tier lacks, while it holds everything above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidates {
    /// The deepest of them.
    pub last: BlockId,
    /// How many they are.
    pub blocks: u32,
    /// Blocks of the path that ends at the deepest, from the root on.
    pub depth: u32,
}

/// Why the question comes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// A request has just used the candidates. Those not admitted are asked about again.
    Used,
    /// The last candidate, a leaf, is about to leave the upper tier: now or never.
    Leaving,
}

/// The rule by which blocks go from an upper tier to the one below. Its blocks are those of the
/// upper tier.
///
/// Called under the lock of the tiers' owner, like an [`Eviction`](crate::Eviction) policy, and
/// should answer in microseconds. What is known of the blocks' return it borrows from the upper
/// tier's [`ReuseModel`].
pub trait Admission: Send + fmt::Debug {
    /// Whether it goes by what the upper tier's reuse model knows.
    fn needs_reuse(&self) -> bool {
        false
    }

    /// A request used a path of the upper tier, as in [`Eviction::touch`](crate::Eviction::touch).
    fn touch(&mut self, _access: &Access, _forest: &dyn Forest) {}

    /// A request has ended.
    fn finished(&mut self, _ended: &Ended) {}

    /// Adds to `work` what another thread is to do for it, besides the reuse model's.
    fn upkeep(&mut self, _work: &mut Vec<Upkeep>) {}

    /// How many of the candidates to write, from the first one on. The caller writes them.
    fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        now_ms: u64,
        forest: &dyn Forest,
        reuse: &ReuseModel,
    ) -> u32;

    /// This number of the blocks just admitted was not written: the lower tier had no room for
    /// them.
    fn refund(&mut self, _blocks: u32) {}
}

/// The two tiers between which a rule stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierPair {
    /// From which blocks go down.
    pub upper: TierShape,
    /// To which they go.
    pub lower: TierShape,
}

/// A tier, as a rule needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierShape {
    /// Blocks that it holds.
    pub capacity: u32,
    /// Which block leaves it.
    pub eviction: EvictionKind,
}

impl TierShape {
    fn shrunk(self, by: u32) -> Self {
        // Not 0: a tier that keeps nothing tells nothing of one that does.
        Self { capacity: (self.capacity / by).max(1), ..self }
    }
}

/// Writes every block as soon as it is used: what is lost with the upper tier is in the lower one.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteThrough;

impl Admission for WriteThrough {
    fn admit(
        &mut self,
        candidates: Candidates,
        _trigger: Trigger,
        _now_ms: u64,
        _forest: &dyn Forest,
        _reuse: &ReuseModel,
    ) -> u32 {
        // Also when they leave: a last chance for blocks that had no room or budget when they were
        // used.
        candidates.blocks
    }
}

/// Writes every block when it is about to leave the upper tier.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteBack;

impl Admission for WriteBack {
    fn admit(
        &mut self,
        candidates: Candidates,
        trigger: Trigger,
        _now_ms: u64,
        _forest: &dyn Forest,
        _reuse: &ReuseModel,
    ) -> u32 {
        match trigger {
            Trigger::Used => 0,
            Trigger::Leaving => candidates.blocks,
        }
    }
}

/// The rules that a live tier may use, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionKind {
    /// Every block, soon after it came: [`WriteThrough`].
    WriteThrough,
    /// Every block, when it is about to leave the tier above: [`WriteBack`].
    #[default]
    WriteBack,
    /// What is about to leave the tier above and likely enough to return: [`Selective`].
    Selective,
    /// As whichever of the others finds the most on a sample of the blocks: [`Auto`].
    Auto,
}

impl AdmissionKind {
    /// Every rule.
    pub const ALL: [Self; 4] = [Self::WriteThrough, Self::WriteBack, Self::Selective, Self::Auto];

    /// The name used in settings and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WriteThrough => "write_through",
            Self::WriteBack => "write_back",
            Self::Selective => "selective",
            Self::Auto => "auto",
        }
    }

    /// A fresh rule of this kind.
    pub fn build(self, pair: &TierPair) -> Box<dyn Admission> {
        match self {
            Self::WriteThrough => Box::new(WriteThrough),
            Self::WriteBack => Box::new(WriteBack),
            Self::Selective => Box::new(Selective::default()),
            Self::Auto => Box::new(Auto::new(pair)),
        }
    }
}

impl fmt::Display for AdmissionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
