//! The DRAM slots through which blocks bounce when no backend connects their source and
//! destination.

use kvbm_tiers::Frame;

#[derive(Debug)]
pub(super) struct StagingSlots {
    idle: Vec<Frame>,
    total: usize,
    /// Slots that overdue copies may still touch.
    lost: usize,
    /// Slots lent to errands.
    lent: usize,
}

/// Occupancy of the staging slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingCounts {
    /// All.
    pub total: usize,
    /// Used by no copy.
    pub idle: usize,
    /// Held by copies that are overdue.
    pub lost: usize,
}

impl StagingSlots {
    pub(super) const fn new(idle: Vec<Frame>) -> Self {
        Self { total: idle.len(), idle, lost: 0, lent: 0 }
    }

    pub(super) const fn counts(&self) -> StagingCounts {
        StagingCounts { total: self.total, idle: self.idle.len() + self.lent, lost: self.lost }
    }

    /// Whether waiting for a slot is useless: none will come back soon.
    pub(super) const fn is_gone(&self) -> bool {
        self.total == self.lost
    }

    pub(super) fn take(&mut self) -> Option<Frame> {
        self.idle.pop()
    }

    pub(super) fn give_back(&mut self, frames: impl IntoIterator<Item = Frame>) {
        self.idle.extend(frames);
    }

    /// Takes a slot for an errand; it counts as idle. Never the last one, and none if half of them
    /// are lost: errands must not cost requests their slots.
    pub(super) fn lend(&mut self) -> Option<Frame> {
        let may = self.idle.len() > 1 && self.lost * 2 < self.total;
        let frame = if may { self.idle.pop() } else { None };
        self.lent += usize::from(frame.is_some());
        frame
    }

    /// Ends a loan.
    pub(super) fn return_lent(&mut self, frame: Frame) {
        self.lent -= 1;
        self.idle.push(frame);
    }

    /// The copies through `slots` taken slots are overdue.
    pub(super) const fn lose(&mut self, slots: usize) {
        self.lost += slots;
    }

    /// The copy through a lent slot is overdue.
    pub(super) const fn lose_lent(&mut self) {
        self.lent -= 1;
        self.lost += 1;
    }

    /// It has ended after all.
    pub(super) fn regain(&mut self, frame: Frame) {
        self.lost -= 1;
        self.idle.push(frame);
    }
}
