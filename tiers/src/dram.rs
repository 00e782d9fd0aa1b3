//! Regions in memory: the host tier, and the device tier where there is no GPU.
//!
//! Memory is the process's own and goes with it, or lies, in part, in a file on tmpfs or hugetlbfs:
//! then the next process attaches to it and finds every byte where it was. Or it lies in a memfd,
//! which other processes may map for reading.

#![expect(unsafe_code, reason = "maps memory")]

mod file;
mod mapping;
mod memfd;
mod pages;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memmap2::{Advice, MmapRaw};

use crate::checksum::{Checksums, SummedCopy, checksum};
use crate::copy::{CopyError, SlotId, SlotRef, Tier};
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{LockWait, SettingNames};
use crate::fork::ProcessBound;
use crate::frame::{Frame, FramePool, Loan, PoolId};
use crate::geometry::Geometry;
use crate::memory::{Memory, forget_checksum};
use crate::peers::SharedMemory;
use crate::verify::corrupt;
use file::MemoryFile;
use pages::{HUGE_PAGE, PageKind, available_memory, prefault};

pub use file::{Mount, MountKind};
pub(crate) use mapping::map_for_reading;
pub(crate) use pages::PageMapper;

/// What to change when memory in a file cannot be had.
pub(crate) static SETTINGS: SettingNames = SettingNames {
    tier: "the host tier",
    dir: "host.persist (DYN_KVBM_CPU_CACHE_PERSIST)",
    capacity: "host.capacity",
    space: "lower host.capacity (DYN_KVBM_CPU_CACHE_GB), or make the mount larger: a container has 64 MiB of /dev/shm \
            unless it is started with --shm-size, a pod unless a volume of `medium: Memory` is mounted there, a \
            machine what `mount -o remount,size=…` gave it; hugetlbfs has as many pages as vm.nr_hugepages",
};

/// Memory, cut into slots, every page of it present before it is first used: registering untouched
/// memory with a ring or a GPU takes tens of seconds per GiB. Small pages of a file, which are
/// there, are mapped in the background.
///
/// Children that the process forks do not get it: the kernel must copy pages that hardware was
/// given, at the fork and for every child (measured: 450 ms for 512 MiB registered with a ring, 431
/// MiB of them copied and all huge pages broken up; without them 0.6 ms). A child that touches a
/// slot is killed by SIGSEGV.
#[derive(Debug)]
pub struct DramRegion {
    tier: Tier,
    geometry: Geometry,
    /// Before the mapping, which it has as well until its thread ends.
    _mapper: Option<PageMapper>,
    map: ProcessBound<Arc<MmapRaw>>,
    /// From the mapping's start to the first slot, which lies on a huge page boundary.
    base: usize,
    /// The host tier's: what lies there may go on to a medium that forgets bits.
    checksums: Option<Arc<Checksums>>,
    pool: PoolId,
    pool_given: AtomicBool,
    /// What its first slots lie in, if these outlive the process. After the mapping.
    file: Option<MemoryFile>,
    /// What all of its slots lie in, if other processes may map them.
    shared: Option<SharedMemory>,
}

/// What slots lie in.
enum Backing {
    /// Memory of this process alone.
    Private,
    /// The first ones in a file, the others in private memory.
    File(MemoryFile),
    /// All in a memfd, which other processes may map.
    Memfd,
}

/// Where slots lie that outlive their process.
#[derive(Clone, Debug)]
pub struct PersistOptions {
    /// A directory on tmpfs or hugetlbfs; its last component is made if it is missing.
    pub dir: PathBuf,
    /// Names all that the bytes of the blocks depend on: letters, digits, `-` and `_`.
    pub namespace: String,
    /// Slots that are to outlive the process: the first ones.
    pub slots: u32,
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

    /// A host tier that other processes of this host may map for reading: see
    /// [`shareable`](Self::shareable). Its memory comes back when this process and all readers have
    /// unmapped it.
    ///
    /// # Errors
    /// `NoSpace`: the system has not that much memory to give. `Unavailable`: it makes no memfd, or
    /// seals none for readers (before Linux 5.1).
    pub fn shareable_host(options: DramOptions) -> Result<Self, SetupError> {
        Self::build(Tier::Host, options, Backing::Memfd)
    }

    /// A host tier whose first slots are found again after the end of the process, however that
    /// comes. The file is `kvbm-<namespace>.memory`, of exactly the size of these slots (on
    /// hugetlbfs rounded up to whole pages), which is all there before this returns. Waits up to 15
    /// s for a file that is in use.
    ///
    /// What lies in the slots is as the last process left it, in mid-copy if it was killed: each
    /// slot's block is to be compared with a checksum before it is used.
    ///
    /// # Errors
    /// `NoSpace`: the mount, or the system, has not that much memory to give. `Invalid`: the
    /// directory is not in memory, the namespace is no file name, or the file is of another size.
    /// `NotWritable`: what lies there is not a file of this user's that is closed to all others.
    /// `InUse`: another process has it.
    pub fn persistent(options: DramOptions, place: &PersistOptions) -> Result<Self, SetupError> {
        Self::persistent_within(options, place, LockWait::FOR_A_DEAD_RING)
    }

    fn persistent_within(
        options: DramOptions,
        place: &PersistOptions,
        patience: Duration,
    ) -> Result<Self, SetupError> {
        let file = MemoryFile::open(place, options, patience)?;
        Self::build(Tier::Host, options, Backing::File(file))
    }

    pub(crate) fn open(tier: Tier, options: DramOptions) -> Result<Self, SetupError> {
        Self::build(tier, options, Backing::Private)
    }

    fn build(tier: Tier, options: DramOptions, backing: Backing) -> Result<Self, SetupError> {
        let DramOptions { geometry, huge_pages, fault_threads } = options;
        let (file, is_shared) = match backing {
            Backing::Private => (None, false),
            Backing::File(file) => (Some(file), false),
            Backing::Memfd => (None, true),
        };
        let too_large = |why: &str| too_large(tier, geometry.bytes(), why);
        let private = geometry.bytes().saturating_sub(file.as_ref().map_or(0, MemoryFile::bytes));
        if let Some(available) = available_memory().filter(|&available| private as u64 > available)
        {
            return Err(too_large(&format!("{} MiB are available", available >> 20)));
        }
        let (bytes, alignment) = file.as_ref().map_or((geometry.bytes(), HUGE_PAGE), |file| {
            (geometry.bytes().max(file.bytes()), file.page_bytes().max(HUGE_PAGE))
        });
        let (mut map, base) =
            mapping::reserve(bytes, alignment, huge_pages).map_err(|error| too_large(&error))?;
        file.iter().try_for_each(|file| file.map_over(&mut map, base, huge_pages))?;
        let shared = is_shared.then(|| memfd::map_over(&mut map, base, options)).transpose()?;
        // Before anything registers the pages, and before they are there.
        if let Err(error) = map.advise(Advice::DontFork) {
            tracing::warn!(%error, "{}: forks will copy it, and be slow", label(tier));
        }
        let map = Arc::new(MmapRaw::from(map));
        let there = file.as_ref().map_or(0, MemoryFile::bytes);
        let later = file.as_ref().is_some_and(|file| !file.may_be_huge());
        let fresh = if is_shared && huge_pages { PageKind::Shmem } else { PageKind::Private };
        prefault(&map, base, if later { 0 } else { there }, fault_threads, PageKind::There)
            .and_then(|()| prefault(&map, base + there, bytes - there, fault_threads, fresh))
            .map_err(|error| too_large(&error.to_string()))?;
        let mapper = later.then(|| PageMapper::start(Arc::clone(&map), base, there)).transpose();
        let mapper = mapper.map_err(|error| no_thread(tier, error))?;
        Ok(Self {
            tier,
            geometry,
            _mapper: mapper,
            map: ProcessBound::new(map),
            base,
            checksums: (tier == Tier::Host).then(Arc::default),
            pool: PoolId::fresh(),
            pool_given: AtomicBool::new(false),
            file,
            shared,
        })
    }

    /// The file that its first slots lie in, and whether an earlier process made it; `None`: all of
    /// it goes with this process.
    pub fn persists(&self) -> Option<(&Path, bool)> {
        self.file.as_ref().map(|file| (file.path(), file.was_there()))
    }

    /// What another process needs to map the slots for reading; `None`: this is no
    /// [`shareable_host`](Self::shareable_host). Memory in a file is none either: the kernel does
    /// not seal files that have names, and a reader of one that is cut off is killed.
    pub const fn shareable(&self) -> Option<&SharedMemory> {
        self.shared.as_ref()
    }

    /// What it is, in reports: `host memory`, `emulated device`.
    pub const fn label(&self) -> &'static str {
        label(self.tier)
    }

    /// The slot allocator of this region's slots. There is only one: `None` after the first call.
    pub fn frames(&self) -> Option<FramePool> {
        if self.pool_given.swap(true, Ordering::Relaxed) {
            return None;
        }
        Some(FramePool::with_id(self.pool, self.tier, self.slots()))
    }

    /// The title to a slot that a leader, which has the slots of its ranks, has given to a copy.
    /// `None`: there is no such slot.
    pub(crate) fn frame_of_leader(&self, slot: SlotRef) -> Option<Frame> {
        let is_there = slot.tier == self.tier && slot.slot.0 < self.slots();
        is_there.then(|| Frame::of_leader(self.pool, slot))
    }

    /// The block in the frame's slot; `None`: the frame is not of this region's
    /// [`frames`](Self::frames).
    pub fn read<'a>(&'a self, frame: &'a Frame) -> Option<&'a [u8]> {
        let slot = self.own_slot(frame.pool(), frame.slot())?;
        // SAFETY: the frame is the slot's only slot handle, and it is borrowed for as long as the
        // slice lives.
        Some(unsafe { std::slice::from_raw_parts(slot.as_ptr(), self.block_bytes()) })
    }

    /// The block in the frame's slot, to be written; `None` as for [`read`](Self::read).
    pub fn write<'a>(&'a self, frame: &'a mut Frame) -> Option<&'a mut [u8]> {
        self.write_slot(frame)?.get_mut(..self.block_bytes())
    }

    /// All bytes of the frame's slot, to be written: the block, and what room there is behind it;
    /// `None` as for [`read`](Self::read).
    pub(crate) fn write_slot<'a>(&'a self, frame: &'a mut Frame) -> Option<&'a mut [u8]> {
        let slot = self.own_slot(frame.pool(), frame.slot())?;
        forget_checksum(self, frame.slot());
        // SAFETY: the frame is the slot's only slot handle, and it is borrowed mutably for as long
        // as the slice lives; a slot has `stride` bytes.
        Some(unsafe { std::slice::from_raw_parts_mut(slot.as_ptr(), self.stride()) })
    }

    /// The block in the frame's slot, all of it, was written by a way that summed it.
    pub fn record_checksum(&self, frame: &Frame, crc: u32) {
        if let Some(checksums) = &self.checksums {
            checksums.record(frame.slot(), crc);
        }
    }

    /// The block in the frame's slot was written by way of [`write`](Self::write), all of it: where
    /// this region remembers checksums it is summed, while it lies in the caches, and need not be
    /// when it leaves. Returns the sum.
    pub fn remember_checksum(&self, frame: &Frame) -> Option<u32> {
        let (checksums, block) = (self.checksums.as_ref()?, self.read(frame)?);
        let crc = checksum(block);
        checksums.record(frame.slot(), crc);
        Some(crc)
    }

    /// Writes a block into the frame's slot, past the caches: it was put together in them, and nothing
    /// reads the slot soon. Returns its checksum, which is remembered as by
    /// [`remember_checksum`](Self::remember_checksum). `None` as for [`read`](Self::read), or the
    /// block has another size.
    pub fn fill(&self, frame: &mut Frame, block: &[u8]) -> Option<u32> {
        let slot = self.write(frame).filter(|slot| slot.len() == block.len())?;
        let mut copy = SummedCopy::new();
        copy.piece(block, slot);
        let crc = copy.finish();
        self.record_checksum(frame, crc);
        Some(crc)
    }

    /// The block in a slot that its pool lent; `None` as for [`read`](Self::read).
    pub fn read_loan<'a>(&'a self, loan: &'a Loan) -> Option<&'a [u8]> {
        let slot = self.own_slot(loan.pool(), loan.slot())?;
        // SAFETY: while a slot is lent its pool gives out no slot handle to it, so nothing writes
        // it; the loan is borrowed for as long as the slice lives.
        Some(unsafe { std::slice::from_raw_parts(slot.as_ptr(), self.block_bytes()) })
    }

    /// The checksums of its blocks; `None`: it remembers none, as it is no host tier's.
    pub const fn shared_checksums(&self) -> Option<&Arc<Checksums>> {
        self.checksums.as_ref()
    }

    /// Compares the block in a slot that its pool lent with the checksum that an earlier process
    /// had of it, if the block is that process's and has not been compared before. A caller that
    /// reads it by [`read_loan`](Self::read_loan) must do this.
    ///
    /// # Errors
    /// `Corrupt`: the block is not what it was.
    pub fn verify_loan(&self, loan: &Loan) -> Result<(), CopyError> {
        let (Some(checksums), Some(block)) = (&self.checksums, self.read_loan(loan)) else {
            return Ok(());
        };
        checksums.verify_inherited(loan.slot(), block).map_err(|(expected, actual)| {
            let slot = SlotRef { tier: self.tier, slot: loan.slot(), generation: 0 };
            corrupt(slot, expected, actual)
        })
    }

    /// Where the frame's slot starts; `None` as for [`read`](Self::read).
    pub(crate) fn start_of(&self, frame: &Frame) -> Option<NonNull<u8>> {
        self.own_slot(frame.pool(), frame.slot())
    }

    fn own_slot(&self, pool: PoolId, slot: SlotId) -> Option<NonNull<u8>> {
        if pool != self.pool {
            return None;
        }
        self.slot(slot).map(NonNull::cast)
    }
}

// SAFETY: the mapping belongs to the region, never moves, starts the slots on a huge page boundary
// and is longer than they need by what that takes. Its bytes are handed out to holders of frames
// only. A file behind it is of its full size and locked, and closed to other users: only programs
// bound by the same rules can cut it off or change it. A memfd behind it is sealed against both;
// processes that map it can read it, and nothing else.
unsafe impl Memory for DramRegion {
    fn tier(&self) -> Tier {
        self.tier
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn checksums(&self) -> Option<&Checksums> {
        self.checksums.as_deref()
    }

    fn lock(&self) -> Option<&File> {
        self.file.as_ref().map(MemoryFile::file)
    }

    fn base(&self) -> NonNull<u8> {
        // SAFETY: `base` is less than the alignment, by which the mapping is longer than the slots.
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

fn no_thread(tier: Tier, error: io::Error) -> SetupError {
    let message = format!(
        "{}: cannot start a thread that maps it: raise the limit on processes",
        label(tier)
    );
    SetupError::caused(SetupErrorKind::Unavailable, message, error)
}

#[cfg(test)]
mod tests;
