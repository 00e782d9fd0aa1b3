//! Memory in a file: what its directory offers, how it is found or made, and mapped over a range of
//! addresses.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memmap2::{MmapMut, MmapRaw};
use rustix::fs::FallocateFlags;

use super::mapping::{map_over, reserve};
use super::pages::{HUGE_PAGE, PageKind, available_memory, prefault};
use super::{DramOptions, PersistOptions, SETTINGS};
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

/// The file system that a directory lies on, if it is one in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Which.
    pub kind: MountKind,
    /// Bytes of the pages that files consist of for sure: 4096 on tmpfs, a huge page on hugetlbfs.
    pub page_bytes: usize,
    /// Bytes that it may have in all; `None`: it sets no limit of its own.
    pub limit: Option<u64>,
    /// Bytes of these that are free.
    pub free: u64,
}

/// A file system in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountKind {
    /// `/dev/shm`, a pod's volume of medium Memory.
    Tmpfs {
        /// It gives huge pages where they are asked for: mounted with `huge=advise`, `within_size`
        /// or `always`.
        huge_pages: bool,
    },
    /// Huge pages that are set apart from all other memory.
    Hugetlbfs,
}

const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;

impl Mount {
    /// What lies under a directory, which need not be there yet.
    ///
    /// # Errors
    /// `Invalid`: it is not in memory. `NotWritable`, `Io`: it cannot be examined.
    pub fn of(dir: &Path) -> Result<Self, SetupError> {
        let site = OwnDirectory::new(dir, &super::SETTINGS);
        let there = nearest(dir);
        let found = rustix::fs::statfs(&there).map_err(|error| site.failed(&error.into()))?;
        let page_bytes = usize::try_from(found.f_bsize).unwrap_or(usize::MAX);
        let kind = match found.f_type as u64 & 0xffff_ffff {
            TMPFS => MountKind::Tmpfs { huge_pages: gives_huge_pages(&there).unwrap_or(false) },
            HUGETLBFS => MountKind::Hugetlbfs,
            other => return Err(not_in_memory(&site, other)),
        };
        let bytes = |blocks: u64| blocks.saturating_mul(page_bytes as u64);
        let limit = (found.f_blocks > 0).then(|| bytes(found.f_blocks));
        Ok(Self { kind, page_bytes, limit, free: bytes(found.f_bavail) })
    }
}

/// The directory, or the first one above it that is there.
fn nearest(dir: &Path) -> PathBuf {
    let there = dir.ancestors().find(|dir| dir.exists());
    there.filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

fn not_in_memory(site: &OwnDirectory, kind: u64) -> SetupError {
    let what = format!(
        "is not in memory (its file system is of type {kind:#x}): for {} name a directory on tmpfs, such as \
         /dev/shm/kvbm, or on hugetlbfs; drives are for the disk tier, disk.dirs (DYN_KVBM_DISK_CACHE_DIR) with \
         disk.keep",
        site.settings.dir
    );
    site.error(SetupErrorKind::Invalid, &what)
}

/// Whether the mount of a directory was made with an option that gives files huge pages.
fn gives_huge_pages(dir: &Path) -> io::Result<bool> {
    let dir = fs::canonicalize(dir)?;
    let mounts = fs::read_to_string("/proc/thread-self/mounts")?;
    // Of mounts above each other the last one counts.
    let holding =
        mounts.lines().filter_map(MountLine::parse).filter(|mount| dir.starts_with(&mount.at));
    let holding =
        holding.enumerate().max_by_key(|(order, mount)| (mount.at.as_os_str().len(), *order));
    Ok(holding.is_some_and(|(_, mount)| mount.has_huge_pages))
}

/// `tmpfs /dev/shm tmpfs rw,size=65536k,huge=advise 0 0`
struct MountLine {
    at: PathBuf,
    has_huge_pages: bool,
}

impl MountLine {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(' ').skip(1);
        // The kernel writes blanks in octal.
        let at = PathBuf::from(fields.next()?.replace("\\040", " "));
        let mut options = fields.nth(1)?.split(',');
        let has_huge_pages = options
            .any(|option| matches!(option, "huge=always" | "huge=within_size" | "huge=advise"));
        Some(Self { at, has_huge_pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_says_whether_it_gives_huge_pages() {
        let line =
            |options| MountLine::parse(&format!("tmpfs /mnt/k\\040v tmpfs {options} 0 0")).unwrap();
        assert_eq!(line("rw").at, Path::new("/mnt/k v"));
        assert!(!line("rw,size=64m,huge=never").has_huge_pages && !line("rw").has_huge_pages);
        assert!(
            line("rw,huge=advise,size=1g").has_huge_pages && line("rw,huge=always").has_huge_pages
        );
    }

    #[test]
    fn a_drive_is_refused_with_what_is_for_drives() {
        let home = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        match Mount::of(&home.path().join("not/there/yet")) {
            Err(error) => {
                assert_eq!(error.kind(), SetupErrorKind::Invalid);
                for part in ["not in memory", "DYN_KVBM_CPU_CACHE_PERSIST", "disk.dirs", "/dev/shm"]
                {
                    assert!(error.to_string().contains(part), "{part}: {error}");
                }
            }
            Ok(mount) => crate::testing::skip("drive", &format!("the sources lie on {mount:?}")),
        }
    }
}
