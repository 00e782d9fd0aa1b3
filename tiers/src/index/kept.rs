//! An index and the slots that it tells of, looked at while no process works with them.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::checksum::checksum;
use crate::copy::SlotId;
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{LockWait, LockedFile, OwnDirectory, lock, open_ours};
use crate::geometry::ALIGNMENT;
use crate::sealed::KeyRing;

use super::format::IndexHeader;
use super::{IndexChange, IndexEntry, IndexOptions, Recovered, TierIndex, file};

/// What a process left: an index, and the file of slots that it tells of. Locked as long as it is
/// looked at.
#[derive(Debug)]
pub struct KeptIndex {
    index: TierIndex,
    found: Recovered,
    has_whole_header: bool,
    slots: LockedFile,
}

/// A process that was killed may not quite be gone.
const PATIENCE: Duration = Duration::from_secs(3);

impl KeptIndex {
    /// Opens an index and its file of slots, of whichever tier and namespace they are, and changes
    /// nothing. One that is authenticated takes its main key.
    ///
    /// # Errors
    /// `Invalid`: it is no index, or one of another version, or its header is damaged twice, or a
    /// file is missing. `InUse`: another process works with it. `NotWritable`: it is not a file of
    /// this user's that is closed to all others. `Io`: the medium.
    pub fn open(
        index: &Path,
        slots: &Path,
        keys: Option<&Arc<KeyRing>>,
    ) -> Result<Self, SetupError> {
        // Which tier's they are is not known before they are read.
        let is_memory = slots.extension().is_some_and(|extension| extension == "memory");
        let settings = if is_memory { &crate::dram::SETTINGS } else { &crate::disk::SETTINGS };
        let (site, slots) =
            (OwnDirectory::new(index, settings), locked(&OwnDirectory::new(slots, settings))?);
        let file = locked(&site)?;
        let (header, _) = file::header(&file, &site, keys.map(|keys| &**keys))?;
        let keys = keys.filter(|_| header.key.is_some()).cloned();
        let (index, found, has_whole_header) =
            TierIndex::read(&options(index, header, keys), file)?;
        Ok(Self { index, found, has_whole_header, slots })
    }

    /// What it is an index of.
    pub const fn options(&self) -> &IndexOptions {
        &self.index.options
    }

    /// What it says.
    pub const fn found(&self) -> &Recovered {
        &self.found
    }

    /// Whether both copies of its header are sound. One is enough.
    pub const fn has_whole_header(&self) -> bool {
        self.has_whole_header
    }

    /// Whether the bytes in a slot are those of the block that it is said to hold. What cannot be
    /// read is not.
    pub fn is_sound(&self, entry: &IndexEntry) -> bool {
        self.read(entry.slot).is_some_and(|block| checksum(&block) == entry.checksum)
    }

    fn read(&self, slot: SlotId) -> Option<Vec<u8>> {
        let block_bytes = self.options().block_bytes;
        let at = u64::from(slot.0)
            .checked_mul(block_bytes.checked_next_multiple_of(ALIGNMENT as u64)?)?;
        // Before memory is set aside for what an index claims.
        let bytes = self.slots.metadata().ok()?.len();
        let mut block =
            (at.checked_add(block_bytes)? <= bytes).then(|| vec![0; block_bytes as usize])?;
        self.slots.read_exact_at(&mut block, at).ok()?;
        Some(block)
    }

    /// Writes the index anew, without what had changed and without what is said of these slots.
    ///
    /// # Errors
    /// `Io`: the medium. The index is as it was then.
    pub fn repair(mut self, bad: &[SlotId]) -> Result<(), SetupError> {
        let removed: Vec<_> = bad.iter().map(|&slot| IndexChange::Removed(slot)).collect();
        let repaired = self.index.append(&removed).and_then(|()| self.index.compact());
        repaired.map_err(|error| self.options().site().failed(&error))
    }
}

fn locked(site: &OwnDirectory) -> Result<LockedFile, SetupError> {
    let missing = || site.error(SetupErrorKind::Invalid, "is missing");
    let file = open_ours(site)?.ok_or_else(missing)?;
    lock(&file, site, &mut LockWait::new(PATIENCE))?;
    Ok(LockedFile::of(file))
}

fn options(path: &Path, header: IndexHeader, keys: Option<Arc<KeyRing>>) -> IndexOptions {
    IndexOptions {
        path: path.to_owned(),
        tier: header.tier,
        namespace: header.namespace,
        identity: header.identity,
        slots: header.slots,
        block_bytes: header.block_bytes,
        parts: header.parts,
        epoch: header.epoch.epoch,
        patience: Duration::ZERO,
        keys,
    }
}
