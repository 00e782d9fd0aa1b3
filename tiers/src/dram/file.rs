//! Memory in a file: found or made, mapped over a range of addresses.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memmap2::{Advice, MmapMut, MmapRaw};
use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::mount::{Mount, MountKind};
use super::pages::{HUGE_PAGE, PageKind, available_memory, prefault};
use super::{DramOptions, PersistOptions, SETTINGS, reserve};
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{
    KeptFile, LockWait, LockedFile, OwnDirectory, check_size, check_space, checked_namespace,
    make_dir, open_kept, remove_abandoned,
};
use crate::geometry::Geometry;

/// A file that slots lie in; locked. All its pages are there, so that a lack of memory for them
/// does not show later, as a SIGBUS.
#[derive(Debug)]
pub(super) struct MemoryFile {
    path: PathBuf,
    file: LockedFile,
    bytes: usize,
    mount: Mount,
    was_there: bool,
}

impl MemoryFile {
    pub(super) fn open(
        place: &PersistOptions,
        options: DramOptions,
        patience: Duration,
    ) -> Result<Self, SetupError> {
        let geometry = Geometry::new(place.slots, options.geometry.block_bytes())?;
        let mount = Mount::of(&place.dir)?;
        make_dir(&place.dir, &SETTINGS)?;
        remove_abandoned(&place.dir, &SETTINGS);
        let namespace = checked_namespace(&place.namespace)?;
        let site = OwnDirectory::new(place.dir.join(format!("kvbm-{namespace}.memory")), &SETTINGS);
        let page_bytes = mount.page_bytes;
        let bytes = geometry.bytes().checked_next_multiple_of(page_bytes).unwrap_or(usize::MAX);
        let making = FileMaking { site: &site, bytes, page_bytes, options };
        let mut patience = LockWait::new(patience);
        let KeptFile { file, was_there } =
            open_kept(&site, &mut patience, |file| making.fill(file))?;
        if was_there {
            making.check(file.file())?;
        }
        Ok(Self { path: site.path, file, bytes, mount, was_there })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) const fn file(&self) -> &File {
        self.file.file()
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) const fn page_bytes(&self) -> usize {
        self.mount.page_bytes
    }

    /// Its mount may give it pages that are larger.
    pub(super) const fn may_be_huge(&self) -> bool {
        !matches!(self.mount.kind, MountKind::Tmpfs { huge_pages: false })
    }

    pub(super) const fn was_there(&self) -> bool {
        self.was_there
    }

    /// Takes the place of the private memory from `base` on, where nothing has used it yet.
    pub(super) fn map_over(
        &self,
        map: &mut MmapMut,
        base: usize,
        huge_pages: bool,
    ) -> Result<(), SetupError> {
        map_over(map, base, self.file(), self.bytes, huge_pages)
            .map_err(|error| OwnDirectory::new(&self.path, &SETTINGS).failed(&error))
    }
}

/// What a new file is to be.
struct FileMaking<'a> {
    site: &'a OwnDirectory,
    bytes: usize,
    page_bytes: usize,
    options: DramOptions,
}

impl FileMaking<'_> {
    /// All its pages, zeroed by several threads. Reserving them is not enough: on a mount that
    /// gives huge pages where they are asked for, only a mapping asks.
    fn fill(&self, file: &File) -> Result<(), SetupError> {
        self.check_memory(file)?;
        file.set_len(self.bytes as u64).map_err(|error| self.site.failed(&error))?;
        match self.touch(file) {
            // Before Linux 5.14 the advice is unknown: the pages are reserved, small ones, and
            // zeroed when they are mapped.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            Err(error) => {
                return Err(self
                    .site
                    .no_space(&format!("{} MiB wanted: {error}", self.bytes >> 20)));
            }
            Ok(()) => {}
        }
        self.reserve(file)
    }

    fn check_memory(&self, file: &File) -> Result<(), SetupError> {
        check_space(self.site, file, self.bytes as u64)?;
        // Huge pages that are set apart are not counted as available.
        let is_tmpfs = self.page_bytes < HUGE_PAGE;
        match available_memory().filter(|&available| is_tmpfs && self.bytes as u64 > available) {
            None => Ok(()),
            Some(available) => {
                let why = format!(
                    "{} MiB wanted, the system has {} MiB",
                    self.bytes >> 20,
                    available >> 20
                );
                Err(self.site.no_space(&why))
            }
        }
    }

    fn touch(&self, file: &File) -> io::Result<()> {
        let DramOptions { huge_pages, fault_threads, .. } = self.options;
        let alignment = self.page_bytes.max(HUGE_PAGE);
        let (mut map, base) = reserve(self.bytes, alignment, false).map_err(io::Error::other)?;
        map_over(&mut map, base, file, self.bytes, huge_pages)?;
        prefault(&MmapRaw::from(map), base, self.bytes, fault_threads, PageKind::New)
    }

    /// Does nothing to pages that are there.
    fn reserve(&self, file: &File) -> Result<(), SetupError> {
        let reserved = rustix::fs::fallocate(file, FallocateFlags::empty(), 0, self.bytes as u64);
        reserved.map_err(|error| self.site.failed(&error.into()))
    }

    /// A file that was there must be of the size that it would be given, with all its pages.
    fn check(&self, file: &File) -> Result<(), SetupError> {
        check_size(self.site, file, self.bytes as u64)?;
        let found = file.metadata().map_err(|error| self.site.failed(&error))?;
        if found.blocks().saturating_mul(512) >= self.bytes as u64 {
            return Ok(());
        }
        let what = "lacks pages that it had: somebody has cut holes into it; remove the file";
        Err(self.site.error(SetupErrorKind::Invalid, what))
    }
}

/// Maps a file over private memory that nothing uses.
fn map_over(
    map: &mut MmapMut,
    base: usize,
    file: &File,
    bytes: usize,
    huge_pages: bool,
) -> io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let start = map[base..base + bytes].as_mut_ptr().cast();
    // SAFETY: the range lies within a mapping that is borrowed mutably, and no reference into it is
    // left.
    unsafe { mmap(start, bytes, access, MapFlags::SHARED | MapFlags::FIXED, file, 0)? };
    // Hugetlbfs needs no advice and takes none.
    if huge_pages && let Err(error) = map.advise_range(Advice::HugePage, base, bytes) {
        tracing::debug!(%error, "no huge pages in a file");
    }
    Ok(())
}
