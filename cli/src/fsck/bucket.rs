//! Buckets: what workers stored, checked beside them.

use std::sync::Arc;
use std::time::Duration;

use kvbm_settings::ObjectSettings;
use kvbm_tiers::object::fsck::{BucketReport, FsckOptions, NamespaceReport, fsck};
use kvbm_tiers::sealed::KeyRing;
use serde::Serialize;

use crate::output::{self, CommandFailure, with_causes};

/// What was found in one bucket.
#[derive(Debug, Serialize)]
pub(super) struct BucketFindings {
    url: String,
    is_sound: bool,
    #[serde(flatten)]
    pub(super) report: BucketReport,
}

/// Whether an argument names a store rather than a directory.
pub(super) fn is_url(text: &str) -> bool {
    text.contains("://")
}

/// Checks the bucket at `url`, reached as the settings say; what is authenticated with these keys.
pub(super) fn check(
    url: &str,
    object: &ObjectSettings,
    keys: Option<Arc<KeyRing>>,
    repair: bool,
) -> Result<BucketFindings, CommandFailure> {
    let options = FsckOptions {
        concurrency: object.concurrency,
        repair,
        renewal: Duration::from_millis(object.renewal_ms),
        collect_after: Duration::from_millis(object.collect_after_ms),
        keys,
    };
    let template = "{bar:30} {bytes}/{total_bytes} read, {bytes_per_sec} ({eta} left)";
    let bar = output::bar(Some(0), template);
    let shown = bar.clone();
    let on_progress = move |read, of| {
        shown.set_length(of);
        shown.set_position(read);
    };
    let report = fsck(url, &kvbm::store_options(object), &options, Arc::new(on_progress));
    bar.finish_and_clear();
    let report = report.map_err(|error| CommandFailure::unusable(with_causes(&error)))?;
    Ok(BucketFindings { url: url.to_owned(), is_sound: report.is_sound(), report })
}

impl BucketFindings {
    pub(super) fn print(&self) -> Result<(), CommandFailure> {
        output::print(&self.table())?;
        for finding in &self.report.findings {
            let end = match (finding.removed, finding.in_use) {
                (true, _) => "; removed",
                (false, true) => "; a worker relies on it",
                (false, false) => "",
            };
            output::print(&format!(
                "{}: {}: {}{end}",
                finding.problem, finding.object, finding.detail
            ))?;
        }
        match self.report.more_findings {
            0 => Ok(()),
            more => output::print(&format!("and {} more", output::count(more))),
        }
    }

    fn table(&self) -> String {
        let titles = [
            "namespace",
            "segments",
            "bytes",
            "blocks",
            "wrong",
            "damaged",
            "missing",
            "workers",
            "garbage",
        ];
        let mut table = output::table(&titles, 1);
        for found in &self.report.namespaces {
            let NamespaceReport { name, segments, bytes, blocks, wrong_blocks, .. } = found;
            let [segments, blocks, wrong, damaged, missing, workers, garbage] = [
                *segments,
                *blocks,
                *wrong_blocks,
                found.damaged + found.unreadable_manifests,
                found.missing,
                found.workers,
                found.garbage,
            ]
            .map(output::count);
            let bytes = output::bytes(*bytes);
            table.add_row([
                name, &segments, &bytes, &blocks, &wrong, &damaged, &missing, &workers, &garbage,
            ]);
        }
        format!("{}\n{}", self.url, table.trim_fmt())
    }
}
