//! Chains that an engine wants kept for a while, whether or not it uses them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::api::lease::Lease;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Mutex;
use crate::table::NamespaceId;

/// Pins that may be held at a time.
const MAX: usize = 65_536;

/// Leases with an end.
#[derive(Debug, Default)]
pub(crate) struct PinnedChains(Mutex<PinnedMemory>);

#[derive(Debug, Default)]
struct PinnedMemory {
    by_end: BinaryHeap<PinnedPages>,
    /// The namespace when pins of earlier ones were last ended.
    namespace: NamespaceId,
}

#[derive(Debug)]
struct PinnedPages {
    until_ms: Reverse<u64>,
    lease: Lease,
}

impl Ord for PinnedPages {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.until_ms.cmp(&other.until_ms)
    }
}

impl PartialOrd for PinnedPages {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for PinnedPages {
    fn eq(&self, other: &Self) -> bool {
        self.until_ms == other.until_ms
    }
}

impl Eq for PinnedPages {}

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
        pins.by_end.push(PinnedPages { until_ms: Reverse(until_ms), lease });
        Ok(())
    }

    /// Ends the pins whose time has come.
    pub(crate) fn expire(&self, now_ms: u64) {
        while let Some(pin) = self.next_expired(now_ms) {
            drop(pin.lease);
        }
    }

    /// Ends those from before a reset.
    pub(crate) fn end_past(&self, present: NamespaceId) {
        let mut pins = self.0.lock();
        if pins.namespace == present {
            return;
        }
        pins.namespace = present;
        let all = std::mem::take(&mut pins.by_end);
        let is_present = |pin: &PinnedPages| pin.lease.pins().namespace() == present;
        let (kept, past): (Vec<PinnedPages>, Vec<PinnedPages>) =
            all.into_iter().partition(is_present);
        pins.by_end = kept.into();
        drop(pins);
        // With the lock released: each lease takes the table's lock when it ends.
        drop(past);
    }

    /// Ends them all.
    pub(crate) fn clear(&self) {
        let pins = std::mem::take(&mut self.0.lock().by_end);
        drop(pins);
    }

    /// With the lock released: a lease takes the table's lock when it ends.
    fn next_expired(&self, now_ms: u64) -> Option<PinnedPages> {
        let mut pins = self.0.lock();
        pins.by_end.peek().filter(|pin| pin.until_ms.0 <= now_ms)?;
        pins.by_end.pop()
    }
}
