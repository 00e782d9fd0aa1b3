//! Removing what is damaged, and garbage, as far as no worker can be relying on it.

use std::time::{Duration, Instant};

use object_store::ObjectStoreExt;
use object_store::path::Path;
use tokio::time::timeout;

use super::super::error::StoreError;
use super::super::files::is_staged;
use super::super::names::SegmentName;
use super::super::share::worker_of;
use super::{
    BucketCheck, CheckedNamespace, DISCOVERY_LIMIT, LivingWorkers, OPERATION_LIMIT, Problem,
    is_older, written_ms,
};

/// A worker that starts has said what it relies on within this time of listing the segments.
const START_LIMIT: Duration = DISCOVERY_LIMIT.saturating_mul(2);

impl BucketCheck {
    /// Removes what may go of a namespace whose objects were `listed` then.
    pub(super) async fn repair(
        &self,
        namespace: &Path,
        checked: &mut CheckedNamespace,
        listed: Instant,
    ) -> Result<(), StoreError> {
        if !checked.findings.iter().any(|(_, finding)| finding.problem.may_go()) {
            return Ok(());
        }
        let starting = START_LIMIT.min(self.options.grace());
        tokio::time::sleep(starting.saturating_sub(listed.elapsed())).await;
        let now_ms = self.now_ms().await?;
        let workers = self.workers_now(namespace, now_ms).await?;
        for (path, finding) in
            checked.findings.iter_mut().filter(|(_, finding)| finding.problem.may_go())
        {
            finding.removed = self.may_remove(finding.problem, path, &workers, now_ms).await?
                && self.remove(path).await?;
            checked.report.removed += u64::from(finding.removed);
        }
        Ok(())
    }

    async fn workers_now(
        &self,
        namespace: &Path,
        now_ms: i64,
    ) -> Result<LivingWorkers, StoreError> {
        let directory = namespace.clone().join("manifests");
        let mut listed = self.store.listing(&directory, None, OPERATION_LIMIT).rest().await?;
        listed.retain(|meta| worker_of(&meta.location).is_some());
        self.workers(&listed, now_ms).await
    }

    async fn may_remove(
        &self,
        problem: Problem,
        path: &Path,
        workers: &LivingWorkers,
        now_ms: i64,
    ) -> Result<bool, StoreError> {
        Ok(match problem {
            Problem::GoneWorker => workers.gone.contains(path),
            Problem::UnreadableManifest => workers.unreadable.contains(&(path.clone(), false)),
            Problem::Leftover => true,
            _ => {
                let name = path.filename().and_then(SegmentName::parse);
                let is_nobodys =
                    name.is_some_and(|name| !workers.rely_on(name)) && !workers.hold_everything();
                is_nobodys && self.is_past_grace(path, now_ms).await?
            }
        })
    }

    /// Whether it is too late for a worker to say that it relies on it.
    async fn is_past_grace(&self, path: &Path, now_ms: i64) -> Result<bool, StoreError> {
        let is_past = |meta| is_older(written_ms(&meta), now_ms, self.options.grace());
        Ok(self.head(path).await?.is_some_and(is_past))
    }

    async fn remove(&self, path: &Path) -> Result<bool, StoreError> {
        let directory = path
            .parts()
            .count()
            .checked_sub(1)
            .map(|parts| path.parts().take(parts).collect::<Path>());
        let file =
            directory.and_then(|directory| self.store.files_below(&directory)).zip(path.filename());
        // What is half-written has a name that the client takes for none.
        if let Some((directory, file)) = file.filter(|(_, file)| is_staged(file)) {
            return Ok(std::fs::remove_file(directory.join(file)).is_ok());
        }
        match timeout(OPERATION_LIMIT, self.store.client.delete(path)).await? {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(true),
            Err(error) => Err(self.store.secrets.scrub(&error)),
        }
    }
}
