//! What a directory in memory offers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{SetupError, SetupErrorKind};
use crate::files::OwnDirectory;

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
