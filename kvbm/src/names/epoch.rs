//! Epochs: what a reset begins, and whose weights its blocks come from.

use std::hash::{BuildHasher, RandomState};

use serde::{Deserialize, Serialize};

use super::fingerprint::digest;

/// What [`Manager::reset`](crate::Manager::reset) begins: a number greater than the present one,
/// and perhaps a name for the weights from then on.
///
/// ```
/// # fn example(manager: &kvbm::Manager) -> kvbm::Result<()> {
/// // To forget everything, or with weights that only this worker has:
/// manager.reset(1)?;
/// // With weights that other workers take on as well:
/// manager.reset(kvbm::NewEpoch::of_weights(2, "step-1000"))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewEpoch<'a> {
    /// Its number.
    pub number: u64,
    /// What the new weights are called, the same in all workers that have them. `None`: only
    /// this worker knows them, and [peers](crate::Peers) neither read its blocks nor give it any.
    pub weights: Option<&'a str>,
}

impl<'a> NewEpoch<'a> {
    /// An epoch of weights that other workers have as well.
    pub const fn of_weights(number: u64, weights: &'a str) -> Self {
        Self { number, weights: Some(weights) }
    }
}

impl From<u64> for NewEpoch<'_> {
    fn from(number: u64) -> Self {
        Self { number, weights: None }
    }
}

/// Tells weights apart within one number of an epoch. Two workers that count to the same number
/// with weights without a name have different ones here. The default is for those that the
/// fingerprint names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WeightsId(u64);

impl WeightsId {
    /// Weights of a later epoch than the fingerprint's, whose weights the fingerprint names.
    pub(crate) fn of(name: Option<&str>) -> Self {
        let unlike_any = || RandomState::new().hash_one("weights without a name");
        let named = |name: &str| digest(&[b"kvbm weights 1", name.as_bytes()].concat()) as u64;
        Self(name.map_or_else(unlike_any, named).max(1))
    }

    pub(crate) fn digest_in(self, epoch: u64) -> EpochDigest {
        let bytes = [self.0.to_le_bytes(), epoch.to_le_bytes()].concat();
        EpochDigest((digest(&bytes) as u64).to_le_bytes())
    }
}

/// The same in two workers: they are in one epoch, and have the same weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EpochDigest([u8; 8]);
