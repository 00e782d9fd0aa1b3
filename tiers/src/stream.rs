//! Copies to memory that is not read soon.
//!
//! A block that goes to the host tier is one of thousands: its destination is in no cache and need
//! not be. An ordinary store would first fetch the line that it overwrites; a streaming store does
//! not, which saves a third of the traffic. With that the copy and the checksum together take less
//! time than `memcpy` does.

#![expect(unsafe_code, reason = "instructions of the processor, memory of other processes")]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_store_si128,
    _mm_stream_si128,
};

use crate::geometry::ALIGNMENT;

/// Bytes that are moved together: a cache line.
pub(crate) const LINE_BYTES: usize = 64;
/// How far ahead of the copy the source is fetched. The processor's own prefetching stops at pages.
const AHEAD_BYTES: usize = 2 << 10;

/// Copies `from` to `to`, past the caches where the processor can. Other threads may rely on the
/// bytes only after [`finish`].
///
/// # Panics
/// If the sizes differ.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "blocks of one size");
    // An engine's tensors start anywhere, and an ordinary copy of all of it would take as long
    // again.
    let head = to.as_ptr().align_offset(LINE_BYTES).min(to.len());
    let (from_head, from) = from.split_at(head);
    let (to_head, to) = to.split_at_mut(head);
    let lines = from.len() / LINE_BYTES * LINE_BYTES;
    let (from_lines, from_tail) = from.split_at(lines);
    let (to_lines, to_tail) = to.split_at_mut(lines);
    to_head.copy_from_slice(from_head);
    copy_lines(from_lines, to_lines);
    to_tail.copy_from_slice(from_tail);
}

/// Both are whole lines of one number, and `to` starts at a line.
#[cfg(target_arch = "x86_64")]
#[expect(
    clippy::cast_ptr_alignment,
    reason = "loads need no alignment, and the destination has it"
)]
fn copy_lines(from: &[u8], to: &mut [u8]) {
    for (from, to) in
        from.as_chunks::<LINE_BYTES>().0.iter().zip(to.as_chunks_mut::<LINE_BYTES>().0)
    {
        let (from, to) = (from.as_ptr().cast::<__m128i>(), to.as_mut_ptr().cast::<__m128i>());
        // Word by word, without `map` or a loop: where debug assertions are on these become calls,
        // which take five times as long as the copy. SAFETY: SSE2 is part of x86-64. A prefetch may
        // name any address. The line is read and written within its 64 bytes, and the destination
        // is aligned to as many.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(AHEAD_BYTES));
            let first = _mm_loadu_si128(from);
            let second = _mm_loadu_si128(from.wrapping_add(1));
            let third = _mm_loadu_si128(from.wrapping_add(2));
            let fourth = _mm_loadu_si128(from.wrapping_add(3));
            _mm_stream_si128(to, first);
            _mm_stream_si128(to.wrapping_add(1), second);
            _mm_stream_si128(to.wrapping_add(2), third);
            _mm_stream_si128(to.wrapping_add(3), fourth);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_lines(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

/// Bytes that [`copy_page`] moves: slots are whole pages.
pub(crate) const PAGE_BYTES: usize = ALIGNMENT;

/// A page in the caches.
#[repr(C, align(64))]
pub(crate) struct Page(pub(crate) [u8; PAGE_BYTES]);

impl Default for Page {
    fn default() -> Self {
        Self([0; PAGE_BYTES])
    }
}

/// Copies a page that another process may write meanwhile to two places: `to`, past the caches as
/// [`copy`] does, and `seen`. Both get the same bytes, since each byte is read once. `wanted` bytes
/// from `from` on are copied soon: nothing behind them is fetched ahead, which others may be
/// writing.
///
/// # Safety
/// `from` is the start of a page that is mapped as long as this runs.
///
/// # Panics
/// If `to` starts amid a cache line.
pub(crate) unsafe fn copy_page(
    from: *const u8,
    wanted: usize,
    to: &mut [u8; PAGE_BYTES],
    seen: &mut Page,
) {
    assert!(to.as_ptr().addr().is_multiple_of(LINE_BYTES), "a slot starts on a page boundary");
    let (to, seen) = (to.as_mut_ptr(), seen.0.as_mut_ptr());
    for line in (0..PAGE_BYTES).step_by(LINE_BYTES) {
        fetch(from.wrapping_add((line + AHEAD_BYTES).min(wanted.saturating_sub(1))));
        // SAFETY: the line lies within all three pages, each of which starts at a line.
        unsafe { copy_line_twice(from.add(line), to.add(line), seen.add(line)) };
    }
}

/// [`copy_page`], to `seen` alone.
///
/// # Safety
/// As of [`copy_page`].
pub(crate) unsafe fn read_page(from: *const u8, wanted: usize, seen: &mut Page) {
    let seen = seen.0.as_mut_ptr();
    for line in (0..PAGE_BYTES).step_by(LINE_BYTES) {
        fetch(from.wrapping_add((line + AHEAD_BYTES).min(wanted.saturating_sub(1))));
        // SAFETY: the line lies within both pages, each of which starts at a line.
        unsafe { read_line(from.add(line), seen.add(line)) };
    }
}

/// Adds a block to `to` that another thread or process may write meanwhile.
///
/// # Safety
/// From `from` on, a page boundary, lie the pages of a block of `block_bytes` bytes, mapped as long
/// as this runs.
pub(crate) unsafe fn copy_block(from: *const u8, block_bytes: usize, to: &mut Vec<u8>) {
    let mut seen = Page::default();
    for start in (0..block_bytes).step_by(PAGE_BYTES) {
        // SAFETY: the page starts within the block, so it is one of those that the caller names.
        unsafe { read_page(from.add(start), usize::MAX, &mut seen) };
        to.extend_from_slice(&seen.0[..PAGE_BYTES.min(block_bytes - start)]);
    }
    finish();
}

/// # Safety
/// All three are lines: `from` is mapped, the others are the caller's alone.
#[cfg(target_arch = "x86_64")]
#[expect(clippy::cast_ptr_alignment, reason = "lines are aligned to more")]
unsafe fn copy_line_twice(from: *const u8, to: *mut u8, seen: *mut u8) {
    let (from, to, seen) = (from.cast::<__m128i>(), to.cast::<__m128i>(), seen.cast::<__m128i>());
    // SAFETY: SSE2 is part of x86-64. The rest is as the caller promises. Volatile: the compiler must
    // not read again what may have changed.
    unsafe {
        let first = from.read_volatile();
        let second = from.add(1).read_volatile();
        let third = from.add(2).read_volatile();
        let fourth = from.add(3).read_volatile();
        _mm_stream_si128(to, first);
        _mm_stream_si128(to.add(1), second);
        _mm_stream_si128(to.add(2), third);
        _mm_stream_si128(to.add(3), fourth);
        _mm_store_si128(seen, first);
        _mm_store_si128(seen.add(1), second);
        _mm_store_si128(seen.add(2), third);
        _mm_store_si128(seen.add(3), fourth);
    }
}

/// # Safety
/// All three are lines: `from` is mapped, the others are the caller's alone.
#[cfg(not(target_arch = "x86_64"))]
#[expect(clippy::cast_ptr_alignment, reason = "lines are aligned to more")]
unsafe fn copy_line_twice(from: *const u8, to: *mut u8, seen: *mut u8) {
    let (from, to, seen) = (from.cast::<u64>(), to.cast::<u64>(), seen.cast::<u64>());
    for word in 0..LINE_BYTES / size_of::<u64>() {
        // SAFETY: the word lies within the line; the rest is as the caller promises. Volatile: the
        // compiler must not read again what may have changed.
        unsafe {
            let read = from.add(word).read_volatile();
            to.add(word).write(read);
            seen.add(word).write(read);
        }
    }
}

/// # Safety
/// Both are lines: `from` is mapped, `seen` is the caller's alone.
#[expect(clippy::cast_ptr_alignment, reason = "lines are aligned to more")]
unsafe fn read_line(from: *const u8, seen: *mut u8) {
    let (from, seen) = (from.cast::<u128>(), seen.cast::<u128>());
    // SAFETY: the words lie within the line; the rest is as the caller promises. Volatile: the
    // compiler must not read again what may have changed.
    unsafe {
        seen.write(from.read_volatile());
        seen.add(1).write(from.add(1).read_volatile());
        seen.add(2).write(from.add(2).read_volatile());
        seen.add(3).write(from.add(3).read_volatile());
    }
}

/// Has the processor bring the line of any address into its caches, if there is one.
fn fetch(line: *const u8) {
    // SAFETY: SSE is part of x86-64, and a prefetch may name any address.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Orders all copies of this thread before whatever it does next.
pub(crate) fn finish() {
    // SAFETY: SSE is part of x86-64.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_page_arrives_at_both_places() {
        let [mut from, mut to, mut seen] = std::array::from_fn(|_| Page::default());
        from.0.iter_mut().zip(0_u32..).for_each(|(byte, at)| *byte = (at * 31 / 8) as u8);
        // SAFETY: pages of this test's own.
        unsafe { copy_page(from.0.as_ptr(), PAGE_BYTES, &mut to.0, &mut seen) };
        finish();
        assert!(to.0 == from.0 && seen.0 == from.0);
    }

    proptest! {
        #[test]
        fn all_bytes_arrive_and_no_others(from: Vec<u8>, before in 0..2 * LINE_BYTES, after in 0..LINE_BYTES) {
            let mut to = vec![7; before + from.len() + after];
            copy(&from, &mut to[before..before + from.len()]);
            finish();
            prop_assert!(to[..before].iter().chain(&to[before + from.len()..]).all(|&byte| byte == 7));
            prop_assert_eq!(&to[before..before + from.len()], &from[..]);
        }
    }
}
