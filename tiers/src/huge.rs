//! Arrays in huge pages, for tables that are read at random: with pages of 4 KiB most such reads also miss the
//! address translation cache, which costs as much again (measured: 25–30 % of a match in a million blocks).

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};

const HUGE_PAGE: usize = 2 << 20;

/// A growing array of plain values. From 2 MiB on it starts on a huge page boundary and asks the kernel for
/// huge pages; where there are none it is an ordinary array. It never shrinks.
///
/// Unlike the slots of a region it is not kept from children that the process forks. No hardware is given its
/// pages, so a fork shares them and copies page tables only; and it comes from the allocator, which would hand
/// the addresses to others later, also in a child, where nothing would lie behind them.
pub struct HugeVec<T: Copy> {
    start: NonNull<T>,
    len: usize,
    capacity: usize,
}

// SAFETY: it owns its values, like a `Vec`.
unsafe impl<T: Copy + Send> Send for HugeVec<T> {}
// SAFETY: shared access gives out shared references to the values only.
unsafe impl<T: Copy + Sync> Sync for HugeVec<T> {}

impl<T: Copy> HugeVec<T> {
    /// Empty, with room for `capacity` values.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut array = Self { start: NonNull::dangling(), len: 0, capacity: 0 };
        array.move_to(capacity);
        array
    }

    /// `len` times `value`.
    pub fn filled(len: usize, value: T) -> Self {
        let mut array = Self::with_capacity(len);
        array.resize(len, value);
        array
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
        if capacity == 0 || size_of::<T>() == 0 {
            self.capacity = capacity;
            return;
        }
        let layout = Self::layout(capacity);
        // SAFETY: the layout is not of size zero.
        let place = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(place.cast::<T>()) else { handle_alloc_error(layout) };
        advise(place, layout);
        // SAFETY: the new place is larger than `len` values and distinct from the old one.
        unsafe { start.copy_from_nonoverlapping(self.start, self.len) };
        self.free();
        (self.start, self.capacity) = (start, capacity);
    }

    /// # Panics
    /// If the array would exceed the address space, like `Vec`.
    fn layout(capacity: usize) -> Layout {
        let plain = Layout::array::<T>(capacity).expect("an array fits into the address space");
        if plain.size() < HUGE_PAGE {
            return plain;
        }
        plain.align_to(HUGE_PAGE).expect("2 MiB is a power of two")
    }

    fn free(&mut self) {
        if self.capacity > 0 && size_of::<T>() > 0 {
            // SAFETY: the place was allocated with this layout and is not used again.
            unsafe { dealloc(self.start.as_ptr().cast(), Self::layout(self.capacity)) };
        }
    }
}

/// Asks for huge pages. Without them everything works, only slower.
fn advise(place: *mut u8, layout: Layout) {
    if layout.align() >= HUGE_PAGE {
        let whole_pages = layout.size() & !(HUGE_PAGE - 1);
        // SAFETY: the range is ours, and this advice changes no content.
        let _ = unsafe { madvise(place.cast(), whole_pages, Advice::LinuxHugepage) };
    }
}

impl<T: Copy> Drop for HugeVec<T> {
    fn drop(&mut self) {
        self.free();
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
    }
}
