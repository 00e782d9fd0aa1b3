//! Which blocks are copied from a tier to the one below, and when.
//!
//! A lower tier keeps what the upper one will lose. A block can go down at once, when it is about to leave
//! the upper tier, or never; an [`Admission`] decides. It is asked about *candidates*, blocks one below another
//! that the lower tier lacks while it holds all above them, and answers how many of the first of them to
//! write: a lower tier is prefix-closed as every tier is, so nothing else could be kept.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::eviction::{Access, BlockId, Forest, RequestId};

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
    /// The last candidate is about to leave the upper tier: now or never.
    Leaving,
}

/// The rule by which blocks go from an upper tier to the one below. Its blocks are those of the upper tier.
pub trait Admission: Send + fmt::Debug {
    /// A request used a path of the upper tier, as in [`Eviction::touch`](crate::Eviction::touch).
    fn touch(&mut self, _access: &Access, _forest: &dyn Forest) {}

    /// `block` left the upper tier, as in [`Eviction::remove`](crate::Eviction::remove).
    fn remove(&mut self, _block: BlockId, _exposed: Option<BlockId>) {}

    /// `request` has ended and generated `output_tokens`.
    fn finished(&mut self, _request: RequestId, _output_tokens: u32, _now_ms: u64) {}

    /// How many of the candidates to write, from the first one on. The caller writes them.
    fn admit(&mut self, candidates: Candidates, moment: Moment, now_ms: u64, forest: &dyn Forest) -> u32;
}

/// Writes every block as soon as it is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteThrough;

impl Admission for WriteThrough {
    fn admit(&mut self, candidates: Candidates, _moment: Moment, _now_ms: u64, _forest: &dyn Forest) -> u32 {
        candidates.blocks
    }
}

/// Writes every block when it is about to leave the upper tier.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteBack;

impl Admission for WriteBack {
    fn admit(&mut self, candidates: Candidates, moment: Moment, _now_ms: u64, _forest: &dyn Forest) -> u32 {
        match moment {
            Moment::Used => 0,
            Moment::Leaving => candidates.blocks,
        }
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
}

impl AdmissionKind {
    /// Every rule.
    pub const ALL: [Self; 2] = [Self::WriteThrough, Self::WriteBack];

    /// The name used in settings and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WriteThrough => "write_through",
            Self::WriteBack => "write_back",
        }
    }

    /// A fresh rule of this kind.
    pub fn build(self) -> Box<dyn Admission> {
        match self {
            Self::WriteThrough => Box::new(WriteThrough),
            Self::WriteBack => Box::new(WriteBack),
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
