//! Slices that a rank copies out of the memory of other ranks on its host. Those only say the
//! checksums. When the lease is over they may write a slot during the copy; the copy then does not
//! match its checksum.

use std::sync::Arc;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::{CopyError, PeerMemory, SlotId};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::coming::{ComingSlots, SliceSums, another_life, compare, sums_of_all};
use crate::peers::link::{PeerFault, PeerLink};
use crate::peers::protocol::{BrokenLink, SlotLife};

/// Copies slices into slots, as they are.
pub(super) async fn take(
    link: &mut PeerLink,
    memory: &PeerMemory,
    slots: &mut ComingSlots,
    until: Instant,
) -> Result<(), PeerFault> {
    let lives = slots.lives();
    let sums = sums_of_all(link, &lives, until).await?;
    for (life, sum) in lives.iter().zip(sums) {
        let Some(slot) = slots.left.front_mut() else { break };
        let (from, came) = (life.get().slot, sum.ok_or_else(another_life));
        let came = came.and_then(|sum| compare(Some(slot.copy_from(memory, from)?), sum));
        slots.next(came);
        // What comes from then on would be late.
        if Instant::now() >= until {
            return Err(BrokenLink::Late.into());
        }
        // Others have this thread too.
        yield_now().await;
    }
    Ok(())
}

/// Slices of one rank, each copied when it is wanted.
pub(super) struct MemorySlices {
    memory: Arc<PeerMemory>,
    /// Where they lie, and their checksums if they are there.
    left: std::vec::IntoIter<(SlotId, Option<[u8; 4]>)>,
    slice: Vec<u8>,
}

impl MemorySlices {
    pub(super) fn new(memory: Arc<PeerMemory>, lives: &[SlotLife], sums: SliceSums) -> Self {
        let slots = lives.iter().map(|life| life.get().slot);
        let left = slots.zip(sums).collect::<Vec<_>>().into_iter();
        Self { memory, left, slice: Vec::new() }
    }

    pub(super) fn next(&mut self) -> Result<&mut [u8], CopyError> {
        let Some((from, Some(sum))) = self.left.next() else { return Err(another_life()) };
        self.memory.copy_out(from, &mut self.slice)?;
        compare(Some(checksum(&self.slice)), sum)?;
        Ok(&mut self.slice)
    }
}
