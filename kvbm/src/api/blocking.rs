//! Get and put, for engines that copy for themselves: on plain threads, without a device tier.
//!
//! [`Blocks::get`] shows an engine the leading blocks of a prompt in the slots of the host tier,
//! and [`Blocks::put`] has it write the missing ones there: there is no copy between the engine's
//! tensors and the slots. Blocks on disk or in objects are loaded to the host tier first, and what
//! is put is flushed by itself, as the settings say.
//!
//! ```
//! use kvbm::blocking::Blocks;
//! use kvbm::{ChainHasher, Options};
//! use kvbm_settings::{Capacity, Settings};
//!
//! # fn main() -> kvbm::Result<()> {
//! let mut settings = Settings { block_bytes: Some(4096), ..Settings::default() };
//! settings.host.capacity = Some(Capacity::Blocks(64));
//! let blocks = Blocks::open(settings, Options::default())?;
//! let chain = ChainHasher::new(16, b"model, weights, layout")?.chain(&[7; 100]);
//!
//! // Nothing is known yet: the engine computes the prompt and saves its six full blocks.
//! assert_eq!(blocks.get(&chain, |_, _| Ok::<_, kvbm::Error>(()))?, 0);
//! let kept = blocks.put(&chain, |position, slot| {
//!     slot.fill(position as u8);
//!     Ok::<_, kvbm::Error>(())
//! })?;
//! assert_eq!(kept, 6);
//!
//! // The same prompt again, or another one that begins like it.
//! let found = blocks.get(&chain, |position, block| {
//!     assert!(block.iter().all(|&byte| byte == position as u8));
//!     Ok::<_, kvbm::Error>(())
//! })?;
//! assert_eq!(found, 6);
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::num::NonZeroU16;
use std::sync::Arc;

use kvbm_settings::Settings;
use kvbm_tiers::{DramRegion, Loan, Memory, Tier};

use crate::api::allocation::LentSlot;
use crate::api::filling::FillingSlots;
use crate::api::layers::LayeredPut;
use crate::api::lease::Lease;
use crate::api::manager::{Manager, Options};
use crate::api::transfer::{Transfer, Transferred};
use crate::error::{Error, ErrorKind};
use crate::names::hash::Chain;
use crate::scheduler::Core;
use crate::table::RequestInfo;
use crate::task::Class;

/// What is loaded at a time: blocks of the first such part are handed over while the second one is
/// on its way. Two of them keep drives and an object store's connections busy, and segments are
/// read whole.
const PART_BYTES: usize = 32 << 20;

/// Blocks lent under one lock: some microseconds, and next to nothing per block.
const LENT: usize = 32;

/// A manager's blocks, which the engine copies itself. A clone is another handle to the same
/// manager.
#[derive(Clone)]
pub struct Blocks {
    manager: Arc<Manager>,
    core: Arc<Core>,
    memory: Arc<DramRegion>,
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("manager", &self.manager).finish_non_exhaustive()
    }
}

impl Blocks {
    /// Opens a manager, as [`Manager::open`] does, on a thread that runs nothing asynchronous.
    ///
    /// # Errors
    /// Those of [`Manager::open`] and [`of`](Self::of). [`ErrorKind::Invalid`] too if the thread
    /// belongs to an async runtime.
    pub fn open(settings: Settings, options: Options) -> Result<Self, Error> {
        if tokio::runtime::Handle::try_current().is_ok() {
            let message =
                "this thread belongs to an async runtime: await Manager::open, and use Blocks::of";
            return Err(Error::invalid(message));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.map_err(|error| {
            Error::caused(ErrorKind::Unavailable, "cannot start a runtime", error)
        })?;
        Self::of(Arc::new(runtime.block_on(Manager::open(settings, options))?))
    }

    /// The blocks of an open manager.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if it has no host tier, or one that outlives the process and is
    /// encrypted.
    pub fn of(manager: Arc<Manager>) -> Result<Self, Error> {
        let Some((core, memory)) = manager.host_tier() else {
            let message = "engines that copy for themselves need a host tier in their process: set host.capacity \
                 (DYN_KVBM_CPU_CACHE_GB)";
            return Err(Error::invalid(message));
        };
        if manager.is_host_sealed() {
            let message = "engines that copy for themselves are shown blocks in the host tier, where these lie encrypted: \
                 leave host.persist (DYN_KVBM_CPU_CACHE_PERSIST) or encryption.key_file and encryption.key \
                 (DYN_KVBM_ENCRYPTION_KEY_FILE, DYN_KVBM_ENCRYPTION_KEY) unset";
            return Err(Error::invalid(message));
        }
        let (core, memory) = (Arc::clone(core), Arc::clone(memory));
        Ok(Self { manager, core, memory })
    }

    /// The manager: for its counts, for the [end](Manager::finished) of a request, to
    /// [drain](Manager::drain) and to [close](Manager::close) it.
    pub const fn manager(&self) -> &Arc<Manager> {
        &self.manager
    }

    /// Bytes of every block, from the settings.
    pub fn block_bytes(&self) -> usize {
        self.memory.block_bytes()
    }

    /// Hands the leading blocks of `chain` that any tier holds to `read`, root first, each with its
    /// position in the chain: [`block_bytes`](Self::block_bytes) bytes in the host tier, aligned to
    /// [`ALIGNMENT`](kvbm_tiers::geometry::ALIGNMENT), which do not change meanwhile. Stops at the
    /// first block that is missing, cannot be read, is not what was written, or is sooner computed
    /// than loaded ([`Match::worth_loading`](crate::table::Match::worth_loading)). Returns how many
    /// blocks `read` has got.
    ///
    /// Blocks further down are loaded as far as the host tier has room: a longer prompt comes in
    /// part. The thread waits for them, and hands over what is there; a thread of an async runtime
    /// is blocked meanwhile.
    ///
    /// # Errors
    /// Those of `read`: it gets no more blocks then. [`ErrorKind::Closed`] if the manager is
    /// closed. [`ErrorKind::Stale`] if it was [reset](Manager::reset) meanwhile: forget what `read`
    /// got, and ask again.
    pub fn get<'a, E: From<Error>>(
        &self,
        chain: impl Into<Chain<'a>>,
        read: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        self.get_for(RequestInfo::default(), chain, read)
    }

    /// [`get`](Self::get), for a request that the engine names or describes. If
    /// [`put_for`](Self::put_for) names the request too, both count as one use of its blocks, else
    /// as two.
    ///
    /// # Errors
    /// Those of [`get`](Self::get).
    pub fn get_for<'a, E: From<Error>>(
        &self,
        info: RequestInfo,
        chain: impl Into<Chain<'a>>,
        read: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        self.check_open()?;
        let chain = chain.into();
        let lease = self.core.lease(chain, info);
        let mut reading = ReadingSlots { blocks: self, lease: &lease, chain, read, handed_over: 0 };
        let mut parts = self.parts(&lease, chain);
        let mut coming = parts.next();
        reading.hand_over(lease.blocks(Tier::Host))?;
        while let Some(part) = coming {
            // Before this one is waited for, so that the medium has work while its blocks are
            // handed over.
            coming = parts.next();
            let arrived = part.loaded.wait()?;
            reading.hand_over(arrived.blocks)?;
            if reading.handed_over < part.end {
                break;
            }
        }
        // After a reset in between, what was handed over is not of the present weights.
        self.core.check_lease(&lease)?;
        Ok(reading.handed_over)
    }

    /// Has `fill` write those blocks of `chain` that the host tier lacks, root first, each with its
    /// position in the chain, into their slots there: [`block_bytes`](Self::block_bytes) bytes of
    /// any content before, which must all be written. Blocks that another thread is putting or
    /// loading are left to it without waiting; so what `fill` wrote can be read once everything
    /// before it is there. Returns how many leading blocks of the chain are kept: there before, on
    /// their way, or written now. The others found no room, or are not worth it, and `fill` is not
    /// asked for them.
    ///
    /// Blocks can be read once all are written. If `fill` fails or panics, the blocks that it wrote
    /// before can be read; the others' slots are given back. It must not wait for a
    /// [`get`](Self::get) of the same chain, which may wait for it.
    ///
    /// # Errors
    /// Those of `fill`. [`ErrorKind::Closed`] if the manager is closed, [`ErrorKind::Stale`] if it
    /// was [reset](Manager::reset) meanwhile: nothing that `fill` wrote is kept then.
    pub fn put<'a, E: From<Error>>(
        &self,
        chain: impl Into<Chain<'a>>,
        fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        self.put_for(RequestInfo::default(), chain, fill)
    }

    /// [`put`](Self::put), for a request that the engine names or describes.
    ///
    /// # Errors
    /// Those of [`put`](Self::put).
    pub fn put_for<'a, E: From<Error>>(
        &self,
        info: RequestInfo,
        chain: impl Into<Chain<'a>>,
        fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        self.check_open()?;
        let mut filling = FillingSlots::take(&self.core, &self.memory, chain.into(), info)?;
        // As for a backend that writes a slot: see `Journal::after_removals`.
        if filling.left() > 0 && !self.core.removals_are_noted(Tier::Host) {
            return Ok(filling.kept());
        }
        let kept = fill_all(&mut filling, fill)?;
        // No wait for what others bring before it.
        if let Some(Err(error)) = filling.publish().and_then(|mut told| told.try_take()) {
            return Err(error.into());
        }
        // Then nothing of it was published.
        self.check_open()?;
        Ok(kept)
    }

    /// [`put_for`](Self::put_for), of blocks that are being computed: the engine writes one layer of
    /// all of them after the other, and [finishes](LayeredPut::finish). A peer that
    /// [follows](crate::Peers::follow) reads each layer once it is written. The `layers` are equal
    /// shares of a block's bytes, the first layer first; the last one has what cannot be divided.
    ///
    /// ```
    /// # use kvbm::{ChainHasher, Options, RequestInfo, blocking::Blocks};
    /// # use kvbm_settings::{Capacity, Settings};
    /// # fn main() -> kvbm::Result<()> {
    /// # let mut settings = Settings { block_bytes: Some(4096), ..Settings::default() };
    /// # settings.host.capacity = Some(Capacity::Blocks(64));
    /// # let blocks = Blocks::open(settings, Options::default())?;
    /// # let chain = ChainHasher::new(16, b"model, weights, layout")?.chain(&[7; 100]);
    /// let layers = 32.try_into().expect("a model has layers");
    /// let mut put = blocks.put_in_layers(RequestInfo::default(), &chain, layers)?;
    /// for layer in 0..32 {
    ///     put.write(|_position, part| {
    ///         part.fill(layer);
    ///         Ok::<_, kvbm::Error>(())
    ///     })?;
    /// }
    /// assert_eq!(put.finish()?, 6);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] if the manager is closed, [`ErrorKind::Stale`] if it was
    /// [reset](Manager::reset) meanwhile.
    pub fn put_in_layers<'a>(
        &self,
        info: RequestInfo,
        chain: impl Into<Chain<'a>>,
        layers: NonZeroU16,
    ) -> Result<LayeredPut, Error> {
        self.check_open()?;
        LayeredPut::begin(&self.core, &self.memory, chain.into(), 0, info, layers)
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.core.is_closed() { Err(Error::closed()) } else { Ok(()) }
    }

    /// What a lease holds below the host tier, in parts; each is on its way up once it is asked
    /// for.
    fn parts<'a>(
        &'a self,
        lease: &'a Lease,
        chain: Chain<'a>,
    ) -> impl Iterator<Item = PutPart> + 'a {
        let (here, held) = (lease.blocks(Tier::Host), lease.held().longest());
        let all = lease.held().worth_loading().max(here);
        self.core.metrics().left_to_engine(held - all);
        let blocks = (PART_BYTES / self.block_bytes()).max(1);
        (here..all).step_by(blocks).map(move |first| {
            let end = all.min(first + blocks);
            let lease = self.core.lease_beginning(lease, chain.prefix(end));
            PutPart { end, loaded: self.core.transfer(Class::Load, Tier::Host, lease) }
        })
    }
}

/// Successive blocks on their way to the host tier.
struct PutPart {
    /// The position behind its last block.
    end: usize,
    loaded: Transfer<Transferred>,
}

/// A chain that is being handed over to an engine.
struct ReadingSlots<'a, R> {
    blocks: &'a Blocks,
    lease: &'a Lease,
    chain: Chain<'a>,
    read: R,
    handed_over: usize,
}

impl<R> ReadingSlots<'_, R> {
    /// Hands over what comes before position `end`. A lease keeps it in the host tier,
    /// [`Self::lease`] or a part's.
    fn hand_over<E>(&mut self, end: usize) -> Result<(), E>
    where
        R: FnMut(usize, &[u8]) -> Result<(), E>,
    {
        while self.handed_over < end {
            let first = self.handed_over;
            let next = first..end.min(first + LENT);
            let lent =
                LentSlot::leading(&self.blocks.core, Tier::Host, self.lease, self.chain, next);
            for loan in lent.loans() {
                let Some(block) = self.sound(loan) else { break };
                (self.read)(self.handed_over, block)?;
                self.handed_over += 1;
            }
            // A lease keeps no block that turned out to be bad, and none over a reset.
            if self.handed_over == first {
                break;
            }
        }
        Ok(())
    }
}

impl<'a, R> ReadingSlots<'a, R> {
    /// The block in a lent slot. `None`: an earlier process left it, and it has changed; it is
    /// dropped.
    fn sound<'b>(&self, loan: &'b Loan) -> Option<&'b [u8]>
    where
        'a: 'b,
    {
        let Blocks { memory, core, .. } = self.blocks;
        if let Err(error) = memory.verify_loan(loan) {
            tracing::error!(%error, "a block that an earlier process left has changed");
            core.lent_is_corrupt(Tier::Host, self.chain, self.handed_over);
            return None;
        }
        memory.read_loan(loan)
    }
}

/// Returns the position behind the last block that is kept.
fn fill_all<E>(
    filling: &mut FillingSlots<'_>,
    mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
) -> Result<usize, E> {
    loop {
        let position = filling.kept();
        let Some(slot) = filling.next() else { return Ok(position) };
        fill(position, slot)?;
        filling.written();
        filling.keep();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use kvbm_policies::EvictionKind;
    use kvbm_settings::Capacity;
    use kvbm_tiers::{Checksums, DramOptions, Geometry};
    use prometheus::Registry;

    use super::*;
    use crate::clock::ManualClock;
    use crate::metrics::Metrics;
    use crate::names::hash::BlockHash;
    use crate::scheduler::{Executor, Parts, ScrubOptions, Tuning};
    use crate::table::{Journal, Notes, Table, TierSpec};

    #[derive(Debug, PartialEq)]
    enum Event {
        WriterIsWanted,
        Filled(usize),
    }

    /// Four slots of a host tier whose index a test writes; it is told when that is wanted.
    fn blocks_with_index() -> (Blocks, Arc<Notes>, Receiver<Event>, std::sync::mpsc::Sender<Event>)
    {
        let mut settings = Settings { block_bytes: Some(4096), ..Settings::default() };
        settings.host.capacity = Some(Capacity::Blocks(4));
        let manager = Arc::clone(Blocks::open(settings, Options::default()).unwrap().manager());
        let geometry = Geometry::new(4, 4096).unwrap();
        let memory = Arc::new(
            DramRegion::host(DramOptions { geometry, huge_pages: false, fault_threads: 1 })
                .unwrap(),
        );
        let (pool, policy) = (memory.frames().unwrap(), EvictionKind::Lru.build(4));
        let mut table = Table::new([TierSpec { pool, policy, flush_to: None, admission: None }]);
        let (notes, (tell, told)) = (Arc::<Notes>::default(), channel());
        let waker = tell.clone();
        notes.set_waker(Some(Box::new(move || waker.send(Event::WriterIsWanted).unwrap())));
        table.keep_journal(
            Tier::Host,
            Journal::new(Arc::new(Checksums::new()), [Some(Arc::clone(&notes))]),
        );
        let core = Core::new(Parts {
            table,
            executor: Executor::default(),
            staging: Vec::new(),
            trials: Vec::new(),
            scrub: ScrubOptions::default(),
            clock: Arc::new(ManualClock::default()),
            metrics: Metrics::new(&Registry::new(), 4096, 1).unwrap(),
            tuning: Tuning {
                max_concurrent: 1,
                max_batch: 1,
                segment_blocks: 1,
                queue_blocks: 1,
                timeout: Duration::from_mins(1),
                object_timeout: Duration::from_mins(1),
                breaker_pause: Duration::from_secs(1),
                flush_interval_ms: 1,
                dirty_watermark: 1.0,
                prefill_block_s: None,
            },
        });
        (Blocks { manager, core, memory }, notes, told, tell)
    }

    #[test]
    fn a_slot_is_filled_after_its_index_knows_what_left() {
        let (blocks, notes, told, tell) = blocks_with_index();
        let chain = |n: u128| {
            (0..4).map(|i| BlockHash::from_u128((10 * n + i + 1) << 64)).collect::<Vec<_>>()
        };
        let put = |n| {
            blocks.put(&chain(n), |position, slot| {
                tell.send(Event::Filled(position)).unwrap();
                slot.fill(n as u8);
                Ok::<_, Error>(())
            })
        };
        assert_eq!(put(1).unwrap(), 4);
        assert_eq!(told.try_iter().count(), 4, "nothing left, so no caller waits");
        std::thread::scope(|threads| {
            let second = threads.spawn(|| put(2).unwrap());
            assert_eq!(told.recv(), Ok(Event::WriterIsWanted));
            let made = notes.take().made;
            assert_eq!(told.try_recv().ok(), None, "it waits");
            notes.written(Some(made));
            assert_eq!(second.join().unwrap(), 4);
        });
        assert_eq!(
            told.try_iter().collect::<Vec<_>>(),
            (0..4).map(Event::Filled).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_block_that_was_put_leaves_without_another_sum() {
        let mut settings = Settings { block_bytes: Some(4096), ..Settings::default() };
        settings.host.capacity = Some(Capacity::Blocks(4));
        let blocks = Blocks::open(settings, Options::default()).unwrap();
        let chain = vec![BlockHash::from_u128(1)];
        let put = blocks.put(&chain, |_, slot| {
            slot.fill(7);
            Ok::<_, Error>(())
        });
        assert_eq!(put.unwrap(), 1);
        let lease = blocks.manager.lease(&chain);
        let lent = LentSlot::leading(&blocks.core, Tier::Host, &lease, Chain::from(&chain), 0..1);
        let known = blocks.memory.checksums().unwrap().get(lent.loans()[0].slot());
        assert_eq!(known, Some(kvbm_tiers::checksum::checksum(&[7; 4096])));
    }
}
