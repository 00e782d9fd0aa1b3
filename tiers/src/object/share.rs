//! Workers that share a bucket: what each says that it relies on, and what it learns of the others.
//!
//! A worker writes a *manifest* with the names of the segments that it reads from, and writes it
//! again and again. No worker deletes a segment that the manifest of a living worker names. The
//! store's clock alone tells whether one is alive: how much older its manifest is than one's own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt, PutMode};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::collect::CollectorLease;
use super::epochs::{EpochStanding, FIRST_PAUSE, OlderEpoch};
use super::error::StoreError;
use super::known::SegmentCatalog;
use super::manifest::{LAPSES, MAX_BYTES, Manifest};
use super::names::SegmentName;
use super::open::Store;
use super::segment::Provenance;
use super::shared::StoreContext;

/// How a bucket is shared with workers that serve the same model.
#[derive(Clone, Debug)]
pub struct Sharing {
    /// Whose blocks are written and found.
    pub provenance: Provenance,
    /// What to do if the bucket is in a later epoch.
    pub older_epoch: OlderEpoch,
    /// How often a worker says what it relies on. One that has not for ten times as long is taken
    /// for gone.
    pub renewal: Duration,
    /// How often a worker looks what others have stored since.
    pub look: Duration,
    /// How old a segment becomes that no worker relies on; at least ten renewals.
    pub collect_after: Duration,
    /// Bytes of all segments of the namespace above which those that no worker relies on go sooner,
    /// oldest first, but not before ten renewals; `None`: any number.
    pub collect_above: Option<u64>,
}

/// A worker among others.
pub(super) struct BucketShare {
    pub(super) sharing: Sharing,
    /// `<root>/<namespace>`.
    pub(super) namespace: Path,
    /// `<root>/<namespace>/manifests`.
    manifests: Path,
    /// `<root>/<namespace>/epochs`.
    pub(super) epochs: Path,
    own: Path,
    /// When the own manifest was last written.
    renewed: Mutex<Option<Instant>>,
    pub(super) others: tokio::sync::Mutex<OtherWorkers>,
    pub(super) known: Mutex<SegmentCatalog>,
    /// How the worker's epoch stands to the bucket's.
    pub(super) standing: Mutex<EpochStanding>,
    pub(super) lease: CollectorLease,
}

/// What other workers rely on.
#[derive(Debug, Default)]
pub(super) struct OtherWorkers {
    /// When it was asked for; `None`: not yet.
    as_of: Option<Instant>,
    /// The store's time then, in milliseconds since 1970.
    pub(super) now_ms: i64,
    manifests: HashMap<Path, OtherWorker>,
}

/// Another worker's manifest.
#[derive(Debug)]
pub(super) struct OtherWorker {
    pub(super) meta: ObjectMeta,
    /// `None`: it cannot be understood, so its worker may rely on anything.
    pub(super) manifest: Option<Manifest>,
}

impl BucketShare {
    pub(super) fn new(sharing: Sharing, namespace: &Path, worker: SegmentName) -> Self {
        let manifests = namespace.clone().join("manifests");
        Self {
            own: manifests.clone().join(format!("{:032x}{MANIFEST}", worker.0)),
            epochs: namespace.clone().join("epochs"),
            manifests,
            namespace: namespace.clone(),
            sharing,
            renewed: Mutex::default(),
            others: tokio::sync::Mutex::default(),
            known: Mutex::default(),
            standing: Mutex::new(EpochStanding::Unknown),
            lease: CollectorLease::new(namespace),
        }
    }

    /// A worker whose manifest is older than this is taken for gone, and what is younger may not be
    /// deleted.
    pub(super) fn grace(&self) -> Duration {
        self.sharing.renewal * LAPSES
    }
}

impl OtherWorkers {
    /// Whether a living worker relies on a segment, or may.
    pub(super) fn rely_on(&self, name: SegmentName) -> bool {
        let living = self.manifests.values().filter(|known| !known.has_lapsed(self.now_ms));
        living
            .into_iter()
            .any(|known| known.manifest.as_ref().is_none_or(|manifest| manifest.holds(name)))
    }

    /// The manifests of workers that are gone.
    fn lapsed(&self) -> Vec<Path> {
        let lapsed = self.manifests.iter().filter(|(_, known)| known.has_lapsed(self.now_ms));
        lapsed.map(|(path, _)| path.clone()).collect()
    }
}

impl OtherWorker {
    fn has_lapsed(&self, now_ms: i64) -> bool {
        let after = self.manifest.as_ref().map_or(UNREADABLE, Manifest::lapses_after);
        let age_ms = now_ms - self.meta.last_modified.timestamp_millis();
        age_ms > i64::try_from(after.as_millis()).unwrap_or(i64::MAX)
    }

    fn is_same(&self, meta: &ObjectMeta) -> bool {
        (self.meta.last_modified, self.meta.size, &self.meta.e_tag)
            == (meta.last_modified, meta.size, &meta.e_tag)
    }
}

const MANIFEST: &str = ".kvman";

/// The number that the worker drew whose manifest this is; `None`: it is something else.
pub(super) fn worker_of(path: &Path) -> Option<u64> {
    let digits = path.filename()?.strip_suffix(MANIFEST)?;
    let is_name = digits.len() == 32
        && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    is_name
        .then(|| u128::from_str_radix(digits, 16).ok().map(SegmentName))?
        .map(SegmentName::writer)
}

/// A manifest that cannot be understood holds everything back for this long.
pub(super) const UNREADABLE: Duration = Duration::from_hours(24);

impl StoreContext {
    /// Says what this worker relies on.
    pub(super) async fn renew(&self, share: &BucketShare) -> Result<(), StoreError> {
        let began = Instant::now();
        let names: Vec<_> = self.locations.lock().segments().map(|id| id.name).collect();
        let manifest = Manifest::new(share.sharing.renewal, names).encode();
        let put =
            self.store.client.put_opts(&share.own, manifest.into(), PutMode::Overwrite.into());
        match timeout(self.limit, put).await?.map_err(|error| self.store.secrets.scrub(&error)) {
            Ok(_) => {
                *share.renewed.lock() = Some(began);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Takes back what it said, when it ends.
    pub(super) async fn resign(&self, share: &BucketShare) {
        if let Err(error) = self.remove(&share.own).await {
            tracing::debug!(%error, "the manifest of this worker is left to others to delete");
        }
    }

    /// Whether another living worker relies on a segment, as of `since` or later.
    pub(super) async fn is_relied_on(
        &self,
        share: &BucketShare,
        name: SegmentName,
        since: Instant,
    ) -> Result<bool, StoreError> {
        let mut others = share.others.lock().await;
        if others.as_of.is_none_or(|as_of| as_of < since) {
            self.read_others(share, &mut others).await?;
        }
        Ok(others.rely_on(name))
    }

    /// Asks what other workers rely on now, and removes the manifests of those that are gone.
    pub(super) async fn hear_others(&self, share: &BucketShare) -> Result<(), StoreError> {
        let mut others = share.others.lock().await;
        self.read_others(share, &mut others).await?;
        for path in others.lapsed() {
            self.remove(&path).await?;
            others.manifests.remove(&path);
        }
        Ok(())
    }

    /// The store's time, in milliseconds since 1970: that of this worker's manifest, and what has
    /// passed since.
    pub(super) async fn store_now_ms(&self, share: &BucketShare) -> Result<i64, StoreError> {
        if share.renewed.lock().is_none() {
            self.renew(share).await?;
        }
        let since = share.renewed.lock().map_or(Duration::ZERO, |renewed| renewed.elapsed());
        let own = timeout(self.limit, self.store.client.head(&share.own)).await?;
        let own = own.map_err(|error| self.store.secrets.scrub(&error))?;
        Ok(own
            .last_modified
            .timestamp_millis()
            .saturating_add(i64::try_from(since.as_millis()).unwrap_or(i64::MAX)))
    }

    async fn read_others(
        &self,
        share: &BucketShare,
        others: &mut OtherWorkers,
    ) -> Result<(), StoreError> {
        let began = Instant::now();
        if share.renewed.lock().is_none() {
            self.renew(share).await?;
        }
        let mut listed = self.store.listing(&share.manifests, None, self.limit).rest().await?;
        listed.retain(|meta| meta.location.filename().is_some_and(|name| name.ends_with(MANIFEST)));
        let own = listed.iter().position(|meta| meta.location == share.own);
        let (Some(own), Some(renewed)) =
            (own.map(|at| listed.swap_remove(at)), *share.renewed.lock())
        else {
            return Err(StoreError::new(
                "the manifest of this worker is gone: it is written again",
            ));
        };
        let since = i64::try_from(renewed.elapsed().as_millis()).unwrap_or(i64::MAX);
        others.now_ms = own.last_modified.timestamp_millis().saturating_add(since);
        let mut manifests = HashMap::new();
        for meta in listed {
            let path = meta.location.clone();
            match others.manifests.remove(&path).filter(|known| known.is_same(&meta)) {
                Some(known) => _ = manifests.insert(path, known),
                None => manifests.extend(
                    read_manifest(&self.store, meta, self.limit).await?.map(|known| (path, known)),
                ),
            }
        }
        (others.manifests, others.as_of) = (manifests, Some(began));
        Ok(())
    }
}

/// What a worker says; `None`: it is gone by now.
pub(super) async fn read_manifest(
    store: &Store,
    meta: ObjectMeta,
    limit: Duration,
) -> Result<Option<OtherWorker>, StoreError> {
    if meta.size > MAX_BYTES {
        return Ok(Some(OtherWorker { meta, manifest: None }));
    }
    let get = store.client.get_range(&meta.location, 0..meta.size.max(1));
    match timeout(limit, get).await? {
        Ok(bytes) => {
            let manifest = Manifest::decode(&bytes).inspect_err(|error| {
                tracing::warn!(path = %meta.location, %error, "a worker may rely on any segment of the object store");
            });
            Ok(Some(OtherWorker { meta, manifest: manifest.ok() }))
        }
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(store.secrets.scrub(&error)),
    }
}

/// Says again and again what this worker relies on, and finds out how its epoch stands as long as
/// that is not known.
pub(super) fn keep_up(shared: &Arc<StoreContext>) {
    let (own, mut ticket) = (Arc::clone(shared), shared.work.ticket());
    shared.store.executor.spawn(async move {
        let Some(share) = &own.share else { return };
        let (mut pause, mut renewed) = (FIRST_PAUSE, None::<Instant>);
        loop {
            let is_due = renewed.is_none_or(|renewed| renewed.elapsed() >= share.sharing.renewal);
            if ticket.unless_hurried(own.take_turn(share, is_due)).await.is_none() {
                return;
            }
            renewed = if is_due { Some(Instant::now()) } else { renewed };
            let until_due = share
                .sharing
                .renewal
                .saturating_sub(renewed.map_or(Duration::ZERO, |at| at.elapsed()));
            let is_known = own.present().is_some();
            if ticket.sleep(if is_known { until_due } else { pause.min(until_due) }).await {
                return;
            }
            pause = if is_known { FIRST_PAUSE } else { (pause * 2).min(share.sharing.renewal) };
        }
    });
}

impl StoreContext {
    async fn take_turn(&self, share: &BucketShare, is_due: bool) {
        if is_due && let Err(error) = self.renew(share).await {
            tracing::debug!(store = %self.store, %error, "the manifest of this worker is written with the next renewal");
        }
        if self.present().is_some() {
            return;
        }
        let before = *share.standing.lock();
        match self.join_epoch(share).await {
            Ok(EpochStanding::Current(epoch)) => {
                tracing::info!(store = %self.store, epoch, "the object tier is of use: which epochs have begun is known");
            }
            Ok(standing @ EpochStanding::Behind(latest)) if standing != before => {
                let own = self.provenance().epoch;
                tracing::error!(
                    store = %self.store, own, latest,
                    "the object tier is not used: the bucket is in a later epoch than this process"
                );
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(store = %self.store, %error, "which epochs have begun is asked again");
            }
        }
    }
}
