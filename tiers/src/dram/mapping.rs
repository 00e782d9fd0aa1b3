//! Mappings: addresses first, then what lies there.

use std::fs::File;
use std::io;

use memmap2::{Advice, MmapMut, MmapRaw};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::pages::HUGE_PAGE;

/// Addresses for `bytes` bytes, and where in them the first boundary lies; no memory yet.
pub(super) fn reserve(
    bytes: usize,
    alignment: usize,
    huge_pages: bool,
) -> Result<(MmapMut, usize), String> {
    let all = bytes.checked_add(alignment).ok_or("no such address")?;
    let map = MmapMut::map_anon(all).map_err(|error| error.to_string())?;
    if huge_pages && let Err(error) = map.advise(Advice::HugePage) {
        tracing::debug!(%error, "no huge pages");
    }
    let base = map.as_ptr().align_offset(alignment);
    Ok((map, base))
}

/// Maps a file over private memory that nothing uses.
pub(super) fn map_over(
    map: &mut MmapMut,
    base: usize,
    file: &File,
    bytes: usize,
    huge_pages: bool,
) -> io::Result<()> {
    place(map, base, file, bytes, ProtFlags::READ | ProtFlags::WRITE)?;
    // Hugetlbfs needs no advice and takes none.
    if huge_pages && let Err(error) = map.advise_range(Advice::HugePage, base, bytes) {
        tracing::debug!(%error, "no huge pages in a file");
    }
    Ok(())
}

/// Maps the first bytes of a file for reading, and says where in the mapping they start: on a huge
/// page boundary, so that huge pages of the file are mapped as such. Forks do not copy it.
pub(crate) fn map_for_reading(file: &File, bytes: usize) -> io::Result<(MmapRaw, usize)> {
    let (mut map, base) = reserve(bytes, HUGE_PAGE, false).map_err(io::Error::other)?;
    place(&mut map, base, file, bytes, ProtFlags::READ)?;
    map.advise(Advice::DontFork)?;
    // From here on there are addresses only: no reference may be had to what lies there.
    Ok((MmapRaw::from(map), base))
}

fn place(
    map: &mut MmapMut,
    base: usize,
    file: &File,
    bytes: usize,
    access: ProtFlags,
) -> io::Result<()> {
    let start = map[base..base + bytes].as_mut_ptr().cast();
    // SAFETY: the range lies within a mapping that is borrowed mutably, and no reference into it is
    // left.
    unsafe { mmap(start, bytes, access, MapFlags::SHARED | MapFlags::FIXED, file, 0)? };
    Ok(())
}
