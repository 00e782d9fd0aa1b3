//! One slot file: opened, locked, filled to its size.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FallocateFlags, OFlags};

use crate::error::{SetupError, SetupErrorKind};
use crate::geometry::ALIGNMENT;

/// An open, locked slot file.
#[derive(Debug)]
pub(super) struct SlotFile {
    file: File,
    direct: bool,
    /// The directory, to be removed again, if it was made for a file that is not kept.
    made_dir: Option<PathBuf>,
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
    pub(super) fn open(dir: &Path, name: &str, options: SlotFileOptions) -> Result<Self, SetupError> {
        let made_dir = make_dir(dir)?;
        let path = dir.join(name);
        let file = open_locked(&path)?;
        let mut slots = Self { file, direct: false, made_dir: made_dir.filter(|_| !options.keep) };
        if let Err(error) = slots.prepare(&path, options) {
            if !options.keep {
                unlink(&path);
            }
            return Err(error);
        }
        Ok(slots)
    }

    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    pub(super) const fn is_direct(&self) -> bool {
        self.direct
    }

    fn prepare(&mut self, path: &Path, options: SlotFileOptions) -> Result<(), SetupError> {
        if !options.keep {
            // From here on nothing is left behind, even if the process is killed.
            unlink(path);
        }
        let found = self.file.metadata().map_err(|error| failed(path, &error))?.len();
        if found == 0 {
            self.fill(path, options).inspect_err(|_| {
                if options.keep {
                    unlink(path);
                }
            })?;
        } else if found != options.bytes {
            return Err(other_size(path, found, options.bytes));
        }
        if options.o_direct {
            self.direct = go_direct(&self.file).map_err(|error| failed(path, &error))?;
        }
        Ok(())
    }

    /// Gives the file its size, with the space behind it.
    fn fill(&self, path: &Path, options: SlotFileOptions) -> Result<(), SetupError> {
        check_space(path, &self.file, options.bytes)?;
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, options.bytes) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) if options.zerofill_fallback => {
                tracing::info!(path = %path.display(), "no fallocate here: writing zeroes");
                zero_fill(&self.file, options.bytes).map_err(|error| failed(path, &error))
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
}

impl Drop for SlotFile {
    fn drop(&mut self) {
        // A ring that had the file registered lets go of it some time after its own end, and with it of the lock.
        if let Err(error) = self.file.unlock() {
            tracing::debug!(%error, "could not unlock a slot file");
        }
        if let Some(dir) = &self.made_dir
            && let Err(error) = fs::remove_dir(dir)
        {
            tracing::debug!(%error, dir = %dir.display(), "left a directory behind");
        }
    }
}

/// Makes the last component of `dir` if it is missing, and says that it did.
fn make_dir(dir: &Path) -> Result<Option<PathBuf>, SetupError> {
    match fs::create_dir(dir) {
        Ok(()) => Ok(Some(dir.to_owned())),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
        // Where a directory must not be made, it may still be there.
        Err(_) if dir.is_dir() => Ok(None),
        Err(error) => Err(failed(dir, &error)),
    }
}

/// Opens and locks a file. One that another process unlinked meanwhile is no use: the next has its name.
fn open_locked(path: &Path) -> Result<File, SetupError> {
    let no_links = OFlags::NOFOLLOW.bits().cast_signed();
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(no_links);
    let file = options.open(path).map_err(|error| failed(path, &error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let message = format!(
                "{} is in use by another process; \
                 stop it, or choose another disk.dirs (DYN_KVBM_DISK_CACHE_DIR)",
                path.display()
            );
            Err(SetupError::new(SetupErrorKind::InUse, message))
        }
        Err(TryLockError::Error(error)) => Err(failed(path, &error)),
    }
}

fn unlink(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %path.display(), "could not remove a slot file");
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

fn other_size(path: &Path, found: u64, wanted: u64) -> SetupError {
    let message = format!(
        "{} has {found} bytes where disk.capacity asks for {wanted}; \
         restore the setting it was made with, or remove the file",
        path.display()
    );
    SetupError::new(SetupErrorKind::Invalid, message)
}

fn no_space(path: &Path, why: &str) -> SetupError {
    let message = format!(
        "{}: no space for the disk tier ({why}); \
         lower disk.capacity (DYN_KVBM_DISK_CACHE_GB) or choose another disk.dirs (DYN_KVBM_DISK_CACHE_DIR)",
        path.display()
    );
    SetupError::new(SetupErrorKind::NoSpace, message)
}

fn failed(path: &Path, error: &io::Error) -> SetupError {
    let kind = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            return no_space(path, &error.to_string());
        }
        ErrorKind::PermissionDenied
        | ErrorKind::NotFound
        | ErrorKind::NotADirectory
        | ErrorKind::ReadOnlyFilesystem => SetupErrorKind::NotWritable,
        _ => SetupErrorKind::Io,
    };
    let message = format!("{}: {error}; choose another disk.dirs (DYN_KVBM_DISK_CACHE_DIR)", path.display());
    SetupError::new(kind, message)
}
