//! Checking a bucket from outside, while workers may use it.
//!
//! Nothing is locked: workers go on storing and deleting. So what is gone by the time that it is
//! read was deleted, and is no damage; and what is to be removed is held against the manifests once
//! more, a while after everything was listed: a worker that started in between has said by then
//! what it relies on.
//!
//! | module | holds |
//! |---|---|
//! | `inventory` | which object is what |
//! | `content` | whether a segment is what its footer says |
//! | `repair` | what may go, and removing it |

mod content;
mod inventory;
mod repair;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt};
use serde::Serialize;
use tokio::time::timeout;

use self::content::ObjectContent;
use self::inventory::{BucketInventory, NamespaceObjects};
use super::OPERATION_LIMIT;
use super::address::StoreOptions;
use super::discover::DISCOVERY_LIMIT;
use super::error::StoreError;
use super::manifest::LAPSES;
use super::names::SegmentName;
use super::open::Store;
use super::segment::{FooterKeys, FormatError};
use super::share::{OtherWorker, UNREADABLE, read_manifest, worker_of};
use crate::clock;
use crate::error::{SetupError, SetupErrorKind};
use crate::sealed::KeyRing;

/// How a bucket is checked.
#[derive(Clone, Debug)]
pub struct FsckOptions {
    /// Requests in flight; each holds up to 4 MiB.
    pub concurrency: u32,
    /// Remove what is damaged, and garbage.
    pub repair: bool,
    /// As [`Sharing::renewal`](super::Sharing::renewal).
    pub renewal: Duration,
    /// As [`Sharing::collect_after`](super::Sharing::collect_after).
    pub collect_after: Duration,
    /// Main keys that footers of encrypted blocks are authenticated with; `None`: those are left
    /// alone.
    pub keys: Option<Arc<KeyRing>>,
}

impl FsckOptions {
    /// What is younger may not be deleted.
    fn grace(&self) -> Duration {
        self.renewal * LAPSES
    }

    /// Garbage is older.
    fn garbage_age(&self) -> Duration {
        self.collect_after.max(self.grace())
    }
}

/// What was found in a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BucketReport {
    /// One for each model, block size and group.
    pub namespaces: Vec<NamespaceReport>,
    /// Objects that are not ours, outside of any namespace: they are left alone.
    pub strangers: u64,
    /// Findings that are worth a line, the first thousand.
    pub findings: Vec<Finding>,
    /// What else would be.
    pub more_findings: u64,
}

/// What was found of the objects that have one fingerprint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NamespaceReport {
    /// Its path below the URL.
    pub name: String,
    /// Segments, and their bytes.
    pub segments: u64,
    /// See there.
    pub bytes: u64,
    /// Blocks in segments that could be read.
    pub blocks: u64,
    /// Of these, with other bytes than were stored.
    pub wrong_blocks: u64,
    /// Segments that are torn or damaged.
    pub damaged: u64,
    /// Segments that could not be fetched, so that nothing is known of them.
    pub unread: u64,
    /// Objects of other formats or versions, or authenticated with a key that is not given.
    pub foreign: u64,
    /// Manifests of workers that are at work.
    pub workers: u64,
    /// Manifests that cannot be understood.
    pub unreadable_manifests: u64,
    /// Segments that are not there although workers rely on them.
    pub missing: u64,
    /// Segments that no worker relies on: what the next ones start warm from, until they are
    /// garbage.
    pub unclaimed: u64,
    /// Unclaimed segments that a worker would collect, manifests of workers that are gone, and
    /// half-written files.
    pub garbage: u64,
    /// Objects that were removed.
    pub removed: u64,
}

/// An object that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its path below the URL.
    pub object: String,
    /// What is wrong.
    pub problem: Problem,
    /// In words.
    pub detail: String,
    /// The manifest of a living worker names it, so that it stays.
    pub in_use: bool,
    /// It is gone now.
    pub removed: bool,
}

/// What may be wrong with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    /// A segment whose end is missing.
    Torn,
    /// A segment whose footer or blocks have changed.
    Damaged,
    /// Another version's, another key's, or no object of this format.
    Foreign,
    /// It could not be fetched.
    Unread,
    /// A segment that is not there although a worker relies on it.
    Missing,
    /// A manifest that cannot be understood.
    UnreadableManifest,
    /// A segment that no worker relies on and that is older than workers let it become.
    Garbage,
    /// The manifest of a worker that is gone.
    GoneWorker,
    /// What a writer that was killed left half-written.
    Leftover,
}

impl Problem {
    /// Whether it may be removed, if no worker relies on it.
    const fn may_go(self) -> bool {
        !matches!(self, Self::Foreign | Self::Unread | Self::Missing)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torn => "torn",
            Self::Damaged => "damaged",
            Self::Foreign => "foreign",
            Self::Unread => "unread",
            Self::Missing => "missing",
            Self::UnreadableManifest => "unreadable manifest",
            Self::Garbage => "garbage",
            Self::GoneWorker => "worker is gone",
            Self::Leftover => "half-written",
        })
    }
}

impl BucketReport {
    /// Whether no worker misses anything for what was found.
    pub fn is_sound(&self) -> bool {
        let damage =
            |found: &NamespaceReport| found.damaged + found.missing + found.unreadable_manifests;
        self.namespaces.iter().all(|namespace| damage(namespace) == 0)
    }

    /// Whether all that is there was read.
    pub fn is_complete(&self) -> bool {
        self.namespaces.iter().all(|namespace| namespace.unread == 0)
    }

    /// Objects that were removed.
    pub fn removed(&self) -> u64 {
        self.namespaces.iter().map(|namespace| namespace.removed).sum()
    }
}

/// Called with the bytes that were read, and how many there are.
pub type OnProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Checks the bucket at `url`: every block of every segment against its checksum, and what workers
/// rely on. Only [`repair`](FsckOptions::repair) changes anything.
///
/// # Errors
/// `Invalid`: the URL or an option is malformed. `Unavailable`: the store does not answer or
/// refuses us.
pub fn fsck(
    url: &str,
    store: &StoreOptions,
    options: &FsckOptions,
    on_progress: OnProgress,
) -> Result<BucketReport, SetupError> {
    check_store(Store::attach(url, store)?, options, on_progress)
}

/// [`fsck`] of a store that is open.
pub(super) fn check_store(
    store: Store,
    options: &FsckOptions,
    on_progress: OnProgress,
) -> Result<BucketReport, SetupError> {
    let store = Arc::new(store);
    let check = BucketCheck { store: Arc::clone(&store), options: options.clone(), on_progress };
    let report = store.executor.wait(Duration::MAX, async move { check.run().await });
    let report = report.unwrap_or_else(|| Err(StoreError::new("the check was interrupted")));
    report.map_err(|error| {
        let message = format!("cannot check the object store '{store}'");
        SetupError::caused(SetupErrorKind::Unavailable, message, error)
    })
}

/// A worker that is at work has written its manifest anew after this many renewals.
const FRESH: u32 = 2;
/// Findings that are told one by one.
const MAX_FINDINGS: usize = 1_000;

/// A check under way.
struct BucketCheck {
    store: Arc<Store>,
    options: FsckOptions,
    on_progress: OnProgress,
}

/// Who relies on what.
#[derive(Debug, Default)]
struct LivingWorkers {
    /// Of those that are at work.
    claims: Vec<WorkerClaim>,
    gone: Vec<Path>,
    /// And whether they still hold everything back.
    unreadable: Vec<(Path, bool)>,
}

/// What a worker that is at work relies on.
#[derive(Debug)]
struct WorkerClaim {
    manifest: Path,
    names: HashSet<SegmentName>,
    /// It was written lately: what it names of its own segments the worker may have deleted since.
    is_fresh: bool,
}

impl LivingWorkers {
    fn rely_on(&self, name: SegmentName) -> bool {
        self.claims.iter().any(|claim| claim.names.contains(&name))
    }

    /// Whether some worker may rely on anything.
    fn hold_everything(&self) -> bool {
        self.unreadable.iter().any(|&(_, holds)| holds)
    }
}

/// A namespace's report, and what may have to go.
#[derive(Default)]
struct CheckedNamespace {
    report: NamespaceReport,
    findings: Vec<(Path, Finding)>,
}

impl BucketCheck {
    async fn run(&self) -> Result<BucketReport, StoreError> {
        let inventory = BucketInventory::take(&self.store).await?;
        let listed = clock::now();
        let now_ms = self.now_ms().await?;
        let read = AtomicU64::new(0);
        let bytes = inventory.bytes();
        (self.on_progress)(0, bytes);
        let mut report = BucketReport { strangers: inventory.strangers, ..BucketReport::default() };
        let mut left = BTreeMap::new();
        for (path, namespace) in inventory.namespaces {
            let mut checked = self.check(&path, &namespace, now_ms, &read, bytes).await?;
            if self.options.repair {
                self.repair(&path, &mut checked, listed).await?;
            }
            left.insert(path, checked);
        }
        for CheckedNamespace { report: namespace, findings } in left.into_values() {
            report.namespaces.push(namespace);
            report.more_findings +=
                findings.len().saturating_sub(MAX_FINDINGS.saturating_sub(report.findings.len()))
                    as u64;
            report.findings.extend(findings.into_iter().map(|(_, finding)| finding));
            report.findings.truncate(MAX_FINDINGS);
        }
        Ok(report)
    }

    /// The store's time, in milliseconds since 1970. A check that only looks writes nothing, and
    /// takes its own clock.
    async fn now_ms(&self) -> Result<i64, StoreError> {
        if !self.options.repair {
            return Ok(i64::try_from(clock::since_1970().as_millis()).unwrap_or(i64::MAX));
        }
        self.store.time_ms(OPERATION_LIMIT).await
    }

    async fn check(
        &self,
        path: &Path,
        namespace: &NamespaceObjects,
        now_ms: i64,
        read: &AtomicU64,
        of: u64,
    ) -> Result<CheckedNamespace, StoreError> {
        let mut checked = CheckedNamespace::default();
        checked.report.name = self.store.relative(path);
        let workers = self.workers(&namespace.manifests, now_ms).await?;
        checked.report.workers = workers.claims.len() as u64;
        for foreign in &namespace.foreign {
            self.note(&mut checked, foreign, Problem::Foreign, "no object of this format", false);
        }
        for (leftover, written_ms) in &namespace.leftovers {
            if is_older(*written_ms, now_ms, self.options.grace()) {
                let detail = "a writer was killed while it wrote it";
                self.note(&mut checked, leftover, Problem::Leftover, detail, false);
            }
        }
        self.check_segments(&mut checked, namespace, &workers, now_ms, read, of).await;
        self.check_manifests(&mut checked, namespace, &workers).await?;
        Ok(checked)
    }

    async fn check_segments(
        &self,
        checked: &mut CheckedNamespace,
        namespace: &NamespaceObjects,
        workers: &LivingWorkers,
        now_ms: i64,
        read: &AtomicU64,
        of: u64,
    ) {
        let ring = self.options.keys.clone();
        let keys = ring.map(|ring| FooterKeys::new(ring, &checked.report.name));
        let contents = futures::stream::iter(namespace.segments.clone()).map(|(name, meta)| {
            let key = keys.as_ref().map(|keys| keys.of(name.0));
            async move {
                let on_read = |bytes| {
                    (self.on_progress)(read.fetch_add(bytes, Ordering::Relaxed) + bytes, of);
                };
                let content = ObjectContent::read(&self.store, &meta, key, &on_read).await;
                (name, meta, content)
            }
        });
        let mut contents = contents.buffered(self.options.concurrency.max(1) as usize);
        let (mut has_authentic, mut not_authentic) = (false, Vec::new());
        while let Some((name, meta, content)) = contents.next().await {
            let in_use = workers.rely_on(name);
            let is_old = is_older(written_ms(&meta), now_ms, self.options.garbage_age());
            let is_garbage = is_old && !in_use && !workers.hold_everything();
            if content == ObjectContent::Gone {
                continue;
            }
            checked.report.segments += 1;
            checked.report.bytes += meta.size;
            checked.report.unclaimed += u64::from(!in_use);
            let (blocks, wrong) = content.blocks();
            checked.report.blocks += blocks;
            checked.report.wrong_blocks += wrong;
            has_authentic |= matches!(content, ObjectContent::Blocks { is_authentic: true, .. });
            if content == ObjectContent::Format(FormatError::NotAuthentic) {
                not_authentic.push((meta.location, in_use));
            } else if let Some((problem, detail)) = content.problem() {
                self.note(checked, &meta.location, problem, &detail, in_use);
            } else if is_garbage {
                let detail = "no worker relies on it, and it is old";
                self.note(checked, &meta.location, Problem::Garbage, detail, false);
            }
        }
        drop(contents);
        // Where the key verifies none it is the wrong one: nothing goes for that.
        let found = if has_authentic {
            (Problem::Damaged, FormatError::NotAuthentic.to_string())
        } else {
            (Problem::Foreign, "no footer here was written with the key that is given".to_owned())
        };
        for (segment, in_use) in not_authentic {
            self.note(checked, &segment, found.0, &found.1, in_use);
        }
    }

    async fn check_manifests(
        &self,
        checked: &mut CheckedNamespace,
        namespace: &NamespaceObjects,
        workers: &LivingWorkers,
    ) -> Result<(), StoreError> {
        for gone in &workers.gone {
            let detail = "its worker did not renew it in time";
            self.note(checked, gone, Problem::GoneWorker, detail, false);
        }
        for (path, holds) in &workers.unreadable {
            let detail = if *holds {
                "it holds all segments back for a day"
            } else {
                "it is more than a day old"
            };
            self.note(checked, path, Problem::UnreadableManifest, detail, *holds);
        }
        let there: HashSet<_> = namespace.segments.iter().map(|&(name, _)| name).collect();
        for WorkerClaim { manifest, names, is_fresh } in &workers.claims {
            let is_own = |name: SegmentName| worker_of(manifest) == Some(name.writer());
            let is_lost = |name: SegmentName| !(there.contains(&name) || *is_fresh && is_own(name));
            for &name in names.iter().filter(|&&name| is_lost(name)) {
                if !self.is_in_any(&namespace.directories, name).await? {
                    let detail = format!("{} names it", self.store.relative(manifest));
                    let last = namespace.directories.last().unwrap_or(&namespace.path);
                    self.note(
                        checked,
                        &last.clone().join(name.to_string()),
                        Problem::Missing,
                        &detail,
                        true,
                    );
                }
            }
        }
        Ok(())
    }

    /// What workers say now.
    async fn workers(
        &self,
        manifests: &[ObjectMeta],
        now_ms: i64,
    ) -> Result<LivingWorkers, StoreError> {
        let mut workers = LivingWorkers::default();
        let read = futures::stream::iter(manifests.to_vec())
            .map(|meta| read_manifest(&self.store, meta, OPERATION_LIMIT));
        let mut read = read.buffered(self.options.concurrency.max(1) as usize);
        while let Some(other) = read.next().await {
            let Some(OtherWorker { meta, manifest }) = &other? else { continue };
            let path = meta.location.clone();
            match manifest {
                None => {
                    workers
                        .unreadable
                        .push((path, !is_older(written_ms(meta), now_ms, UNREADABLE)));
                }
                Some(manifest) if is_older(written_ms(meta), now_ms, manifest.lapses_after()) => {
                    workers.gone.push(path);
                }
                Some(claim) => workers.claims.push(WorkerClaim {
                    manifest: path,
                    names: claim.names().collect(),
                    is_fresh: !is_older(
                        written_ms(meta),
                        now_ms,
                        claim.lapses_after() * FRESH / LAPSES,
                    ),
                }),
            }
        }
        Ok(workers)
    }

    /// It may have been stored since the listing.
    async fn is_in_any(
        &self,
        directories: &BTreeSet<Path>,
        name: SegmentName,
    ) -> Result<bool, StoreError> {
        for directory in directories {
            if self.head(&directory.clone().join(name.to_string())).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// `None`: it is not there.
    async fn head(&self, path: &Path) -> Result<Option<ObjectMeta>, StoreError> {
        match timeout(OPERATION_LIMIT, self.store.client.head(path)).await? {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.store.secrets.scrub(&error)),
        }
    }

    fn note(
        &self,
        checked: &mut CheckedNamespace,
        object: &Path,
        problem: Problem,
        detail: &str,
        in_use: bool,
    ) {
        let report = &mut checked.report;
        let count = match problem {
            Problem::Torn | Problem::Damaged => &mut report.damaged,
            Problem::Foreign => &mut report.foreign,
            Problem::Unread => &mut report.unread,
            Problem::Missing => &mut report.missing,
            Problem::UnreadableManifest => &mut report.unreadable_manifests,
            Problem::Garbage | Problem::GoneWorker | Problem::Leftover => &mut report.garbage,
        };
        *count += 1;
        let (name, detail) = (self.store.relative(object), detail.to_owned());
        let finding = Finding { object: name, problem, detail, in_use, removed: false };
        checked.findings.push((object.clone(), finding));
    }
}

fn written_ms(meta: &ObjectMeta) -> i64 {
    meta.last_modified.timestamp_millis()
}

fn is_older(written_ms: i64, now_ms: i64, than: Duration) -> bool {
    u128::try_from(now_ms.saturating_sub(written_ms)).is_ok_and(|age_ms| age_ms > than.as_millis())
}
