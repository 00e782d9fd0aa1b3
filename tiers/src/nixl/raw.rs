//! Baselines: NIXL called directly, without the types of this module and without a manager.

use std::ffi::c_int;
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::process;
use std::ptr::null_mut;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use super::agent::{Agent, BackendHandle};
use super::library::Library;
use super::registration::{RegisteredRange, Registration, device_of};
use super::request::{Direction, ListedSegments, NixlRequest, SegmentList};
use super::sys::{self, XferReqS};
use crate::checksum::checksum;
use crate::clock;
use crate::copy::{CopyError, CopyErrorKind, SlotId, Tier};
use crate::disk::{DiskOptions, DiskRegion};
use crate::dram::{DramOptions, DramRegion};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::Memory;

/// Moves all slots of a region to and from the other end, in their order, `batch` to a request and
/// `in_flight` requests at a time, and looks for their ends without pause.
#[derive(Debug)]
pub struct RawNixl {
    near: Arc<SegmentList>,
    far: Arc<SegmentList>,
    memory: Arc<dyn Memory>,
    batch: usize,
    in_flight: usize,
}

/// Who makes the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Nothing lies between.
    Direct,
    /// [`NixlRequest`] lies between.
    Layered,
}

impl RawNixl {
    /// Files, through the plugin POSIX on `io_uring`.
    ///
    /// # Errors
    /// Those of [`DiskRegion::open`]; `NoSpace`: no memory; `Unavailable`: no NIXL.
    pub fn posix(
        memory: DramOptions,
        disk: &DiskOptions,
        batch: usize,
        in_flight: usize,
    ) -> Result<Self, SetupError> {
        let posix = start("POSIX", &[("use_uring", "true")])?;
        let disk = Arc::new(DiskRegion::open(disk)?);
        let (near, memory) = near(&posix, memory)?;
        let stride = memory.stride();
        let files = Registration::files(&posix, &disk)?;
        let place = |slot| {
            let (file, offset) = disk.place(SlotId(slot)).unwrap_or_default();
            RegisteredRange {
                address: offset as usize,
                bytes: stride,
                device: device_of(disk.file(file)),
            }
        };
        let far = SegmentList::far(&files, (0..disk.geometry().slots()).map(place))?;
        Ok(Self { near, far, memory, batch, in_flight })
    }

    /// Memory of this process, through the plugin UCX.
    ///
    /// # Errors
    /// `NoSpace`: no memory; `Unavailable`: no NIXL.
    pub fn loopback(memory: DramOptions, batch: usize) -> Result<Self, SetupError> {
        let ucx = start("UCX", &[])?;
        let other: Arc<dyn Memory> = Arc::new(DramRegion::open(Tier::Device, memory)?);
        let (near, memory) = near(&ucx, memory)?;
        let registration = Registration::memory(&ucx, &other)?;
        let far = SegmentList::far(&registration, segments(&*other))?;
        Ok(Self { near, far, memory, batch, in_flight: 1 })
    }

    /// Memory of the process that [`RawNixlPeer`] is in, through the plugin UCX, once it has left
    /// its introduction at `place`.
    ///
    /// # Errors
    /// As [`loopback`](Self::loopback), and `Unavailable`: no peer comes to `place`.
    pub fn load_remote_metadata(
        memory: DramOptions,
        place: &Path,
        batch: usize,
        in_flight: usize,
    ) -> Result<Self, SetupError> {
        let ucx = start("UCX", &[])?;
        let slots = memory.geometry.slots();
        let (near, memory) = near(&ucx, memory)?;
        let stride = memory.stride();
        let (base, metadata) = await_introduction(place)?;
        let peer = Arc::new(ucx.agent().load_remote_metadata(&metadata)?);
        peer.connect()?;
        let segment = |slot| RegisteredRange {
            address: base + slot as usize * stride,
            bytes: stride,
            device: 0,
        };
        let far = SegmentList::of_peer(&peer, (0..slots).map(segment))?;
        Ok(Self { near, far, memory, batch, in_flight })
    }

    /// Moves everything once.
    ///
    /// # Errors
    /// A transfer failed.
    pub fn run(&mut self, direction: Direction, caller: Caller) -> Result<Duration, CopyError> {
        match caller {
            Caller::Direct => {
                self.drive(|indices| Direct::start(self, direction, indices), Direct::is_over)
            }
            Caller::Layered => self.drive(
                |indices| {
                    let near = ListedSegments { list: &self.near, indices };
                    let far = ListedSegments { list: &self.far, indices };
                    let mut request = NixlRequest::new(direction, near, far)?;
                    // SAFETY: nothing else has a slot handle to any slot, and `run` borrows all of
                    // them.
                    unsafe { request.post() }?;
                    Ok(request)
                },
                |request| match request.poll() {
                    Poll::Pending => Ok(false),
                    Poll::Ready(result) => result.map(|()| true),
                },
            ),
        }
    }

    /// Reads everything once, and sums each block when it is there.
    ///
    /// # Errors
    /// A transfer failed.
    pub fn read_and_sum(&mut self) -> Result<Duration, CopyError> {
        let raw = &*self;
        raw.drive(
            |indices| Ok((Direct::start(raw, Direction::Read, indices)?, indices.to_vec())),
            |(direct, indices)| {
                let is_over = direct.is_over()?;
                if is_over {
                    indices.iter().for_each(|&index| _ = black_box(raw.sum(index as usize)));
                }
                Ok(is_over)
            },
        )
    }

    fn sum(&self, slot: usize) -> u32 {
        let at = self.memory.base().as_ptr().wrapping_add(slot * self.memory.stride());
        // SAFETY: a slot of the region, which `self` keeps; its transfer is over, and nothing else
        // has a slot handle to it.
        checksum(unsafe { slice::from_raw_parts(at, self.memory.block_bytes()) })
    }

    fn drive<T>(
        &self,
        start: impl Fn(&[c_int]) -> Result<T, CopyError>,
        is_over: impl Fn(&mut T) -> Result<bool, CopyError>,
    ) -> Result<Duration, CopyError> {
        let all: Vec<_> = (0..self.near.len() as c_int).collect();
        let mut batches = all.chunks(self.batch);
        let mut flights: Vec<T> = Vec::with_capacity(self.in_flight);
        let started = clock::now();
        loop {
            while flights.len() < self.in_flight
                && let Some(batch) = batches.next()
            {
                flights.push(start(batch)?);
            }
            if flights.is_empty() {
                return Ok(started.elapsed());
            }
            let mut at = 0;
            while at < flights.len() {
                if is_over(&mut flights[at])? {
                    drop(flights.swap_remove(at));
                } else {
                    at += 1;
                }
            }
        }
    }
}

/// A request without the type.
struct Direct<'a> {
    agent: &'a Agent,
    handle: *mut XferReqS,
}

impl<'a> Direct<'a> {
    fn start(raw: &'a RawNixl, direction: Direction, indices: &[c_int]) -> Result<Self, CopyError> {
        let (agent, mut handle) = (raw.near.agent(), null_mut());
        let op = match direction {
            Direction::Read => sys::XFER_READ,
            Direction::Write => sys::XFER_WRITE,
        };
        let (at, count) = (indices.as_ptr(), indices.len());
        let (near, far) = (raw.near.as_ptr(), raw.far.as_ptr());
        // SAFETY: agent and lists live as long as `raw`, and the indices are positions in both
        // lists; nothing else has a slot handle to any slot.
        let status = unsafe {
            let api = agent.api();
            let made = (api.make_xfer_req)(
                agent.handle(),
                op,
                near,
                at,
                count,
                far,
                at,
                count,
                &raw mut handle,
                null_mut(),
            );
            if made == sys::SUCCESS {
                (api.post_xfer_req)(agent.handle(), handle, null_mut())
            } else {
                made
            }
        };
        if status < 0 { Err(failed(status)) } else { Ok(Self { agent, handle }) }
    }

    fn is_over(&mut self) -> Result<bool, CopyError> {
        // SAFETY: agent and request live.
        match unsafe { (self.agent.api().get_xfer_status)(self.agent.handle(), self.handle) } {
            sys::SUCCESS => Ok(true),
            sys::IN_PROGRESS => Ok(false),
            status => Err(failed(status)),
        }
    }
}

impl Drop for Direct<'_> {
    fn drop(&mut self) {
        // SAFETY: ours. One that is still under way when another failed is left to itself.
        unsafe {
            if (self.agent.api().get_xfer_status)(self.agent.handle(), self.handle) == sys::SUCCESS
            {
                (self.agent.api().release_xfer_req)(self.agent.handle(), self.handle);
                (self.agent.api().destroy_xfer_req)(self.handle);
            }
        }
    }
}

/// Memory that a [`RawNixl`] in another process moves blocks to and from.
#[derive(Debug)]
pub struct RawNixlPeer {
    _registration: Arc<Registration>,
}

impl RawNixlPeer {
    /// Leaves an introduction in a new file at `place`.
    ///
    /// # Errors
    /// `NoSpace`: no memory; `NotWritable`: the file; `Unavailable`: no NIXL.
    pub fn open(memory: DramOptions, place: &Path) -> Result<Self, SetupError> {
        let ucx = start("UCX", &[])?;
        // Of the pages that a holder's tier has, which neighbours may map.
        let memory: Arc<dyn Memory> = Arc::new(DramRegion::shareable_host(memory)?);
        let registration = Registration::memory(&ucx, &memory)?;
        // SAFETY: nothing has a slot handle to any slot here: the other process may do with them
        // what it likes.
        let metadata = unsafe { ucx.agent().metadata() }?;
        let base = memory.base().addr().get().to_le_bytes();
        let unfinished = place.with_extension("unfinished");
        let left = fs::write(&unfinished, [&base[..], &metadata].concat());
        left.and_then(|()| fs::rename(&unfinished, place)).map_err(|error| {
            let message = format!("cannot write {}: {error}", place.display());
            SetupError::caused(SetupErrorKind::NotWritable, message, error)
        })?;
        Ok(Self { _registration: registration })
    }
}

fn await_introduction(place: &Path) -> Result<(usize, Vec<u8>), SetupError> {
    let deadline = clock::now() + Duration::from_secs(20);
    loop {
        if let Ok(bytes) = fs::read(place)
            && let Some((base, metadata)) = bytes.split_first_chunk()
        {
            return Ok((usize::from_le_bytes(*base), metadata.to_vec()));
        }
        if clock::now() > deadline {
            let message = format!("the other process left nothing at {}", place.display());
            return Err(SetupError::unavailable(message));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn start(plugin: &str, parameters: &[(&str, &str)]) -> Result<Arc<BackendHandle>, SetupError> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("raw-{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let parameters =
        parameters.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    Ok(Arc::new(Agent::new(Library::load(None)?, &name)?.backend(plugin, &parameters)?))
}

fn near(
    plugin: &Arc<BackendHandle>,
    options: DramOptions,
) -> Result<(Arc<SegmentList>, Arc<dyn Memory>), SetupError> {
    let memory: Arc<dyn Memory> = Arc::new(DramRegion::host(options)?);
    let registration = Registration::memory(plugin, &memory)?;
    Ok((SegmentList::near(&registration, segments(&*memory))?, memory))
}

fn segments(memory: &dyn Memory) -> impl Iterator<Item = RegisteredRange> + use<> {
    let (base, bytes) = (memory.base().addr().get(), memory.stride());
    (0..memory.slots()).map(move |slot| RegisteredRange {
        address: base + slot as usize * bytes,
        bytes,
        device: 0,
    })
}

fn failed(status: sys::Status) -> CopyError {
    CopyError::new(CopyErrorKind::Io, format!("NIXL answered {status}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{options, skip};

    #[test]
    fn both_callers_move_everything() {
        if let Err(error) = Library::load(None) {
            return skip("nixl", &error);
        }
        let home = tempfile::tempdir().unwrap();
        let memory = options(40, 64 << 10);
        let disk = DiskOptions {
            geometry: memory.geometry,
            dirs: vec![home.path().to_owned()],
            o_direct: true,
            zerofill_fallback: true,
            keep: None,
        };
        let place = home.path().join("peer");
        let _peer = RawNixlPeer::open(memory, &place).unwrap();
        let all = [
            RawNixl::posix(memory, &disk, 16, 2),
            RawNixl::loopback(memory, 16),
            RawNixl::load_remote_metadata(memory, &place, 16, 2),
        ];
        for raw in all {
            let mut raw = raw.unwrap();
            for caller in [Caller::Direct, Caller::Layered] {
                raw.run(Direction::Write, caller).unwrap();
                raw.run(Direction::Read, caller).unwrap();
            }
        }
    }
}
