//! Two ranks in simulated time, between which a double of NIXL does what it is told.

use std::time::Duration;

use kvbm_tiers::ranks::{
    HeadShare, PeerSeat, PullFrom, PullSource, PulledSlot, pulled_slot, rank_slots,
};
use kvbm_tiers::testing::{fill_pattern, has_pattern};
use kvbm_tiers::{
    BlockKey, CopyErrorKind, CopyOp, Done, DramOptions, DramRegion, Geometry, SlotId, SlotRef, Tier,
};
use tokio::io::duplex;
use tokio::time::{Instant, sleep};
use tokio_util::codec::FramedRead;

use super::super::holder::SliceHolder;
use super::super::reader::{RankPlace, SliceReader};
use super::super::tests::pull_from;
use super::*;
use crate::peers::greeting::tests::member;
use crate::peers::greeting::{Credentials, PeerProofs};
use crate::peers::nixl::tests::{NixlDouble, Reads};
use crate::peers::nixl::{NixlHolders, NixlMessage};
use crate::peers::protocol::{ToHolder, requests};
use crate::peers::tests::simulated;
use crate::sync::Mutex;

const SLOTS: u32 = 10;
/// Two are read at once, and four are under way.
const BYTES: usize = READ_BYTES / 2;
const UNDER_WAY: usize = 2 * READS;
/// Every slot's, at the rank that is read.
const LIFE: u32 = 7;
const LIMIT: Duration = Duration::from_secs(2);
/// Of the rank that is read, as the double has it.
const SEAT: PeerSeat = PeerSeat { port: 1, incarnation: 1 };

type Ends = Arc<Mutex<Vec<(usize, Option<CopyErrorKind>)>>>;

struct RankPair {
    reader: SliceReader,
    holder: Arc<SliceHolder>,
    double: Arc<NixlDouble>,
    there: Arc<DramRegion>,
    here: Arc<DramRegion>,
}

fn memory() -> Arc<DramRegion> {
    let geometry = Geometry::new(SLOTS, BYTES).unwrap();
    let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
    Arc::new(DramRegion::shareable_host(options).unwrap())
}

fn op(slot: u32, life: u32) -> CopyOp {
    let slot = |generation| SlotRef { tier: Tier::Host, slot: SlotId(slot), generation };
    let block = BlockKey { hash: 0, group: 0 };
    CopyOp { block, parent: None, owner: None, from: slot(life), to: slot(0) }
}

fn credentials(incarnation: u64) -> Arc<Credentials> {
    let member = member(&format!("rank of worker {incarnation}"), incarnation);
    Arc::new(Credentials { member, proofs: PeerProofs::default(), converts_types: false })
}

impl RankPair {
    fn new(is_required: bool) -> Self {
        let (there, here) = (memory(), memory());
        for slot in 0..SLOTS {
            let mut filled = pulled_slot(&there, op(slot, LIFE), 0, Done::new(|_| ()));
            fill_pattern(slot as usize, filled.bytes());
            assert!(filled.written().is_some());
        }
        let double = NixlDouble::of(Arc::clone(&here));
        let lives = (0..SLOTS).map(|slot| op(slot, LIFE).from);
        let holder = Arc::new(SliceHolder {
            slots: rank_slots(Arc::clone(&there), lives),
            sealed: None,
            nixl: Some(double.holder(&there)),
            credentials: credentials(1),
            limit: LIMIT,
        });
        let reader = SliceReader {
            credentials: credentials(2),
            waiting: Mutex::default(),
            seal: None,
            neighbours: None,
            nixl: Some(NixlHolders::new(double.reader(), is_required, 0)),
        };
        Self { reader, holder, double, there, here }
    }

    /// Pulls all slots, in these lives of them: how each ended.
    async fn pull(&self, life: impl Fn(u32) -> u32 + Send) -> Ends {
        let ends = Ends::default();
        let told = Arc::clone(&ends);
        let done = Done::new(move |ended| {
            let end = |(place, result): (usize, Result<(), CopyError>)| {
                (place, result.err().map(|error| error.kind()))
            };
            told.lock().extend(ended.into_iter().map(end));
        });
        let (stream, there) = duplex(1 << 20);
        let holder = Arc::clone(&self.holder);
        tokio::spawn(async move {
            holder.answer("the other rank", FramedRead::new(there, requests())).await;
        });
        let place = RankPlace { host: "there".to_owned(), seat: SEAT };
        self.reader.tidy();
        if self.reader.waiting.lock().get(&place).is_none_or(Vec::is_empty) {
            let link = PeerLink::to(self.holder.credentials.member.clone(), Box::new(stream));
            self.reader.keep(place, link);
        }
        let slot = |(at, slot): (usize, u32)| {
            pulled_slot(&self.here, op(slot, life(slot)), at, done.clone())
        };
        let slots = (0..SLOTS).enumerate().map(slot).collect();
        let whole = HeadShare::WHOLE;
        let sources = vec![PullSource { seat: SEAT, give: whole, into: whole }];
        let from = pull_from(&self.holder.credentials.member, sources);
        self.reader.bring(PullFrom { limit: LIMIT, ..from }, slots).await;
        ends
    }

    /// Slots whose bytes came as they are there.
    fn right(&self) -> usize {
        let is_right = |slot: &u32| has_pattern(*slot as usize, self.slot(*slot).bytes());
        (0..SLOTS).filter(is_right).count()
    }

    fn slot(&self, slot: u32) -> PulledSlot {
        pulled_slot(&self.here, op(slot, LIFE), 0, Done::new(|_| ()))
    }

    /// Everything comes again, by NIXL or not.
    async fn heals(&self) {
        self.double.set(Reads::Whole);
        (0..SLOTS).for_each(|slot| self.slot(slot).bytes().fill(0));
        let ends = self.pull(|_| LIFE).await;
        assert_eq!((all_ended(&ends), failed(&ends), self.right()), (true, vec![], SLOTS as usize));
    }
}

fn all_ended(ends: &Ends) -> bool {
    ends.lock().len() == SLOTS as usize
}

fn failed(ends: &Ends) -> Vec<(usize, CopyErrorKind)> {
    let mut failed: Vec<_> =
        ends.lock().iter().filter_map(|&(place, end)| Some((place, end?))).collect();
    failed.sort_unstable_by_key(|(place, _)| *place);
    failed
}

/// All slots failed, as those of a peer that is away.
fn all_failed() -> Vec<(usize, CopyErrorKind)> {
    (0..SLOTS as usize).map(|place| (place, CopyErrorKind::Unavailable)).collect()
}

#[test]
fn slices_come_by_nixl_and_not_those_of_other_lives() {
    simulated(async {
        let pair = RankPair::new(true);
        for _ in 0..2 {
            let ends = pair.pull(|slot| if slot % 5 == 0 { LIFE + 1 } else { LIFE }).await;
            let stale = [0, 5].map(|place| (place, CopyErrorKind::Unavailable));
            assert_eq!((all_ended(&ends), failed(&ends)), (true, stale.to_vec()));
        }
        assert_eq!((pair.right(), pair.double.agents()), (SLOTS as usize - 2, 1));
        pair.heals().await;
    });
}

#[test]
fn a_slice_that_differs_from_its_checksum_has_not_come() {
    simulated(async {
        let pair = RankPair::new(true);
        let (slot, known) = (SlotId(3), pair.there.shared_checksums().unwrap());
        let crc = known.get(slot).unwrap();
        let fill = |pattern| {
            let mut changed = pulled_slot(&pair.there, op(slot.0, LIFE), 0, Done::new(|_| ()));
            fill_pattern(pattern, changed.bytes());
            known.record(slot, crc);
        };
        fill(99);
        let ends = pair.pull(|_| LIFE).await;
        assert!(all_ended(&ends));
        assert_eq!(failed(&ends), [(3, CopyErrorKind::Corrupt)]);
        fill(3);
        pair.heals().await;
    });
}

#[test]
fn where_nixl_fails_slices_come_over_the_connection() {
    simulated(async {
        let pair = RankPair::new(false);
        pair.double.set(Reads::Fail);
        for _ in 0..2 {
            let ends = pair.pull(|_| LIFE).await;
            assert_eq!((all_ended(&ends), failed(&ends)), (true, vec![]));
            assert_eq!((pair.right(), pair.double.agents()), (SLOTS as usize, 1));
        }
        // After a while it is tried again.
        sleep(Duration::from_mins(1)).await;
        pair.heals().await;
        assert_eq!(pair.double.agents(), 2);
    });
}

#[test]
fn what_is_required_is_not_replaced_by_the_connection() {
    simulated(async {
        let pair = RankPair::new(true);
        pair.double.set(Reads::Fail);
        let ends = pair.pull(|_| LIFE).await;
        assert_eq!((failed(&ends), pair.right()), (all_failed(), 0));
        sleep(Duration::from_mins(1)).await;
        pair.heals().await;
    });
}

#[test]
fn a_hanging_read_is_ended_and_its_slots_come_back() {
    simulated(async {
        let pair = RankPair::new(false);
        pair.double.set(Reads::Hang);
        let began = Instant::now();
        let ends = pair.pull(|_| LIFE).await;
        assert!(began.elapsed() <= LIMIT + 2 * GRACE, "{:?}", began.elapsed());
        assert_eq!(failed(&ends), all_failed());
        // For a while slices come over the connection, and then by NIXL again.
        pair.heals().await;
        assert_eq!(pair.double.agents(), 1);
        sleep(Duration::from_mins(1)).await;
        pair.heals().await;
        assert_eq!(pair.double.agents(), 2);
    });
}

#[test]
fn slots_that_stay_away_have_no_end_until_they_return() {
    simulated(async {
        let pair = RankPair::new(false);
        pair.double.set(Reads::NeverEnd);
        let ends = pair.pull(|_| LIFE).await;
        assert_eq!(ends.lock().len(), SLOTS as usize - UNDER_WAY);
        pair.double.end_kept();
        assert_eq!(failed(&ends), all_failed());
        pair.heals().await;
    });
}

#[test]
fn slots_that_never_come_back_cost_no_more_than_themselves() {
    simulated(async {
        let pair = RankPair::new(false);
        pair.double.set(Reads::Forget);
        let ends = pair.pull(|_| LIFE).await;
        assert_eq!(ends.lock().len(), SLOTS as usize - UNDER_WAY);
        assert_eq!(failed(&ends), []);
        pair.heals().await;
    });
}

#[test]
fn a_rank_does_not_answer_what_it_has_not() {
    simulated(async {
        let pair = RankPair::new(true);
        let lives = vec![SlotLife::of(op(0, LIFE).from); MAX_SLICES + 1];
        let nixl = NixlMessage::new(&b"reader".to_vec()).unwrap();
        for asked in [ToHolder::Nixl(1, nixl), ToHolder::SliceSums(lives)] {
            let (stream, there) = duplex(1 << 20);
            let mut link = PeerLink::to(pair.holder.credentials.member.clone(), Box::new(stream));
            let (answer, ()) = tokio::join!(
                link.exchange(&asked),
                pair.holder.answer("the other rank", FramedRead::new(there, requests())),
            );
            assert!(matches!(answer, Err(BrokenLink::Closed(_))), "{answer:?}");
        }
        pair.heals().await;
    });
}
