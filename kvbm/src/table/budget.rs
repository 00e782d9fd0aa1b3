//! What one hold of the table's lock may do.
//!
//! A loop that counts what it changes is no bound where most of what it looks at stays as it is, and the other way round. So
//! every call that loops under the lock pays for both from one budget. When that is spent the call says that there is more,
//! and its caller goes on with a fresh one once others have had the table.

/// What is left of a hold.
#[derive(Debug)]
#[must_use = "a loop without it may take as long as the table is large"]
pub struct Budget {
    looks: usize,
}

/// Looks of a hold, a cache miss or two each: some 300 µs.
const HOLD: usize = 4_096;
/// A block that takes a slot, leaves one or goes into a queue costs as much as so many looks.
const CHANGE: usize = 16;

impl Budget {
    /// Blocks that one hold changes at most.
    #[cfg(test)]
    pub(super) const MAX_CHANGES: usize = HOLD / CHANGE;
    /// Records, slots and queue entries that one hold may read or write, however it spends its budget: a change touches a
    /// block, its parent and its neighbours in several tiers.
    #[cfg(test)]
    pub(super) const MAX_TOUCHED: usize = 4 * HOLD;

    /// Of a whole hold.
    pub const fn of_a_hold() -> Self {
        Self { looks: HOLD }
    }

    /// Pays for a look. False: it is spent.
    pub const fn look(&mut self) -> bool {
        self.pay(1)
    }

    /// Pays for a change. False: it is spent. The last change may cost more than was left.
    pub const fn change(&mut self) -> bool {
        self.pay(CHANGE)
    }

    /// Whether nothing is left.
    pub const fn is_spent(&self) -> bool {
        self.looks == 0
    }

    /// Pays for so many looks, as far as there is enough.
    pub(super) const fn pay(&mut self, looks: usize) -> bool {
        let can_pay = self.looks > 0;
        self.looks = self.looks.saturating_sub(looks);
        can_pay
    }

    /// Pays for changes that are made together.
    pub(super) const fn pay_changes(&mut self, changes: usize) {
        self.looks = self.looks.saturating_sub(changes.saturating_mul(CHANGE));
    }

    pub(super) const fn looks_left(&self) -> usize {
        self.looks
    }

    /// A budget of as many looks as there are changes left, where each look may lead to a change. It is all of this one.
    pub(super) const fn changes_as_looks(&mut self) -> Self {
        let looks = self.looks.div_ceil(CHANGE);
        self.looks = 0;
        Self { looks }
    }
}
