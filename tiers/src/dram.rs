//! Regions in anonymous memory: the host tier, and the device tier where there is no GPU.

use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{Advice, MmapMut, MmapRaw};

use crate::checksum::{Checksums, checksum};
use crate::copy::{SlotId, Tier};
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::Maker;
use crate::frame::{Frame, FramePool, Loan, PoolId};
use crate::geometry::{ALIGNMENT, Geometry};
use crate::memory::{Memory, forget_checksum};

const HUGE_PAGE: usize = 2 << 20;

/// Anonymous memory, cut into slots, every page of it present before it is first used: registering untouched
/// memory with a ring or a GPU takes tens of seconds per GiB.
///
/// Children that the process forks do not get it: the kernel must copy pages that hardware was given, at the
/// fork and for every child (measured: 450 ms for 512 MiB registered with a ring, 431 MiB of them copied and
/// all huge pages broken up; without them 0.6 ms). A child that touches a slot is killed by SIGSEGV.
#[derive(Debug)]
pub struct DramRegion {
    tier: Tier,
    geometry: Geometry,
    map: ManuallyDrop<MmapRaw>,
    maker: Maker,
    /// From the mapping's start to the first slot, which lies on a huge page boundary.
    base: usize,
    huge_bytes: usize,
    /// The host tier's: what lies there may go on to a medium that forgets bits.
    checksums: Option<Checksums>,
    pool: PoolId,
    pool_given: AtomicBool,
}

/// How memory is obtained.
#[derive(Clone, Copy, Debug)]
pub struct DramOptions {
    /// Size and number of the slots.
    pub geometry: Geometry,
    /// Ask for transparent huge pages.
    pub huge_pages: bool,
    /// Threads that touch the pages at start-up.
    pub fault_threads: usize,
}

impl DramRegion {
    /// The host tier (G2).
    ///
    /// # Errors
    /// `NoSpace`: the system has not that much memory to give.
    pub fn host(options: DramOptions) -> Result<Self, SetupError> {
        Self::open(Tier::Host, options)
    }

    /// An emulated device: host memory that plays the device tier (G1) where there is no GPU.
    ///
    /// # Errors
    /// `NoSpace`: the system has not that much memory to give.
    pub fn emulated_device(options: DramOptions) -> Result<Self, SetupError> {
        Self::open(Tier::Device, options)
    }

    pub(crate) fn open(tier: Tier, options: DramOptions) -> Result<Self, SetupError> {
        let DramOptions { geometry, huge_pages, fault_threads } = options;
        let too_large = |why: &str| too_large(tier, geometry.bytes(), why);
        if let Some(available) = available_memory().filter(|&available| geometry.bytes() as u64 > available) {
            return Err(too_large(&format!("{} MiB are available", available >> 20)));
        }
        let bytes = geometry.bytes().checked_add(HUGE_PAGE).ok_or_else(|| too_large("no such address"))?;
        let map = MmapMut::map_anon(bytes).map_err(|error| too_large(&error.to_string()))?;
        let base = map.as_ptr().align_offset(HUGE_PAGE);
        // Before anything registers the pages, and before they are there.
        if let Err(error) = map.advise(Advice::DontFork) {
            tracing::warn!(%error, "{}: forks will copy it, and be slow", label(tier));
        }
        if huge_pages && let Err(error) = map.advise(Advice::HugePage) {
            tracing::debug!(%error, "{}: no huge pages", label(tier));
        }
        prefault(&map, base, geometry.bytes(), fault_threads)
            .map_err(|error| too_large(&error.to_string()))?;
        let map = ManuallyDrop::new(MmapRaw::from(map));
        // The kernel's report is long where a process has many mappings: it is read only where it can say something.
        let huge_bytes =
            if huge_pages { huge_bytes(map.as_ptr() as usize, bytes).min(geometry.bytes()) } else { 0 };
        let (pool, maker) = (PoolId::fresh(), Maker::this_process());
        let checksums = (tier == Tier::Host).then(Checksums::new);
        let pool_given = AtomicBool::new(false);
        Ok(Self { tier, geometry, map, maker, base, huge_bytes, checksums, pool, pool_given })
    }

    /// What it is, in reports: `host memory`, `emulated device`.
    pub const fn label(&self) -> &'static str {
        label(self.tier)
    }

    /// How many of its bytes lie in huge pages, as the kernel reported after they were touched.
    pub const fn huge_bytes(&self) -> usize {
        self.huge_bytes
    }

    /// The slot allocator of this region's slots. There is only one: `None` after the first call.
    pub fn frames(&self) -> Option<FramePool> {
        if self.pool_given.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(FramePool::with_id(self.pool, self.tier, self.slots()))
    }

    /// The block in the frame's slot; `None`: the frame is not of this region's [`frames`](Self::frames).
    pub fn read<'a>(&'a self, frame: &'a Frame) -> Option<&'a [u8]> {
        let slot = self.own_slot(frame.pool(), frame.slot())?;
        // SAFETY: the frame is the slot's only slot handle, and it is borrowed for as long as the slice lives.
        Some(unsafe { std::slice::from_raw_parts(slot.as_ptr(), self.block_bytes()) })
    }

    /// The block in the frame's slot, to be written; `None` as for [`read`](Self::read).
    pub fn write<'a>(&'a self, frame: &'a mut Frame) -> Option<&'a mut [u8]> {
        let slot = self.own_slot(frame.pool(), frame.slot())?;
        forget_checksum(self, frame.slot());
        // SAFETY: the frame is the slot's only slot handle, and it is borrowed mutably for as long as the slice lives.
        Some(unsafe { std::slice::from_raw_parts_mut(slot.as_ptr(), self.block_bytes()) })
    }

    /// The block in the frame's slot was written by way of [`write`](Self::write), all of it: where this region
    /// remembers checksums it is summed, while it lies in the caches, and need not be when it leaves.
    pub fn remember_checksum(&self, frame: &Frame) {
        if let (Some(checksums), Some(block)) = (&self.checksums, self.read(frame)) {
            checksums.record(frame.slot(), checksum(block));
        }
    }

    /// The block in a slot that its pool lent; `None` as for [`read`](Self::read).
    pub fn read_loan<'a>(&'a self, loan: &'a Loan) -> Option<&'a [u8]> {
        let slot = self.own_slot(loan.pool(), loan.slot())?;
        // SAFETY: while a slot is lent its pool gives out no slot handle to it, so nobody writes it; the loan is
        // borrowed for as long as the slice lives.
        Some(unsafe { std::slice::from_raw_parts(slot.as_ptr(), self.block_bytes()) })
    }

    fn own_slot(&self, pool: PoolId, slot: SlotId) -> Option<NonNull<u8>> {
        if pool != self.pool {
            return None;
        }
        self.slot(slot).map(NonNull::cast)
    }
}

impl Drop for DramRegion {
    fn drop(&mut self) {
        if self.maker.is_this_process() {
            // SAFETY: the region is going, so nobody uses the mapping any more.
            unsafe { ManuallyDrop::drop(&mut self.map) };
        }
    }
}

// SAFETY: the mapping belongs to the region, never moves, starts the slots on a huge page boundary and is
// `HUGE_PAGE` bytes longer than they need. Its bytes are handed out to holders of frames only.
unsafe impl Memory for DramRegion {
    fn tier(&self) -> Tier {
        self.tier
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn checksums(&self) -> Option<&Checksums> {
        self.checksums.as_ref()
    }

    fn base(&self) -> NonNull<u8> {
        // SAFETY: `base` is less than a huge page, by which the mapping is longer than the slots.
        let first = unsafe { self.map.as_mut_ptr().add(self.base) };
        // SAFETY: no mapping of ours lies at address zero.
        unsafe { NonNull::new_unchecked(first) }
    }
}

const fn label(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "emulated device",
        Tier::Host => "host memory",
        Tier::Disk => "emulated disk",
        Tier::Object => "emulated object store",
    }
}

fn too_large(tier: Tier, bytes: usize, why: &str) -> SetupError {
    let setting = match tier {
        Tier::Device => "lower device.capacity (DYN_KVBM_DEVICE_CACHE_GB)",
        _ => "lower host.capacity (DYN_KVBM_CPU_CACHE_GB)",
    };
    let message = format!("{}: cannot obtain {} MiB: {why}; {setting}", label(tier), bytes >> 20);
    SetupError::new(SetupErrorKind::NoSpace, message)
}

/// Makes all pages present, each thread its share of huge pages.
fn prefault(map: &MmapMut, base: usize, bytes: usize, threads: usize) -> io::Result<()> {
    let share = bytes.div_ceil(threads.max(1)).next_multiple_of(HUGE_PAGE);
    std::thread::scope(|scope| {
        let start = |from: usize| scope.spawn(move || populate(map, base + from, share.min(bytes - from)));
        let running: Vec<_> = (0..bytes).step_by(share).map(start).collect();
        running.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn populate(map: &MmapMut, from: usize, bytes: usize) -> io::Result<()> {
    match map.advise_range(Advice::PopulateWrite, from, bytes) {
        // Before Linux 5.14 the advice is unknown.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            for offset in (from..from + bytes).step_by(ALIGNMENT) {
                // SAFETY: the page lies within the mapping, which nobody uses yet; other threads write others.
                unsafe { map.as_ptr().cast_mut().add(offset).write_volatile(0) };
            }
            Ok(())
        }
        result => result,
    }
}

/// What the system, or the container it limits us to, can still give.
fn available_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let system = kilobytes(meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?)?;
    let cgroup = |name| std::fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok();
    let number = |text: String| text.trim().parse::<u64>().ok();
    let limit = cgroup("max").and_then(number);
    let used = cgroup("current").and_then(number).unwrap_or(0);
    Some(limit.map_or(system, |limit| system.min(limit.saturating_sub(used))))
}

/// How much of an address range the kernel keeps in huge pages.
fn huge_bytes(start: usize, bytes: usize) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let mut inside = false;
    let mut huge = 0;
    for line in smaps.lines() {
        if let Some((from, to)) = address_range(line) {
            inside = from < start + bytes && start < to;
        } else if inside && let Some(value) = line.strip_prefix("AnonHugePages:") {
            huge += kilobytes(value).unwrap_or(0) as usize;
        }
    }
    huge
}

/// `7f00-7f10 rw-p …`: the first line of a mapping in `smaps`.
fn address_range(line: &str) -> Option<(usize, usize)> {
    let (from, to) = line.split_once(' ')?.0.split_once('-')?;
    Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
}

/// `  12 kB` in bytes.
fn kilobytes(text: &str) -> Option<u64> {
    text.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::holds_in_a_child;
    use crate::testing::skip;

    fn options(slots: u32, block_bytes: usize) -> DramOptions {
        let geometry = Geometry::new(slots, block_bytes).unwrap();
        DramOptions { geometry, huge_pages: true, fault_threads: 2 }
    }

    #[test]
    fn blocks_are_kept_apart_and_aligned() {
        let region = DramRegion::host(options(600, 5000)).unwrap();
        let mut frames = region.frames().unwrap();
        let mut all: Vec<Frame> = std::iter::from_fn(|| frames.take()).collect();
        assert_eq!(all.len(), 600);
        for frame in &mut all {
            let mark = frame.slot().0 as u8;
            region.write(frame).unwrap().fill(mark);
        }
        for frame in &all {
            let block = region.read(frame).unwrap();
            assert_eq!(block.len(), 5000);
            assert!(block.as_ptr().addr().is_multiple_of(ALIGNMENT));
            assert!(block.iter().all(|&byte| byte == frame.slot().0 as u8));
        }
        assert!(region.base().addr().get().is_multiple_of(HUGE_PAGE));
    }

    #[test]
    fn a_frame_opens_its_own_region_only() {
        let ours = DramRegion::host(options(1, 4096)).unwrap();
        let theirs = DramRegion::emulated_device(options(1, 4096)).unwrap();
        let mut frame = theirs.frames().unwrap().take().unwrap();
        assert!(theirs.frames().is_none());
        assert!(ours.read(&frame).is_none() && ours.write(&mut frame).is_none());
        assert_eq!(theirs.label(), "emulated device");
    }

    /// What the kernel says of the region's pages: KiB in memory, KiB in huge pages.
    fn pages(region: &DramRegion) -> [u64; 2] {
        let start = region.base().addr().get();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps
            .lines()
            .skip_while(|line| !address_range(line).is_some_and(|(from, to)| from <= start && start < to));
        ["Rss:", "AnonHugePages:"]
            .map(|field| kilobytes(lines.find_map(|line| line.strip_prefix(field)).unwrap()).unwrap())
    }

    /// With a ring, whose registered memory the kernel would copy at the fork.
    #[test]
    fn a_fork_copies_nothing_of_the_pool() {
        for open in [DramRegion::host, DramRegion::emulated_device] {
            let region = open(options(64, 1 << 20)).unwrap();
            let ring = crate::disk::ring::build(1).inspect_err(|error| skip("uring", error)).ok();
            let _parts = ring.as_ref().and_then(|ring| crate::disk::ring::register_memory(ring, &region));
            let before = pages(&region);
            let start = region.base().as_ptr();
            assert!(
                holds_in_a_child(|| {
                    // SAFETY: the kernel is asked what lies at an address and writes the answer for one page.
                    let found = unsafe { libc::mincore(start.cast(), ALIGNMENT, [0].as_mut_ptr()) };
                    found == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
                }),
                "the child has the pool"
            );
            assert_eq!(pages(&region), before);
        }
    }

    #[test]
    fn a_child_that_drops_the_pool_unmaps_nothing() {
        let mut region = Some(DramRegion::host(options(4, 4096)).unwrap());
        let start = region.as_ref().unwrap().base();
        assert!(holds_in_a_child(|| {
            // Something else of the child's lies where the pool was.
            // SAFETY: nothing lies there in the child, else this fails.
            let place = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                libc::mmap(start.as_ptr().cast(), ALIGNMENT, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
            };
            drop(region.take());
            // SAFETY: mapped above, unless the drop has unmapped it, which ends the child and fails the test.
            place == start.as_ptr().cast() && unsafe { start.read_volatile() } == 0
        }));
        let mut frame = region.as_ref().unwrap().frames().unwrap().take().unwrap();
        region.as_ref().unwrap().write(&mut frame).unwrap().fill(1);
    }

    #[test]
    fn more_memory_than_there_is_names_the_setting() {
        let error = DramRegion::host(options(1 << 20, 1 << 30)).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NoSpace);
        assert!(error.to_string().contains("DYN_KVBM_CPU_CACHE_GB"), "{error}");
    }
}
