//! Memory in a memfd: a file without a name, sealed so that other processes can do nothing with it
//! but read.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use memmap2::MmapMut;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::{DramOptions, mapping};
use crate::error::{SetupError, SetupErrorKind};
use crate::peers::SharedMemory;

/// What `/proc/PID/maps` calls it, behind `/memfd:`.
const NAME: &str = "kvbm-host";

/// Puts a new memfd in the place of private memory from `base` on, where nothing has used it yet.
/// No other process, nor this one, can map it for writing afterwards.
pub(super) fn map_over(
    map: &mut MmapMut,
    base: usize,
    options: DramOptions,
) -> Result<SharedMemory, SetupError> {
    let DramOptions { geometry, huge_pages, .. } = options;
    let sealed = create(geometry.bytes()).and_then(|file| {
        mapping::map_over(map, base, &file, geometry.bytes(), huge_pages)?;
        fcntl_add_seals(&file, SharedMemory::SEALS | SealFlags::SEAL)?;
        reopen_for_reading(&file)
    });
    sealed.map(|file| SharedMemory::new(file, geometry)).map_err(|error| {
        let message = format!("host memory that other processes may read: {error}");
        SetupError::caused(SetupErrorKind::Unavailable, message, error)
    })
}

fn create(bytes: usize) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Some systems insist that memory is no program; before Linux 6.3 none can be told so.
    let made = memfd_create(NAME, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| memfd_create(NAME, flags))?;
    let file = File::from(made);
    file.set_len(bytes as u64)?;
    Ok(file)
}

/// Another descriptor of the same file, which can be handed out.
fn reopen_for_reading(file: &File) -> io::Result<File> {
    File::open(format!("/proc/thread-self/fd/{}", file.as_raw_fd()))
}
