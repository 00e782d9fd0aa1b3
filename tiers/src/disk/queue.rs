//! In which order a ring's operations start.

use std::collections::VecDeque;

/// Reads wait behind reads only: an engine waits for them, and nothing waits for writes. But no
/// more than [`MAX_READS_IN_A_ROW`] overtake a write, else a tier that is read all the time would
/// never be flushed to and fill up with blocks that cannot leave.
#[derive(Debug)]
pub(super) struct ReadsFirst<T> {
    reads: VecDeque<T>,
    writes: VecDeque<T>,
    reads_in_a_row: usize,
}

/// A write in sixteen operations costs reads at most as much as the disk's own jitter does.
const MAX_READS_IN_A_ROW: usize = 15;

impl<T> ReadsFirst<T> {
    pub(super) const fn new() -> Self {
        Self { reads: VecDeque::new(), writes: VecDeque::new(), reads_in_a_row: 0 }
    }

    pub(super) fn push_read(&mut self, read: T) {
        self.reads.push_back(read);
    }

    pub(super) fn push_write(&mut self, write: T) {
        self.writes.push_back(write);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        if self.writes.is_empty() || self.reads_in_a_row >= MAX_READS_IN_A_ROW {
            self.reads_in_a_row = 0;
            return self.writes.pop_front().or_else(|| self.reads.pop_front());
        }
        let read = self.reads.pop_front();
        self.reads_in_a_row = if read.is_some() { self.reads_in_a_row + 1 } else { 0 };
        read.or_else(|| self.writes.pop_front())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    enum Op {
        Read(usize),
        Write(usize),
    }

    fn queue(reads: usize, writes: usize) -> ReadsFirst<Op> {
        let mut queue = ReadsFirst::new();
        (0..writes).for_each(|n| queue.push_write(Op::Write(n)));
        (0..reads).for_each(|n| queue.push_read(Op::Read(n)));
        queue
    }

    #[test]
    fn a_read_overtakes_all_writes_that_wait() {
        let mut queue = queue(1, 256);
        assert_eq!(queue.pop(), Some(Op::Read(0)));
        for n in 0..256 {
            assert_eq!(queue.pop(), Some(Op::Write(n)));
        }
        assert!(queue.pop().is_none() && queue.is_empty());
    }

    #[test]
    fn a_write_waits_for_few_reads_however_many_come() {
        let mut queue = queue(100, 3);
        for write in 0..3 {
            for _ in 0..MAX_READS_IN_A_ROW {
                assert!(matches!(queue.pop(), Some(Op::Read(_))));
            }
            assert_eq!(queue.pop(), Some(Op::Write(write)));
        }
        assert_eq!(std::iter::from_fn(|| queue.pop()).count(), 100 - 3 * MAX_READS_IN_A_ROW);
    }

    #[test]
    fn reads_that_overtook_nothing_do_not_count() {
        let mut queue = queue(MAX_READS_IN_A_ROW, 0);
        while queue.pop().is_some() {}
        queue.push_write(Op::Write(0));
        queue.push_read(Op::Read(0));
        assert_eq!(queue.pop(), Some(Op::Read(0)));
    }
}
