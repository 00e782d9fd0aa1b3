//! Test doubles, and the suite that every backend passes. Behind the `testing` feature.
//!
//! The doubles are backends themselves, so that they stand where the real ones do: [`MemoryStore`]
//! plays a disk or an object store, [`FaultBackend`] fails in chosen ways, [`ParkedBackend`] lets a
//! test decide when and in which order copies end.

#![expect(unsafe_code, reason = "doubles of memory and of backends")]

mod child;
pub mod conformance;
mod fault;
mod freeze;
mod panics;
mod parked;
mod store;
mod tensors;

pub use child::{Child, holds_in_a_child};
pub use fault::{Fault, FaultBackend};
pub use freeze::freeze;
pub(crate) use panics::end_at_panics;
pub use panics::panics_are_meant;
pub use parked::{ParkedBackend, Pending};
pub use store::MemoryStore;
pub use tensors::{TensorView, Tensors, TwoFaced};

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::backend::Backend;
use crate::copy::{BlockKey, CopyError, CopyErrorKind, CopyOp, Done, SlotRef};
use crate::disk::{DiskOptions, DiskRegion};
use crate::dram::{DramOptions, DramRegion};
use crate::frame::{Frame, FramePool};
use crate::geometry::Geometry;
use crate::sealed::KeyRing;

/// A host region for a test, small pages and one thread.
///
/// # Panics
/// If there is not that much memory.
pub fn host(slots: u32, block_bytes: usize) -> DramRegion {
    DramRegion::host(options(slots, block_bytes)).expect("memory for a test")
}

pub(crate) fn options(slots: u32, block_bytes: usize) -> DramOptions {
    let geometry = Geometry::new(slots, block_bytes).expect("a test's geometry is valid");
    DramOptions { geometry, huge_pages: false, fault_threads: 1 }
}

/// All frames of a region.
///
/// # Panics
/// If others have been given its frames.
pub fn frames(region: &DramRegion) -> Vec<Frame> {
    take_all(region.frames().expect("a region of its own"))
}

/// All frames of a pool.
pub fn take_all(mut pool: FramePool) -> Vec<Frame> {
    std::iter::from_fn(|| pool.take()).collect()
}

/// A disk tier in these directories that does not outlive its region, read past the page cache.
///
/// # Panics
/// If there can be no such blocks.
pub fn disk_options<P: AsRef<Path>>(dirs: &[P], slots: u32, block_bytes: usize) -> DiskOptions {
    DiskOptions {
        geometry: Geometry::new(slots, block_bytes).expect("a test's geometry is valid"),
        dirs: dirs.iter().map(|dir| dir.as_ref().to_owned()).collect(),
        o_direct: true,
        zerofill_fallback: true,
        keep: None,
    }
}

/// A region of [`disk_options`].
///
/// # Panics
/// If there is no room.
pub fn disk<P: AsRef<Path>>(dirs: &[P], slots: u32, block_bytes: usize) -> Arc<DiskRegion> {
    let options = disk_options(dirs, slots, block_bytes);
    Arc::new(DiskRegion::open(&options).expect("room on disk for a test"))
}

/// A main key as settings have it: `digits` are the first sixteen of its sixty-four.
pub fn main_key(number: u32, digits: &str) -> String {
    format!("{number}:{}", digits.repeat(4))
}

/// A ring of one [`main_key`].
///
/// # Panics
/// If these are no digits.
pub fn key_ring(number: u32, digits: &str) -> Arc<KeyRing> {
    Arc::new(KeyRing::parse(&main_key(number, digits)).expect("a test's key is valid"))
}

/// How each operation failed.
pub fn kinds(results: &[Result<(), CopyError>]) -> Vec<Option<CopyErrorKind>> {
    results.iter().map(|result| result.as_ref().err().map(CopyError::kind)).collect()
}

/// Checks how an operation failed.
///
/// # Panics
/// If it did not, or otherwise.
#[track_caller]
pub fn assert_fails(result: Result<(), CopyError>, kind: CopyErrorKind) {
    assert_eq!(result.map_err(|error| error.kind()), Err(kind));
}

/// A copy order for the `number`-th block of a test.
pub fn order(number: usize, from: SlotRef, to: SlotRef) -> CopyOp {
    CopyOp {
        block: BlockKey { hash: number as u128, group: 0 },
        parent: None,
        owner: None,
        from,
        to,
    }
}

/// Fills a block with bytes that no other `number` has.
pub fn fill_pattern(number: usize, block: &mut [u8]) {
    for (word, bytes) in block.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&pattern_word(number, word).to_le_bytes()[..bytes.len()]);
    }
}

/// Whether a block is as [`fill_pattern`] left it.
pub fn has_pattern(number: usize, block: &[u8]) -> bool {
    block
        .chunks(8)
        .enumerate()
        .all(|(word, bytes)| *bytes == pattern_word(number, word).to_le_bytes()[..bytes.len()])
}

/// `SplitMix64` of block and position.
fn pattern_word(number: usize, word: usize) -> u64 {
    let mut mixed = ((number as u64) << 32 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Submits a batch and waits until all of it has ended.
///
/// # Panics
/// If an operation ends twice, does not exist, or does not end in a minute.
pub fn run(backend: &dyn Backend, batch: Vec<CopyOp>) -> Vec<Result<(), CopyError>> {
    let mut results: Vec<Option<_>> = vec![None; batch.len()];
    let reports = start(backend, batch);
    for _ in 0..results.len() {
        let (index, result) =
            reports.recv_timeout(Duration::from_mins(1)).expect("an operation did not end");
        assert!(results[index].replace(result).is_none(), "operation {index} ended twice");
    }
    // All reporters are gone once the backend let go of the batch: it has nothing more to say.
    let extra = reports.recv_timeout(Duration::from_mins(1));
    assert_eq!(extra.err(), Some(mpsc::RecvTimeoutError::Disconnected), "an operation ended twice");
    results.into_iter().flatten().collect()
}

/// Submits a batch; its reports arrive in the channel.
pub fn start(
    backend: &dyn Backend,
    batch: Vec<CopyOp>,
) -> mpsc::Receiver<(usize, Result<(), CopyError>)> {
    let (report, reports) = mpsc::channel();
    let done = each(move |index, result| {
        // A test that stopped listening has failed already.
        let _ = report.send((index, result));
    });
    backend.submit(batch, done);
    reports
}

/// Tells `listen` of each operation alone.
pub fn each(listen: impl Fn(usize, Result<(), CopyError>) + Send + Sync + 'static) -> Done {
    Done::new(move |ended| ended.into_iter().for_each(|(index, result)| listen(index, result)))
}

/// Says that a test is skipped, or fails it if `KVBM_REQUIRE` (a list such as `uring,cuda`) names
/// `what`.
///
/// # Panics
/// If `what` is required.
pub fn skip(what: &str, why: &dyn std::fmt::Display) {
    let required = std::env::var("KVBM_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name.trim() == what), "{what} is required: {why}");
    eprintln!("SKIPPED: no {what} here: {why}");
}
