//! Two workers in simulated time, between which a double of NIXL does what it is told.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use futures::future::join_all;
use kvbm_tiers::checksum::RunningChecksum;
use kvbm_tiers::{CopyError, DramRegion, PeerMemory, ReadDone, SlotRead, Tier, UnmetReader};
use tokio_util::sync::CancellationToken;

use super::super::holder::LeasedBlocks;
use super::super::reader::{MAX_WAIT, PeerLease};
use super::super::tests::{Fault, Pair, SLOTS, TTL, chain, simulated};
use super::*;
use crate::names::hash::BlockHash;

/// What becomes of reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::peers) enum Reads {
    Whole,
    /// They last until they are ended.
    Hang,
    Fail,
    /// As many come before one fails.
    FailBehind(u32),
    /// Their slots do not even come back then.
    NeverEnd,
    /// An agent is not gone when it should be: their slots never come back.
    Forget,
}

/// Stands for the library of all workers.
pub(in crate::peers) struct NixlDouble {
    /// Those of holders, by the addresses of their first slots.
    there: Mutex<HashMap<u64, Arc<DramRegion>>>,
    here: Arc<DramRegion>,
    reads: Mutex<Reads>,
    agents: std::sync::atomic::AtomicU32,
    /// What agents read into that is no host tier.
    scratch: Mutex<Vec<Weak<DramRegion>>>,
    kept: Mutex<Vec<KeptRead>>,
    /// Called when an agent is dropped.
    on_end: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

/// Where a read writes that has not ended.
struct KeptRead {
    into: Arc<DramRegion>,
    frames: Vec<Frame>,
    done: ReadDone,
}

impl std::fmt::Debug for NixlDouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NixlDouble")
    }
}

/// Of a holder of some memory, or of the reader.
#[derive(Debug)]
pub(in crate::peers) struct Shared(Arc<NixlDouble>, Option<Arc<DramRegion>>);

impl OneSided for Shared {
    fn place(&self) -> Result<(Vec<u8>, TierPlace), SetupError> {
        let place = TierPlace::of(&**self.1.as_ref().unwrap());
        Ok((b"there".to_vec(), place))
    }

    fn admit(&self, metadata: &[u8]) -> Result<(), SetupError> {
        assert_eq!(metadata, b"reader");
        Ok(())
    }

    fn reader(&self) -> Result<Box<dyn UnmetReader>, SetupError> {
        self.0.agents.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(Box::new(Unmet(Arc::clone(&self.0))))
    }

    fn close(&self) {}
}

struct Unmet(Arc<NixlDouble>);

impl UnmetReader for Unmet {
    fn metadata(&self) -> &[u8] {
        b"reader"
    }

    fn meet(
        self: Box<Self>,
        name: &str,
        metadata: &[u8],
        place: TierPlace,
        into: Option<Arc<DramRegion>>,
    ) -> Result<Box<dyn SlotReads>, SetupError> {
        assert!(name.starts_with("kvbm-") && metadata == b"there", "{name}");
        let there = Arc::clone(&self.0.there.lock()[&place.base]);
        assert_eq!(place, TierPlace::of(&*there));
        self.0.scratch.lock().extend(into.as_ref().map(Arc::downgrade));
        let into = into.unwrap_or_else(|| Arc::clone(&self.0.here));
        let is_over = Mutex::new(false);
        Ok(Box::new(DoubleReads { double: self.0, there, into, is_over }))
    }
}

struct DoubleReads {
    double: Arc<NixlDouble>,
    there: Arc<DramRegion>,
    into: Arc<DramRegion>,
    is_over: Mutex<bool>,
}

impl std::fmt::Debug for DoubleReads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DoubleReads")
    }
}

impl SlotReads for DoubleReads {
    fn read(&self, SlotRead { from, mut to, bytes }: SlotRead, done: ReadDone) {
        let mut reads = self.double.reads.lock();
        let now = match *reads {
            Reads::FailBehind(0) => Reads::Fail,
            Reads::FailBehind(left) => {
                *reads = Reads::FailBehind(left - 1);
                Reads::Whole
            }
            now => now,
        };
        drop(reads);
        match now {
            Reads::Whole | Reads::FailBehind(_) => {
                let there = PeerMemory::map(self.there.shareable().unwrap()).unwrap();
                let here = &self.into;
                for (from, to) in from.into_iter().zip(&mut to) {
                    let Some(bytes) = bytes.clone() else {
                        there.copy_into(from, here, to).unwrap();
                        continue;
                    };
                    let part = &mut here.write(to).unwrap()[bytes.clone()];
                    there.copy_part(from, bytes, part, &mut RunningChecksum::after(0)).unwrap();
                }
                done(to, Ok(()));
            }
            Reads::Fail => {
                *self.is_over.lock() = true;
                done(to, Err(CopyError::refused("this test wants it")));
            }
            Reads::Forget => {
                std::mem::forget(to);
                drop(done);
            }
            Reads::Hang | Reads::NeverEnd => {
                let into = Arc::clone(&self.into);
                self.double.kept.lock().push(KeptRead { into, frames: to, done });
            }
        }
    }

    fn end(&self, _why: &str) {
        *self.is_over.lock() = true;
        if *self.double.reads.lock() == Reads::Hang {
            self.double.end_kept();
        }
    }

    fn is_over(&self) -> bool {
        *self.is_over.lock()
    }
}

impl Drop for DoubleReads {
    fn drop(&mut self) {
        if let Some(on_end) = self.double.on_end.lock().take() {
            on_end();
        }
    }
}

impl NixlDouble {
    fn between(pair: &Pair) -> Arc<Self> {
        Self::of(Arc::clone(pair.here.manager().host_tier().unwrap().1))
    }

    /// For a reader with this memory.
    pub(in crate::peers) fn of(here: Arc<DramRegion>) -> Arc<Self> {
        Arc::new(Self {
            there: Mutex::default(),
            here,
            reads: Mutex::new(Reads::Whole),
            agents: 0.into(),
            scratch: Mutex::default(),
            kept: Mutex::default(),
            on_end: Mutex::default(),
        })
    }

    pub(in crate::peers) fn reader(self: &Arc<Self>) -> Arc<dyn OneSided> {
        Arc::new(Shared(Arc::clone(self), None))
    }

    /// What a holder with this memory has.
    pub(in crate::peers) fn holder(self: &Arc<Self>, there: &Arc<DramRegion>) -> Arc<dyn OneSided> {
        self.there.lock().insert(TierPlace::of(&**there).base, Arc::clone(there));
        Arc::new(Shared(Arc::clone(self), Some(Arc::clone(there))))
    }

    /// How many memories of agents are there that are no host tier.
    pub(in crate::peers) fn scratches(&self) -> usize {
        self.scratch.lock().iter().filter(|scratch| scratch.strong_count() > 0).count()
    }

    pub(in crate::peers) fn set(&self, reads: Reads) {
        *self.reads.lock() = reads;
    }

    /// They write once more before they end.
    pub(in crate::peers) fn end_kept(&self) {
        for KeptRead { into, mut frames, done } in std::mem::take(&mut *self.kept.lock()) {
            frames.iter_mut().for_each(|frame| into.write(frame).unwrap().fill(0xEE));
            done(frames, Err(CopyError::refused("this test ended it")));
        }
    }

    pub(in crate::peers) fn agents(&self) -> u32 {
        self.agents.load(std::sync::atomic::Ordering::Relaxed)
    }
}

pub(in crate::peers) async fn pair() -> (Pair, Arc<NixlDouble>) {
    with_nixl(Pair::new().await)
}

/// Of blocks that are alike, and of others, which come into scratch.
async fn pairs() -> [(Pair, Arc<NixlDouble>); 2] {
    [pair().await, with_nixl(Pair::of_other_order().await)]
}

fn with_nixl(mut pair: Pair) -> (Pair, Arc<NixlDouble>) {
    let double = NixlDouble::between(&pair);
    pair.there.nixl = Some(double.holder(pair.there.manager().host_tier().unwrap().1));
    pair.reader.nixl = Some(NixlHolders::new(double.reader(), false, 0));
    (pair, double)
}

pub(in crate::peers) fn lost(pair: &Pair) -> (u32, u32) {
    let counts = pair.here.manager().admin().counts(Tier::Host);
    (counts.filling, counts.lost)
}

pub(in crate::peers) fn came_by(pair: &Pair, way: &str) -> u64 {
    pair.here.manager().host_tier().unwrap().0.metrics().peers().received_by(way)
}

#[test]
fn blocks_come_by_nixl_with_one_agent_for_all_links() {
    simulated(async {
        for (mut pair, double) in pairs().await {
            for n in 0..3 {
                let wanted = chain(n, 10);
                pair.there.compute(&wanted);
                // Another link each time.
                pair.reader.waiting.lock().clear();
                let before = came_by(&pair, "nixl");
                pair.lease(&wanted, Fault::None).await;
                let only_there = pair.lease.as_ref().map_or(0, PeerLease::only_there);
                let came = pair.pull().await;
                assert_eq!((came, pair.here.check(&wanted)), (only_there, 10));
                assert_eq!(came_by(&pair, "nixl") - before, came as u64);
            }
            let agents = (double.agents(), came_by(&pair, "tcp"));
            assert_eq!(agents, (3, 0), "it goes with its last link");
            pair.heals().await;
        }
    });
}

#[test]
fn a_hanging_read_is_ended_and_its_slots_come_back() {
    simulated(async {
        for (mut pair, double) in pairs().await {
            let wanted = chain(0, 10);
            pair.there.compute(&wanted);
            double.set(Reads::Hang);
            pair.lease(&wanted, Fault::None).await;
            let before = Instant::now();
            assert_eq!((pair.pull().await, lost(&pair)), (0, (0, 0)));
            let took = before.elapsed();
            assert!(took <= TTL + GRACE + Duration::from_millis(2), "{took:?}");
            // For a while blocks come over the connection, and then by NIXL again.
            double.set(Reads::Whole);
            pair.lease(&wanted, Fault::None).await;
            assert_eq!((pair.pull().await, came_by(&pair, "tcp")), (10, 10));
            pair.here.manager().admin().evict(Tier::Host, 10);
            tokio::time::sleep(PAUSE).await;
            pair.reader.tidy();
            pair.lease(&wanted, Fault::None).await;
            assert_eq!((pair.pull().await, came_by(&pair, "nixl")), (10, 10));
            pair.heals().await;
        }
    });
}

#[test]
fn slots_that_stay_away_are_lost_until_they_return() {
    simulated(async {
        let (mut pair, double) = pair().await;
        let wanted = chain(0, 10);
        pair.there.compute(&wanted);
        double.set(Reads::NeverEnd);
        pair.lease(&wanted, Fault::None).await;
        assert_eq!(pair.pull().await, 0);
        // Two parts were under way.
        assert_eq!(lost(&pair), (0, 8));
        assert_eq!(pair.here.manager().admin().audit(), []);
        // No other block gets them.
        let others: Vec<_> =
            (0..SLOTS).map(|at| BlockHash::from_u128(1 << 90 | u128::from(at))).collect();
        pair.here.compute(&others);
        assert_eq!(pair.here.check(&others), SLOTS as usize - 8);
        double.end_kept();
        assert_eq!(lost(&pair), (0, 0));
        double.set(Reads::Whole);
        pair.heals().await;
    });
}

#[test]
fn slots_that_never_come_back_cost_no_more_than_themselves() {
    simulated(async {
        let (mut pair, double) = pair().await;
        let wanted = chain(0, 10);
        pair.there.compute(&wanted);
        double.set(Reads::Forget);
        pair.lease(&wanted, Fault::None).await;
        assert_eq!((pair.pull().await, lost(&pair)), (0, (0, 8)));
        assert_eq!(pair.here.manager().admin().audit(), []);
        double.set(Reads::Whole);
        pair.lease(&wanted, Fault::None).await;
        assert_eq!((pair.pull().await, pair.here.check(&wanted)), (10, 10));
    });
}

#[test]
fn where_nixl_fails_blocks_come_over_the_connection() {
    simulated(async {
        for reads in [Reads::Fail, Reads::FailBehind(1)] {
            for (mut pair, double) in pairs().await {
                let wanted = chain(0, 10);
                pair.there.compute(&wanted);
                double.set(reads);
                pair.lease(&wanted, Fault::None).await;
                assert_eq!((pair.pull().await, pair.here.check(&wanted)), (10, 10));
                let came = ["nixl", "tcp"].map(|way| came_by(&pair, way));
                assert_eq!((came[0] == 0, came[0] + came[1]), (reads == Reads::Fail, 10));
                double.set(Reads::Whole);
                pair.heals().await;
            }
        }
    });
}

#[test]
fn what_is_required_is_not_replaced_by_tcp() {
    simulated(async {
        for (mut pair, double) in pairs().await {
            pair.reader.nixl = Some(NixlHolders::new(double.reader(), true, 0));
            let wanted = chain(0, 10);
            pair.there.compute(&wanted);
            double.set(Reads::Fail);
            pair.lease(&wanted, Fault::None).await;
            assert_eq!(pair.pull().await, 0);
            pair.lease(&wanted, Fault::None).await;
            let said = pair.said.as_deref().unwrap_or_default();
            assert!(pair.lease.is_none() && said.contains("DYN_KVBM_PEERS_NIXL"), "{said}");
            double.set(Reads::Whole);
            tokio::time::sleep(PAUSE).await;
            pair.lease(&wanted, Fault::None).await;
            assert_eq!((pair.pull().await, came_by(&pair, "nixl")), (10, 10));
            pair.heals().await;
        }
    });
}

/// What deployed systems answer with wrong tokens.
#[test]
fn slots_reused_after_a_lease_are_not_taken_for_its() {
    simulated(async {
        for (mut pair, _) in pairs().await {
            pair.leased = Arc::new(LeasedBlocks::new(SLOTS as usize));
            for n in 0..1_000 {
                let wanted = [BlockHash::from_u128(1 << 80 | n)];
                pair.there.compute(&wanted);
                pair.lease(&wanted, Fault::None).await;
                let lease = pair.lease.as_mut().unwrap();
                // Its own clock fails: it takes the lease for one that goes on.
                lease.named.ttl = Duration::from_hours(1);
                tokio::time::sleep(TTL + Duration::from_secs(1)).await;
                assert_eq!(pair.there.manager().admin().evict(Tier::Host, 1), 1);
                let other = |at| BlockHash::from_u128(1 << 90 | n << 8 | u128::from(at));
                pair.there.compute(&(0..SLOTS).map(other).collect::<Vec<_>>());
                assert_eq!((pair.pull().await, pair.here.check(&wanted)), (0, 0));
                pair.there.manager().admin().evict(Tier::Host, SLOTS as usize);
            }
            assert_eq!(lost(&pair), (0, 0));
            pair.heals().await;
        }
    });
}

/// Scratch is what all pulls at a holder have: they take turns, and no one waits for ever.
#[test]
fn pulls_that_share_scratch_all_come_or_end() {
    simulated(async {
        let (mut pair, double) = with_nixl(Pair::of_other_order().await);
        pair.leased = Arc::new(LeasedBlocks::new(2 * SLOTS as usize));
        let chains = [1, 2].map(|n| chain(n, 10));
        for (reads, expected) in [(Reads::Whole, 10), (Reads::Hang, 0)] {
            let mut leases = Vec::new();
            for chain in &chains {
                pair.there.compute(chain);
                pair.lease(chain, Fault::None).await;
                leases.push(pair.lease.take().unwrap());
            }
            double.set(reads);
            let (never, began) = (CancellationToken::new(), Instant::now());
            let pulls = leases.into_iter().map(|lease| pair.reader.pull(lease, None, &never));
            join_all(pulls).await.into_iter().for_each(|pulled| drop(pulled.unwrap()));
            let took = began.elapsed();
            assert!(took <= TTL + 2 * GRACE, "{took:?}");
            assert_eq!(chains.each_ref().map(|chain| pair.here.check(chain)), [expected; 2]);
            assert_eq!((double.agents(), lost(&pair)), (1, (0, 0)));
            pair.here.manager().admin().evict(Tier::Host, SLOTS as usize);
        }
        double.set(Reads::Whole);
        pair.heals().await;
    });
}

/// NIXL cancels nothing.
#[test]
fn scratch_stays_while_reads_of_a_cancelled_pull_go_on() {
    simulated(async {
        let (mut pair, double) = with_nixl(Pair::of_other_order().await);
        let wanted = chain(0, 10);
        pair.there.compute(&wanted);
        pair.lease(&wanted, Fault::None).await;
        double.set(Reads::NeverEnd);
        let cancelled = CancellationToken::new();
        let pull = pair.reader.pull(pair.lease.take().unwrap(), None, &cancelled);
        let cancelling = async {
            while double.kept.lock().is_empty() {
                tokio::task::yield_now().await;
            }
            cancelled.cancel();
        };
        let (pulled, ()) = tokio::join!(pull, cancelling);
        assert_eq!((pulled.unwrap().copied, lost(&pair)), (0, (0, 0)));
        double.set(Reads::Whole);
        pair.heals().await;
        assert_eq!((double.agents(), double.scratches()), (2, 2), "one may still be written");
        double.end_kept();
        assert_eq!(double.scratches(), 1);
        pair.heals().await;
    });
}

/// Else no later pull at this holder would get any.
#[test]
fn a_pull_that_gets_no_scratch_ends_the_agent() {
    simulated(async {
        let (mut pair, double) = with_nixl(Pair::of_other_order().await);
        pair.leased = Arc::new(LeasedBlocks::new(2 * SLOTS as usize));
        double.set(Reads::Hang);
        let mut leases = Vec::new();
        for wanted in [1, 2].map(|n| chain(n, 10)) {
            pair.there.compute(&wanted);
            pair.lease(&wanted, Fault::None).await;
            leases.push(pair.lease.take().unwrap());
        }
        let [first, second] = leases.try_into().ok().unwrap();
        let cancelled = CancellationToken::new();
        let hanging = async {
            while double.kept.lock().len() < READS {
                tokio::task::yield_now().await;
            }
            cancelled.cancel();
        };
        let (pulled, ()) = tokio::join!(pair.reader.pull(first, None, &cancelled), hanging);
        assert_eq!((pulled.unwrap().copied, double.kept.lock().len()), (0, READS));
        let pulled = pair.reader.pull(second, None, &CancellationToken::new()).await.unwrap();
        assert_eq!((pulled.copied, double.kept.lock().len()), (0, 0), "{:?}", pulled.fault);
        drop(pulled);
        double.set(Reads::Whole);
        pair.heals().await;
    });
}

/// The end of an agent takes a while.
#[test]
fn what_links_hold_ends_outside_of_their_lock() {
    simulated(async {
        for forgets in [false, true] {
            let (mut pair, double) = pair().await;
            pair.there.compute(&chain(0, 4));
            pair.lease(&chain(0, 4), Fault::None).await;
            assert_eq!(pair.pull().await, 4);
            tokio::time::sleep(MAX_WAIT).await;
            let (ending, ends) = channel();
            let (locked, is_locked) = channel();
            let (told, was_free) = channel();
            *double.on_end.lock() = Some(Box::new(move || {
                ending.send(()).unwrap();
                told.send(is_locked.recv_timeout(Duration::from_secs(10)).is_ok()).unwrap();
            }));
            let (reader, runtime) = (&pair.reader, tokio::runtime::Handle::current());
            thread::scope(|scope| {
                scope.spawn(|| {
                    let _in_simulated_time = runtime.enter();
                    if forgets { reader.forget_links() } else { reader.tidy() }
                });
                ends.recv().unwrap();
                drop(reader.waiting.lock());
                locked.send(()).unwrap();
            });
            assert!(was_free.recv().unwrap(), "it is locked meanwhile");
            pair.heals().await;
        }
    });
}

#[test]
fn a_flipped_bit_in_a_nixl_message_is_noticed() {
    let place = HolderPlace { metadata: vec![7; 400], base: 1 << 40, stride: 4096, slots: 9 };
    let said = NixlMessage::new(&place).unwrap();
    assert_eq!(said.content::<HolderPlace>().unwrap(), place);
    for bit in 0..8 * said.bytes.len() {
        let mut damaged = said.clone();
        damaged.bytes[bit / 8] ^= 1 << (bit % 8);
        damaged.content::<HolderPlace>().unwrap_err();
    }
    let long = HolderPlace { metadata: vec![7; MAX_METADATA], ..place };
    assert!(matches!(NixlMessage::new(&long), Err(BrokenLink::TooLong(..))));
}

#[test]
fn neighbours_on_both_sides_are_one_descriptor() {
    let mut pool = kvbm_tiers::FramePool::new(Tier::Host, 8);
    let frames: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(
        frames.iter().map(|frame| frame.slot().0).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 5, 6, 7]
    );
    let of = |from: &[u32]| {
        let from: Vec<_> = from.iter().copied().map(SlotId).collect();
        descriptors(&from, &frames[..from.len()])
    };
    assert_eq!((of(&[]), of(&[9]), of(&[4, 5, 6]), of(&[4, 5, 7, 8, 3])), (0, 1, 1, 3));
}
