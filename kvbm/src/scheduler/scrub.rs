//! Scrubbing: idle blocks are read and verified, at a bounded rate, so that a rotten one is found
//! while another tier still has a good copy.

use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::{CopyError, CopyErrorKind, CopyOp, DramRegion, Frame, Memory, Route, Tier};

use super::Core;
use super::errand::CopyPurpose;
use crate::sync::Mutex;
use crate::table::Scrubbed;
use crate::task::Defect;

/// How much is scrubbed, and which memory without copies.
#[derive(Debug, Default)]
pub struct ScrubOptions {
    /// For each tier; 0: no scrubbing.
    pub bytes_per_second: u64,
    /// Of a block.
    pub block_bytes: u64,
    /// The host tier's memory, if it outlives the process.
    pub memory: Option<Arc<DramRegion>>,
}

#[derive(Debug)]
pub(super) struct ScrubProgress {
    options: ScrubOptions,
    state: Mutex<ScrubState>,
}

#[derive(Debug, Default)]
struct ScrubState {
    /// When the allowance was last increased.
    since: Duration,
    /// Bytes that may be read now.
    allowance: u64,
    /// By tier: the slot to go on with.
    next: [u32; Tier::COUNT],
    /// A medium is reading a block.
    is_reading: bool,
}

/// The most that is read at once is the allowance of this time.
const MAX_BURST: Duration = Duration::from_millis(100);

impl ScrubProgress {
    pub(super) fn new(options: ScrubOptions) -> Self {
        Self { options, state: Mutex::default() }
    }

    /// Whether a block may be read now; if so, it is counted.
    fn may_read(&self, now: Duration) -> bool {
        let ScrubOptions { bytes_per_second, block_bytes, .. } = self.options;
        let mut state = self.state.lock();
        let passed = now.saturating_sub(state.since);
        let bytes_in = |time: Duration| {
            let bytes = time.as_micros().saturating_mul(bytes_per_second.into()) / 1_000_000;
            u64::try_from(bytes).unwrap_or(u64::MAX)
        };
        let added = bytes_in(passed);
        if added > 0 {
            let most = bytes_in(MAX_BURST).max(block_bytes);
            state.since = now;
            state.allowance = state.allowance.saturating_add(added).min(most);
        }
        let may = !state.is_reading && state.allowance >= block_bytes && block_bytes > 0;
        if may {
            state.allowance -= block_bytes;
        }
        may
    }
}

impl Core {
    /// Verifies idle blocks, as many as are allowed now.
    pub(super) fn scrub_some(self: &Arc<Self>) {
        if self.upkeep.scrubbing.options.bytes_per_second == 0 {
            return;
        }
        while self.upkeep.scrubbing.may_read(self.clock.uptime()) {
            let has_memory = self.upkeep.scrubbing.options.memory.is_some() && self.scrub_memory();
            if !self.scrub_disk() && !has_memory {
                return;
            }
        }
    }

    fn next_to_scrub(&self, tier: Tier) -> Option<Scrubbed> {
        let mut table = self.table();
        if !table.has(tier) {
            return None;
        }
        let mut state = self.upkeep.scrubbing.state.lock();
        let from = &mut state.next[tier.index()];
        let (found, next) = table.scrub_next(tier, *from);
        *from = next.unwrap_or(0);
        found
    }

    /// Returns whether there was a block.
    fn scrub_memory(self: &Arc<Self>) -> bool {
        let Some(memory) = &self.upkeep.scrubbing.options.memory else { return false };
        let Some(scrubbed) = self.next_to_scrub(Tier::Host) else { return false };
        let expected = memory.checksums().and_then(|checksums| checksums.get(scrubbed.slot.slot));
        let actual = memory.read_loan(&scrubbed.loan).map(checksum);
        // Without a checksum it cannot be told.
        let is_sound = expected.is_none() || expected == actual;
        self.scrubbed(scrubbed, (!is_sound).then_some(Defect::Corrupt));
        true
    }

    /// Returns whether there was a block. Nothing is read while the disk has other reads, or is
    /// left alone.
    fn scrub_disk(self: &Arc<Self>) -> bool {
        let route = Route::new(Tier::Disk, Tier::Host);
        let is_busy = [Tier::Device, Tier::Host]
            .into_iter()
            .any(|to| self.traffic(Route::new(Tier::Disk, to)) != (0, 0));
        if is_busy
            || self.is_closed()
            || !self.sending.executor.connects(route)
            || self.health.breakers.is_open(route)
        {
            return false;
        }
        let Some(staging) = self.sending.staging.lock().lend() else { return false };
        let Some(scrubbed) = self.next_to_scrub(Tier::Disk) else {
            self.sending.staging.lock().return_lent(staging);
            return false;
        };
        if self.health.directories.is_left_alone(scrubbed.slot) {
            self.sending.staging.lock().return_lent(staging);
            self.scrubbed(scrubbed, None);
            return true;
        }
        self.upkeep.scrubbing.state.lock().is_reading = true;
        let op = CopyOp {
            block: scrubbed.block,
            parent: scrubbed.parent,
            // The block read says itself whose key opens it.
            owner: None,
            from: scrubbed.slot,
            to: staging.slot_ref(),
        };
        self.run_errand(op, staging, CopyPurpose::Scrub(scrubbed));
        true
    }

    /// The medium has read the block.
    pub(super) fn scrub_read(
        self: &Arc<Self>,
        op: &CopyOp,
        scrubbed: Scrubbed,
        staging: Frame,
        error: Option<&CopyError>,
    ) {
        let now = self.clock.uptime();
        self.sending.staging.lock().return_lent(staging);
        let defect = match error.map(CopyError::kind) {
            Some(CopyErrorKind::Corrupt) => Some(Defect::Corrupt),
            Some(CopyErrorKind::Io) => {
                self.health.directory_failed(op, now);
                Some(Defect::Unreadable)
            }
            // A medium that is away says nothing about a block.
            _ => None,
        };
        if let Some(error) = error {
            tracing::warn!(?op, %error, "a block that no request asked for could not be verified");
        }
        self.scrubbed(scrubbed, defect);
        self.upkeep.scrubbing.state.lock().is_reading = false;
        // A task that waits for a staging slot may take this one; and there may be an allowance for
        // another block.
        self.pump();
        self.scrub_some();
    }

    /// A read is overdue: the next may go once the medium moves again.
    pub(super) fn scrub_gave_up(&self) {
        self.upkeep.scrubbing.state.lock().is_reading = false;
    }

    fn scrubbed(self: &Arc<Self>, scrubbed: Scrubbed, defect: Option<Defect>) {
        let tier = scrubbed.slot.tier;
        self.metrics.scrubbed(tier, defect.is_none());
        if defect == Some(Defect::Corrupt) {
            self.metrics.found_corrupt(tier);
        }
        self.end_scrub(scrubbed, defect);
    }

    pub(super) fn end_scrub(self: &Arc<Self>, scrubbed: Scrubbed, defect: Option<Defect>) {
        let mut table = self.table();
        table.scrubbed(scrubbed, defect);
        let effects = table.take_effects();
        drop(table);
        self.apply(effects);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_of_any_length_allows_one_burst() {
        for (bytes_per_second, days) in [(100 << 20, 36_500), (u64::MAX, 1)] {
            let options = ScrubOptions { bytes_per_second, block_bytes: 1 << 20, memory: None };
            let scrubbing = ScrubProgress::new(options);
            let now = Duration::from_secs(days * 86_400);
            assert!(scrubbing.may_read(now));
            let most = bytes_per_second / 10;
            assert!(scrubbing.state.lock().allowance <= most, "{bytes_per_second}");
        }
    }
}
