//! Tiers whose slots outlive the process: opens their indices, and makes resident what these list.

use std::cmp::Reverse;
use std::fs::DirBuilder;
use std::mem;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvbm_settings::{HostSettings, Settings};
use kvbm_tiers::ranks::{KeptSlots, Leader, SlotJournal};
use kvbm_tiers::sealed::TenantKeys;
use kvbm_tiers::{
    Checksums, CopyOp, DiskOptions, DramRegion, IndexEntry, IndexOptions, Memory, Mount, MountKind,
    Recovered, SlotId, SlotRef, Tier, TierEpoch, TierIndex, clock, is_of_directory,
};

use super::{ObjectTier, OpenedRegions, setup};
use crate::durable::{DurableTiers, OnDurable, RecoveryReport, WriterService};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::Metrics;
use crate::names::fingerprint::Fingerprint;
use crate::table::{Journal, Naming, Notes, Table};

/// A killed process may not be quite gone.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);

/// Names the files and objects of a manager.
#[derive(Debug, Default)]
pub(super) struct NamespaceNames {
    pub(super) name: String,
    /// What tells its blocks from others; `None`: nothing left by an earlier process is found.
    pub(super) identity: Option<NameSeed>,
    /// Whether others find its objects, which are whole blocks.
    pub(super) shares_objects: bool,
}

impl NamespaceNames {
    /// The namespace of a part of it.
    pub(super) fn part(self, part: &str) -> Self {
        Self { name: format!("{}-{part}", self.name), ..self }
    }
}

/// What the names of blocks begin with.
#[derive(Clone, Copy, Debug)]
pub(super) struct NameSeed {
    pub(super) digest: u128,
    pub(super) epoch: u64,
}

impl NameSeed {
    pub(super) fn of(fingerprint: &Fingerprint) -> Self {
        Self { digest: fingerprint.digest_in(0), epoch: fingerprint.epoch }
    }
}

/// A tier with the content of its indices.
pub(super) struct KeptTier {
    tier: Tier,
    /// Number `i` of `n` lists the slots `i`, `i + n` and so on, in order. `None`: it is not
    /// available now.
    indices: Vec<Option<(TierIndex, Recovered)>>,
    bytes: BlockBytes,
    /// The keys of its blocks, if they are encrypted.
    tenants: Option<Arc<TenantKeys>>,
    /// The time to open the indices.
    took: Duration,
}

/// Where the bytes of a kept tier are.
pub(super) enum BlockBytes {
    /// This process; these are their checksums.
    Here(Arc<Checksums>),
    /// Its ranks, each with checksums of its own.
    InRanks(Arc<Leader>),
}

impl OpenedRegions {
    /// Each slot file of the disk tier has an index beside it; `new` says which of the files were
    /// made just now. A directory whose index is not available joins those that are `away`.
    pub(super) fn keep_disk(
        &mut self,
        options: &DiskOptions,
        new: &[bool],
        away: &mut [bool],
        checksums: &Arc<Checksums>,
    ) -> Result<()> {
        let Some(identity) = self.namespace.identity.filter(|_| options.keep.is_some()) else {
            return Ok(());
        };
        let (started, mut indices) = (clock::now(), Vec::new());
        for (dir, is_away) in away.iter_mut().enumerate() {
            let index = IndexOptions {
                path: options.index_path(dir).unwrap_or_default(),
                tier: Tier::Disk,
                namespace: self.namespace.name.clone(),
                identity: identity.digest,
                slots: options.slots_per_dir(),
                block_bytes: options.geometry.block_bytes() as u64,
                parts: options.dirs.len() as u32,
                epoch: identity.epoch,
                patience: PATIENCE,
                keys: self.keys.clone(),
            };
            indices.push(match (!*is_away).then(|| TierIndex::open(&index)).transpose() {
                Err(error) if is_of_directory(&error) => {
                    tracing::error!(%error, "the disk tier does without a directory");
                    *is_away = true;
                    None
                }
                opened => opened.map_err(setup)?,
            });
        }
        self.keep(Tier::Disk, indices, BlockBytes::Here(Arc::clone(checksums)), started.elapsed());
        self.kept.last_mut().map_or(Ok(()), |kept| kept.forget_parts(new))
    }

    /// The host tier's index lies beside the persistent memory, or where the settings say.
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
            path: host_index_dir(memory, settings)?
                .join(format!("kvbm-{}-host.index", self.namespace.name)),
            tier: Tier::Host,
            namespace: self.namespace.name.clone(),
            identity: identity.digest,
            slots,
            block_bytes: region.block_bytes() as u64,
            parts: 1,
            epoch: identity.epoch,
            patience: PATIENCE,
            keys: self.keys.clone(),
        };
        self.keep_one(&index, BlockBytes::Here(Arc::clone(checksums)))?;
        self.kept.last_mut().map_or(Ok(()), |kept| kept.forget_parts(&[!was_there]))
    }

    /// A leader's indices of what its ranks keep: which block lies in which slot. They lie where
    /// its own slots would.
    pub(super) fn keep_in_ranks(
        &mut self,
        leader: &Arc<Leader>,
        slots: [u32; Tier::COUNT],
        settings: &Settings,
    ) -> Result<()> {
        let Some(identity) = self.namespace.identity else { return Ok(()) };
        let mut place = |tier: Tier, dir: &Path| {
            make_dir(dir)?;
            let index = IndexOptions {
                // Named unlike indices that have slots beside them.
                path: dir.join(format!("kvbm-{}-{tier}.leader", self.namespace.name)),
                tier,
                namespace: self.namespace.name.clone(),
                identity: identity.digest,
                slots: slots[tier.index()],
                block_bytes: settings.block_bytes.unwrap_or_default(),
                parts: 1,
                epoch: identity.epoch,
                patience: PATIENCE,
                keys: self.keys.clone(),
            };
            self.keep_one(&index, BlockBytes::InRanks(Arc::clone(leader)))
        };
        let HostSettings { persist, persist_index, .. } = &settings.host;
        if let Some(dir) = persist.as_ref().filter(|_| slots[Tier::Host.index()] > 0) {
            place(Tier::Host, persist_index.as_ref().unwrap_or(dir))?;
        }
        let kept = settings
            .disk
            .dirs
            .first()
            .filter(|_| settings.disk.keep && slots[Tier::Disk.index()] > 0);
        kept.map_or(Ok(()), |dir| place(Tier::Disk, dir))
    }

    /// Opens the only index of a tier.
    fn keep_one(&mut self, index: &IndexOptions, bytes: BlockBytes) -> Result<()> {
        let started = clock::now();
        let opened = TierIndex::open(index).map_err(setup)?;
        self.keep(index.tier, vec![Some(opened)], bytes, started.elapsed());
        Ok(())
    }

    fn keep(
        &mut self,
        tier: Tier,
        indices: Vec<Option<(TierIndex, Recovered)>>,
        bytes: BlockBytes,
        took: Duration,
    ) {
        let tenants = self.keys_of(tier);
        self.kept.push(KeptTier { tier, indices, bytes, tenants, took });
    }
}

/// Where the index of memory in a file lies.
fn host_index_dir<'a>(memory: &'a Path, settings: &'a HostSettings) -> Result<&'a Path> {
    let beside = memory.parent().unwrap_or(Path::new("."));
    let Some(dir) = &settings.persist_index else {
        if Mount::of(beside).map_err(setup)?.kind == MountKind::Hugetlbfs {
            return Err(Error::invalid(NO_INDEX_ON_HUGETLBFS));
        }
        return Ok(beside);
    };
    make_dir(dir)?;
    Ok(dir)
}

fn make_dir(dir: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|error| {
        let message = format!(
            "{}: {error}; choose another directory for the index (disk.dirs, host.persist or host.persist_index)",
            dir.display()
        );
        Error::caused(ErrorKind::Unavailable, message, error)
    })
}

const NO_INDEX_ON_HUGETLBFS: &str = "host.persist (DYN_KVBM_CPU_CACHE_PERSIST) is on hugetlbfs, which has no files that \
     grow: name a directory on tmpfs for the index with host.persist_index (DYN_KVBM_CPU_CACHE_PERSIST_INDEX)";

/// Warns of what an operator would wonder about later.
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

/// Makes resident again what an earlier process left, and notes from here on what comes and leaves.
pub(super) fn resume(
    table: Table,
    mut kept: Vec<KeptTier>,
    objects: Option<ObjectTier>,
    on_durable: Option<&OnDurable>,
    metrics: &Metrics,
) -> Result<(Table, DurableTiers)> {
    let epochs =
        kept.iter().flat_map(KeptTier::epochs).chain(objects.as_ref().and_then(ObjectTier::epoch));
    let epoch = epochs.fold(table.naming().epoch, Ord::max);
    let mut table = if epoch == table.naming().epoch { table } else { table.resuming(epoch) };
    // Blocks that also lie further down need not go there again.
    kept.sort_by_key(|kept| Reverse(kept.tier));
    let mut reports = Vec::new();
    if let Some(objects) = objects {
        reports.extend(objects.restore(&mut table));
    }
    for kept in &mut kept {
        reports.push(kept.restore(&mut table, epoch)?);
    }
    let durable = DurableTiers::reporting(reports);
    for KeptTier { tier, indices, bytes, .. } in kept {
        let (naming, parts) = (table.naming(), indices.len() as u32);
        let service = || WriterService {
            tier,
            parts,
            naming,
            on_durable: on_durable.cloned(),
            metrics: Some(metrics.clone()),
        };
        let notes = durable.write_all(indices, service)?;
        table.keep_journal(tier, bytes.journal(notes));
    }
    Ok((table, durable))
}

/// What a rank's tiers hold of an earlier process; notes from here on what comes to them. The
/// leader says which of it is a block.
pub(super) fn resume_rank(kept: Vec<KeptTier>) -> Result<(Vec<KeptSlots>, DurableTiers)> {
    let durable = DurableTiers::default();
    let resume = |mut kept: KeptTier| {
        let parts = kept.indices.len() as u32;
        let of_tier = |(part, index): (u32, &mut Option<(TierIndex, Recovered)>)| {
            let found = index.as_mut().map(|(_, found)| mem::take(&mut found.entries));
            found.into_iter().flatten().map(move |entry| of_tier(entry, part, parts))
        };
        let left: Vec<_> = (0..).zip(&mut kept.indices).flat_map(of_tier).collect();
        kept.bytes.inherit(kept.tier, &left);
        let KeptTier { tier, indices, bytes, .. } = kept;
        let slots = indices.iter().flatten().map(|(index, _)| index.slots()).sum();
        // The leader handles names, and tells listeners.
        let service = || WriterService {
            tier,
            parts,
            naming: Naming::default(),
            on_durable: None,
            metrics: None,
        };
        let journal = bytes.journal(durable.write_all(indices, service)?);
        tracing::info!(%tier, slots = left.len(), "a rank has something in slots of an earlier process");
        Ok(KeptSlots { tier, left, journal: Arc::new(RankJournal { journal, slots }) })
    };
    let kept = kept.into_iter().map(resume).collect::<Result<_>>()?;
    Ok((kept, durable))
}

/// Notes what copies bring to a rank's slots.
#[derive(Debug)]
struct RankJournal {
    journal: Journal,
    /// The slots behind them bounce blocks, and keep none.
    slots: u32,
}

impl SlotJournal for RankJournal {
    fn begun(&self, op: &CopyOp) {
        if op.to.slot.0 < self.slots {
            self.journal.removed(op.to.slot, op.block, op.parent);
        }
    }

    fn arrived(&self, op: &CopyOp) {
        if op.to.slot.0 < self.slots {
            self.journal.stored(op.to, op.block, op.parent, op.owner.map(|owner| owner.tenant));
        }
    }
}

impl BlockBytes {
    fn journal(&self, notes: Vec<Option<Arc<Notes>>>) -> Journal {
        match self {
            Self::Here(checksums) => Journal::new(Arc::clone(checksums), notes),
            Self::InRanks(_) => Journal::of_ranks(notes),
        }
    }

    /// Takes the checksums that blocks were stored with.
    fn inherit(&self, tier: Tier, entries: &[IndexEntry]) {
        if let Self::Here(checksums) = self {
            // Reads from memory are not verified each time, unlike reads from a drive.
            let note = if tier == Tier::Host { Checksums::inherit } else { Checksums::record };
            entries.iter().for_each(|entry| note(checksums, entry.slot, entry.checksum));
        }
    }

    /// The entries that all processes with a part of them have.
    fn agree(&self, tier: Tier, entries: Vec<IndexEntry>) -> Vec<IndexEntry> {
        match self {
            Self::Here(_) => entries,
            Self::InRanks(leader) => leader.agree(tier, entries).unwrap_or_else(|error| {
                tracing::warn!(%tier, %error, "nothing of an earlier process is found: not all ranks say what they have");
                Vec::new()
            }),
        }
    }

    /// Tells all processes with a part of it what was made resident.
    fn adopt(&self, tier: Tier, entries: &[IndexEntry], table: &Table) {
        if let Self::InRanks(leader) = self {
            let lives = entries.iter().filter_map(|&IndexEntry { slot, .. }| {
                Some(SlotRef { tier, slot, generation: table.life(tier, slot)? })
            });
            leader.adopt(tier, &lives.collect::<Vec<_>>());
        }
    }
}

/// Which of the slot files are not there yet. A file that another process makes meanwhile costs a
/// cold start.
pub(super) fn missing_files(options: &DiskOptions) -> Vec<bool> {
    let paths = (0..options.dirs.len()).map(|file| options.index_path(file));
    paths.map(|index| index.is_some_and(|index| !index.with_extension("blocks").exists())).collect()
}

impl KeptTier {
    /// Forgets what these indices list: the files, or the memory, were removed.
    fn forget_parts(&mut self, gone: &[bool]) -> Result<()> {
        let gone = self.indices.iter_mut().zip(gone).filter(|&(_, &is_gone)| is_gone);
        for (index, found) in gone.filter_map(|(index, _)| index.as_mut()) {
            if !mem::take(&mut found.entries).is_empty() {
                tracing::warn!(path = %index.path().display(), "what an index tells of was not there any more");
                index.set_epoch(index.epoch()).map_err(|error| not_begun(index, error))?;
            }
        }
        Ok(())
    }

    pub(super) fn epochs(&self) -> impl Iterator<Item = TierEpoch> {
        self.indices.iter().flatten().map(|(_, found)| found.epoch)
    }

    fn restore(&mut self, table: &mut Table, epoch: TierEpoch) -> Result<RecoveryReport> {
        let started = clock::now();
        let (mut entries, mut past, mut damaged, mut torn_bytes) = (Vec::new(), 0, 0, 0);
        let parts = self.indices.len() as u32;
        for (part, index) in (0..).zip(&mut self.indices) {
            let Some((index, found)) = index else { continue };
            damaged += found.damaged;
            torn_bytes += found.torn;
            if found.epoch == epoch {
                // A single index's entries stay where they are: megabytes that are not copied.
                let found = mem::take(&mut found.entries).into_iter();
                let found: Vec<_> = found.map(|entry| of_tier(entry, part, parts)).collect();
                if entries.is_empty() { entries = found } else { entries.extend(found) }
            } else {
                past += mem::take(&mut found.entries).len();
                index.set_epoch(epoch).map_err(|error| not_begun(index, error))?;
            }
        }
        let found = entries.len();
        // Blocks of a tenant whose key was destroyed cannot be read.
        self.tenants.iter().for_each(|keys| keys.retain_readable(&mut entries));
        let forgotten = found - entries.len();
        self.bytes.inherit(self.tier, &entries);
        let readable = entries.len();
        let entries = self.bytes.agree(self.tier, entries);
        let disagreed = readable - entries.len();
        let restored = table.restore(self.tier, &entries);
        self.bytes.adopt(self.tier, &entries, table);
        let took_us = (self.took + started.elapsed()).as_micros() as u64;
        let (tier, blocks, dropped) = (self.tier, restored.blocks, restored.dropped + forgotten);
        let report =
            RecoveryReport { tier, blocks, dropped, past, disagreed, damaged, torn_bytes, took_us };
        tracing::info!(?report, "found blocks of an earlier process");
        Ok(report)
    }
}

/// An entry of the index number `part` of `parts`, with the slot that it has in the tier.
const fn of_tier(entry: IndexEntry, part: u32, parts: u32) -> IndexEntry {
    IndexEntry { slot: SlotId(entry.slot.0 * parts + part), ..entry }
}

fn not_begun(index: &TierIndex, error: std::io::Error) -> Error {
    let message = format!("{}: a new epoch cannot be begun: {error}", index.path().display());
    Error::caused(ErrorKind::Unavailable, message, error)
}
