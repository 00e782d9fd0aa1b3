//! Which epochs a bucket knows of, and how a worker's own stands to them.
//!
//! A marker tells of each epoch that has begun. **Nothing is stored, linked or taken in by a worker
//! that does not know that its epoch is the bucket's latest and has a marker**: a store that
//! refuses, is slow or answers in part is no store without epochs. Such a worker tries until it
//! knows.

use std::time::Duration;

use object_store::PutMode;
use object_store::path::Path;
use tokio::time::timeout;

use super::error::StoreError;
use super::names::{epoch_name, parse_epoch_name};
use super::segment::Provenance;
use super::share::BucketShare;
use super::shared::StoreContext;

/// Ends the names of markers.
pub(super) const EXTENSION: &str = ".kvepoch";
/// The first pause of a worker that does not know of the bucket's epochs. Later ones double, up to
/// a renewal.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// How a worker's epoch stands to those that a bucket knows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpochStanding {
    /// They could not be read yet.
    Unknown,
    /// This one has begun since, and the worker may not go on in its own.
    Behind(u64),
    /// The worker's own is the latest, or it stays there on purpose, and has a marker.
    Current(u64),
}

/// What becomes of a worker whose epoch is older than the bucket's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OlderEpoch {
    /// It is not to share the bucket: its operator must say what is meant.
    #[default]
    Refuse,
    /// It goes on in the bucket's.
    Follow,
    /// It goes on in its own.
    Keep,
}

pub(super) fn parse_marker(path: &Path) -> Option<u64> {
    parse_epoch_name(path.filename()?.strip_suffix(EXTENSION)?)
}

impl StoreContext {
    /// The provenance under which blocks are stored and found now; `None`: it is not known yet how
    /// the epoch stands.
    pub(super) fn present(&self) -> Option<Provenance> {
        let provenance = self.provenance();
        let is_current = |share: &BucketShare| {
            *share.standing.lock() == EpochStanding::Current(provenance.epoch)
        };
        self.share.as_ref().is_none_or(is_current).then_some(provenance)
    }

    /// Finds out how the present epoch stands, and has it marked where no worker has.
    pub(super) async fn join_epoch(
        &self,
        share: &BucketShare,
    ) -> Result<EpochStanding, StoreError> {
        let own = self.provenance().epoch;
        let latest = self.latest_epoch(share).await?;
        let standing = if latest > Some(own) && share.sharing.older_epoch != OlderEpoch::Keep {
            EpochStanding::Behind(latest.unwrap_or(own))
        } else {
            // No bucket has an epoch before the first one.
            if own > 0 && latest != Some(own) {
                self.mark_epoch(share, own).await?;
            }
            EpochStanding::Current(own)
        };
        // Another may have begun meanwhile, of which this says nothing.
        if self.provenance().epoch == own {
            *share.standing.lock() = standing;
        }
        Ok(standing)
    }

    /// The latest epoch that a worker has begun; `None`: none since the first.
    async fn latest_epoch(&self, share: &BucketShare) -> Result<Option<u64>, StoreError> {
        let mut listing = self.store.listing(&share.epochs, None, self.limit);
        let mut latest = None;
        while let Some(meta) = listing.next().await? {
            latest = latest.max(parse_marker(&meta.location));
        }
        Ok(latest)
    }

    async fn mark_epoch(&self, share: &BucketShare, epoch: u64) -> Result<(), StoreError> {
        let path = share.epochs.clone().join(format!("{}{EXTENSION}", epoch_name(epoch)));
        let put = self.store.client.put_opts(&path, "kvbm".into(), PutMode::Create.into());
        match timeout(self.limit, put).await? {
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
            Err(error) => Err(self.store.secrets.scrub(&error)),
        }
    }

    /// Goes on in an epoch of the bucket's, which has a marker.
    pub(super) fn follow_epoch(&self, share: &BucketShare, epoch: u64) {
        let present = self.provenance();
        *self.provenance.lock() = Provenance { epoch, forgotten: 0, ..present };
        share.known.lock().begin_epoch();
        *share.standing.lock() = EpochStanding::Current(epoch);
    }
}
