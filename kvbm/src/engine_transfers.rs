//! What an engine with memory of its own asks of a manager.

use std::ops::Range;
use std::sync::Arc;

use kvbm_tiers::{Fence, SlotId, Tier};

use crate::engine_results::{Loaded, Saved};
use crate::error::{Error, ErrorKind, Result};
use crate::hash::Chain;
use crate::lease::Lease;
use crate::manager::Manager;
use crate::scheduler::{JoinedTransfer, LoadInto, SaveFrom};
use crate::table::RequestInfo;
use crate::task::TransferId;
use crate::transfer::Transfer;

impl Manager {
    /// Copies successive blocks of a request's `chain`, from position `first` on, out of the engine's `slots` to the
    /// uppermost tier, once `ready` has come. Blocks that are there already are not copied again. Those before `first` must
    /// be there or on their way: so bring a chain from its root, or a prefill's chunks in their order.
    ///
    /// The slots must not change until the answer. It is an error of kind [`Invalid`](ErrorKind::Invalid) if there is no
    /// engine's memory, a slot does not exist or the chain is shorter, and of kind [`Closed`](ErrorKind::Closed) after
    /// [`close`](Self::close). Where `ready` does not come within `transfer.timeout_ms` (`DYN_KVBM_TRANSFER_TIMEOUT_MS`),
    /// or cannot come any more, all of its blocks count as failed.
    pub fn save_from<'a>(
        &self,
        info: RequestInfo,
        chain: impl Into<Chain<'a>>,
        first: usize,
        slots: &[SlotId],
        ready: Fence,
    ) -> Transfer<Saved> {
        let chain = chain.into();
        self.begin_save(SaveFrom { info, chain, first, slots, ready, part_of: None })
    }

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

    /// Copies the blocks at the positions `blocks` of what `lease` holds into the engine's `slots`, once `after` has come:
    /// the work that used the slots before. Blocks that no tier holds count as failed, as do those behind one that
    /// cannot be read.
    ///
    /// Nobody else may use the slots until the answer, and those that failed until its [`Writers`](crate::Writers) are gone. It is an
    /// error of kind [`Invalid`](ErrorKind::Invalid) if there is no engine's memory, a slot does not exist or is named
    /// twice, there is not one for each block, or the lease is of another manager; of kind [`Stale`](ErrorKind::Stale) if it is
    /// from before a [`reset`](Self::reset), and of kind [`Closed`](ErrorKind::Closed) after [`close`](Self::close). For `after` what [`save_from`](Self::save_from) says of `ready` holds.
    pub fn load_into(
        &self,
        lease: Lease,
        blocks: Range<usize>,
        slots: &[SlotId],
        after: Fence,
    ) -> Transfer<Loaded> {
        self.begin_load(lease, (blocks, slots), after, (Arc::default(), None))
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
            // Two blocks that come into one slot mix. Saving one slot twice harms nobody, so it is not looked for.
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

    /// Adds the names of the saves from and loads into the engine's memory that have ended since the last call, well or not:
    /// for an engine that polls. One of all cache groups is named once, when the last of them has ended. They are noted
    /// from the first call on, the last 65,536 of them.
    pub fn completions(&self, out: &mut Vec<TransferId>) {
        self.core().completions(out);
    }

    fn uppermost(&self) -> Result<Tier> {
        self.below_device().ok_or_else(|| {
            Error::new(ErrorKind::Invalid, "there is no tier to save to: set host.capacity, or a lower tier")
        })
    }
}

fn too_short(first: usize, (wanted, there): (usize, usize)) -> Error {
    let message =
        format!("{wanted} blocks from position {first} on, of {there}: name one slot for each block");
    Error::new(ErrorKind::Invalid, message)
}

pub(crate) fn check_distinct(slots: &[SlotId]) -> Result<()> {
    // Sorted, not hashed: an engine waits, and most bring them in order.
    let mut sorted: Vec<_> = slots.iter().map(|slot| slot.0).collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => {
            Err(Error::new(ErrorKind::Invalid, format!("slot {} is to get two blocks at once", pair[0])))
        }
    }
}
