//! The other side: memory, files and objects without a manager.

#[cfg(feature = "nixl")]
use kvbm_tiers::nixl::Direction;
#[cfg(feature = "nixl")]
use kvbm_tiers::nixl::raw::{Caller, RawNixl};

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvbm_settings::Settings;
use kvbm_tiers::raw::{RawCopy, RawRing};
use kvbm_tiers::{DiskOptions, DramOptions, Geometry, clock};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use url::Url;

use super::super::{failed, setup};
use super::Bottom;
use crate::output::CommandFailure;

/// The raw medium of a contest.
#[derive(Debug)]
pub(super) enum Raw {
    Copy {
        copy: Box<RawCopy>,
        threads: usize,
    },
    Ring(Box<RawRing>),
    #[cfg(feature = "nixl")]
    Nixl(Box<RawNixl>),
    Client(Client),
}

impl Raw {
    /// Of the shape that `settings` give the manager.
    pub(super) fn open(settings: &Settings, bottom: Bottom) -> Result<Self, CommandFailure> {
        let block_bytes = settings.block_bytes.unwrap_or_default();
        let blocks = settings.host.capacity.map_or(0, |capacity| capacity.blocks(block_bytes));
        let geometry = Geometry::new(blocks as u32, block_bytes as usize).map_err(setup)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let huge_pages = settings.host.huge_pages;
        let memory = DramOptions { geometry, huge_pages, fault_threads: threads };
        Ok(match bottom {
            Bottom::Host => {
                let threads = settings.transfer.copy_threads as usize;
                Self::Copy { copy: Box::new(RawCopy::open(memory).map_err(setup)?), threads }
            }
            Bottom::Disk => {
                let ring =
                    RawRing::open(memory, &disk(settings, geometry), settings.disk.queue_depth);
                Self::Ring(Box::new(ring.map_err(setup)?))
            }
            // The manager's batches, and as many of them in flight as its blocks.
            #[cfg(feature = "nixl")]
            Bottom::Nixl => {
                let depth = settings.disk.queue_depth as usize;
                let batch = depth.min(settings.transfer.max_batch as usize);
                let nixl = RawNixl::posix(memory, &disk(settings, geometry), batch, depth / batch);
                Self::Nixl(Box::new(nixl.map_err(setup)?))
            }
            Bottom::Object => Self::Client(Client::open(settings, geometry)?),
        })
    }

    /// Waits until what either side left to the page cache has reached the drive, so that neither
    /// pays for the other.
    pub(super) fn sync(&self) -> Result<(), CommandFailure> {
        match self {
            Self::Client(client) => client.sync(),
            Self::Copy { .. } | Self::Ring(_) => Ok(()),
            #[cfg(feature = "nixl")]
            Self::Nixl(_) => Ok(()),
        }
    }

    /// Moves the working set down.
    pub(super) fn write(&mut self) -> Result<Duration, CommandFailure> {
        match self {
            Self::Copy { copy, threads } => Ok(copy.run(*threads)),
            Self::Ring(ring) => ring.write().map_err(failed),
            #[cfg(feature = "nixl")]
            Self::Nixl(nixl) => nixl.run(Direction::Write, Caller::Direct).map_err(failed),
            Self::Client(client) => client.write(),
        }
    }

    /// Moves it up again.
    pub(super) fn read(&mut self) -> Result<Duration, CommandFailure> {
        match self {
            Self::Copy { copy, threads } => Ok(copy.run(*threads)),
            Self::Ring(ring) => ring.read().map_err(failed),
            #[cfg(feature = "nixl")]
            Self::Nixl(nixl) => nixl.run(Direction::Read, Caller::Direct).map_err(failed),
            Self::Client(client) => client.read(),
        }
    }
}

fn disk(settings: &Settings, geometry: Geometry) -> DiskOptions {
    DiskOptions {
        geometry,
        dirs: settings.disk.dirs.clone(),
        o_direct: settings.disk.o_direct,
        zerofill_fallback: settings.disk.zerofill_fallback,
        keep: None,
    }
}

/// The object store's client, one object per block, through the page cache as ours.
#[derive(Debug)]
pub(super) struct Client {
    work: Arc<Work>,
    runtime: Runtime,
    concurrency: u32,
    dir: File,
}

/// What its tasks share.
#[derive(Debug)]
struct Work {
    store: LocalFileSystem,
    blocks: Vec<PutPayload>,
    next: AtomicUsize,
}

impl Client {
    fn open(settings: &Settings, geometry: Geometry) -> Result<Self, CommandFailure> {
        let url = settings.object.url.as_deref().and_then(|url| Url::parse(url).ok());
        let dir = url.and_then(|url| url.to_file_path().ok());
        let dir = dir.ok_or_else(|| {
            CommandFailure::unusable("objects are timed in files: give --dir a directory")
        })?;
        // The threads that the manager's own client has; those for the copies start on their own.
        let runtime = Builder::new_multi_thread().worker_threads(2).build().map_err(failed)?;
        let block = |slot: u32| PutPayload::from(vec![slot as u8; geometry.block_bytes()]);
        let work = Work {
            store: LocalFileSystem::new_with_prefix(&dir).map_err(failed)?,
            blocks: (0..geometry.slots()).map(block).collect(),
            next: AtomicUsize::new(0),
        };
        let dir = File::open(dir).map_err(failed)?;
        Ok(Self { work: Arc::new(work), runtime, concurrency: settings.object.concurrency, dir })
    }

    /// Deletes the objects of the round before, as the manager does, and writes new ones. Not in
    /// one step: some file systems write out at once what replaces a file.
    fn write(&self) -> Result<Duration, CommandFailure> {
        self.run(|work| async move {
            while let Some((path, block)) = work.take() {
                work.delete(&path).await?;
                work.store.put(&path, block.clone()).await?;
            }
            Ok(())
        })
    }

    fn read(&self) -> Result<Duration, CommandFailure> {
        self.run(|work| async move {
            while let Some((path, block)) = work.take() {
                let found = work.store.get(&path).await?.bytes().await?;
                assert_eq!(found.len(), block.content_length(), "{path} was cut short");
            }
            Ok(())
        })
    }

    /// As many tasks as requests may be in flight, each taking one block after the other.
    fn run<T>(&self, task: impl Fn(Arc<Work>) -> T) -> Result<Duration, CommandFailure>
    where
        T: Future<Output = object_store::Result<()>> + Send + 'static,
    {
        self.work.next.store(0, Ordering::Relaxed);
        let started = clock::now();
        self.runtime.block_on(async {
            let tasks = (0..self.concurrency).map(|_| task(Arc::clone(&self.work)));
            let mut tasks: JoinSet<_> = tasks.collect();
            while let Some(ended) = tasks.join_next().await {
                ended.map_err(failed)?.map_err(failed)?;
            }
            Ok(started.elapsed())
        })
    }

    fn sync(&self) -> Result<(), CommandFailure> {
        rustix::fs::syncfs(&self.dir).map_err(failed)
    }
}

impl Work {
    /// The next block that is not taken yet, and the name of its object.
    fn take(&self) -> Option<(Path, &PutPayload)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Some((Path::from(number.to_string()), self.blocks.get(number)?))
    }

    async fn delete(&self, path: &Path) -> object_store::Result<()> {
        match self.store.delete(path).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            result => result,
        }
    }
}
