//! The table behind its lock.

use std::fmt;
use std::sync::Arc;

use super::Table;
use super::lock_times::{TableGuard, watch};
use crate::clock::Clock;
use crate::sync::Mutex;

/// The table of a manager, and its clock. One mutex: its critical sections are microseconds.
pub struct SharedTable {
    table: Mutex<Table>,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for SharedTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedTable").field("clock", &self.clock).finish_non_exhaustive()
    }
}

impl SharedTable {
    /// Puts a table behind a lock.
    pub fn new(table: Table, clock: Arc<dyn Clock>) -> Self {
        Self { table: Mutex::new(table), clock }
    }

    /// The locked table, with its clock set.
    pub fn lock(&self) -> TableGuard<'_> {
        let mut table = watch(self.table.lock());
        table.advance_clock(self.clock.now_ms());
        table
    }

    /// Provides memory that the table needs soon, so that no holder of its lock waits for the
    /// kernel.
    pub(crate) fn provide_memory(&self) {
        let wanted = self.lock().wanted_memory();
        if let Some(spare) = wanted.provide() {
            // Dropped with the table unlocked.
            let _unused = self.lock().supply(spare);
        }
    }
}
