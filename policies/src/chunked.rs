//! Arrays that never move.

use std::ops::{Index, IndexMut};

/// Values of a chunk.
// A power of two, so that a place is a shift and a mask. The list of the chunks of a million values
// takes 24 KB.
const CHUNK: usize = 1_024;

/// A growing array in chunks, of which it adds one at a time: a `Vec` copies all that it has when
/// it grows, and a tier's lock would be held for milliseconds meanwhile.
#[derive(Debug)]
pub(crate) struct ChunkedVec<T> {
    chunks: Vec<Vec<T>>,
    len: usize,
}

impl<T> ChunkedVec<T> {
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// `None` where it does not reach.
    pub(crate) fn get(&self, at: usize) -> Option<&T> {
        self.chunks.get(at / CHUNK)?.get(at % CHUNK)
    }

    pub(crate) fn push(&mut self, value: T) {
        if self.len == self.chunks.len() * CHUNK {
            // At its full size at once: it never grows, so nothing in it moves.
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        if let Some(last) = self.chunks.last_mut() {
            last.push(value);
        }
        self.len += 1;
    }

    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten()
    }
}

impl<T: Copy> ChunkedVec<T> {
    /// The value at `at`. So that there is one, `fill` is appended as often as it takes.
    pub(crate) fn reach(&mut self, at: usize, fill: T) -> &mut T {
        while self.len <= at {
            self.push(fill);
        }
        &mut self[at]
    }
}

impl<T> Default for ChunkedVec<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), len: 0 }
    }
}

impl<T> Index<usize> for ChunkedVec<T> {
    type Output = T;

    fn index(&self, at: usize) -> &T {
        &self.chunks[at / CHUNK][at % CHUNK]
    }
}

impl<T> IndexMut<usize> for ChunkedVec<T> {
    fn index_mut(&mut self, at: usize) -> &mut T {
        &mut self.chunks[at / CHUNK][at % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_where_they_are_while_it_grows() {
        let mut array = ChunkedVec::default();
        assert_eq!(array.get(0), None);
        array.push(1);
        let place: *const i32 = &raw const array[0];
        *array.reach(100 * CHUNK, 7) = 2;
        assert_eq!((&raw const array[0], array[0], array[1], array[100 * CHUNK]), (place, 1, 7, 2));
        assert_eq!((array.get(100 * CHUNK + 1), array.len()), (None, 100 * CHUNK + 1));
        assert!(array.iter().eq((0..array.len()).map(|at| &array[at])));
    }
}
