//! Leases: the right to read a chain's blocks. Some are kept for a while, whether or not the engine
//! uses them.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvbm_tiers::Tier;

use crate::api::groups::CheckpointLeases;
use crate::error::{Error, ErrorKind, Result};
use crate::peers::PeerLease;
use crate::sync::Mutex;
use crate::table::{Match, NamespaceId, Pins, SharedTable};

/// Keeps the leading blocks of a chain where they are, in every tier, until it is dropped. It pins
/// one block per tier, the deepest: tiers drain leaf-first, so its ancestors cannot leave before
/// it. Of a hybrid model it keeps the checkpoints of the other cache groups as well.
pub struct Lease {
    table: Arc<SharedTable>,
    pins: Pins,
    /// `None`: there are no other cache groups, or the lease is of full attention only.
    checkpoints: Option<Box<CheckpointLeases>>,
}

/// What a load takes: a lease of what the tiers here hold, or of what a peer holds besides.
#[derive(Debug)]
pub enum AnyLease {
    /// From [`Manager::lease`](crate::Manager::lease) and its like.
    Here(Lease),
    /// From [`Peers::lease`](crate::Peers::lease).
    AtPeer(Box<PeerLease>),
}

impl From<Lease> for AnyLease {
    fn from(lease: Lease) -> Self {
        Self::Here(lease)
    }
}

impl From<PeerLease> for AnyLease {
    fn from(lease: PeerLease) -> Self {
        Self::AtPeer(Box::new(lease))
    }
}

impl Lease {
    pub(crate) const fn new(table: Arc<SharedTable>, pins: Pins) -> Self {
        Self { table, pins, checkpoints: None }
    }

    /// A lease of nothing, in the same table.
    pub(crate) fn of_nothing(&self) -> Self {
        let nothing = Pins::of_nothing(self.pins.context(), self.pins.namespace());
        Self::new(Arc::clone(&self.table), nothing)
    }

    pub(crate) fn with_checkpoints(mut self, checkpoints: CheckpointLeases) -> Self {
        self.checkpoints = Some(Box::new(checkpoints));
        self
    }

    pub(crate) const fn has_checkpoints(&self) -> bool {
        self.checkpoints.is_some()
    }

    pub(crate) fn take_checkpoints(&mut self) -> Option<CheckpointLeases> {
        self.checkpoints.take().map(|checkpoints| *checkpoints)
    }

    /// Leading blocks of the chain that are worth loading and that all cache groups can give back:
    /// each group has a checkpoint at the end of the last of them.
    pub fn usable(&self) -> usize {
        self.checkpoints.as_ref().map_or(self.held().worth_loading(), |groups| groups.blocks)
    }

    /// Positions of the blocks that a cache group has for the engine; `None`: there is no such
    /// group.
    pub fn wanted(&self, group: u8) -> Option<Range<usize>> {
        match &self.checkpoints {
            Some(checkpoints) => checkpoints.wanted(group),
            None => Some(0..self.usable()).filter(|_| group == 0),
        }
    }

    /// Leading blocks that each tier holds for this lease, of full attention.
    pub const fn held(&self) -> Match {
        *self.pins.held()
    }

    /// Leading blocks that `tier` holds for this lease, of full attention.
    pub const fn blocks(&self, tier: Tier) -> usize {
        self.held().blocks(tier)
    }

    /// Whether it belongs to this table.
    pub(crate) fn is_of(&self, table: &Arc<SharedTable>) -> bool {
        Arc::ptr_eq(&self.table, table)
    }

    pub(crate) const fn pins(&self) -> &Pins {
        &self.pins
    }

    /// The pins, which the caller releases from now on.
    pub(crate) fn into_pins(mut self) -> Pins {
        self.take_pins()
    }

    /// Leaves a lease of nothing, whose drop does nothing.
    const fn take_pins(&mut self) -> Pins {
        let nothing = Pins::of_nothing(self.pins.context(), self.pins.namespace());
        std::mem::replace(&mut self.pins, nothing)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let pins = self.take_pins();
        // A lease of nothing needs no lock.
        if !pins.is_of_nothing() {
            self.table.lock().release(pins);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.held()).finish()
    }
}

/// Pins that may be held at a time.
const MAX: usize = 65_536;

/// Leases with an end.
#[derive(Debug, Default)]
pub(crate) struct PinnedChains(Mutex<PinnedMemory>);

#[derive(Debug, Default)]
struct PinnedMemory {
    /// By their ends, and by their numbers: several may end at once.
    by_end: BTreeMap<(u64, u64), Lease>,
    added: u64,
    /// The namespace when pins of earlier ones were last ended.
    namespace: NamespaceId,
}

impl PinnedChains {
    /// `check` runs under the lock: a reset that comes after it finds the pin, and ends it.
    pub(crate) fn add(
        &self,
        lease: Lease,
        until_ms: u64,
        check: impl FnOnce(&Lease) -> Result<()>,
    ) -> Result<()> {
        let mut pins = self.0.lock();
        check(&lease)?;
        if pins.by_end.len() >= MAX {
            drop(pins);
            let message = format!(
                "{MAX} chains are pinned already: wait until some of the pins have expired"
            );
            return Err(Error::new(ErrorKind::Full, message));
        }
        pins.added += 1;
        let key = (until_ms, pins.added);
        pins.by_end.insert(key, lease);
        Ok(())
    }

    /// Ends the pins whose time has come.
    pub(crate) fn expire(&self, now_ms: u64) {
        let until = ..=(now_ms, u64::MAX);
        let ended: Vec<_> = self.0.lock().by_end.extract_if(until, |_, _| true).collect();
        // With the lock released: each lease takes the table's lock when it ends.
        drop(ended);
    }

    /// Ends those from before a reset.
    pub(crate) fn end_past(&self, present: NamespaceId) {
        let mut pins = self.0.lock();
        if pins.namespace == present {
            return;
        }
        pins.namespace = present;
        let past: Vec<_> =
            pins.by_end.extract_if(.., |_, lease| lease.pins().namespace() != present).collect();
        drop(pins);
        // With the lock released, as above.
        drop(past);
    }

    /// Ends them all.
    pub(crate) fn clear(&self) {
        let pins = std::mem::take(&mut self.0.lock().by_end);
        drop(pins);
    }
}
