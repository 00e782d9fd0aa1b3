//! Tiers whose slots outlive the process: their indices are opened, and what these say is resident again.

use std::cmp::Reverse;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvbm_settings::{HostSettings, Settings};
use kvbm_tiers::{
    Checksums, DiskOptions, DramRegion, IndexOptions, Memory, Mount, MountKind, Recovered, Tier, TierIndex,
    clock,
};

use super::{Objects, Tiers, setup};
use crate::durable::{Durable, OnDurable, RecoveryReport, Service};
use crate::error::{Error, ErrorKind, Result};
use crate::fingerprint::Fingerprint;
use crate::metrics::Metrics;
use crate::table::{Journal, Notes, Table};

/// A process that was killed may not quite be gone.
const PATIENCE: Duration = Duration::from_secs(15);

/// Names the files and objects of a manager.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    pub(super) name: String,
    /// What its blocks are told from others by: `None`, and nothing that is left is found again.
    pub(super) identity: Option<Identity>,
}

/// What the names of blocks begin with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    pub(super) digest: u128,
    pub(super) epoch: u64,
}

impl Identity {
    pub(super) fn of(fingerprint: &Fingerprint) -> Self {
        Self { digest: fingerprint.digest_in(0), epoch: fingerprint.epoch }
    }
}

/// A tier with what its indices say.
pub(super) struct KeptTier {
    tier: Tier,
    indices: Vec<(TierIndex, Recovered)>,
    checksums: Arc<Checksums>,
    /// To open the indices.
    took: Duration,
}

impl Tiers {
    /// The slot files of the disk tier have an index each, beside them; `new` says which of the files were made just now.
    pub(super) fn keep_disk(
        &mut self,
        options: &DiskOptions,
        new: &[bool],
        checksums: &Arc<Checksums>,
    ) -> Result<()> {
        let files = options.dirs.len() as u32;
        let Some(identity) = self.namespace.identity.filter(|_| options.keep.is_some()) else {
            return Ok(());
        };
        let index = |file: u32| IndexOptions {
            path: options.index_path(file as usize).unwrap_or_default(),
            tier: Tier::Disk,
            namespace: self.namespace.name.clone(),
            identity: identity.digest,
            slots: options.geometry.slots(),
            block_bytes: options.geometry.block_bytes() as u64,
            part: (file, files),
            epoch: identity.epoch,
            patience: PATIENCE,
        };
        let indices: Vec<IndexOptions> = (0..files).map(index).collect();
        self.keep(Tier::Disk, &indices, Arc::clone(checksums))?;
        self.kept.last_mut().map_or(Ok(()), |kept| kept.forget_parts(new))
    }

    /// The host tier's index lies beside the memory that persists, or where the settings want it.
    pub(super) fn keep_host(
        &mut self,
        region: &DramRegion,
        settings: &HostSettings,
        slots: u32,
    ) -> Result<()> {
        let (Some((memory, was_there)), Some(checksums), Some(identity)) =
            (region.persists(), region.shared_checksums(), self.namespace.identity)
        else {
            return Ok(());
        };
        let index = IndexOptions {
            path: host_index_dir(memory, settings)?.join(format!("kvbm-{}-host.index", self.namespace.name)),
            tier: Tier::Host,
            namespace: self.namespace.name.clone(),
            identity: identity.digest,
            slots,
            block_bytes: region.block_bytes() as u64,
            part: (0, 1),
            epoch: identity.epoch,
            patience: PATIENCE,
        };
        self.keep(Tier::Host, &[index], Arc::clone(checksums))?;
        self.kept.last_mut().map_or(Ok(()), |kept| kept.forget_parts(&[!was_there]))
    }

    /// Opens the indices of a tier. Number `i` tells of the slots `i`, `i + n` and so on, if they are `n`.
    pub(super) fn keep(
        &mut self,
        tier: Tier,
        indices: &[IndexOptions],
        checksums: Arc<Checksums>,
    ) -> Result<()> {
        let started = clock::now();
        let open = |options| TierIndex::open(options).map_err(setup);
        let indices = indices.iter().map(open).collect::<Result<_>>()?;
        self.kept.push(KeptTier { tier, indices, checksums, took: started.elapsed() });
        Ok(())
    }
}

/// Where the index of memory in a file lies.
fn host_index_dir<'a>(memory: &'a Path, settings: &'a HostSettings) -> Result<&'a Path> {
    let beside = memory.parent().unwrap_or(Path::new("."));
    let Some(dir) = &settings.persist_index else {
        if Mount::of(beside).map_err(setup)?.kind == MountKind::Hugetlbfs {
            return Err(Error::new(ErrorKind::Invalid, NO_INDEX_ON_HUGETLBFS));
        }
        return Ok(beside);
    };
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map(|()| dir.as_path()).map_err(|error| {
        let message = format!(
            "{}: {error}; choose another host.persist_index (DYN_KVBM_CPU_CACHE_PERSIST_INDEX)",
            dir.display()
        );
        Error::caused(ErrorKind::Unavailable, message, error)
    })
}

const NO_INDEX_ON_HUGETLBFS: &str = "host.persist (DYN_KVBM_CPU_CACHE_PERSIST) is on hugetlbfs, which has no files that \
     grow: name a directory on tmpfs for the index with host.persist_index (DYN_KVBM_CPU_CACHE_PERSIST_INDEX)";

/// Says what an operator would wonder about later.
pub(super) fn warn_of_cold_start(settings: &Settings, fingerprint: Option<&Fingerprint>) {
    if settings.disk.capacity.is_some() && settings.disk.keep && fingerprint.is_none() {
        tracing::warn!(
            "disk.keep (DYN_KVBM_DISK_KEEP) keeps the slot files, but without Options::fingerprint nothing tells models \
             apart: no block in them will be found after a restart"
        );
    }
    if settings.host.persist.is_some() && fingerprint.is_none() {
        tracing::warn!(
            "host.persist (DYN_KVBM_CPU_CACHE_PERSIST) keeps the memory, but without Options::fingerprint nothing tells \
             models apart: no block in it will be found after a restart"
        );
    }
}

/// Makes resident again what is left of an earlier process, and has noted from here on what comes and leaves.
pub(super) fn resume(
    table: Table,
    (mut kept, objects): (Vec<KeptTier>, Option<Objects>),
    on_durable: Option<&OnDurable>,
    metrics: &Metrics,
) -> Result<(Table, Durable)> {
    let epochs = kept.iter().flat_map(KeptTier::epochs).chain(objects.as_ref().and_then(Objects::epoch));
    let epoch = epochs.fold(table.naming().epoch, Ord::max);
    let mut table = if epoch == table.naming().epoch { table } else { table.resuming(epoch) };
    // What lies further down as well need not go there again.
    kept.sort_by_key(|kept| Reverse(kept.tier));
    let mut reports = Vec::new();
    if let Some(objects) = objects {
        reports.extend(objects.restore(&mut table)?);
    }
    for kept in &mut kept {
        reports.push(kept.restore(&mut table, epoch)?);
    }
    let durable = Durable::reporting(reports);
    for KeptTier { tier, indices, checksums, .. } in kept {
        let notes: Vec<Arc<Notes>> = indices.iter().map(|_| Arc::default()).collect();
        table.keep_journal(tier, Journal::new(checksums, notes.iter().cloned()));
        for ((index, _), notes) in indices.into_iter().zip(notes) {
            let (naming, metrics) = (table.naming(), metrics.clone());
            durable.write(
                index,
                notes,
                Service { tier, naming, on_durable: on_durable.cloned(), metrics },
            )?;
        }
    }
    Ok((table, durable))
}

/// Which of the slot files are not there yet. Whoever makes one meanwhile costs a cold start.
pub(super) fn missing_files(options: &DiskOptions) -> Vec<bool> {
    let paths = (0..options.dirs.len()).map(|file| options.index_path(file));
    paths.map(|index| index.is_some_and(|index| !index.with_extension("blocks").exists())).collect()
}

impl KeptTier {
    /// What these indices tell of is gone: somebody removed the files, or the memory.
    fn forget_parts(&mut self, gone: &[bool]) -> Result<()> {
        for ((index, found), _) in self.indices.iter_mut().zip(gone).filter(|&(_, &is_gone)| is_gone) {
            if !std::mem::take(&mut found.entries).is_empty() {
                tracing::warn!(path = %index.path().display(), "what an index tells of was not there any more");
                let (epoch, forgotten) = index.epoch();
                index.set_epoch(epoch, forgotten).map_err(|error| not_begun(index, error))?;
            }
        }
        Ok(())
    }

    fn epochs(&self) -> impl Iterator<Item = (u64, u64)> {
        self.indices.iter().map(|(_, found)| found.epoch)
    }

    fn restore(&mut self, table: &mut Table, epoch: (u64, u64)) -> Result<RecoveryReport> {
        let started = clock::now();
        let (mut entries, mut past, mut damaged, mut torn_bytes) = (Vec::new(), 0, 0, 0);
        for (index, found) in &mut self.indices {
            damaged += found.damaged;
            torn_bytes += found.torn;
            if found.epoch == epoch {
                entries.append(&mut found.entries);
            } else {
                past += std::mem::take(&mut found.entries).len();
                index.set_epoch(epoch.0, epoch.1).map_err(|error| not_begun(index, error))?;
            }
        }
        // What is read from memory is not verified each time, as what is read from a drive is.
        let note = if self.tier == Tier::Host { Checksums::inherit } else { Checksums::record };
        entries.iter().for_each(|entry| note(&self.checksums, entry.slot, entry.checksum));
        let restored = table.restore(self.tier, &entries);
        let took_us = (self.took + started.elapsed()).as_micros() as u64;
        let (tier, blocks, dropped) = (self.tier, restored.blocks, restored.dropped);
        tracing::info!(%tier, blocks, dropped, past, damaged, torn_bytes, took_us, "found blocks of an earlier process");
        Ok(RecoveryReport { tier, blocks, dropped, past, damaged, torn_bytes, took_us })
    }
}

fn not_begun(index: &TierIndex, error: std::io::Error) -> Error {
    let message = format!("{}: a new epoch cannot be begun: {error}", index.path().display());
    Error::caused(ErrorKind::Unavailable, message, error)
}
