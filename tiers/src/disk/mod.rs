//! The disk tier: slot files on local drives.
//!
//! # Format
//! A region is striped over `n` files of equal size, one in each directory. With stride `s` (the block's
//! bytes rounded up to 4096), slot `i` is the bytes `[i / n * s, i / n * s + s)` of file `i % n`; the
//! block comes first, the rest of the stride means nothing. Files hold slots and nothing else, no header: what
//! lies in a slot, and its checksum, is known to its [index](crate::index), which lies beside it.
//!
//! A kept file is called `kvbm-<namespace>-<f>of<n>.blocks`, where the namespace is the caller's (it commits to
//! everything that the bytes depend on) and `f` counts from 0, so that directories given in another order
//! are not mistaken for these. Until it has its full size it is called `….blocks.partial`: what a killed process
//! leaves under such a name, the next one that opens a file in the directory removes. A file that is not kept has no
//! name (`O_TMPFILE`), or where the file system cannot do that is called `kvbm-<pid>-<k>-<f>of<n>.blocks.partial`
//! and loses its name as soon as it is open: its space returns to the file system with the process, however that
//! ends.
//!
//! Files are readable by their owner only (mode 0600), and kept ones locked as long as they are open. A kept file
//! that is found is used only if it is a regular file of this user's with mode 0600 and no other name: in a directory
//! that others may write, somebody could else have made it first, and read or change what is written to it.

mod files;
mod queue;
pub(crate) mod ring;
mod threads;
mod transfer;
mod uring;
mod wake;

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use crate::copy::SlotId;
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{Patience, SettingNames};
use crate::geometry::Geometry;

use files::{SlotFile, SlotFileOptions};
pub use threads::ThreadsBackend;
pub use uring::UringBackend;

/// What to change when a slot file cannot be had.
pub(crate) static SETTINGS: SettingNames = SettingNames {
    tier: "the disk tier",
    dir: "disk.dirs (DYN_KVBM_DISK_CACHE_DIR)",
    capacity: "disk.capacity",
    space: "lower disk.capacity (DYN_KVBM_DISK_CACHE_GB) or choose another disk.dirs (DYN_KVBM_DISK_CACHE_DIR)",
};

/// Slots in preallocated files, one per directory.
#[derive(Debug)]
pub struct DiskRegion {
    geometry: Geometry,
    files: Vec<SlotFile>,
    file_bytes: u64,
    direct: bool,
}

/// Where and how slot files are made.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Size and number of the slots, all files together.
    pub geometry: Geometry,
    /// One file in each; the last component is created if it is missing.
    pub dirs: Vec<PathBuf>,
    /// Bypass the page cache where the file system can.
    pub o_direct: bool,
    /// Write zeroes where the file system cannot `fallocate`.
    pub zerofill_fallback: bool,
    /// `Some(namespace)`: leave the files in place, and use those that an earlier process left.
    pub keep: Option<String>,
}

impl DiskOptions {
    /// Where the [index](crate::TierIndex) of slot file number `file` belongs, if the files are kept: beside it.
    pub fn index_path(&self, file: usize) -> Option<PathBuf> {
        let name = files::names(Some(self.keep.as_deref()?), self.dirs.len()).ok()?.nth(file)?;
        Some(self.dirs.get(file)?.join(name).with_extension("index"))
    }
}

impl DiskRegion {
    /// Makes or reopens the files. Waits up to 15 s for a kept file that is in use: the kernel lets go of the files of
    /// a killed process's ring a second or so after its end.
    ///
    /// # Errors
    /// `NotWritable`: a directory; or what lies at a kept file's place is not a file of this user's that is closed
    /// to all others. `NoSpace`: the file system lacks the space. `InUse`: another process has a kept file open.
    /// `Invalid`: no directory, a namespace that is no file name, or a kept file of another size. `Unavailable`: no
    /// `fallocate`, and writing zeroes was not allowed; or the limit on open files is reached. `Io`: the medium
    /// failed.
    pub fn open(options: &DiskOptions) -> Result<Self, SetupError> {
        Self::open_within(options, Patience::FOR_A_DEAD_RING)
    }

    fn open_within(options: &DiskOptions, patience: Duration) -> Result<Self, SetupError> {
        if options.dirs.is_empty() {
            let message = "no directory for the disk tier; set disk.dirs (DYN_KVBM_DISK_CACHE_DIR)";
            return Err(SetupError::new(SetupErrorKind::Invalid, message));
        }
        let geometry = options.geometry;
        let slots_per_file = (geometry.slots() as usize).div_ceil(options.dirs.len());
        let names = files::names(options.keep.as_deref(), options.dirs.len())?;
        let file_bytes = (slots_per_file * geometry.stride()) as u64;
        let shape = SlotFileOptions {
            bytes: file_bytes,
            o_direct: options.o_direct,
            zerofill_fallback: options.zerofill_fallback,
            keep: options.keep.is_some(),
        };
        let mut patience = Patience::new(patience);
        let open = |(dir, name): (&PathBuf, String)| SlotFile::open(dir, &name, shape, &mut patience);
        let files: Vec<_> = options.dirs.iter().zip(names).map(open).collect::<Result<_, _>>()?;
        let direct = files.iter().all(SlotFile::is_direct);
        if options.o_direct && !direct {
            tracing::warn!(dirs = ?options.dirs, "no O_DIRECT here: the disk tier goes through the page cache");
        }
        Ok(Self { geometry, files, file_bytes, direct })
    }

    /// Files that a test made, whatever they are.
    #[cfg(test)]
    fn of_files(geometry: Geometry, files: Vec<File>) -> Self {
        let files = files.into_iter().map(SlotFile::of).collect();
        Self { geometry, files, file_bytes: 0, direct: false }
    }

    /// How it is cut.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether every file bypasses the page cache.
    pub const fn is_direct(&self) -> bool {
        self.direct
    }

    /// Size of each slot file.
    pub const fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The slot files, in striping order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &File> {
        self.files.iter().map(SlotFile::file)
    }

    pub(crate) fn file(&self, index: usize) -> &File {
        self.files[index].file()
    }

    /// Where a slot is: index of its file and offset in bytes there; `None`: there is no such slot.
    pub fn place(&self, slot: SlotId) -> Option<(usize, u64)> {
        self.geometry.offset(slot)?;
        let (row, file) = (slot.0 as usize / self.files.len(), slot.0 as usize % self.files.len());
        Some((file, (row * self.geometry.stride()) as u64))
    }
}

#[cfg(test)]
mod tests;
