//! One slot file: made or found, locked, of its full size.
//!
//! Others may write the directory (the default is `/tmp`): what is not kept never has a name where
//! the file system can do that, and what is kept is opened as [`files`](crate::files) does.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::OFlags;

use crate::disk::SETTINGS;
use crate::error::SetupError;
use crate::files::{
    KeptFile, LockWait, LockedFile, OwnDirectory, checked_namespace, create_locked, fill, make_dir,
    open_kept, partial, remove_abandoned, resize, unlink,
};
use crate::fork::MakerProcess;
use crate::geometry::ALIGNMENT;

/// An open slot file; a kept one is locked.
#[derive(Debug)]
pub(super) struct SlotFile {
    file: LockedFile,
    direct: bool,
    // After the file.
    _made_dir: Option<MadeDir>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SlotFileOptions {
    pub(super) bytes: u64,
    pub(super) o_direct: bool,
    pub(super) zerofill_fallback: bool,
    pub(super) keep: bool,
}

/// The name of a file in its directory.
pub(super) fn name(namespace: Option<&str>) -> Result<String, SetupError> {
    static UNKEPT: AtomicU32 = AtomicU32::new(0);
    let namespace = match namespace {
        Some(namespace) => checked_namespace(namespace)?.to_owned(),
        None => format!("{}-{}", std::process::id(), UNKEPT.fetch_add(1, Ordering::Relaxed)),
    };
    Ok(format!("kvbm-{namespace}.blocks"))
}

impl SlotFile {
    /// Waits until `patience` ends for the process that has the file locked.
    pub(super) fn open(
        dir: &Path,
        name: &str,
        options: SlotFileOptions,
        patience: &mut LockWait,
    ) -> Result<Self, SetupError> {
        // What is kept keeps its directory.
        let goes_again = make_dir(dir, &SETTINGS)? && !options.keep;
        let made_dir = goes_again
            .then(|| MadeDir { path: dir.to_owned(), maker: MakerProcess::this_process() });
        remove_abandoned(dir, &SETTINGS);
        let site = OwnDirectory::new(dir.join(name), &SETTINGS);
        let file = open_file(dir, &site, options, patience)?;
        let direct =
            options.o_direct && go_direct(file.file()).map_err(|error| site.failed(&error))?;
        Ok(Self { file, direct, _made_dir: made_dir })
    }

    pub(super) const fn file(&self) -> &File {
        self.file.file()
    }

    pub(super) const fn is_direct(&self) -> bool {
        self.direct
    }

    /// A file that a test made.
    #[cfg(test)]
    pub(super) fn of(file: File) -> Self {
        Self { file: LockedFile::of(file), direct: false, _made_dir: None }
    }
}

/// A directory that was made for files that are not kept, and goes with them.
#[derive(Debug)]
struct MadeDir {
    path: PathBuf,
    maker: MakerProcess,
}

impl Drop for MadeDir {
    fn drop(&mut self) {
        if self.maker.is_this_process()
            && let Err(error) = fs::remove_dir(&self.path)
        {
            tracing::debug!(%error, dir = %self.path.display(), "left a directory behind");
        }
    }
}

fn open_file(
    dir: &Path,
    site: &OwnDirectory,
    options: SlotFileOptions,
    patience: &mut LockWait,
) -> Result<LockedFile, SetupError> {
    let fill = |file: &File| fill(site, file, options.bytes, options.zerofill_fallback);
    if !options.keep {
        let nameless = open_nameless(dir, site, patience)?;
        fill(&nameless)?;
        return Ok(LockedFile::of(nameless));
    }
    let KeptFile { file: kept, .. } = open_kept(site, patience, fill)?;
    resize(site, kept.file(), options.bytes, options.zerofill_fallback)?;
    Ok(kept)
}

/// A file that vanishes with the process, however that ends.
fn open_nameless(
    dir: &Path,
    site: &OwnDirectory,
    patience: &mut LockWait,
) -> Result<File, SetupError> {
    // Without O_EXCL: cuFile registers files by names only, and is lent one (`cuda::cufile`).
    let flags = OFlags::TMPFILE.bits().cast_signed();
    match OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(dir) {
        Ok(file) => Ok(file),
        // Not every file system has files without names: NFS, FUSE.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            open_unlinked(site, patience)
        }
        Err(error) => Err(site.at(dir).failed(&error)),
    }
}

/// As [`open_nameless`], except in the moment until the name is gone again.
fn open_unlinked(site: &OwnDirectory, patience: &mut LockWait) -> Result<File, SetupError> {
    let partial = partial(site);
    let file = create_locked(&partial, patience)?;
    unlink(&partial.path);
    Ok(file)
}

/// Switches the file to `O_DIRECT` and tries a real read: some file systems refuse only then.
fn go_direct(file: &File) -> io::Result<bool> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    if rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT).is_err() {
        return Ok(false);
    }
    let mut buffer = vec![0; 2 * ALIGNMENT];
    let aligned = buffer.as_ptr().align_offset(ALIGNMENT);
    match file.read_exact_at(&mut buffer[aligned..aligned + ALIGNMENT], 0) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::InvalidInput => {
            rustix::fs::fcntl_setfl(file, flags)?;
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::time::Duration;

    use super::*;
    use crate::error::SetupErrorKind;

    const NAME: &str = "kvbm-test.blocks";
    const PARTIAL: &str = "kvbm-test.blocks.partial";
    const KEPT: SlotFileOptions =
        SlotFileOptions { bytes: 16 * 4096, o_direct: false, zerofill_fallback: true, keep: true };
    const UNKEPT: SlotFileOptions = SlotFileOptions { keep: false, ..KEPT };

    fn open(dir: &Path, options: SlotFileOptions) -> Result<SlotFile, SetupError> {
        SlotFile::open(dir, NAME, options, &mut LockWait::new(Duration::ZERO))
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// A file such as a process leaves that is killed while it writes zeroes.
    fn leave_half(path: &Path) {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
        file.set_len(4096).unwrap();
    }

    #[test]
    fn what_a_stranger_put_there_is_not_written_to() {
        type PutFn = fn(&Path);
        let stranger: PutFn = |path| {
            fs::write(path, "").unwrap();
            fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(path, Some(65534), None).unwrap();
        };
        let open_to_all: PutFn = |path| {
            fs::write(path, vec![0; KEPT.bytes as usize]).unwrap();
            fs::set_permissions(path, PermissionsExt::from_mode(0o666)).unwrap();
        };
        let two_names: PutFn = |path| {
            leave_half(path);
            fs::hard_link(path, path.with_extension("other")).unwrap();
        };
        let link: PutFn =
            |path| std::os::unix::fs::symlink(path.with_extension("other"), path).unwrap();
        let pipe: PutFn = |path| {
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            rustix::fs::mkfifoat(rustix::fs::CWD, path, mode).unwrap();
        };
        let mut cases = vec![
            (open_to_all, "has mode 666"),
            (two_names, "has 2 names"),
            (link, "is a symbolic link"),
            (pipe, "is not a regular file"),
        ];
        if rustix::process::geteuid().is_root() {
            cases.push((stranger, "belongs to user 65534"));
        }
        for (put, wrong) in cases {
            // Where the file is to be, and where it lies until it is complete.
            for name in [NAME, PARTIAL] {
                let home = tempfile::tempdir().unwrap();
                let path = home.path().join(name);
                put(&path);
                let error = open(home.path(), KEPT).unwrap_err();
                assert_eq!(error.kind(), SetupErrorKind::NotWritable, "{error}");
                let message = error.to_string();
                for part in [wrong, path.to_str().unwrap(), "remove it", "DYN_KVBM_DISK_CACHE_DIR"]
                {
                    assert!(message.contains(part), "{part}: {message}");
                }
                fs::remove_file(&path).unwrap();
                open(home.path(), KEPT).unwrap();
                drop(open(home.path(), KEPT).unwrap());
            }
        }
    }

    #[test]
    fn files_not_kept_never_have_a_name_to_take() {
        let home = tempfile::tempdir().unwrap();
        // A stranger has guessed every name.
        for name in [NAME, PARTIAL] {
            fs::write(home.path().join(name), "").unwrap();
        }
        let slots = open(home.path(), UNKEPT).unwrap();
        let made = slots.file().metadata().unwrap();
        assert_eq!((made.nlink(), made.mode() & 0o7777, made.len()), (0, 0o600, UNKEPT.bytes));
    }

    #[test]
    fn without_nameless_files_the_name_is_new_and_soon_gone() {
        let home = tempfile::tempdir().unwrap();
        let (site, partial) =
            (OwnDirectory::new(home.path().join(NAME), &SETTINGS), home.path().join(PARTIAL));
        let open = || open_unlinked(&site, &mut LockWait::new(Duration::ZERO));
        let made = open().unwrap().metadata().unwrap();
        assert_eq!((made.nlink(), made.mode() & 0o7777), (0, 0o600));
        assert!(names(home.path()).is_empty());
        fs::write(&partial, "a stranger's").unwrap();
        fs::set_permissions(&partial, PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(open().unwrap_err().kind(), SetupErrorKind::NotWritable);
        fs::remove_file(&partial).unwrap();
        open().unwrap();
    }

    #[test]
    fn a_start_killed_amid_zeroes_does_not_forbid_the_next() {
        let home = tempfile::tempdir().unwrap();
        let others = home.path().join("kvbm-of-another-namespace.blocks.partial");
        leave_half(&home.path().join(PARTIAL));
        leave_half(&others);
        let slots = open(home.path(), KEPT).unwrap();
        assert_eq!(slots.file().metadata().unwrap().len(), KEPT.bytes);
        assert_eq!(names(home.path()), [NAME]);
    }

    #[test]
    fn what_a_living_process_is_making_is_left_to_it() {
        let home = tempfile::tempdir().unwrap();
        let site = OwnDirectory::new(home.path().join(PARTIAL), &SETTINGS);
        let theirs = create_locked(&site, &mut LockWait::new(Duration::ZERO)).unwrap();
        assert_eq!(open(home.path(), KEPT).unwrap_err().kind(), SetupErrorKind::InUse);
        let left = site.path.metadata().unwrap();
        assert_eq!(left.ino(), theirs.metadata().unwrap().ino());
        drop(theirs);
        open(home.path(), KEPT).unwrap();
    }

    #[test]
    fn a_failed_start_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        for options in [KEPT, UNKEPT] {
            let error =
                open(home.path(), SlotFileOptions { bytes: 1 << 60, ..options }).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::NoSpace, "{error}");
            assert!(names(home.path()).is_empty());
        }
        open(home.path(), KEPT).unwrap();
    }

    /// Each makes the file or finds it, and one in three removes it, all at the same time.
    #[test]
    fn racing_starts_have_a_file_one_after_another() {
        let home = tempfile::tempdir().unwrap();
        let owned = parking_lot::Mutex::new(());
        let start = |number: usize| {
            for round in 0..20 {
                let mut patience = LockWait::new(Duration::from_secs(30));
                let slots = SlotFile::open(home.path(), NAME, KEPT, &mut patience).unwrap();
                let alone = owned.try_lock().expect("two have it at once");
                assert_eq!(slots.file().metadata().unwrap().len(), KEPT.bytes);
                // Once it is unlinked, the next may make another.
                drop(alone);
                if (number + round).is_multiple_of(3) {
                    unlink(&home.path().join(NAME));
                }
            }
        };
        std::thread::scope(|scope| {
            for number in 0..4 {
                scope.spawn(move || start(number));
            }
        });
        open(home.path(), KEPT).unwrap();
        assert_eq!(names(home.path()), [NAME]);
    }
}
