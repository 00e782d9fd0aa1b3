//! NIXL without a manager: the same reads, posted and awaited by one thread that compares nothing.

use std::path::Path;
use std::time::Duration;

use kvbm_tiers::nixl::Direction;
use kvbm_tiers::nixl::raw::{Caller, RawNixl, RawNixlPeer};
use kvbm_tiers::{DramOptions, Geometry};

use super::super::{failed, setup};
use crate::output::CommandFailure;

/// Bytes of a request, and requests in flight: as of a pull.
const REQUEST_BYTES: u64 = 4 << 20;
const IN_FLIGHT: usize = 3;

/// The reader's side.
pub(super) struct DirectReader(RawNixl);

impl DirectReader {
    /// `place`: where the holder left its introduction.
    pub(super) fn open(blocks: usize, size: u64, place: &Path) -> Result<Self, CommandFailure> {
        let batch = (REQUEST_BYTES / size).max(1) as usize;
        let memory = memory(blocks, size)?;
        RawNixl::load_remote_metadata(memory, place, batch, IN_FLIGHT).map(Self).map_err(setup)
    }

    /// Reads all blocks once; then again, and sums each when it is there.
    pub(super) fn read(&mut self) -> Result<(Duration, Duration), CommandFailure> {
        let read = self.0.run(Direction::Read, Caller::Direct);
        let both = read.and_then(|read| Ok((read, self.0.read_and_sum()?)));
        both.map_err(failed)
    }
}

/// The holder's side: memory that is read, as long as this lives.
pub(super) fn hold(blocks: usize, size: u64, place: &Path) -> Result<RawNixlPeer, CommandFailure> {
    RawNixlPeer::open(memory(blocks, size)?, place).map_err(setup)
}

fn memory(blocks: usize, size: u64) -> Result<DramOptions, CommandFailure> {
    let geometry = Geometry::new(blocks as u32, size as usize).map_err(setup)?;
    Ok(DramOptions { geometry, huge_pages: true, fault_threads: 1 })
}
