//! GPUDirect Storage: blocks between the disk tier and a GPU, past the CPU.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;

use super::checksum::DeviceChecksum;
use super::cufile::{CuFile, CuFileBuffer, CuFileHandle, CuFileOptions, DevicePlace, PIN_SETTING};
use super::driver::Gpu;
use crate::backend::Backend;
use crate::checksum::Checksums;
use crate::copy::{CopyError, CopyErrorKind, CopyOp, Done, Route, SlotRef, Tier};
use crate::disk::DiskRegion;
use crate::error::{SetupError, SetupErrorKind};
use crate::fork::{ProcessBound, ServiceThread};
use crate::geometry::{ALIGNMENT, Part};
use crate::memory::{DeviceRegion, Space, no_such_slot};

/// Reads and writes of cuFile, one thread for each in flight; the pieces of a block are shared by
/// several. Blocks are checksummed on the GPU while they are written, and verified there after they
/// are read.
#[derive(Debug)]
pub struct GdsBackend {
    // Before the threads, which finish what was submitted.
    queue: ProcessBound<Sender<BlockShare>>,
    threads: Vec<ServiceThread>,
    /// Pieces that one thread moves, of every block.
    shares: Vec<Range<usize>>,
    /// Why not every file is reached directly.
    indirect: Option<String>,
    /// Why cuFile does not know the device memory.
    unregistered: Option<String>,
}

const ROUTES: [Route; 2] = Route::new(Tier::Device, Tier::Disk).both_ways();

/// A block under way.
#[derive(Debug)]
struct GdsTransfer {
    op: CopyOp,
    index: usize,
    done: Done,
    /// Shares that have not ended.
    left: AtomicUsize,
    failure: Mutex<Option<CopyError>>,
}

/// Some pieces of a block.
#[derive(Debug)]
struct BlockShare {
    transfer: Arc<GdsTransfer>,
    pieces: Range<usize>,
}

/// What the threads work with.
#[derive(Debug)]
struct GdsEnds {
    gpu: Gpu,
    // Before the regions: handles and buffers go before what they name.
    handles: Vec<CuFileHandle>,
    /// One for each part of the device region, or none.
    buffers: Vec<CuFileBuffer>,
    sums: DeviceChecksum,
    device: Arc<DeviceRegion>,
    disk: Arc<DiskRegion>,
    checksums: Arc<Checksums>,
}

impl GdsBackend {
    /// Moves blocks between `device`, in this GPU's memory, and `disk`, with at most `depth` calls
    /// at a time. `checksums` are those of the disk tier's blocks, whichever path writes them.
    ///
    /// # Errors
    /// `Invalid`: the blocks differ in size, or the device region is elsewhere. `Unavailable`: no
    /// cuFile, files that do not bypass the page cache, a file system that cuFile does not know, or
    /// no threads.
    pub fn new(
        gpu: &Gpu,
        device: Arc<DeviceRegion>,
        disk: Arc<DiskRegion>,
        checksums: Arc<Checksums>,
        depth: u32,
        options: &CuFileOptions,
    ) -> Result<Self, SetupError> {
        check_fit(gpu, &device, &disk)?;
        let cufile = CuFile::open(options).map_err(|why| unavailable(&why))?;
        let indirect = disk.files().find_map(|file| cufile.reaches(file, options).err());
        let _entered = gpu.enter().map_err(|error| super::driver::failed("no context", error))?;
        let handles = disk
            .files()
            .map(|file| CuFileHandle::new(&cufile, file.as_fd()))
            .collect::<Result<_, _>>();
        let handles = handles.map_err(|why| {
            unavailable(&format!(
                "cuFile does not take the slot files ({why}); put disk.dirs on ext4 or XFS on NVMe, and mount /run/udev \
                 in a container: cuFile looks there what a drive holds"
            ))
        })?;
        let (buffers, unregistered) = match register(&cufile, &device) {
            Ok(buffers) => (buffers, None),
            Err(why) => (Vec::new(), Some(not_registered(gpu, &cufile, &device, &why))),
        };
        let sums = DeviceChecksum::new(gpu)?;
        sums.reserve(depth as usize, device.segments().parts().len())?;
        let shares = shares(device.segments().parts(), depth as usize);
        let ends =
            Arc::new(GdsEnds { gpu: gpu.clone(), handles, buffers, sums, device, disk, checksums });
        let (queue, orders) = crossbeam_channel::unbounded();
        let queue = ProcessBound::new(queue);
        let mut backend = Self { queue, threads: Vec::new(), shares, indirect, unregistered };
        backend.start(&ends, &orders, depth).map_err(|error| {
            let message =
                "cannot start GDS threads; lower disk.queue_depth (DYN_KVBM_DISK_QUEUE_DEPTH)";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        Ok(backend)
    }

    fn start(
        &mut self,
        ends: &Arc<GdsEnds>,
        orders: &Receiver<BlockShare>,
        depth: u32,
    ) -> std::io::Result<()> {
        for number in 0..depth.max(1) {
            let (ends, orders) = (Arc::clone(ends), orders.clone());
            let work = move || ends.work(&orders);
            self.threads.push(ServiceThread::spawn(format!("kvbm-gds-{number}"), work)?);
        }
        Ok(())
    }

    /// Why cuFile works in compatibility mode, if it does: through buffers of its own in host
    /// memory, with ordinary reads and writes.
    pub fn indirect(&self) -> Option<&str> {
        self.indirect.as_deref()
    }

    /// Why transfers go through buffers of cuFile's own on the GPU, if they do.
    pub fn unregistered(&self) -> Option<&str> {
        self.unregistered.as_deref()
    }
}

/// Cuts the pieces of a block into at most `depth` runs of about equal size. Only where a piece
/// starts on a page of the file: cuFile reads, changes and writes the pages that a piece has a part
/// of, and two threads that do so to one page lose the bytes of one.
fn shares(parts: &[Part], depth: usize) -> Vec<Range<usize>> {
    let bytes: usize = parts.iter().map(|part| part.bytes).sum();
    let enough = bytes.div_ceil(depth.max(1));
    let (mut shares, mut start, mut from, mut at) = (Vec::new(), 0, 0, 0);
    for (number, part) in parts.iter().enumerate() {
        if at - from >= enough && at % ALIGNMENT == 0 {
            shares.push(start..number);
            (start, from) = (number, at);
        }
        at += part.bytes;
    }
    shares.push(start..parts.len());
    shares
}

fn check_fit(gpu: &Gpu, device: &DeviceRegion, disk: &DiskRegion) -> Result<(), SetupError> {
    let (ours, theirs) = (device.segments().block_bytes(), disk.geometry().block_bytes());
    if ours != theirs || device.space() != Space::Cuda(gpu.ordinal()) {
        let message = format!("{device:?} does not fit {gpu:?} and disk blocks of {theirs} bytes");
        return Err(SetupError::invalid(message));
    }
    if !disk.is_direct() {
        return Err(unavailable(
            "the slot files go through the page cache; set disk.o_direct, on ext4 or XFS",
        ));
    }
    Ok(())
}

/// Without registration cuFile copies through buffers of its own on the GPU, so this may fail.
fn register(cufile: &Arc<CuFile>, device: &DeviceRegion) -> Result<Vec<CuFileBuffer>, String> {
    let slots = device.segments().slots() as usize;
    let buffers = device.segments().parts().iter().map(|part| {
        // SAFETY: the part is the region's, which outlives the buffer.
        unsafe { CuFileBuffer::new(cufile, part.base, part.extent_bytes(slots)) }
    });
    buffers.collect()
}

/// What to say to that: usually one of two limits is too low.
fn not_registered(gpu: &Gpu, cufile: &CuFile, device: &DeviceRegion, why: &str) -> String {
    let slots = device.segments().slots() as usize;
    let wanted: usize = device.segments().parts().iter().map(|part| part.extent_bytes(slots)).sum();
    let window = gpu.device().window_bytes();
    let window =
        window.map_or_else(|| "of unknown size".into(), |bytes| format!("{} MiB", bytes >> 20));
    let message = format!(
        "cuFile does not register the {} MiB of the device tier ({why}), and copies through buffers of its own on the \
         GPU; it pins at most {} MiB ({PIN_SETTING}), and the GPU's window for other devices (BAR1) is {window}",
        wanted >> 20,
        cufile.max_pinned() >> 20,
    );
    tracing::warn!("{message}");
    message
}

fn unavailable(why: &str) -> SetupError {
    SetupError::unavailable(format!("no GPUDirect Storage: {why}"))
}

// SAFETY: threads move the shares of an operation with calls that end before they return, and the
// one whose share ends last reports it; `GdsEnds` keeps the regions alive and moves the pieces of
// slots that exist.
unsafe impl Backend for GdsBackend {
    fn name(&self) -> &'static str {
        if self.indirect.is_none() { "gds" } else { "gds (compatibility mode)" }
    }

    fn routes(&self) -> &[Route] {
        &ROUTES
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        for (index, op) in batch.into_iter().enumerate() {
            let left = AtomicUsize::new(self.shares.len());
            let transfer = Arc::new(GdsTransfer {
                op,
                index,
                done: done.clone(),
                left,
                failure: Mutex::new(None),
            });
            for pieces in self.shares.iter().cloned() {
                let share = BlockShare { transfer: Arc::clone(&transfer), pieces };
                if self.queue.send(share).is_err() {
                    transfer.end_share(Err(CopyError::refused("GDS threads died")), None);
                }
            }
        }
    }
}

impl GdsTransfer {
    /// The last share to end reports the block; `ends`: to verify it with.
    fn end_share(&self, outcome: Result<(), CopyError>, ends: Option<&GdsEnds>) {
        if let Err(error) = outcome {
            self.failure.lock().get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let failure = self.failure.lock().take();
        let arrived = failure.map_or(Ok(()), Err);
        let outcome = match ends {
            Some(ends) if self.op.to.tier == Tier::Device => {
                arrived.and_then(|()| ends.verify(&self.op))
            }
            _ => arrived,
        };
        self.done.report(vec![(self.index, outcome)]);
    }
}

impl GdsEnds {
    fn work(&self, shares: &Receiver<BlockShare>) {
        let entered = self.gpu.enter();
        for BlockShare { transfer, pieces } in shares {
            let outcome = match &entered {
                Ok(_) => self.execute(&transfer.op, pieces),
                Err(error) => Err(CopyError::caused(
                    CopyErrorKind::Io,
                    format!("CUDA: no context: {error}"),
                    *error,
                )),
            };
            transfer.end_share(outcome, Some(self));
        }
    }

    fn execute(&self, op: &CopyOp, pieces: Range<usize>) -> Result<(), CopyError> {
        match (op.from.tier, op.to.tier) {
            (Tier::Device, Tier::Disk) => self.write(op, pieces),
            (Tier::Disk, Tier::Device) => self.read(op, pieces),
            _ => Err(no_such_slot(op.from)),
        }
    }

    /// The first share also sums the block.
    fn write(&self, op: &CopyOp, pieces: Range<usize>) -> Result<(), CopyError> {
        self.disk.place(op.to.slot).ok_or_else(|| no_such_slot(op.to))?;
        if pieces.start == 0 {
            let sum = self.sums.of(&self.device, op.from.slot)?;
            self.checksums.record(op.to.slot, sum);
        }
        // SAFETY: pieces of the source, which nothing writes.
        self.each_piece(op.from, op.to, pieces, |handle, place, bytes, at| unsafe {
            handle.write(place, bytes, at)
        })
    }

    fn read(&self, op: &CopyOp, pieces: Range<usize>) -> Result<(), CopyError> {
        // SAFETY: pieces of the destination, which nothing else uses.
        self.each_piece(op.to, op.from, pieces, |handle, place, bytes, at| unsafe {
            handle.read(place, bytes, at)
        })
    }

    /// All pieces have arrived.
    fn verify(&self, op: &CopyOp) -> Result<(), CopyError> {
        let (expected, actual) =
            (self.checksums.get(op.from.slot), self.sums.of(&self.device, op.to.slot)?);
        if expected == Some(actual) {
            Ok(())
        } else {
            Err(crate::verify::corrupt(op.from, expected, actual))
        }
    }

    /// Moves some pieces of a device slot to or from a slot of a file, one after the other.
    fn each_piece(
        &self,
        ours: SlotRef,
        theirs: SlotRef,
        range: Range<usize>,
        transfer: impl Fn(&CuFileHandle, DevicePlace, usize, u64) -> Result<usize, String>,
    ) -> Result<(), CopyError> {
        let (file, start) = self.disk.place(theirs.slot).ok_or_else(|| no_such_slot(theirs))?;
        let segments = self.device.segments();
        let pieces = segments.segments(ours.slot).ok_or_else(|| no_such_slot(ours))?;
        let mut at = start
            + segments.parts()[..range.start].iter().map(|part| part.bytes as u64).sum::<u64>();
        for (part, piece) in segments.parts().iter().zip(pieces).take(range.end).skip(range.start) {
            let base = if self.buffers.is_empty() { piece.address } else { part.base };
            let place = DevicePlace { base, offset: piece.address - base };
            match transfer(&self.handles[file], place, piece.bytes, at) {
                Ok(bytes) if bytes == piece.bytes => at += bytes as u64,
                Ok(bytes) => {
                    return Err(failed(
                        theirs,
                        &format!("{bytes} of {} bytes were moved", piece.bytes),
                    ));
                }
                Err(why) => return Err(failed(theirs, &why)),
            }
        }
        Ok(())
    }
}

fn failed(slot: SlotRef, why: &str) -> CopyError {
    CopyError::new(CopyErrorKind::Io, format!("{slot}: GPUDirect Storage: {why}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(sizes: &[usize]) -> Vec<Part> {
        sizes.iter().map(|&bytes| Part { base: 0, stride: bytes, bytes }).collect()
    }

    proptest! {
        #[test]
        fn shares_are_all_pieces_and_no_page_is_shared(
            sizes in proptest::collection::vec(prop_oneof![1_usize..9000, Just(ALIGNMENT), Just(4 * ALIGNMENT)], 1..40),
            depth in 0_usize..9,
        ) {
            let shares = shares(&parts(&sizes), depth);
            prop_assert!(shares.len() <= depth.max(1));
            prop_assert_eq!((shares[0].start, shares[shares.len() - 1].end), (0, sizes.len()));
            for pair in shares.windows(2) {
                prop_assert_eq!(pair[0].end, pair[1].start);
                prop_assert_eq!(sizes[..pair[1].start].iter().sum::<usize>() % ALIGNMENT, 0);
            }
        }
    }

    #[test]
    fn pieces_of_whole_pages_are_shared_by_all_threads() {
        assert_eq!(shares(&parts(&[ALIGNMENT; 8]), 4), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(shares(&parts(&[5000; 3]), 4).len(), 1);
    }
}
