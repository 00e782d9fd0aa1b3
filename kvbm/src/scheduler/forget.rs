//! Forgetting a tenant: what he stored leaves every tier, and what of it is under way lands nowhere.

use std::sync::Arc;

use super::Core;
use crate::table::Coming;

impl Core {
    /// Forgets what a tenant stored, and returns how often that was done by now. Takes time in proportion to the table,
    /// in steps between which others use it. Who reads a block of his now may end that.
    pub(crate) fn forget(self: &Arc<Self>, tenant: u32) -> u32 {
        let life = self.table().begin_forgetting(tenant);
        // A flush may have begun behind the first look: what it brings is found by the next one. Nothing else is his.
        while self.forget_found(tenant) > 0 {}
        life
    }

    fn forget_found(self: &Arc<Self>, tenant: u32) -> usize {
        let (mut found, mut next) = (0, Some(Coming::default()));
        while let Some(coming) = next {
            let (has_ended, then) = self.hold(|table, hold| table.end_forgotten(tenant, coming, hold));
            found += usize::from(has_ended);
            next = then;
        }
        let mut next = Some(0);
        while let Some(record) = next {
            let (blocks, then) = self.hold(|table, hold| table.drop_forgotten(tenant, record, hold));
            found += blocks;
            next = then;
            // At once: a match looks at each block of which more is to be dropped.
            while self.hold(|table, _| table.drop_more()) {}
        }
        found
    }
}
