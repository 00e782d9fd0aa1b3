//! The files of an index: what of one is sound, and a new one, which lies beside the old one until
//! it is complete.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::format::{
    ENTRIES_AT, ENTRY_BYTES, HEADER_BYTES, IndexChange, IndexEntry, IndexHeader, NoHeader,
    SEALED_VERSION, VERSION,
};
use super::{SPARE, STEP, SlotEntries};
use crate::error::SetupError;
use crate::files::{LockWait, LockedFile, OwnDirectory, create_locked, partial, sync_dir, unlink};
use crate::sealed::KeyRing;

/// A file on its way to take another one's place.
pub(super) struct FileDraft {
    site: OwnDirectory,
    file: Option<LockedFile>,
    header: IndexHeader,
    buffer: Vec<u8>,
    len: u64,
    residents: SlotEntries,
    /// The first thing that went wrong: the file is not used then.
    failure: Option<io::Error>,
}

/// A file in its place.
pub(super) struct PlacedFile {
    pub(super) file: LockedFile,
    pub(super) header: IndexHeader,
    pub(super) len: u64,
    pub(super) residents: SlotEntries,
    /// Whether its name is on the medium.
    pub(super) synced: io::Result<()>,
}

impl FileDraft {
    pub(super) fn begin(
        site: &OwnDirectory,
        header: IndexHeader,
        patience: &mut LockWait,
    ) -> Result<Self, SetupError> {
        let file = LockedFile::of(create_locked(&partial(site), patience)?);
        let (residents, buffer) = (SlotEntries::default(), header.encode().repeat(2));
        let site = site.clone();
        Ok(Self { site, file: Some(file), header, buffer, len: 0, residents, failure: None })
    }

    pub(super) fn add(&mut self, change: &IndexChange) {
        self.buffer.extend(change.encode(&self.header, self.len));
        self.residents.note(change, self.len);
        self.len += 1;
        if self.buffer.len() >= STEP * ENTRY_BYTES && self.failure.is_none() {
            self.failure = self.write().err();
        }
    }

    fn write(&mut self) -> io::Result<()> {
        let end = ENTRIES_AT + self.len * ENTRY_BYTES as u64;
        let Some(file) = &self.file else { return Ok(()) };
        file.write_all_at(&self.buffer, end - self.buffer.len() as u64)?;
        self.buffer.clear();
        Ok(())
    }

    /// Gives the file its name once all of it is on the medium.
    pub(super) fn put_in_place(mut self) -> io::Result<PlacedFile> {
        self.failure.take().map_or(Ok(()), Err)?;
        self.write()?;
        let file =
            self.file.take().ok_or_else(|| io::Error::other("a file is put in place once"))?;
        let placed =
            file.sync_all().and_then(|()| fs::rename(partial(&self.site).path, &self.site.path));
        if let Err(error) = placed {
            self.file = Some(file);
            return Err(error);
        }
        let synced = sync_dir(&self.site.path);
        let (header, residents) = (self.header.clone(), std::mem::take(&mut self.residents));
        Ok(PlacedFile { file, header, len: self.len, residents, synced })
    }
}

impl Drop for FileDraft {
    fn drop(&mut self) {
        if self.file.is_some() {
            unlink(&partial(&self.site).path);
        }
    }
}

/// What a look at all entries found.
pub(super) struct IndexScan {
    /// Entries up to the last sound one, that one included.
    pub(super) len: u64,
    pub(super) residents: SlotEntries,
    /// What is up to date, in the order of storing.
    pub(super) live: Vec<IndexEntry>,
    pub(super) damaged: u64,
    /// Bytes behind the last sound entry.
    pub(super) torn: u64,
}

impl IndexScan {
    pub(super) fn of(file: &File, header: &IndexHeader) -> io::Result<Self> {
        let bytes = file.metadata()?.len().saturating_sub(ENTRIES_AT);
        let (mut residents, mut len, mut sound) = (SlotEntries::default(), 0, 0);
        let entries = (bytes / ENTRY_BYTES as u64).min(u64::from(header.slots));
        let mut stored = StoredEntry(Vec::with_capacity(entries as usize));
        each_entry(file, header, bytes / ENTRY_BYTES as u64, |position, change| {
            if let Some(change) = change {
                residents.note(&change, position);
                stored.add(change, position, &residents);
                len = position + 1;
                sound += 1;
            }
        })?;
        let live = stored.live(&residents);
        Ok(Self {
            len,
            residents,
            live,
            damaged: len - sound,
            torn: bytes - len * ENTRY_BYTES as u64,
        })
    }
}

/// What was stored so far. Entries are taken to pieces once: that is most of what opening an index
/// takes.
struct StoredEntry(Vec<(u64, IndexEntry)>);

impl StoredEntry {
    fn add(&mut self, change: IndexChange, position: u64, residents: &SlotEntries) {
        let IndexChange::Stored(entry) = change else { return };
        // However long the file, memory is in proportion to what is up to date in it.
        if self.0.len() as u64 > 2 * u64::from(residents.live) + SPARE {
            self.0.retain(|(position, entry)| residents.is_latest(entry.slot, *position));
        }
        self.0.push((position, entry));
    }

    fn live(self, residents: &SlotEntries) -> Vec<IndexEntry> {
        let is_latest =
            |(position, entry): &(u64, IndexEntry)| residents.is_latest(entry.slot, *position);
        self.0.into_iter().filter(is_latest).map(|(_, entry)| entry).collect()
    }
}

/// Shows the first `len` entries in turn; `None`: it is not what was written there.
pub(super) fn each_entry(
    file: &File,
    header: &IndexHeader,
    len: u64,
    mut each: impl FnMut(u64, Option<IndexChange>),
) -> io::Result<()> {
    let mut bytes = vec![0; STEP * ENTRY_BYTES];
    let mut position = 0;
    while position < len {
        let entries = (len - position).min(STEP as u64) as usize;
        let step = &mut bytes[..entries * ENTRY_BYTES];
        file.read_exact_at(step, ENTRIES_AT + position * ENTRY_BYTES as u64)?;
        for entry in step.as_chunks::<ENTRY_BYTES>().0 {
            each(position, IndexChange::decode(entry, header, position));
            position += 1;
        }
    }
    Ok(())
}

/// The header, and whether both copies of it are sound.
pub(super) fn header(
    file: &File,
    site: &OwnDirectory,
    ring: Option<&KeyRing>,
) -> Result<(IndexHeader, bool), SetupError> {
    let copies = [copy(file, 0, ring), copy(file, HEADER_BYTES as u64, ring)];
    match copies.map(|copy| copy.map_err(|error| site.failed(&error))) {
        [Err(error), _] | [_, Err(error)] => Err(error),
        [Ok(Ok(one)), Ok(Ok(other))] => Ok((one.clone(), one == other)),
        [Ok(Ok(one)), Ok(Err(_))] | [Ok(Err(_)), Ok(Ok(one))] => Ok((one, false)),
        [Ok(Err(one)), Ok(Err(other))] => Err(no_header(&site.path, one, other)),
    }
}

fn copy(file: &File, at: u64, ring: Option<&KeyRing>) -> io::Result<Result<IndexHeader, NoHeader>> {
    let mut bytes = [0; HEADER_BYTES];
    match file.read_exact_at(&mut bytes, at) {
        Ok(()) => Ok(IndexHeader::decode(&bytes, ring)),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(Err(NoHeader::Foreign)),
        Err(error) => Err(error),
    }
}

fn no_header(path: &Path, one: NoHeader, other: NoHeader) -> SetupError {
    let path = path.display();
    let message = match (one, other) {
        (NoHeader::Version(version), NoHeader::Version(same)) if version == same => format!(
            "{path} is an index of version {version}, and this program reads versions {VERSION} and \
             {SEALED_VERSION}: open it with the \
             program that wrote it, or remove it to start cold"
        ),
        (NoHeader::NoKey(number), _) | (_, NoHeader::NoKey(number)) => format!(
            "{path} is authenticated with main key {number}, which is not given: add it behind the others in \
             encryption.key_file (DYN_KVBM_ENCRYPTION_KEY_FILE), or remove the index to start cold"
        ),
        (NoHeader::Foreign, NoHeader::Foreign) => {
            format!(
                "{path} is not an index of blocks: move it elsewhere, or choose another directory"
            )
        }
        _ => format!(
            "{path}: both copies of the index's header are damaged, or made without its key. Remove it to start cold; if the weights were \
             exchanged since the fingerprint's epoch (Manager::reset), give the fingerprint a greater epoch as well"
        ),
    };
    SetupError::invalid(message)
}
