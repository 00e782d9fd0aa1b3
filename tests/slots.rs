//! Saves from and loads into the slots of an engine whose model is plain.

use kvbm::{
    Chain, Fence, GroupSlots, Lease, Loaded, Manager, SaveRequest, Saved, SlotId, Transfer,
};

/// Saves the blocks of `chain` from position `first` on out of `slots`, for no request in
/// particular.
pub fn save_slots<'a>(
    manager: &Manager,
    chain: impl Into<Chain<'a>>,
    first: usize,
    slots: &[SlotId],
    ready: Fence,
) -> Transfer<Saved> {
    let (chain, slots): (Chain<'_>, _) = (chain.into(), [GroupSlots::full(first, slots)]);
    manager.save_from(&SaveRequest { ready, ..SaveRequest::of(chain, &slots) })
}

/// Loads the blocks from position `first` on that `lease` holds into `slots`.
pub fn load_slots(
    manager: &Manager,
    lease: Lease,
    first: usize,
    slots: &[SlotId],
    after: &Fence,
) -> Transfer<Loaded> {
    manager.load_into(lease, &[GroupSlots::full(first, slots)], after)
}
