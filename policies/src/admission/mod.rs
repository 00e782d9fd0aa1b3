//! Which blocks are copied from a tier to the one below, and when.
//!
//! A lower tier keeps what the upper one will lose. A block can go down at once, when it is about to leave
//! the upper tier, or never; an [`Admission`] decides. It is asked about *candidates*, blocks one below another
//! that the lower tier lacks while it holds all above them, and answers how many of the first of them to
//! write: a lower tier is prefix-closed as every tier is, so nothing else could be kept.
//!
//! | module | name | writes |
//! |---|---|---|
//! | [`fixed`] | `write_through` | every block as soon as it is used |
//! | [`fixed`] | `write_back` | every block when it is about to leave the upper tier |
//! | [`selective`] | `selective` | what is about to leave and likely enough to return |
//! | [`auto`] | `auto` | as whichever of these serves best on a sample |
//! | [`budget`] | | at most so many bytes a day, the likeliest to return first |
//! | `worth` | | how likely a block is to return, and compared to the others |

pub mod auto;
pub mod budget;
pub mod fixed;
#[cfg(test)]
mod properties;
pub mod selective;
mod shadow;
mod worth;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

pub use auto::Auto;
pub use budget::{Budget, Budgeted};
pub use fixed::{WriteBack, WriteThrough};
pub use selective::Selective;

use crate::eviction::{Access, BlockId, EvictionKind, Forest, RequestId, Upkeep};

/// Blocks one below another that the lower tier lacks, while it holds everything above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidates {
    /// The deepest of them.
    pub last: BlockId,
    /// How many they are.
    pub blocks: u32,
}

/// Why the question comes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// A request has just used the candidates. Those not admitted are asked about again.
    Used,
    /// The last candidate, a leaf, is about to leave the upper tier: now or never.
    Leaving,
}

/// The rule by which blocks go from an upper tier to the one below. Its blocks are those of the upper tier.
///
/// Called under the lock of the tiers' owner, like an [`Eviction`](crate::Eviction) policy: it hears the same of
/// the upper tier, and should answer in microseconds.
pub trait Admission: Send + fmt::Debug {
    /// A request used a path of the upper tier, as in [`Eviction::touch`](crate::Eviction::touch).
    fn touch(&mut self, _access: &Access, _forest: &dyn Forest) {}

    /// `block` left the upper tier, as in [`Eviction::remove`](crate::Eviction::remove).
    fn remove(&mut self, _block: BlockId, _exposed: Option<BlockId>) {}

    /// `request` has ended and generated `output_tokens`.
    fn finished(&mut self, _request: RequestId, _output_tokens: u32, _now_ms: u64) {}

    /// Work for another thread, as in [`Eviction::upkeep`](crate::Eviction::upkeep).
    fn upkeep(&mut self) -> Option<Upkeep> {
        None
    }

    /// How many of the candidates to write, from the first one on. The caller writes them.
    fn admit(&mut self, candidates: Candidates, moment: Moment, now_ms: u64, forest: &dyn Forest) -> u32;

    /// So many of the blocks just admitted were not written, because the lower tier had no room for them.
    fn refund(&mut self, _blocks: u32) {}
}

/// The two tiers between which a rule stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// From which blocks go down.
    pub upper: Side,
    /// To which they go.
    pub lower: Side,
}

/// A tier, as a rule needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Blocks that it holds.
    pub capacity: u32,
    /// Which block leaves it.
    pub eviction: EvictionKind,
}

impl Side {
    fn shrunk(self, by: u32) -> Self {
        Self { capacity: (self.capacity / by).max(1), ..self }
    }
}

/// The rules that a live tier may use, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AdmissionKind {
    /// [`WriteThrough`].
    WriteThrough,
    /// [`WriteBack`].
    #[default]
    WriteBack,
    /// [`Selective`].
    Selective,
    /// [`Auto`].
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
    pub fn build(self, edge: &Edge) -> Box<dyn Admission> {
        match self {
            Self::WriteThrough => Box::new(WriteThrough),
            Self::WriteBack => Box::new(WriteBack),
            Self::Selective => Box::new(Selective::with_capacity(edge.upper.capacity)),
            Self::Auto => Box::new(Auto::new(edge)),
        }
    }
}

impl fmt::Display for AdmissionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AdmissionKind {
    type Err = UnknownAdmission;

    fn from_str(name: &str) -> Result<Self, UnknownAdmission> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| UnknownAdmission {
            name: name.to_owned(),
            valid: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// A name of no admission rule; says which there are.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown admission `{name}`; valid: {valid}")]
pub struct UnknownAdmission {
    name: String,
    valid: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name() {
        for kind in AdmissionKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
    }

    #[test]
    fn an_unknown_name_lists_the_valid_ones() {
        let error = "always".parse::<AdmissionKind>().unwrap_err().to_string();
        assert!(error.starts_with("unknown admission `always`; valid: write_through, write_back"), "{error}");
    }
}
