//! The index of a tier that outlives its process: a file that says which block lies in which slot.
//!
//! A tier's slots hold bytes and nothing else. What they mean is in this file, one format for slot
//! files on disk and for a host tier on tmpfs; docs/disk-format.md describes it byte by byte.
//! Changes are appended, each with its own checksum; when most of what is there is out of date, the
//! file is written anew.
//!
//! Nothing that a file says is believed for itself: an entry has the checksum of its block, so a
//! slot that was written since, or never, is found out when it is read. So entries may be lost or
//! late. One thing may not: the epoch, since the names of past epochs would mean blocks of past
//! weights. It lies in the header, which is there twice, and another epoch is another file.
//!
//! | module | holds |
//! |---|---|
//! | `format` | the bytes |
//! | `file` | a file of ours: found or made, locked, written anew and put in the old one's place |
//! | `kept` | an index and its slots, looked at while no process works with them |

mod file;
mod format;
mod kept;
#[cfg(test)]
mod tests;

use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use self::file::{FileDraft, IndexScan};
use self::format::{ENTRIES_AT, ENTRY_BYTES, IndexHeader, MAX_NAMESPACE, mac_key};
use crate::copy::{SlotId, Tier};
use crate::error::SetupError;
use crate::files::{LockWait, LockedFile, OwnDirectory, is_at, lock, open_ours};
use crate::sealed::KeyRing;

#[cfg(any(test, feature = "testing"))]
pub use self::format::read_in_every_way;
pub use self::format::{IndexChange, IndexEntry};
pub use self::kept::KeptIndex;

/// Which file, and of what.
#[derive(Clone, Debug)]
pub struct IndexOptions {
    /// Where it lies. Beside it, with `.partial` behind its name, the file lies that will take its
    /// place.
    pub path: PathBuf,
    /// Of which tier it tells.
    pub tier: Tier,
    /// Names all that the bytes of the blocks depend on, in at most 200 bytes, as the names of slot
    /// files do.
    pub namespace: String,
    /// The same in 128 bits, so that two namespaces of one name by chance are told apart.
    pub identity: u128,
    /// Slots that it tells of, numbered from 0.
    pub slots: u32,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// How many indices the tier has.
    pub parts: u32,
    /// The epoch that a new file begins with.
    pub epoch: u64,
    /// How long a start waits for the file where it is in use: a killed process may not quite be
    /// gone.
    pub patience: Duration,
    /// What authenticates it, where blocks are encrypted: without these keys no one can forge it.
    pub keys: Option<Arc<KeyRing>>,
}

impl IndexOptions {
    fn site(&self) -> OwnDirectory {
        let settings =
            if self.tier == Tier::Host { &crate::dram::SETTINGS } else { &crate::disk::SETTINGS };
        OwnDirectory::new(&self.path, settings)
    }
}

/// What the names of a tier's blocks depend on. The later one is the greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TierEpoch {
    /// The epoch.
    pub epoch: u64,
    /// How often everything was forgotten in it.
    pub forgotten: u64,
}

/// What an index told when it was opened.
#[derive(Debug)]
pub struct Recovered {
    /// What lies in the slots, in the order in which it was stored. At most one for each slot; a
    /// block may be in two.
    pub entries: Vec<IndexEntry>,
    /// What the names of the blocks depend on.
    pub epoch: TierEpoch,
    /// Entries that had changed, and were skipped.
    pub damaged: u64,
    /// Bytes at the end that are no whole entry: a process was killed while it wrote. They are cut
    /// off.
    pub torn: u64,
}

/// The open index of a tier, or of one of its files. Locked: no other process has it.
#[derive(Debug)]
pub struct TierIndex {
    options: IndexOptions,
    file: LockedFile,
    header: IndexHeader,
    /// Entries in the file.
    len: u64,
    residents: SlotEntries,
    /// Entries that must be there before the file is written anew: after a failure, more.
    compact_from: u64,
}

/// A file with fewer out-of-date entries than this is left as it is: 1 MiB of them.
const SPARE: u64 = 16 << 10;
/// Entries written or read at once.
const STEP: usize = 4_096;

impl TierIndex {
    /// Opens the index, or makes one, and tells what it says. What is damaged is skipped, and the
    /// file put right.
    ///
    /// # Errors
    /// `Invalid`: what lies there is no index, is one of another version or of other slots, or its
    /// header is damaged twice; nothing is changed then, and the message says what to do. `InUse`:
    /// another process, or another index of this one, has it open. `NotWritable`: it is not a file
    /// of this user's that is closed to all others. `NoSpace`, `Io`: the medium.
    pub fn open(options: &IndexOptions) -> Result<(Self, Recovered), SetupError> {
        check(options)?;
        let (site, mut patience) = (options.site(), LockWait::new(options.patience));
        loop {
            match open_ours(&site)? {
                Some(file) => {
                    lock(&file, &site, &mut patience)?;
                    if is_at(&file, &site)? {
                        return Self::recover(options, LockedFile::of(file));
                    }
                }
                None => {
                    if let Some(index) = Self::make(options, &mut patience)? {
                        let epoch = TierEpoch { epoch: options.epoch, forgotten: 0 };
                        return Ok((
                            index,
                            Recovered { entries: Vec::new(), epoch, damaged: 0, torn: 0 },
                        ));
                    }
                }
            }
        }
    }

    /// `None`: another process made it meanwhile.
    fn make(options: &IndexOptions, patience: &mut LockWait) -> Result<Option<Self>, SetupError> {
        let header = header(options, TierEpoch { epoch: options.epoch, forgotten: 0 });
        let draft = FileDraft::begin(&options.site(), header, patience)?;
        // The process that makes the file has the partial one locked until it has its name.
        if options.path.symlink_metadata().is_ok() {
            return Ok(None);
        }
        let new = draft.put_in_place().map_err(|error| options.site().failed(&error))?;
        Ok(Some(Self::over(options.clone(), new)))
    }

    fn over(options: IndexOptions, new: file::PlacedFile) -> Self {
        let file::PlacedFile { file, header, len, residents, .. } = new;
        Self { options, file, header, len, residents, compact_from: 0 }
    }

    fn recover(options: &IndexOptions, file: LockedFile) -> Result<(Self, Recovered), SetupError> {
        let (mut index, mut found, is_whole) = Self::read(options, file)?;
        if found.torn > 0 {
            let end = ENTRIES_AT + index.len * ENTRY_BYTES as u64;
            index.file.set_len(end).map_err(|error| options.site().failed(&error))?;
        }
        let is_under_old_key = index.header.key != header(options, index.epoch()).key;
        if (index.header.slots, index.header.parts) != (options.slots, options.parts) {
            found.entries.retain(|entry| entry.slot.0 < options.slots);
            index.resize().map_err(|error| options.site().failed(&error))?;
        } else if found.damaged > 0 || !is_whole || is_under_old_key || index.is_mostly_dead() {
            index.compact_or_later();
        }
        Ok((index, found))
    }

    /// Changes nothing. Tells as well whether both copies of the header are sound.
    fn read(
        options: &IndexOptions,
        file: LockedFile,
    ) -> Result<(Self, Recovered, bool), SetupError> {
        let failed = |error: &io::Error| options.site().failed(error);
        let (header, is_whole) = file::header(&file, &options.site(), options.keys.as_deref())?;
        check_header(options, &header)?;
        let scan = IndexScan::of(&file, &header).map_err(|error| failed(&error))?;
        let IndexScan { len, residents, live: entries, damaged, torn } = scan;
        let options = options.clone();
        let index = Self { options, file, header, len, residents, compact_from: 0 };
        let epoch = index.epoch();
        Ok((index, Recovered { entries, epoch, damaged, torn }, is_whole))
    }

    /// Adds changes, in their order. When it returns, they survive the end of this process, but not
    /// of the machine.
    ///
    /// # Errors
    /// None of them counts as added, and the next call writes in their place.
    pub fn append(&mut self, changes: &[IndexChange]) -> io::Result<()> {
        for changes in changes.chunks(STEP) {
            self.append_some(changes)?;
        }
        if self.is_mostly_dead() && self.len >= self.compact_from {
            self.compact_or_later();
        }
        Ok(())
    }

    fn append_some(&mut self, changes: &[IndexChange]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(changes.len() * ENTRY_BYTES);
        for (change, position) in changes.iter().zip(self.len..) {
            bytes.extend(change.encode(&self.header, position));
        }
        self.file.write_all_at(&bytes, ENTRIES_AT + self.len * ENTRY_BYTES as u64)?;
        for (change, position) in changes.iter().zip(self.len..) {
            self.residents.note(change, position);
        }
        self.len += changes.len() as u64;
        Ok(())
    }

    /// Begins another epoch, or forgets everything within it: no block that is there now will be
    /// recovered. On the medium when it returns.
    ///
    /// # Errors
    /// It may not be on the medium.
    pub fn set_epoch(&mut self, epoch: TierEpoch) -> io::Result<()> {
        let header = header(&self.options, epoch);
        let draft = self.draft(header)?;
        self.replace(draft)
    }

    /// Waits until all that was added is on the medium.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// The present epoch.
    pub const fn epoch(&self) -> TierEpoch {
        self.header.epoch
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.options.path
    }

    /// Slots of the tier, with or without a block.
    pub const fn slots(&self) -> u32 {
        self.options.slots
    }

    /// Slots with a block.
    pub const fn blocks(&self) -> u32 {
        self.residents.live
    }

    fn is_mostly_dead(&self) -> bool {
        self.len > 2 * u64::from(self.residents.live) + SPARE
    }

    /// Out-of-date entries are no harm but the room that they take: there is always a later time.
    fn compact_or_later(&mut self) {
        if let Err(error) = self.compact() {
            tracing::warn!(%error, path = %self.options.path.display(), "could not write an index anew");
            self.compact_from = self.len + SPARE;
        }
    }

    fn compact(&mut self) -> io::Result<()> {
        let header = header(&self.options, self.epoch());
        let slots = header.slots;
        let mut draft = self.draft(header)?;
        self.each_live(|entry| {
            if entry.slot.0 < slots {
                draft.add(&IndexChange::Stored(entry));
            }
        })?;
        self.replace(draft)
    }

    /// The file is to tell of as many slots as the options say.
    fn resize(&mut self) -> io::Result<()> {
        let IndexHeader { slots, parts, .. } = self.header;
        let (path, options) = (self.options.path.display(), &self.options);
        tracing::info!(%path, slots, parts, now = options.slots, parts_now = options.parts, "a tier has another size");
        self.compact()
    }

    fn draft(&self, header: IndexHeader) -> io::Result<FileDraft> {
        let mut now = LockWait::new(Duration::ZERO);
        FileDraft::begin(&self.options.site(), header, &mut now).map_err(io::Error::other)
    }

    fn replace(&mut self, draft: FileDraft) -> io::Result<()> {
        let mut new = draft.put_in_place()?;
        let synced = std::mem::replace(&mut new.synced, Ok(()));
        *self = Self::over(self.options.clone(), new);
        synced
    }

    /// What is up to date, in the order of storing.
    fn each_live(&self, mut each: impl FnMut(IndexEntry)) -> io::Result<()> {
        file::each_entry(&self.file, &self.header, self.len, |position, change| {
            if let Some(IndexChange::Stored(entry)) = change
                && self.residents.is_latest(entry.slot, position)
            {
                each(entry);
            }
        })
    }
}

/// Which entry tells of each slot. Four bytes a slot, as far as they are used.
#[derive(Debug, Default)]
struct SlotEntries {
    latest: Vec<u32>,
    live: u32,
}

const NONE: u32 = u32::MAX;

impl SlotEntries {
    fn note(&mut self, change: &IndexChange, position: u64) {
        let slot = change.slot().0 as usize;
        if slot >= self.latest.len() {
            self.latest.resize(slot + 1, NONE);
        }
        let is_stored = matches!(change, IndexChange::Stored(_));
        // A file has fewer: it is written anew before.
        let latest = if is_stored { position as u32 } else { NONE };
        let before = std::mem::replace(&mut self.latest[slot], latest);
        self.live = self.live + u32::from(is_stored) - u32::from(before != NONE);
    }

    fn is_latest(&self, slot: SlotId, position: u64) -> bool {
        self.latest.get(slot.0 as usize).is_some_and(|&latest| u64::from(latest) == position)
    }
}

fn header(options: &IndexOptions, epoch: TierEpoch) -> IndexHeader {
    IndexHeader {
        file: fastrand::u64(..),
        epoch,
        block_bytes: options.block_bytes,
        identity: options.identity,
        slots: options.slots,
        parts: options.parts,
        tier: options.tier,
        namespace: options.namespace.clone(),
        key: options.keys.as_deref().and_then(|ring| mac_key(ring, ring.current())),
    }
}

fn check(options: &IndexOptions) -> Result<(), SetupError> {
    let length = options.namespace.len();
    if length <= MAX_NAMESPACE {
        return Ok(());
    }
    let message = format!("the name of a namespace has {length} bytes: {MAX_NAMESPACE} at most");
    Err(SetupError::invalid(message))
}

/// Slots with another meaning must not be reinterpreted, nor their entries overwritten. A disk tier
/// may have another size than before: its slots that are there still mean what they did.
fn check_header(options: &IndexOptions, found: &IndexHeader) -> Result<(), SetupError> {
    let wanted = header(options, TierEpoch::default());
    let of = |header: &IndexHeader| {
        let IndexHeader { namespace, identity, tier, block_bytes, key, .. } = header;
        let who = if key.is_some() { "authenticated, " } else { "" };
        let slots = if *tier == Tier::Disk { String::new() } else { format!("{} ", header.slots) };
        format!(
            "{who}the {tier} tier of {slots}slots of {block_bytes} bytes, namespace {namespace} ({identity:032x})"
        )
    };
    if of(found) == of(&wanted) {
        return Ok(());
    }
    let message = format!(
        "{} is the index of {}, and here it would be that of {}: restore the settings that it was made with, or \
         remove it with the slot files beside it",
        options.path.display(),
        of(found),
        of(&wanted)
    );
    Err(SetupError::invalid(message))
}
