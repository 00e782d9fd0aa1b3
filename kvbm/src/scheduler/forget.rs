//! Forgetting a tenant: what it stored leaves every tier, and what of it is under way lands nowhere.

use std::sync::Arc;

use super::Core;
use crate::table::TransferCursor;

impl Core {
    /// Forgets what a tenant stored, and returns how often that was done by now. Takes time in proportion to the table,
    /// in steps between which others use it. Who reads a block of it now may end that.
    pub fn forget(self: &Arc<Self>, tenant: u32) -> u32 {
        // From here on no copy of it is planned: once what is under way has ended, nothing more comes to what is found.
        let life = self.table().begin_forgetting(tenant);
        let mut under_way = Some(TransferCursor::default());
        while let Some(from) = under_way {
            under_way = self.hold(|table, hold| table.end_forgotten(from, hold));
        }
        let mut next = Some(0);
        while let Some(record) = next {
            next = self.hold(|table, hold| table.drop_forgotten(record, hold));
            // At once: a match looks at each block of which more is to be dropped.
            while self.hold(|table, _| table.drop_more()) {}
        }
        life
    }
}
