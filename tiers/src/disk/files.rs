//! One slot file: made or found, locked, of its full size.
//!
//! Others may write the directory (the default is `/tmp`), so nothing that lies there is trusted: what is not kept
//! never has a name where the file system can do that, what is kept is made under a name that did not exist, and
//! what is found must be ours and closed to others.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FallocateFlags, OFlags};

use crate::disk::failure::{failed, no_space};
use crate::disk::lock::{Patience, lock};
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::Maker;
use crate::geometry::ALIGNMENT;

/// An open slot file; a kept one is locked.
#[derive(Debug)]
pub(super) struct SlotFile {
    file: File,
    direct: bool,
    maker: Maker,
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

/// The names of `count` files that belong together.
pub(super) fn names(
    namespace: Option<&str>,
    count: usize,
) -> Result<impl Iterator<Item = String>, SetupError> {
    static UNKEPT: AtomicU32 = AtomicU32::new(0);
    let namespace = match namespace {
        Some(namespace) if is_file_name(namespace) => namespace.to_owned(),
        Some(namespace) => {
            let message = format!("disk namespace {namespace:?}: use letters, digits, '-' and '_' only");
            return Err(SetupError::new(SetupErrorKind::Invalid, message));
        }
        None => format!("{}-{}", std::process::id(), UNKEPT.fetch_add(1, Ordering::Relaxed)),
    };
    Ok((0..count).map(move |file| format!("kvbm-{namespace}-{file}of{count}.blocks")))
}

fn is_file_name(namespace: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    !namespace.is_empty() && namespace.len() <= 200 && namespace.bytes().all(allowed)
}

impl SlotFile {
    /// Waits for whoever has the file locked until `patience` ends.
    pub(super) fn open(
        dir: &Path,
        name: &str,
        options: SlotFileOptions,
        patience: &mut Patience,
    ) -> Result<Self, SetupError> {
        // What is kept keeps its directory.
        let goes_again = make_dir(dir)? && !options.keep;
        let made_dir = goes_again.then(|| MadeDir { path: dir.to_owned(), maker: Maker::this_process() });
        remove_abandoned(dir);
        let path = dir.join(name);
        let (file, maker) = (open_file(dir, &path, options, patience)?, Maker::this_process());
        let direct = options.o_direct && go_direct(&file).map_err(|error| failed(&path, &error))?;
        Ok(Self { file, direct, maker, _made_dir: made_dir })
    }

    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    pub(super) const fn is_direct(&self) -> bool {
        self.direct
    }

    /// A file that a test made.
    #[cfg(test)]
    pub(super) fn of(file: File) -> Self {
        Self { file, direct: false, maker: Maker::this_process(), _made_dir: None }
    }
}

impl Drop for SlotFile {
    /// A ring that had the file registered lets go of it some time after its own end, and so do children that were
    /// forked: closing alone would leave it locked. A child that closes its copy must not unlock, since there is
    /// only one lock, its parent's.
    fn drop(&mut self) {
        if self.maker.is_this_process()
            && let Err(error) = self.file.unlock()
        {
            tracing::debug!(%error, "could not unlock a slot file");
        }
    }
}

/// A directory that was made for files that are not kept, and goes with them.
#[derive(Debug)]
struct MadeDir {
    path: PathBuf,
    maker: Maker,
}

/// Makes the last component of `dir` if it is missing, for this user alone. Whether it was.
fn make_dir(dir: &Path) -> Result<bool, SetupError> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        // Where a directory must not be made, it may still be there.
        Err(_) if dir.is_dir() => Ok(false),
        Err(error) => Err(failed(dir, &error)),
    }
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
    path: &Path,
    options: SlotFileOptions,
    patience: &mut Patience,
) -> Result<File, SetupError> {
    if options.keep {
        return open_kept(path, options, patience);
    }
    let file = open_nameless(dir, path, patience)?;
    fill(path, &file, options)?;
    Ok(file)
}

/// A file that vanishes with the process, however that ends.
fn open_nameless(dir: &Path, path: &Path, patience: &mut Patience) -> Result<File, SetupError> {
    let flags = OFlags::TMPFILE.bits().cast_signed() | libc::O_EXCL;
    match OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(dir) {
        Ok(file) => Ok(file),
        // Not every file system has files without names: NFS, FUSE.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            open_unlinked(path, patience)
        }
        Err(error) => Err(failed(dir, &error)),
    }
}

/// As [`open_nameless`], except in the moment until the name is gone again.
fn open_unlinked(path: &Path, patience: &mut Patience) -> Result<File, SetupError> {
    let partial = partial(path);
    let file = create_locked(&partial, patience)?;
    unlink(&partial);
    Ok(file)
}

/// The file that an earlier process left, or a new one.
fn open_kept(path: &Path, options: SlotFileOptions, patience: &mut Patience) -> Result<File, SetupError> {
    loop {
        match open_ours(path)? {
            Some(file) => {
                lock(&file, path, patience)?;
                if is_at(&file, path)? {
                    check_size(path, &file, options.bytes)?;
                    return Ok(file);
                }
            }
            None => {
                if let Some(file) = make_kept(path, options, patience)? {
                    return Ok(file);
                }
            }
        }
    }
}

/// A new file gets its name when it has its size: a process that is killed before leaves nothing that looks like a
/// slot file. `None`: another process made it meanwhile.
fn make_kept(
    path: &Path,
    options: SlotFileOptions,
    patience: &mut Patience,
) -> Result<Option<File>, SetupError> {
    let partial = partial(path);
    let file = create_locked(&partial, patience)?;
    // Whoever makes the file holds the lock on the partial one until it has its final name.
    let made = if path.symlink_metadata().is_ok() {
        Ok(None)
    } else {
        fill(path, &file, options)
            .and_then(|()| fs::rename(&partial, path).map_err(|error| failed(path, &error)))
            .map(|()| Some(file))
    };
    if !matches!(made, Ok(Some(_))) {
        unlink(&partial);
    }
    made
}

/// Where a file lies until it is complete.
pub(crate) fn partial(path: &Path) -> PathBuf {
    path.with_added_extension(PARTIAL)
}

const PARTIAL: &str = "partial";

/// A file that did not exist before. One that a dead process left under the name is removed, one of a living
/// process waited for.
pub(crate) fn create_locked(path: &Path, patience: &mut Patience) -> Result<File, SetupError> {
    let create = || OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    loop {
        match create() {
            Ok(file) => {
                lock(&file, path, patience)?;
                // Somebody may have taken it for abandoned before it was locked.
                if is_at(&file, path)? {
                    return Ok(file);
                }
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                if let Some(file) = open_ours(path)? {
                    lock(&file, path, patience)?;
                    unlink_locked(&file, path)?;
                }
            }
            Err(error) => return Err(failed(path, &error)),
        }
    }
}

/// Removes what processes that died while they made a file left in the directory, of whichever namespace.
fn remove_abandoned(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| is_partial(path)) {
        // What is not ours or still locked is somebody's business.
        if let Ok(Some(file)) = open_ours(&path)
            && file.try_lock().is_ok()
        {
            tracing::info!(path = %path.display(), "removing a file that was never finished");
            // Whoever needs the name will meet the error again.
            let _ = unlink_locked(&file, &path);
        }
    }
}

fn is_partial(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| {
        name.starts_with("kvbm-") && (name.ends_with(".blocks.partial") || name.ends_with(".index.partial"))
    })
}

/// Unlinks the path if it still is this file, which the caller has locked.
fn unlink_locked(file: &File, path: &Path) -> Result<(), SetupError> {
    if is_at(file, path)? {
        unlink(path);
    }
    Ok(())
}

/// Opens a file that is there; `None`: there is none.
///
/// # Errors
/// It is not a file of this user's that is closed to all others.
pub(crate) fn open_ours(path: &Path) -> Result<Option<File>, SetupError> {
    // O_NONBLOCK: somebody may have put a device or a pipe there.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    match OpenOptions::new().read(true).write(true).custom_flags(flags).open(path) {
        Ok(file) => {
            check_ours(path, &file)?;
            block_again(&file).map_err(|error| failed(path, &error))?;
            Ok(Some(file))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Err(not_ours(path, "is a symbolic link")),
        Err(error) => Err(failed(path, &error)),
    }
}

/// Rings of older kernels return EAGAIN for files that must not block, instead of waiting elsewhere.
fn block_again(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)?;
    Ok(())
}

fn check_ours(path: &Path, file: &File) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| failed(path, &error))?;
    let (us, mode) = (rustix::process::geteuid().as_raw(), found.mode() & 0o7777);
    let wrong = if !found.is_file() {
        "is not a regular file".to_owned()
    } else if found.uid() != us {
        format!("belongs to user {}, and this process runs as {us}", found.uid())
    } else if mode != 0o600 {
        format!("has mode {mode:o} where 600 keeps others from reading and changing blocks")
    } else if found.nlink() > 1 {
        format!("has {} names, so others may reach it by another way", found.nlink())
    } else {
        return Ok(());
    };
    Err(not_ours(path, &wrong))
}

/// Whether the path leads to this open file.
pub(crate) fn is_at(file: &File, path: &Path) -> Result<bool, SetupError> {
    let ours = file.metadata().map_err(|error| failed(path, &error))?;
    match path.symlink_metadata() {
        Ok(there) => Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(path, &error)),
    }
}

fn check_size(path: &Path, file: &File, wanted: u64) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| failed(path, &error))?.len();
    if found == wanted {
        return Ok(());
    }
    let message = format!(
        "{} has {found} bytes where disk.capacity asks for {wanted}; \
         restore the setting it was made with, or remove the file",
        path.display()
    );
    Err(SetupError::new(SetupErrorKind::Invalid, message))
}

pub(crate) fn unlink(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %path.display(), "could not remove a slot file");
    }
}

/// Gives the file its size, with the space behind it.
fn fill(path: &Path, file: &File, options: SlotFileOptions) -> Result<(), SetupError> {
    check_space(path, file, options.bytes)?;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, options.bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) if options.zerofill_fallback => {
            tracing::info!(path = %path.display(), "no fallocate here: writing zeroes");
            zero_fill(file, options.bytes).map_err(|error| failed(path, &error))
        }
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            let message = format!(
                "{}: the file system has no fallocate; \
                 allow disk.zerofill_fallback (DYN_KVBM_DISK_ZEROFILL_FALLBACK)",
                path.display()
            );
            Err(SetupError::new(SetupErrorKind::Unavailable, message))
        }
        Err(error) => Err(failed(path, &error.into())),
    }
}

fn check_space(path: &Path, file: &File, bytes: u64) -> Result<(), SetupError> {
    let stat = rustix::fs::fstatvfs(file).map_err(|error| failed(path, &error.into()))?;
    let available = stat.f_bavail.saturating_mul(stat.f_frsize);
    if available >= bytes {
        return Ok(());
    }
    Err(no_space(path, &format!("{} MiB wanted, {} MiB available", bytes >> 20, available >> 20)))
}

fn zero_fill(mut file: &File, bytes: u64) -> io::Result<()> {
    let zeroes = vec![0; 1 << 20];
    let mut left = bytes;
    while left > 0 {
        let some = left.min(zeroes.len() as u64);
        file.write_all(&zeroes[..some as usize])?;
        left -= some;
    }
    file.sync_all()
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

fn not_ours(path: &Path, wrong: &str) -> SetupError {
    let message = format!(
        "{} {wrong}; remove it, or choose another disk.dirs (DYN_KVBM_DISK_CACHE_DIR), \
         best a directory that no other user can write",
        path.display()
    );
    SetupError::new(SetupErrorKind::NotWritable, message)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;

    const NAME: &str = "kvbm-test-0of1.blocks";
    const KEPT: SlotFileOptions =
        SlotFileOptions { bytes: 16 * 4096, o_direct: false, zerofill_fallback: true, keep: true };
    const UNKEPT: SlotFileOptions = SlotFileOptions { keep: false, ..KEPT };

    fn open(dir: &Path, options: SlotFileOptions) -> Result<SlotFile, SetupError> {
        SlotFile::open(dir, NAME, options, &mut Patience::new(Duration::ZERO))
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
        type Put = fn(&Path);
        let stranger: Put = |path| {
            fs::write(path, "").unwrap();
            fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(path, Some(65534), None).unwrap();
        };
        let open_to_all: Put = |path| {
            fs::write(path, vec![0; KEPT.bytes as usize]).unwrap();
            fs::set_permissions(path, PermissionsExt::from_mode(0o666)).unwrap();
        };
        let two_names: Put = |path| {
            leave_half(path);
            fs::hard_link(path, path.with_extension("other")).unwrap();
        };
        let link: Put = |path| std::os::unix::fs::symlink(path.with_extension("other"), path).unwrap();
        let pipe: Put = |path| {
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
            for name in [NAME.to_owned(), format!("{NAME}.{PARTIAL}")] {
                let home = tempfile::tempdir().unwrap();
                let path = home.path().join(name);
                put(&path);
                let error = open(home.path(), KEPT).unwrap_err();
                assert_eq!(error.kind(), SetupErrorKind::NotWritable, "{error}");
                let message = error.to_string();
                for part in [wrong, path.to_str().unwrap(), "remove it", "DYN_KVBM_DISK_CACHE_DIR"] {
                    assert!(message.contains(part), "{part}: {message}");
                }
                fs::remove_file(&path).unwrap();
                open(home.path(), KEPT).unwrap();
                drop(open(home.path(), KEPT).unwrap());
            }
        }
    }

    #[test]
    fn what_is_not_kept_never_has_a_name_that_others_could_take() {
        let home = tempfile::tempdir().unwrap();
        // A stranger has guessed every name.
        for name in [NAME.to_owned(), format!("{NAME}.{PARTIAL}")] {
            fs::write(home.path().join(name), "").unwrap();
        }
        let slots = open(home.path(), UNKEPT).unwrap();
        let made = slots.file().metadata().unwrap();
        assert_eq!((made.nlink(), made.mode() & 0o7777, made.len()), (0, 0o600, UNKEPT.bytes));
    }

    #[test]
    fn without_nameless_files_the_name_is_new_and_soon_gone() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(NAME);
        let open = || open_unlinked(&path, &mut Patience::new(Duration::ZERO));
        let made = open().unwrap().metadata().unwrap();
        assert_eq!((made.nlink(), made.mode() & 0o7777), (0, 0o600));
        assert!(names(home.path()).is_empty());
        fs::write(partial(&path), "a stranger's").unwrap();
        fs::set_permissions(partial(&path), PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(open().unwrap_err().kind(), SetupErrorKind::NotWritable);
        fs::remove_file(partial(&path)).unwrap();
        open().unwrap();
    }

    #[test]
    fn a_start_that_was_killed_while_it_wrote_zeroes_does_not_forbid_the_next() {
        let home = tempfile::tempdir().unwrap();
        let others = home.path().join("kvbm-of-another-namespace-0of1.blocks.partial");
        leave_half(&home.path().join(NAME).with_added_extension(PARTIAL));
        leave_half(&others);
        let slots = open(home.path(), KEPT).unwrap();
        assert_eq!(slots.file().metadata().unwrap().len(), KEPT.bytes);
        assert_eq!(names(home.path()), [NAME]);
    }

    #[test]
    fn what_a_living_process_is_making_is_left_to_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(NAME);
        let theirs = create_locked(&partial(&path), &mut Patience::new(Duration::ZERO)).unwrap();
        assert_eq!(open(home.path(), KEPT).unwrap_err().kind(), SetupErrorKind::InUse);
        assert!(is_at(&theirs, &partial(&path)).unwrap());
        drop(theirs);
        open(home.path(), KEPT).unwrap();
    }

    #[test]
    fn a_failed_start_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        for options in [KEPT, UNKEPT] {
            let error = open(home.path(), SlotFileOptions { bytes: 1 << 60, ..options }).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::NoSpace, "{error}");
            assert!(names(home.path()).is_empty());
        }
        open(home.path(), KEPT).unwrap();
    }

    /// Each makes the file or finds it, and one in three removes it, all at the same time.
    #[test]
    fn starts_that_race_for_a_file_have_it_one_after_the_other() {
        let home = tempfile::tempdir().unwrap();
        let owned = parking_lot::Mutex::new(());
        let start = |number: usize| {
            for round in 0..20 {
                let mut patience = Patience::new(Duration::from_secs(30));
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

    #[test]
    fn being_short_of_files_or_memory_is_not_the_mediums_fault() {
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
            let error = failed(Path::new("x"), &io::Error::from_raw_os_error(errno));
            assert_eq!(error.kind(), SetupErrorKind::Unavailable, "{error}");
        }
    }
}
