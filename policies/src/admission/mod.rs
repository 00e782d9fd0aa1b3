//! Which blocks are copied from a tier to the one below, and when.
//!
//! A lower tier keeps what the upper one will lose. A block can go down at once, when it is about
//! to leave the upper tier, or never; an [`Admission`] decides. It is asked about *candidates*,
//! blocks one below another that the lower tier lacks while it holds all above them, and answers
//! how many of the first of them to write: a lower tier is prefix-closed as every tier is, so
//! nothing else could be kept.
//!
//! | module | name | writes |
//! |---|---|---|
//! | [`fixed`] | `write_through` | every block as soon as it is used |
//! | [`fixed`] | `write_back` | every block when it is about to leave the upper tier |
//! | [`selective`] | `selective` | what is about to leave and likely enough to return |
//! | [`auto`] | `auto` | the one of these that serves best on a sample |
//! | [`budget`] | | a limit of bytes a day, the likeliest to return first |
//! | `worth` | | how a block's chance to return compares to the others' |

pub mod auto;
pub mod budget;
pub mod fixed;
mod kind;
mod pair;
#[cfg(test)]
mod properties;
pub(crate) mod rule;
pub mod selective;
mod shadow;
mod worth;

pub use auto::Auto;
pub use budget::{Budget, Budgeted};
pub use fixed::{WriteBack, WriteThrough};
pub use kind::{AdmissionKind, UnknownAdmission};
pub use pair::{TierPair, TierShape};
pub use rule::{Admission, Candidates, Trigger};
pub use selective::Selective;
