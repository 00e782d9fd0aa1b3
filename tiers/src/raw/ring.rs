use std::io::{self, ErrorKind};
use std::time::Duration;

use io_uring::types::Fixed;
use io_uring::{IoUring, opcode};

use crate::clock;
use crate::copy::{SlotId, Tier};
use crate::disk::ring::{build, register_memory};
use crate::disk::{DiskOptions, DiskRegion};
use crate::dram::{DramOptions, DramRegion};
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::Memory;

/// A ring that reads or writes all slots of a region in their order, with registered buffers and
/// files, as many at a time as it is told.
#[derive(Debug)]
pub struct RawRing {
    // Before the memory, so that it is gone before that.
    uring: Ring,
    memory: DramRegion,
    disk: DiskRegion,
    slots_per_buffer: u32,
    depth: u32,
}

struct Ring(IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ring")
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

impl RawRing {
    /// Memory and files of this shape, which nothing else gets at. `depth` (1–4096): operations in
    /// flight. Must be used by the thread that opened it.
    ///
    /// # Errors
    /// Those of [`DiskRegion::open`]; `NoSpace`: no memory; `Unavailable`: no `io_uring`, or its
    /// memory cannot be registered.
    pub fn open(memory: DramOptions, disk: &DiskOptions, depth: u32) -> Result<Self, SetupError> {
        let refused = |error| {
            SetupError::caused(SetupErrorKind::Unavailable, "io_uring is not available", error)
        };
        let (memory, disk) = (DramRegion::open(Tier::Host, memory)?, DiskRegion::open(disk)?);
        if memory.geometry() != disk.geometry() {
            return Err(SetupError::invalid("memory and disk are not of one shape"));
        }
        let uring = build(depth).map_err(refused)?;
        let files: Vec<_> = disk.files().map(std::os::fd::AsRawFd::as_raw_fd).collect();
        uring.submitter().register_files(&files).map_err(refused)?;
        let slots_per_buffer = register_memory(&uring, &memory).ok_or_else(|| {
            SetupError::unavailable("memory cannot be registered: raise the memlock limit")
        })?;
        Ok(Self { uring: Ring(uring), memory, disk, slots_per_buffer, depth })
    }

    /// Reads every slot into its counterpart in memory.
    ///
    /// # Errors
    /// A read failed or was short.
    pub fn read(&mut self) -> io::Result<Duration> {
        self.run(Direction::Read)
    }

    /// Writes every slot from its counterpart in memory.
    ///
    /// # Errors
    /// A write failed or was short.
    pub fn write(&mut self) -> io::Result<Duration> {
        self.run(Direction::Write)
    }

    fn run(&mut self, direction: Direction) -> io::Result<Duration> {
        let started = clock::now();
        let mut outcome = Ok(());
        let (mut next, mut flying) = (0, 0);
        while flying > 0 || (next < self.memory.slots() && outcome.is_ok()) {
            while flying < self.depth && next < self.memory.slots() && outcome.is_ok() {
                self.push(direction, SlotId(next));
                next += 1;
                flying += 1;
            }
            self.enter();
            for event in self.uring.0.completion() {
                flying -= 1;
                outcome = outcome.and(outcome_of(event.result(), self.memory.stride()));
            }
        }
        outcome.map(|()| started.elapsed())
    }

    fn push(&mut self, direction: Direction, slot: SlotId) {
        let (Some(memory), Some((file, offset))) = (self.memory.slot(slot), self.disk.place(slot))
        else {
            unreachable!("memory and disk have the slots of one geometry")
        };
        let (file, start, len) =
            (Fixed(file as u32), memory.cast::<u8>().as_ptr(), memory.len() as u32);
        let buffer = (slot.0 / self.slots_per_buffer) as u16;
        let entry = match direction {
            Direction::Read => {
                opcode::ReadFixed::new(file, start, len, buffer).offset(offset).build()
            }
            Direction::Write => {
                opcode::WriteFixed::new(file, start, len, buffer).offset(offset).build()
            }
        };
        // SAFETY: `run` returns only when nothing is in flight, and holds the memory mutably until
        // then.
        let pushed = unsafe { self.uring.0.submission().push(&entry) };
        assert!(pushed.is_ok(), "the queue has room for all that may be in flight");
    }

    /// What is in flight must be waited for whatever happens.
    fn enter(&self) {
        if let Err(error) = self.uring.0.submit_and_wait(1)
            && error.kind() != ErrorKind::Interrupted
        {
            tracing::warn!(%error, "the ring refused a submission; trying again");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn outcome_of(result: i32, bytes: usize) -> io::Result<()> {
    match usize::try_from(result) {
        Ok(moved) if moved == bytes => Ok(()),
        Ok(_) => Err(ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::from_raw_os_error(result.saturating_neg())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{fill_pattern, has_pattern, options, skip};

    #[test]
    fn what_is_written_is_read_again() {
        if let Err(error) = crate::UringBackend::probe() {
            return skip("uring", &error);
        }
        let home = tempfile::tempdir().unwrap();
        let memory = options(9, 5000);
        let disk = DiskOptions {
            geometry: memory.geometry,
            dirs: vec![home.path().to_owned()],
            o_direct: true,
            zerofill_fallback: true,
            keep: None,
        };
        let mut raw = RawRing::open(memory, &disk, 4).unwrap();
        let mut frames = raw.memory.frames().unwrap();
        let mut slots: Vec<_> = std::iter::from_fn(|| frames.take()).collect();
        for (number, slot) in slots.iter_mut().enumerate() {
            fill_pattern(number, raw.memory.write(slot).unwrap());
        }
        raw.write().unwrap();
        slots.iter_mut().for_each(|slot| raw.memory.write(slot).unwrap().fill(0));
        raw.read().unwrap();
        for (number, slot) in slots.iter().enumerate() {
            assert!(has_pattern(number, raw.memory.read(slot).unwrap()));
        }
    }
}
