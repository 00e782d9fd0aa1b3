//! Forgetting a tenant: its blocks leave every tier, and its copies under way are discarded.

use std::sync::Arc;

use super::Core;
use crate::table::TransferCursor;

impl Core {
    /// Forgets what a tenant stored, and returns how often it was forgotten so far. Takes time in
    /// proportion to the table, in steps between which others use it. Current readers of its blocks
    /// may finish.
    pub fn forget(self: &Arc<Self>, tenant: u32) -> u32 {
        // From here on no copy of its blocks is planned: once those under way have ended, no more
        // come.
        let life = self.table().begin_forgetting(tenant);
        let mut under_way = Some(TransferCursor::default());
        while let Some(from) = under_way {
            under_way = self.hold(|table, hold| table.end_forgotten(from, hold));
        }
        let mut next = Some(0);
        while let Some(record) = next {
            next = self.hold(|table, hold| table.drop_forgotten(record, hold));
            // At once: a match looks at each chain that is still being dropped.
            while self.hold(|table, _| table.drop_more()) {}
        }
        life
    }
}
