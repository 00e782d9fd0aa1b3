//! GPUDirect Storage: blocks between the disk tier and a GPU, past the CPU.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::checksum::DeviceChecksum;
use super::cufile::{Buffer, CuFile, CuFileMode, CuFileOptions, Handle, Place};
use super::driver::Gpu;
use crate::batch::{CopyThreads, Execute};
use crate::checksum::Checksums;
use crate::copy::{Backend, CopyError, CopyErrorKind, CopyOp, Done, Route, SlotRef, Tier};
use crate::device::{DeviceRegion, Space};
use crate::disk::DiskRegion;
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::no_such_slot;

/// Reads and writes of cuFile, one thread for each in flight. Blocks are checksummed on the GPU before they are
/// written, and verified there after they are read.
#[derive(Debug)]
pub struct GdsBackend {
    threads: CopyThreads,
    mode: CuFileMode,
}

const ROUTES: [Route; 2] = [(Tier::Device, Tier::Disk), (Tier::Disk, Tier::Device)];

/// What the threads work with.
#[derive(Debug)]
struct Ends {
    gpu: Gpu,
    // Before the regions: handles and buffers go before what they name.
    handles: Vec<Handle>,
    /// One for each part of the device region, or none.
    buffers: Vec<Buffer>,
    sums: DeviceChecksum,
    device: Arc<DeviceRegion>,
    disk: Arc<DiskRegion>,
    checksums: Arc<Checksums>,
}

impl GdsBackend {
    /// Moves blocks between `device`, in this GPU's memory, and `disk`, at most `depth` at a time. `checksums` are
    /// those of the disk tier's blocks, whoever writes them.
    ///
    /// # Errors
    /// `Invalid`: the blocks differ in size, or the device region is elsewhere. `Unavailable`: no cuFile, files
    /// that do not bypass the page cache, a file system that cuFile does not know, or no threads.
    pub fn new(
        gpu: &Gpu,
        device: Arc<DeviceRegion>,
        disk: Arc<DiskRegion>,
        checksums: Arc<Checksums>,
        depth: u32,
        options: &CuFileOptions,
    ) -> Result<Self, SetupError> {
        check_fit(gpu, &device, &disk)?;
        let cufile = CuFile::open(options).ready().map_err(|why| unavailable(&why))?;
        let _entered = gpu.enter().map_err(|error| super::driver::failed("no context", error))?;
        let handles = disk.files().map(|file| Handle::new(&cufile, file.as_fd())).collect::<Result<_, _>>();
        let handles = handles.map_err(|why| {
            unavailable(&format!(
                "cuFile does not take the slot files ({why}); put disk.dirs on ext4 or XFS on NVMe"
            ))
        })?;
        let (mode, buffers) = (cufile.mode(), register(&cufile, &device));
        let sums = DeviceChecksum::new(gpu)?;
        let ends = Ends { gpu: gpu.clone(), handles, buffers, sums, device, disk, checksums };
        let execute: Arc<Execute> = Arc::new(move |op: &CopyOp| ends.execute(op));
        let threads = CopyThreads::start("kvbm-gds", depth as usize, 1, &execute).map_err(|error| {
            let message = "cannot start GDS threads; lower disk.queue_depth (DYN_KVBM_DISK_QUEUE_DEPTH)";
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        Ok(Self { threads, mode })
    }

    /// How cuFile moves bytes here.
    pub const fn mode(&self) -> CuFileMode {
        self.mode
    }
}

fn check_fit(gpu: &Gpu, device: &DeviceRegion, disk: &DiskRegion) -> Result<(), SetupError> {
    let (ours, theirs) = (device.segments().block_bytes(), disk.geometry().block_bytes());
    if ours != theirs || device.space() != Space::Cuda(gpu.ordinal()) {
        let message = format!("{device:?} does not fit {gpu:?} and disk blocks of {theirs} bytes");
        return Err(SetupError::new(SetupErrorKind::Invalid, message));
    }
    if !disk.is_direct() {
        return Err(unavailable(
            "the slot files go through the page cache; set disk.o_direct, on ext4 or XFS",
        ));
    }
    Ok(())
}

/// Without registration cuFile copies through buffers of its own on the GPU, so this may fail.
fn register(cufile: &Arc<CuFile>, device: &DeviceRegion) -> Vec<Buffer> {
    let slots = device.segments().slots() as usize;
    let buffers = device.segments().parts().iter().map(|part| {
        // SAFETY: the part is the region's, which outlives the buffer.
        unsafe { Buffer::new(cufile, part.base, part.stride * (slots - 1) + part.bytes) }
    });
    buffers.collect::<Result<_, _>>().unwrap_or_else(|why| {
        tracing::info!(why, "cuFile does not register the device tier: transfers go through its own buffers");
        Vec::new()
    })
}

fn unavailable(why: &str) -> SetupError {
    SetupError::new(SetupErrorKind::Unavailable, format!("no GPUDirect Storage: {why}"))
}

// SAFETY: every thread executes the operations that it took, one by one, with calls that end before they return,
// and completes each right after; `Ends` keeps the regions alive and moves the pieces of slots that exist.
unsafe impl Backend for GdsBackend {
    fn name(&self) -> &'static str {
        match self.mode {
            CuFileMode::Direct => "gds",
            CuFileMode::Compatibility => "gds (compatibility mode)",
        }
    }

    fn routes(&self) -> &[Route] {
        &ROUTES
    }

    fn submit(&self, batch: Vec<CopyOp>, done: Done) {
        self.threads.submit(batch, done);
    }
}

impl Ends {
    fn execute(&self, op: &CopyOp) -> Result<(), CopyError> {
        let _entered = self.gpu.enter().map_err(|error| {
            CopyError::caused(CopyErrorKind::Io, format!("CUDA: no context: {error}"), error)
        })?;
        match op.route() {
            (Tier::Device, Tier::Disk) => self.write(op),
            (Tier::Disk, Tier::Device) => self.read(op),
            _ => Err(no_such_slot(op.from)),
        }
    }

    fn write(&self, op: &CopyOp) -> Result<(), CopyError> {
        self.disk.place(op.to.slot).ok_or_else(|| no_such_slot(op.to))?;
        let sum = self.sums.of(&self.device, op.from.slot)?;
        self.checksums.record(op.to.slot, sum);
        // SAFETY: pieces of the source, which nobody writes.
        self.each_piece(op.from, op.to, |handle, place, bytes, at| unsafe { handle.write(place, bytes, at) })
    }

    fn read(&self, op: &CopyOp) -> Result<(), CopyError> {
        // SAFETY: pieces of the destination, which nobody else uses.
        self.each_piece(op.to, op.from, |handle, place, bytes, at| unsafe { handle.read(place, bytes, at) })?;
        let (expected, actual) = (self.checksums.get(op.from.slot), self.sums.of(&self.device, op.to.slot)?);
        if expected == Some(actual) { Ok(()) } else { Err(crate::verify::corrupt(op.from, expected, actual)) }
    }

    /// Moves the pieces of a device slot to or from a slot of a file, one after the other.
    fn each_piece(
        &self,
        ours: SlotRef,
        theirs: SlotRef,
        transfer: impl Fn(&Handle, Place, usize, u64) -> Result<usize, String>,
    ) -> Result<(), CopyError> {
        let (file, mut at) = self.disk.place(theirs.slot).ok_or_else(|| no_such_slot(theirs))?;
        let segments = self.device.segments();
        let pieces = segments.segments(ours.slot).ok_or_else(|| no_such_slot(ours))?;
        for (part, piece) in segments.parts().iter().zip(pieces) {
            let base = if self.buffers.is_empty() { piece.address } else { part.base };
            let place = Place { base, offset: piece.address - base };
            match transfer(&self.handles[file], place, piece.bytes, at) {
                Ok(bytes) if bytes == piece.bytes => at += bytes as u64,
                Ok(bytes) => {
                    return Err(failed(theirs, &format!("{bytes} of {} bytes were moved", piece.bytes)));
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
