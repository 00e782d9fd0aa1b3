//! The disk tier: slot files on local drives.
//!
//! # Format
//! A region has `n` files of equal size, one in each directory. With stride `s` (the block's bytes
//! rounded up to 4096), slot `i` is the bytes `[i / n * s, i / n * s + s)` of file `i % n`; the
//! block comes first, the rest of the stride means nothing. Files hold slots and nothing else, no
//! header: what lies in a slot, and its checksum, is known to its [index](crate::index), which lies
//! beside it.
//!
//! Each directory stands for itself: its file and its index number their slots from 0, so that
//! directories may be added, removed and given in another order, and the others keep what they
//! have. One that cannot be opened is left out, as long as there is another; its slots [are not
//! there](DiskRegion::absent) then.
//!
//! A kept file is called `kvbm-<namespace>.blocks`, where the namespace is the caller's: it commits
//! to everything that the bytes depend on. Until it has its full size it is called
//! `….blocks.partial`: what a killed process leaves under such a name, the next one that opens a
//! file in the directory removes. A kept file of another size is given this one. A file that is not
//! kept has no name (`O_TMPFILE`), or where the file system cannot do that is called
//! `kvbm-<pid>-<k>.blocks.partial` and loses its name as soon as it is open: its space returns to
//! the file system with the process, however that ends.
//!
//! Files are readable by their owner only (mode 0600), and kept ones locked as long as they are
//! open. A kept file that is found is used only if it is a regular file of this user's with mode
//! 0600 and no other name: else, in a directory that others may write, another user could have made
//! it first, and read or change what is written to it.
//!
//! # Modules
//! | module | what |
//! |---|---|
//! | `files` | makes, finds, sizes and locks slot files |
//! | `transfer` | what a copy comes down to, what its result means, and which goes first |
//! | `backends` | the backend on io_uring, and the one where there is none: a pool of threads |
//! | `ring` | the ring that reads and writes |

mod backends;
mod files;
pub(crate) mod ring;
mod transfer;

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use crate::copy::SlotId;
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{LockWait, SettingNames};
use crate::geometry::Geometry;
use files::{SlotFile, SlotFileOptions};

pub use backends::{ThreadsBackend, UringBackend};
#[cfg(feature = "nixl")]
pub(crate) use transfer::check_fit;

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
    /// Of each directory.
    places: Vec<Option<usize>>,
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
    /// Where the [index](crate::TierIndex) of the slot file in a directory belongs, if the files
    /// are kept: beside it.
    pub fn index_path(&self, dir: usize) -> Option<PathBuf> {
        let name = files::name(Some(self.keep.as_deref()?)).ok()?;
        Some(self.dirs.get(dir)?.join(name).with_extension("index"))
    }

    /// Slots of each directory; with fewer by one in some.
    pub const fn slots_per_dir(&self) -> u32 {
        self.geometry.slots().div_ceil(self.dirs.len() as u32)
    }
}

impl DiskRegion {
    /// Makes or reopens the files. Waits up to 15 s for a kept file that is in use: the kernel lets
    /// go of the files of a killed process's ring a second or so after its end. A directory that
    /// cannot be used, or whose medium fails, is left out, unless all are so.
    ///
    /// # Errors
    /// `NotWritable`: all directories; or what lies at a kept file's place is not a file of this
    /// user's that is closed to all others. `NoSpace`: a file system lacks the space. `InUse`:
    /// another process has a kept file open. `Invalid`: no directory, or a namespace that is no
    /// file name. `Unavailable`: no `fallocate`, and writing zeroes was not allowed; or the limit
    /// on open files is reached. `Io`: the media failed.
    pub fn open(options: &DiskOptions) -> Result<Self, SetupError> {
        Self::open_within(options, LockWait::FOR_A_DEAD_RING)
    }

    fn open_within(options: &DiskOptions, patience: Duration) -> Result<Self, SetupError> {
        if options.dirs.is_empty() {
            let message = "no directory for the disk tier; set disk.dirs (DYN_KVBM_DISK_CACHE_DIR)";
            return Err(SetupError::invalid(message));
        }
        let geometry = options.geometry;
        let file_bytes = u64::from(options.slots_per_dir()) * geometry.stride() as u64;
        let shape = SlotFileOptions {
            bytes: file_bytes,
            o_direct: options.o_direct,
            zerofill_fallback: options.zerofill_fallback,
            keep: options.keep.is_some(),
        };
        let mut patience = LockWait::new(patience);
        let (mut files, mut places, mut failed) = (Vec::new(), Vec::new(), None);
        for dir in &options.dirs {
            let name = files::name(options.keep.as_deref())?;
            match SlotFile::open(dir, &name, shape, &mut patience) {
                Ok(file) => {
                    places.push(Some(files.len()));
                    files.push(file);
                }
                Err(error) if is_of_directory(&error) => {
                    places.push(None);
                    failed.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        match failed {
            Some(error) if files.is_empty() => return Err(error),
            Some(error) => tracing::error!(%error, "the disk tier does without a directory"),
            None => {}
        }
        let direct = files.iter().all(SlotFile::is_direct);
        if options.o_direct && !direct {
            tracing::warn!(dirs = ?options.dirs, "no O_DIRECT here: the disk tier goes through the page cache");
        }
        Ok(Self { geometry, files, places, file_bytes, direct })
    }

    /// Files that a test made, whatever they are.
    #[cfg(test)]
    fn of_files(geometry: Geometry, files: Vec<File>) -> Self {
        let places = (0..files.len()).map(Some).collect();
        let files = files.into_iter().map(SlotFile::of).collect();
        Self { geometry, files, places, file_bytes: 0, direct: false }
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

    /// The directories that could not be opened: slot `i` is that of directory `i` modulo their
    /// number.
    pub fn absent(&self) -> impl Iterator<Item = usize> {
        self.places.iter().enumerate().filter(|(_, place)| place.is_none()).map(|(dir, _)| dir)
    }

    /// The slot files that are open.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &File> {
        self.files.iter().map(SlotFile::file)
    }

    pub(crate) fn file(&self, index: usize) -> &File {
        self.files[index].file()
    }

    /// Where a slot is: index of its file and offset in bytes there; `None`: there is no such slot.
    pub fn place(&self, slot: SlotId) -> Option<(usize, u64)> {
        self.geometry.offset(slot)?;
        let (row, dir) = (slot.0 as usize / self.places.len(), slot.0 as usize % self.places.len());
        Some((self.places[dir]?, (row * self.geometry.stride()) as u64))
    }
}

/// Whether an error says that a directory, or the medium below it, cannot be used: others may.
pub fn is_of_directory(error: &SetupError) -> bool {
    matches!(error.kind(), SetupErrorKind::NotWritable | SetupErrorKind::Io)
}

#[cfg(test)]
mod tests;
