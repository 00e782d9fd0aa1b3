//! Chains that an engine wants kept for a while, whether or not it uses them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::sync::Mutex;

/// So many pins may be held at a time.
const MAX: usize = 65_536;

/// Leases with an end.
#[derive(Debug, Default)]
pub(crate) struct PinnedChains(Mutex<BinaryHeap<Pin>>);

#[derive(Debug)]
struct Pin {
    until_ms: Reverse<u64>,
    lease: Lease,
}

impl Ord for Pin {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.until_ms.cmp(&other.until_ms)
    }
}

impl PartialOrd for Pin {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pin {
    fn eq(&self, other: &Self) -> bool {
        self.until_ms == other.until_ms
    }
}

impl Eq for Pin {}

impl PinnedChains {
    pub(crate) fn add(&self, lease: Lease, until_ms: u64) -> Result<()> {
        let mut pins = self.0.lock();
        if pins.len() >= MAX {
            drop(pins);
            let message =
                format!("{MAX} chains are pinned already: wait until some of the pins have expired");
            return Err(Error::new(ErrorKind::Full, message));
        }
        pins.push(Pin { until_ms: Reverse(until_ms), lease });
        Ok(())
    }

    /// Ends the pins whose time has come.
    pub(crate) fn expire(&self, now_ms: u64) {
        while let Some(pin) = self.next_expired(now_ms) {
            drop(pin.lease);
        }
    }

    /// Ends them all.
    pub(crate) fn clear(&self) {
        let pins = std::mem::take(&mut *self.0.lock());
        drop(pins);
    }

    /// Out of the lock: a lease takes the table's when it ends.
    fn next_expired(&self, now_ms: u64) -> Option<Pin> {
        let mut pins = self.0.lock();
        pins.peek().filter(|pin| pin.until_ms.0 <= now_ms)?;
        pins.pop()
    }
}
