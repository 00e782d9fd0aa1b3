//! The files of an index: a new one lies beside the old one until it is complete.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;

use crate::error::SetupError;
use crate::files::{LockWait, LockedFile, OwnDirectory, create_locked, partial, sync_dir, unlink};

use super::format::{ENTRIES_AT, ENTRY_BYTES, IndexChange, IndexHeader};
use super::{STEP, SlotEntries};

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
