//! What an engine with memory of its own asks of a manager.

use std::ops::Range;
use std::sync::Arc;

use kvbm_tiers::{Fence, SlotId, Tier};

use crate::api::engine_results::{Loaded, Saved};
use crate::api::lease::Lease;
use crate::api::manager::Manager;
use crate::api::transfer::Transfer;
use crate::error::{Error, ErrorKind, Result};
use crate::scheduler::{JoinedTransfer, LoadInto, SaveFrom};
use crate::task::TransferId;

impl Manager {
    /// [`save_from`](Self::save_from), perhaps as a part of a larger transfer.
    pub(crate) fn begin_save(&self, save: SaveFrom<'_>) -> Transfer<Saved> {
        let (chain, first, slots) = (save.chain, save.first, save.slots);
        let is_long_enough = first.checked_add(slots.len()).is_some_and(|end| end <= chain.len());
        let checked = self.engine().and_then(|engine| engine.check(slots)).and_then(|()| {
            let blocks = (slots.len(), chain.len());
            if is_long_enough { self.uppermost() } else { Err(too_short(first, blocks)) }
        });
        match checked {
            Ok(to) => self.core().save_from(to, save),
            Err(error) => Transfer::failed(error),
        }
    }

    /// [`load_into`](Self::load_into), perhaps as a part of a larger transfer.
    pub(crate) fn begin_load(
        &self,
        lease: Lease,
        (blocks, slots): (Range<usize>, &[SlotId]),
        after: Fence,
        (with_media, part_of): (Arc<()>, Option<Arc<JoinedTransfer>>),
    ) -> Transfer<Loaded> {
        let checked = self.engine().and_then(|engine| {
            engine.check(slots)?;
            // Two blocks loaded into one slot would mix. Saving one slot twice is harmless, so it
            // is not checked.
            check_distinct(slots)?;
            self.core().check_lease(&lease)?;
            if blocks.len() == slots.len() {
                Ok(engine.layers())
            } else {
                Err(too_short(0, (blocks.len(), slots.len())))
            }
        });
        match checked {
            Ok(layers) => {
                let load = LoadInto { lease, blocks, slots, after, layers, with_media, part_of };
                self.core().load_into(load)
            }
            Err(error) => Transfer::failed(error),
        }
    }

    /// Adds the names of the saves from and loads into the engine's memory that have ended since
    /// the last call, successfully or not: for an engine that polls. A transfer of all cache groups
    /// is named once, when its last group has ended. They are noted from the first call on, the
    /// last 65,536 of them.
    pub fn completions(&self, out: &mut Vec<TransferId>) {
        self.core().completions(out);
    }

    fn uppermost(&self) -> Result<Tier> {
        self.below_device().ok_or_else(|| {
            Error::new(
                ErrorKind::Invalid,
                "there is no tier to save to: set host.capacity, or a lower tier",
            )
        })
    }
}

fn too_short(first: usize, (wanted, there): (usize, usize)) -> Error {
    let message = format!(
        "{wanted} blocks from position {first} on, of {there}: name one slot for each block"
    );
    Error::new(ErrorKind::Invalid, message)
}

pub(crate) fn check_distinct(slots: &[SlotId]) -> Result<()> {
    // Sorted, not hashed: an engine waits, and most give them in order.
    let mut sorted: Vec<_> = slots.iter().map(|slot| slot.0).collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(Error::new(
            ErrorKind::Invalid,
            format!("slot {} is to get two blocks at once", pair[0]),
        )),
    }
}
