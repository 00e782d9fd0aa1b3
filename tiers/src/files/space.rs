//! Room for a file, taken before it is needed.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

use rustix::fs::FallocateFlags;

use crate::error::{SetupError, SetupErrorKind};
use crate::files::OwnDirectory;

/// Gives a file that was there another size; what lies below that stays.
pub(crate) fn resize(
    site: &OwnDirectory,
    file: &File,
    bytes: u64,
    zerofill: bool,
) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| site.failed(&error))?.len();
    if found == bytes {
        return Ok(());
    }
    tracing::info!(path = %site.path.display(), found, bytes, "a file is given another size");
    if found > bytes {
        file.set_len(bytes).map_err(|error| site.failed(&error))
    } else {
        fill(site, file, bytes, zerofill)
    }
}

/// Gives the file its size, with the space behind it. `zerofill`: by writing, where the file system
/// cannot otherwise.
pub(crate) fn fill(
    site: &OwnDirectory,
    file: &File,
    bytes: u64,
    zerofill: bool,
) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| site.failed(&error))?.len();
    check_space(site, file, bytes.saturating_sub(found))?;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) if zerofill => {
            tracing::info!(path = %site.path.display(), "no fallocate here: writing zeroes");
            zero_fill(file, bytes.saturating_sub(found)).map_err(|error| site.failed(&error))
        }
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            let message = format!(
                "{}: the file system has no fallocate; \
                 allow disk.zerofill_fallback (DYN_KVBM_DISK_ZEROFILL_FALLBACK)",
                site.path.display()
            );
            Err(SetupError::new(SetupErrorKind::Unavailable, message))
        }
        Err(error) => Err(site.failed(&error.into())),
    }
}

/// Checks that the file system has `bytes` bytes for the file.
pub(crate) fn check_space(site: &OwnDirectory, file: &File, bytes: u64) -> Result<(), SetupError> {
    let stat = rustix::fs::fstatvfs(file).map_err(|error| site.failed(&error.into()))?;
    let (limit, available) = (stat.f_blocks, stat.f_bavail.saturating_mul(stat.f_frsize));
    // File systems in memory may have no limit of their own.
    if available >= bytes || limit == 0 {
        return Ok(());
    }
    let limit = limit.saturating_mul(stat.f_frsize);
    let [wanted, available, limit] = [bytes, available, limit].map(|bytes| bytes >> 20);
    Err(site.no_space(&format!("{wanted} MiB wanted, {available} MiB of {limit} MiB available")))
}

/// That a file that was there is of the size that it would be given.
pub(crate) fn check_size(site: &OwnDirectory, file: &File, wanted: u64) -> Result<(), SetupError> {
    let found = file.metadata().map_err(|error| site.failed(&error))?.len();
    if found == wanted {
        return Ok(());
    }
    let what = format!(
        "has {found} bytes where {} asks for {wanted}; \
         restore the setting it was made with, or remove the file",
        site.settings.capacity
    );
    Err(site.error(SetupErrorKind::Invalid, &what))
}

fn zero_fill(mut file: &File, more: u64) -> io::Result<()> {
    let zeroes = vec![0; 1 << 20];
    let mut left = more;
    file.seek(SeekFrom::End(0))?;
    while left > 0 {
        let some = left.min(zeroes.len() as u64);
        file.write_all(&zeroes[..some as usize])?;
        left -= some;
    }
    file.sync_all()
}
