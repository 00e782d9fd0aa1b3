//! Arrays in huge pages, for tables that are read at random: with pages of 4 KiB most such reads
//! also miss the address translation cache, which costs as much again (measured: 25–30 % of a match
//! in a million blocks).

#![expect(unsafe_code, reason = "maps memory")]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap_fixed, munmap,
};
use rustix::param::page_size;

const HUGE_PAGE: usize = 2 << 20;

/// Bytes in the mappings of all arrays.
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// Bytes that this process has in arrays of 2 MiB and more, room to grow included: no allocator
/// counts them.
pub fn mapped_bytes() -> usize {
    MAPPED.load(Ordering::Relaxed)
}

/// A growing array of plain values. From 2 MiB on it is a mapping of its own, starts on a huge page
/// boundary and asks the kernel for huge pages; where there are none it is an ordinary array. It
/// never shrinks.
///
/// Such a mapping grows without copying: the kernel gives its pages a larger place, so that
/// appending a value takes next to no time in proportion to the array.
///
/// The first use of a huge page takes milliseconds in a virtual machine: the kernel clears it, and
/// the machine below has to find it first. A caller that appends under a lock provides memory
/// [`ahead`](Self::ahead) before it takes the lock.
///
/// Unlike the slots of a region it is not kept from children that the process forks. No hardware is
/// given its pages, so a fork shares them and copies page tables only.
pub struct HugeVec<T: Copy> {
    start: NonNull<T>,
    len: usize,
    capacity: usize,
    /// Bytes from the start on whose pages were named by [`ahead`](Self::ahead) or are there
    /// already.
    provided: usize,
}

// SAFETY: it owns its values, like a `Vec`.
unsafe impl<T: Copy + Send> Send for HugeVec<T> {}
// SAFETY: shared access gives out shared references to the values only.
unsafe impl<T: Copy + Sync> Sync for HugeVec<T> {}

impl HugeVec<u64> {
    /// `len` zeroes. Large arrays are not written to: their pages come into being when they are
    /// first used.
    pub fn zeroed(len: usize) -> Self {
        let mut array = Self::with_capacity(len);
        if matches!(place_of::<u64>(len), Some(ArrayPlace::Mapped(_))) {
            // Fresh mappings read as zero.
            array.len = len;
        } else {
            array.resize(len, 0);
        }
        array
    }
}

impl<T: Copy> HugeVec<T> {
    /// Empty, with room for `capacity` values.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut array = Self { start: NonNull::dangling(), len: 0, capacity: 0, provided: 0 };
        array.move_to(capacity);
        array
    }

    /// `len` times `value`.
    pub fn filled(len: usize, value: T) -> Self {
        let mut array = Self::with_capacity(len);
        array.resize(len, value);
        array
    }

    /// Has the kernel provide the memory for all its room now.
    #[must_use]
    pub fn populated(mut self) -> Self {
        if let Some(ArrayPlace::Mapped(bytes)) = place_of::<T>(self.capacity) {
            Ahead { start: self.start.addr().get(), bytes }.provide();
            self.provided = bytes;
        }
        self
    }

    /// Names the pages of the next `values` values, as far as there is room for these, which have
    /// not been used or named before. `None`: there are none, or the array is none of its own
    /// pages.
    pub fn ahead(&mut self, values: usize) -> Option<Ahead> {
        let Some(ArrayPlace::Mapped(bytes)) = place_of::<T>(self.capacity) else { return None };
        let used = (self.len * size_of::<T>()).next_multiple_of(HUGE_PAGE);
        let wanted = self.len.saturating_add(values).min(self.capacity) * size_of::<T>();
        let (from, to) = (self.provided.max(used), wanted.next_multiple_of(HUGE_PAGE).min(bytes));
        self.provided = from.max(to);
        (from < to).then(|| Ahead { start: self.start.addr().get() + from, bytes: to - from })
    }

    /// How many values fit before it moves.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes room for exactly `additional` more values, if there is less.
    pub fn reserve_exact(&mut self, additional: usize) {
        let wanted = self.len.saturating_add(additional);
        if wanted > self.capacity {
            self.move_to(wanted);
        }
    }

    /// Appends a value; doubles the room if there is none.
    pub fn push(&mut self, value: T) {
        if self.len == self.capacity {
            self.reserve_exact(self.len.max(4));
        }
        // SAFETY: there is room for one more value behind the last.
        unsafe { self.start.add(self.len).write(value) };
        self.len += 1;
    }

    /// Appends `value` until there are `len` values. Never shortens.
    pub fn resize(&mut self, len: usize, value: T) {
        self.reserve_exact(len.saturating_sub(self.len));
        while self.len < len {
            self.push(value);
        }
    }

    /// Moves the values to a larger place.
    fn move_to(&mut self, capacity: usize) {
        let (from, to) = (place_of::<T>(self.capacity), place_of::<T>(capacity));
        self.start = match (from, to) {
            (Some(ArrayPlace::Mapped(old)), Some(ArrayPlace::Mapped(new))) => {
                remap(self.start.cast(), old, new).cast()
            }
            (_, to) => {
                let start = to.map_or(NonNull::dangling(), |to| to.take().cast());
                // SAFETY: the new place is larger than `len` values and distinct from the old one.
                unsafe { start.copy_from_nonoverlapping(self.start, self.len) };
                from.into_iter().for_each(|from| from.give_back(self.start.cast()));
                start
            }
        };
        self.capacity = capacity;
    }
}

/// Pages that an array will use soon.
#[derive(Debug)]
#[must_use = "nothing is provided until it is asked for"]
pub struct Ahead {
    /// An address: the array may have moved or gone by the time that the pages are provided.
    start: usize,
    bytes: usize,
}

impl Ahead {
    /// Has the kernel provide them, which takes milliseconds for each 2 MiB. Where it cannot
    /// (before Linux 5.14, or memory is short) nothing is lost, and nothing happens where the array
    /// has moved meanwhile.
    pub fn provide(self) {
        // A page at a time: a thread that maps memory meanwhile, perhaps with a lock, waits for no
        // more than one.
        for from in (0..self.bytes).step_by(HUGE_PAGE) {
            let bytes = HUGE_PAGE.min(self.bytes - from);
            // SAFETY: this advice changes no content of any memory, whatever its owner is by now;
            // of memory that is not mapped it says so.
            let provided = unsafe {
                madvise((self.start + from) as *mut _, bytes, Advice::LinuxPopulateWrite)
            };
            if let Err(error) = provided {
                return tracing::debug!(bytes, %error, "memory is not provided ahead of its use");
            }
        }
    }
}

/// What an array of some size lies in.
#[derive(Clone, Copy, Debug)]
enum ArrayPlace {
    Allocated(Layout),
    /// Whole pages; their bytes.
    Mapped(usize),
}

/// `None` for nothing.
///
/// # Panics
/// If the array would exceed the address space, like `Vec`.
fn place_of<T>(capacity: usize) -> Option<ArrayPlace> {
    let layout = Layout::array::<T>(capacity).expect("an array fits into the address space");
    match layout.size() {
        0 => None,
        1..HUGE_PAGE => Some(ArrayPlace::Allocated(layout)),
        size => Some(ArrayPlace::Mapped(size.next_multiple_of(page_size()))),
    }
}

impl ArrayPlace {
    fn take(self) -> NonNull<u8> {
        match self {
            Self::Allocated(layout) => {
                // SAFETY: the layout is not of size zero.
                let start = unsafe { alloc(layout) };
                NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout))
            }
            Self::Mapped(bytes) => {
                let start = map_aligned(bytes, ProtFlags::READ | ProtFlags::WRITE);
                advise(start, bytes);
                MAPPED.fetch_add(bytes, Ordering::Relaxed);
                start
            }
        }
    }

    fn give_back(self, start: NonNull<u8>) {
        match self {
            // SAFETY: the place was allocated with this layout and is not used again.
            Self::Allocated(layout) => unsafe { dealloc(start.as_ptr(), layout) },
            Self::Mapped(bytes) => {
                unmap(start.as_ptr(), bytes);
                MAPPED.fetch_sub(bytes, Ordering::Relaxed);
            }
        }
    }
}

/// Gives the pages of a mapping a larger place.
fn remap(start: NonNull<u8>, old: usize, new: usize) -> NonNull<u8> {
    if old == new {
        return start;
    }
    // The kernel moves whole huge pages only between places that are both aligned to them, and
    // chooses none itself.
    let target = map_aligned(new, ProtFlags::empty());
    // SAFETY: `start` is a mapping of `old` bytes that nothing uses any more, and `target` one of
    // `new` bytes that nothing has used yet.
    let moved = unsafe {
        mremap_fixed(start.as_ptr().cast(), old, new, MremapFlags::MAYMOVE, target.as_ptr().cast())
    };
    let Some(moved) = moved.ok().and_then(|moved| NonNull::new(moved.cast())) else {
        out_of_memory(new)
    };
    advise(moved, new);
    MAPPED.fetch_add(new - old, Ordering::Relaxed);
    moved
}

/// New private memory from a huge page boundary on. It need not be there before it is used: the
/// process is not charged for room to grow.
fn map_aligned(bytes: usize, access: ProtFlags) -> NonNull<u8> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the kernel chooses a place that is free.
    let place = unsafe { mmap_anonymous(null_mut(), bytes + HUGE_PAGE, access, flags) };
    let Ok(place) = place else { out_of_memory(bytes) };
    let place = place.cast::<u8>();
    let before = place.align_offset(HUGE_PAGE);
    let start = place.wrapping_add(before);
    unmap(place, before);
    unmap(start.wrapping_add(bytes), HUGE_PAGE - before);
    NonNull::new(start).unwrap_or_else(|| out_of_memory(bytes))
}

/// Whole pages of ours that nothing uses again.
fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: callers own the range and forget it.
        let unmapped = unsafe { munmap(start.cast(), bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours could not be given back");
    }
}

/// Asks for huge pages. Without them everything works, only slower.
fn advise(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the range is ours, and this advice changes no content.
    let _ = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
}

/// Ends the process as a failed allocation does.
fn out_of_memory(bytes: usize) -> ! {
    handle_alloc_error(Layout::from_size_align(bytes, 1).unwrap_or(Layout::new::<u8>()))
}

impl<T: Copy> Drop for HugeVec<T> {
    fn drop(&mut self) {
        place_of::<T>(self.capacity)
            .into_iter()
            .for_each(|place| place.give_back(self.start.cast()));
    }
}

impl<T: Copy> Deref for HugeVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the first `len` values are initialised.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Copy> DerefMut for HugeVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: the first `len` values are initialised, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Copy> fmt::Debug for HugeVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HugeVec({} of {})", self.len, self.capacity)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_grows_like_a_vec_across_the_huge_page_boundary() {
        let (mut array, mut model) = (HugeVec::with_capacity(3), Vec::new());
        for value in 0..600_000u64 {
            array.push(value);
            model.push(value);
        }
        assert!(array.capacity() >= array.len());
        assert_eq!(array.as_ptr() as usize % HUGE_PAGE, 0);
        array.resize(700_000, 7);
        model.resize(700_000, 7);
        array[5] = 1;
        model[5] = 1;
        assert_eq!(&*array, &*model);
    }

    #[test]
    fn capacity_is_exact_and_may_be_nothing() {
        assert_eq!(HugeVec::<u32>::filled(1000, 1).capacity(), 1000);
        let mut empty = HugeVec::<u32>::with_capacity(0);
        assert!(empty.is_empty());
        empty.push(3);
        assert_eq!(&*empty, &[3]);
        let mut units = HugeVec::with_capacity(2);
        (0..9).for_each(|_| units.push(()));
        assert_eq!(units.len(), 9);
    }

    #[test]
    fn zeroes_are_zero_however_many() {
        for len in [0, 100, 300_000] {
            let zeroes = HugeVec::zeroed(len);
            assert_eq!(zeroes.len(), len);
            assert!(zeroes.iter().all(|&zero| zero == 0));
        }
    }

    /// Whether the kernel has a page for an address already.
    fn is_there(address: usize) -> bool {
        let mut entry = [0; 8];
        let file = std::fs::File::open("/proc/self/pagemap").unwrap();
        let at = (address / page_size() * 8) as u64;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut entry, at).unwrap();
        u64::from_le_bytes(entry) >> 63 == 1
    }

    #[test]
    fn what_is_ahead_is_provided_once_and_elsewhere() {
        let mut array = HugeVec::<u64>::with_capacity(8 * HUGE_PAGE / 8);
        let end_of =
            |pages: usize, array: &HugeVec<u64>| array.start.addr().get() + pages * HUGE_PAGE - 1;
        assert!(!is_there(end_of(1, &array)));
        array.ahead(1).expect("nothing has been used").provide();
        assert!(is_there(end_of(1, &array)) && !is_there(end_of(2, &array)));
        assert!(array.ahead(1000).is_none(), "these pages are there");
        array.resize(HUGE_PAGE / 8 * 3, 7);
        let ahead = array.ahead(usize::MAX).expect("five pages have not been used");
        assert_eq!(ahead.bytes, 5 * HUGE_PAGE);
        std::thread::spawn(|| ahead.provide()).join().unwrap();
        assert!(is_there(end_of(8, &array)));
        assert!(array.iter().all(|&value| value == 7));
        assert!(
            HugeVec::<u64>::with_capacity(8).ahead(8).is_none(),
            "it is of the allocator's pages"
        );
    }

    #[test]
    fn pages_of_an_array_that_is_gone_are_not_provided() {
        let mut array = HugeVec::<u64>::with_capacity(4 * HUGE_PAGE / 8);
        let ahead = array.ahead(usize::MAX).unwrap();
        drop(array);
        ahead.provide();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Sizes around those where it moves; three bytes a value, which no page is a multiple of.
        #[test]
        fn it_keeps_its_values_however_it_grows(steps in prop::collection::vec(0..900_000usize, 1..6)) {
            let (mut array, mut len) = (HugeVec::with_capacity(0), 0u32);
            for more in steps {
                array.reserve_exact(more);
                for _ in 0..more {
                    array.push([len as u8, (len >> 8) as u8, (len >> 16) as u8]);
                    len += 1;
                }
                let expected = (0..len).map(|n| [n as u8, (n >> 8) as u8, (n >> 16) as u8]);
                prop_assert!(array.iter().copied().eq(expected));
            }
        }
    }
}
