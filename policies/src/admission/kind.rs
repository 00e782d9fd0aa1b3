//! Rules by their names.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::auto::Auto;
use super::fixed::{WriteBack, WriteThrough};
use super::pair::TierPair;
use super::rule::Admission;
use super::selective::Selective;

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
        assert!(
            error.starts_with("unknown admission `always`; valid: write_through, write_back"),
            "{error}"
        );
    }
}
