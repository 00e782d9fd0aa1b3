//! Pages: made present before they are used, and how much of them the system can still give.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{Advice, MmapRaw};

use crate::fork::ServiceThread;
use crate::geometry::ALIGNMENT;

pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Pages that are to be present before they are used.
#[derive(Clone, Copy, Debug)]
pub(super) enum PageKind {
    /// The process's own, zeroed.
    Private,
    /// Of a file that may turn out to have no memory for them.
    New,
    /// Of a file that has them all: they are mapped, several at a time, and what is in them stays.
    There,
    /// Of a memfd, zeroed. Most systems give it small pages, and huge ones for the asking.
    Shmem,
}

/// Makes all pages present, each thread its share of huge pages.
pub(super) fn prefault(
    map: &MmapRaw,
    base: usize,
    bytes: usize,
    threads: usize,
    pages: PageKind,
) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let share = bytes.div_ceil(threads.max(1)).next_multiple_of(HUGE_PAGE);
    std::thread::scope(|scope| {
        let start = |from: usize| {
            scope.spawn(move || populate(map, base + from, share.min(bytes - from), pages))
        };
        let running: Vec<_> = (0..bytes).step_by(share).map(start).collect();
        running.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn populate(map: &MmapRaw, from: usize, bytes: usize, pages: PageKind) -> io::Result<()> {
    let advice = match pages {
        PageKind::Shmem => {
            collapse(map, from, bytes)?;
            Advice::PopulateWrite
        }
        PageKind::Private | PageKind::New => Advice::PopulateWrite,
        // Three times as fast, and shared pages can still be written: nothing waits for first
        // writes to them.
        PageKind::There => Advice::PopulateRead,
    };
    match map.advise_range(advice, from, bytes) {
        // Before Linux 5.14 the advice is unknown.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            touch(map, from, bytes, pages).ok_or(error)
        }
        result => result,
    }
}

/// Has the kernel make huge pages of a range as far as it can. It looks only where a page is
/// mapped already, and does some work for each call.
fn collapse(map: &MmapRaw, from: usize, bytes: usize) -> io::Result<()> {
    for huge_page in (from..from + bytes).step_by(HUGE_PAGE) {
        populate(map, huge_page, ALIGNMENT, PageKind::Private)?;
    }
    // SAFETY: the range lies within the mapping, and what is in its pages stays.
    let made =
        unsafe { libc::madvise(map.as_mut_ptr().add(from).cast(), bytes, libc::MADV_COLLAPSE) };
    if made != 0 {
        // Before Linux 6.1, or where memory lies in pieces.
        tracing::debug!(error = %io::Error::last_os_error(), "small pages in memory that others may read");
    }
    Ok(())
}

/// `None`: a page without memory behind it would end the process.
fn touch(map: &MmapRaw, from: usize, bytes: usize, pages: PageKind) -> Option<()> {
    for offset in (from..from + bytes).step_by(ALIGNMENT) {
        match pages {
            // SAFETY: the page lies within the mapping, which nothing uses yet; other threads write
            // others.
            PageKind::Private | PageKind::Shmem => unsafe {
                map.as_mut_ptr().add(offset).write_volatile(0);
            },
            // SAFETY: the page lies within the mapping, and its file has it.
            PageKind::There => drop(unsafe { map.as_ptr().add(offset).read_volatile() }),
            PageKind::New => return None,
        }
    }
    Some(())
}

/// Maps the pages of a file that has them all, while they are used already: 4 KiB pages take 0.2
/// s/GiB, and a restart is to serve from its first moment. A thread that reaches a page first maps
/// it itself. It ends with this handle.
#[derive(Debug)]
pub(crate) struct PageMapper {
    is_over: Arc<AtomicBool>,
    _thread: ServiceThread,
}

/// Mapped at a time. A thread that maps or unmaps something else meanwhile waits for that: half a
/// millisecond.
const STEP: usize = HUGE_PAGE;

impl PageMapper {
    pub(crate) fn start(map: Arc<MmapRaw>, from: usize, bytes: usize) -> io::Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_over);
        let work = move || {
            let mut steps =
                (from..from + bytes).step_by(STEP).take_while(|_| !told.load(Ordering::Relaxed));
            let mapped = steps.try_for_each(|step| {
                populate(&map, step, STEP.min(from + bytes - step), PageKind::There)
            });
            if let Err(error) = mapped {
                tracing::warn!(%error, "memory in a file is mapped as it is used: its first use is slow");
            }
        };
        Ok(Self { is_over, _thread: ServiceThread::spawn("kvbm-map", work)? })
    }
}

impl Drop for PageMapper {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// What the system, or the container it limits us to, can still give.
pub(super) fn available_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let system = kilobytes(meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?)?;
    let cgroup = |name| std::fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok();
    let number = |text: String| text.trim().parse::<u64>().ok();
    let limit = cgroup("max").and_then(number);
    let used = cgroup("current").and_then(number).unwrap_or(0);
    Some(limit.map_or(system, |limit| system.min(limit.saturating_sub(used))))
}

/// `  12 kB` in bytes.
pub(super) fn kilobytes(text: &str) -> Option<u64> {
    text.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}
