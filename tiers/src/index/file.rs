//! The files of an index: a new one lies beside the old one until it is complete.

use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::disk::failure::failed;
use crate::disk::files::{create_locked, partial, unlink};
use crate::disk::lock::Patience;
use crate::error::SetupError;
use crate::fork::Maker;

use super::format::{ENTRIES_AT, ENTRY_BYTES, Header, IndexChange};
use super::{Residents, STEP};

pub(super) fn failed_at(path: &Path, error: &io::Error) -> SetupError {
    failed(path, error)
}

/// A locked file, unlocked when this process drops it: a child that it forked has the same lock, and may live longer.
#[derive(Debug)]
pub(super) struct IndexFile {
    file: File,
    maker: Maker,
}

impl IndexFile {
    pub(super) fn locked(file: File) -> Self {
        Self { file, maker: Maker::this_process() }
    }
}

impl Deref for IndexFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for IndexFile {
    fn drop(&mut self) {
        if self.maker.is_this_process()
            && let Err(error) = self.file.unlock()
        {
            tracing::debug!(%error, "could not unlock an index");
        }
    }
}

/// A file on its way to take another one's place.
pub(super) struct Draft {
    path: PathBuf,
    file: Option<IndexFile>,
    header: Header,
    buffer: Vec<u8>,
    len: u64,
    residents: Residents,
    /// The first thing that went wrong: the file is not used then.
    failure: Option<io::Error>,
}

/// A file in its place.
pub(super) struct Placed {
    pub(super) file: IndexFile,
    pub(super) header: Header,
    pub(super) len: u64,
    pub(super) residents: Residents,
    /// Whether its name is on the medium.
    pub(super) synced: io::Result<()>,
}

impl Draft {
    pub(super) fn begin(path: &Path, header: Header, patience: &mut Patience) -> Result<Self, SetupError> {
        let file = IndexFile::locked(create_locked(&partial(path), patience)?);
        let (residents, buffer) = (Residents::default(), header.encode().repeat(2));
        let path = path.to_owned();
        Ok(Self { path, file: Some(file), header, buffer, len: 0, residents, failure: None })
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
    pub(super) fn put_in_place(mut self) -> io::Result<Placed> {
        self.failure.take().map_or(Ok(()), Err)?;
        self.write()?;
        let file = self.file.take().ok_or_else(|| io::Error::other("a file is put in place once"))?;
        let placed = file.sync_all().and_then(|()| fs::rename(partial(&self.path), &self.path));
        if let Err(error) = placed {
            self.file = Some(file);
            return Err(error);
        }
        let synced = sync_dir(&self.path);
        let (header, residents) = (self.header.clone(), std::mem::take(&mut self.residents));
        Ok(Placed { file, header, len: self.len, residents, synced })
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.file.is_some() {
            unlink(&partial(&self.path));
        }
    }
}

fn sync_dir(path: &Path) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}
