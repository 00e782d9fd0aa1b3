//! Slots of the host tier that a caller fills: an engine that copies for itself, or a peer.

use std::sync::Arc;

use kvbm_tiers::{DramRegion, Frame, Tier};

use crate::api::lease::Lease;
use crate::api::transfer::{Transfer, Transferred};
use crate::error::{Error, Result};
use crate::names::hash::Chain;
use crate::scheduler::Core;
use crate::table::{NamespaceId, RequestInfo, Reserved};

/// Slots for the blocks of a chain that the host tier lacks, root first. On every path the filled
/// ones are published and the others given back.
pub(crate) struct FillingSlots<'a> {
    core: &'a Arc<Core>,
    memory: &'a DramRegion,
    /// `None` once it is published.
    slots: Option<(Reserved, Lease)>,
    filled: usize,
}

impl<'a> FillingSlots<'a> {
    /// Takes the slots. They must not be written before [`Core::after_removals`] says so.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::ErrorKind::Stale): a reset came in between.
    pub(crate) fn take(
        core: &'a Arc<Core>,
        memory: &'a DramRegion,
        chain: Chain<'_>,
        info: RequestInfo,
    ) -> Result<Self> {
        let lease = core.lease(chain, RequestInfo { has_asked: true, ..info });
        let reserved = core.reserve(Tier::Host, chain, lease.pins().context().info);
        if reserved.namespace() != lease.pins().namespace() {
            core.abandon(reserved);
            return Err(Error::stale());
        }
        Ok(Self { core, memory, slots: Some((reserved, lease)), filled: 0 })
    }

    /// What the blocks will be blocks of.
    pub(crate) fn namespace(&self) -> Option<NamespaceId> {
        self.slots.as_ref().map(|(reserved, _)| reserved.namespace())
    }

    /// Leading blocks of the chain that the tier has or awaits, and those that are filled.
    pub(crate) fn kept(&self) -> usize {
        self.slots.as_ref().map_or(0, |(reserved, _)| reserved.before) + self.filled
    }

    /// Slots that are not filled yet.
    pub(crate) fn left(&self) -> usize {
        self.slots.as_ref().map_or(0, |(reserved, _)| reserved.frames.len() - self.filled)
    }

    /// The next slot: it has any content before, and all of it must be written. `None`: there is no
    /// more.
    pub(crate) fn next(&mut self) -> Option<&mut [u8]> {
        let (reserved, _) = self.slots.as_mut()?;
        self.memory.write(reserved.frames.get_mut(self.filled)?)
    }

    /// Has `copy` write the [next](Self::next) slot.
    pub(crate) fn copy<T>(
        &mut self,
        copy: impl FnOnce(&DramRegion, &mut Frame) -> Option<T>,
    ) -> Option<T> {
        let (reserved, _) = self.slots.as_mut()?;
        copy(self.memory, reserved.frames.get_mut(self.filled)?)
    }

    /// The [next](Self::next) slot is written. Returns the checksum of its block.
    pub(crate) fn written(&self) -> Option<u32> {
        let (reserved, _) = self.slots.as_ref()?;
        self.memory.remember_checksum(reserved.frames.get(self.filled)?)
    }

    /// The [next](Self::next) slot holds what its name says.
    pub(crate) const fn keep(&mut self) {
        self.filled += 1;
    }

    /// Makes the filled blocks resident, and gives back the other slots.
    pub(crate) fn publish(&mut self) -> Option<Transfer<Transferred>> {
        let (reserved, lease) = self.slots.take()?;
        Some(self.core.publish(reserved, self.filled, lease))
    }
}

impl Drop for FillingSlots<'_> {
    fn drop(&mut self) {
        // The caller's own error is the one to report.
        drop(self.publish());
    }
}
