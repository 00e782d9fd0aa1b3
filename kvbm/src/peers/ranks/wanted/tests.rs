//! Slices that become others here: over a connection, out of a neighbour's memory, and by a double of
//! NIXL.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use kvbm_tiers::checksum::checksum;
use kvbm_tiers::numbers::{HalfType, halves_to_halves};
use kvbm_tiers::ranks::{
    PullFrom, PullSource, PulledBlock, pulled_slot, pulled_slot_of, rank_slots,
};
use kvbm_tiers::{
    BlockKey, CopyErrorKind, CopyOp, Done, DramOptions, DramRegion, Geometry, Memory, PeerMemory,
    SlotId, SlotRef, Tier,
};
use tokio::io::duplex;
use tokio_util::codec::FramedRead;

use super::super::holder::SliceHolder;
use super::super::reader::{RankPlace, SliceReader};
use super::super::tests::{pull_from, sealing};
use super::*;
use crate::peers::conversion::tests::{PROMPT, RANK_ORDERS, RankSlices, ranks_of};
use crate::peers::greeting::{Credentials, PeerProofs};
use crate::peers::link::PeerLink;
use crate::peers::nixl::NixlHolders;
use crate::peers::nixl::tests::{NixlDouble, Reads};
use crate::peers::protocol::{Member, requests};
use crate::peers::tests::simulated;
use crate::sync::Mutex;

/// Every slot's, at the ranks that are read.
const LIFE: u32 = 7;
const LIMIT: Duration = Duration::from_secs(30);

/// A rank that reads, the ranks that have its heads, and their memories.
struct ReadRanks {
    ours: RankSlices,
    here: Arc<DramRegion>,
    holders: Vec<(Arc<SliceHolder>, Arc<DramRegion>)>,
    double: Arc<NixlDouble>,
    way: Way,
}

/// How slices come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tcp,
    Memory,
    Nixl,
    NixlOrTcp,
    /// By NIXL, though the first rank's memory is mapped.
    PartlyMapped,
    /// Over connections, though the first rank has NIXL.
    PartlyNixl,
}

impl Way {
    const ALL: [Self; 5] =
        [Self::Tcp, Self::Memory, Self::Nixl, Self::PartlyMapped, Self::PartlyNixl];
}

type Ends = Vec<(usize, Option<CopyErrorKind>)>;

/// Where copies tell how they ended.
fn told() -> (Done, Arc<Mutex<Ends>>) {
    let ends = Arc::<Mutex<Ends>>::default();
    let told = Arc::clone(&ends);
    let done = Done::new(move |ended| {
        let end = |(place, result): (usize, Result<(), CopyError>)| {
            (place, result.err().map(|error| error.kind()))
        };
        told.lock().extend(ended.into_iter().map(end));
    });
    (done, ends)
}

fn memory(slices: usize, bytes: u64) -> Arc<DramRegion> {
    let geometry = Geometry::new(slices as u32, bytes as usize).unwrap();
    let options = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
    Arc::new(DramRegion::shareable_host(options).unwrap())
}

fn life(slot: usize, generation: u32) -> SlotRef {
    SlotRef { tier: Tier::Host, slot: SlotId(slot as u32), generation }
}

fn op(from: SlotRef, to: usize) -> CopyOp {
    let block = BlockKey { hash: 0, group: 0 };
    CopyOp { block, parent: None, owner: None, from, to: life(to, 0) }
}

fn credentials(member: Member) -> Arc<Credentials> {
    Arc::new(Credentials { member, proofs: PeerProofs::default(), converts_types: false })
}

fn holder_of(
    rank: &RankSlices,
    double: Option<&Arc<NixlDouble>>,
) -> (Arc<SliceHolder>, Arc<DramRegion>) {
    let memory = memory(rank.slices.len(), rank.member.block_bytes);
    for (slot, slice) in rank.slices.iter().enumerate() {
        let filling = op(life(0, LIFE), slot);
        let mut filled = pulled_slot(&memory, filling, 0, Done::new(|_| ()));
        filled.bytes().copy_from_slice(slice);
        assert!(filled.written().is_some());
    }
    let lives = (0..rank.slices.len()).map(|slot| life(slot, LIFE));
    let holder = SliceHolder {
        slots: rank_slots(Arc::clone(&memory), lives),
        sealed: None,
        nixl: double.map(|double| double.holder(&memory)),
        credentials: credentials(rank.member.clone()),
        limit: LIMIT,
    };
    (Arc::new(holder), memory)
}

impl ReadRanks {
    /// The second of two ranks here reads the third and the fourth of four. Here heads lie inside of
    /// tokens, there outside.
    fn new(tokens: usize, there: usize, way: Way) -> Self {
        let ours = ranks_of(RANK_ORDERS[0], tokens, 2).remove(1);
        Self::of(ours, &ranks_of(RANK_ORDERS[1], there, 4)[2..], way)
    }

    fn of(ours: RankSlices, theirs: &[RankSlices], way: Way) -> Self {
        let here = memory(ours.slices.len(), ours.member.block_bytes);
        let double = NixlDouble::of(Arc::clone(&here));
        let holder = |(at, rank)| {
            let has_nixl = at == 0 || way != Way::PartlyNixl;
            holder_of(rank, Some(&double).filter(|_| has_nixl))
        };
        let holders = theirs.iter().enumerate().map(holder).collect();
        Self { ours, here, holders, double, way }
    }

    fn reader(&self) -> (SliceReader, Vec<PullSource>) {
        let nixl = match self.way {
            Way::Tcp | Way::Memory => None,
            Way::Nixl | Way::PartlyMapped => Some(NixlHolders::new(self.double.reader(), true, 0)),
            Way::NixlOrTcp | Way::PartlyNixl => {
                Some(NixlHolders::new(self.double.reader(), false, 0))
            }
        };
        let reader = SliceReader {
            credentials: credentials(self.ours.member.clone()),
            waiting: Mutex::default(),
            seal: None,
            neighbours: None,
            nixl,
        };
        let mut sources = Vec::new();
        for ((holder, memory), rank) in self.holders.iter().zip(0..) {
            let member = &holder.credentials.member;
            let seat = PeerSeat { port: rank, incarnation: member.incarnation };
            // For two pulls at once.
            for _ in 0..2 {
                let (stream, there) = duplex(1 << 20);
                let serving = Arc::clone(holder);
                tokio::spawn(async move {
                    serving.answer("the other rank", FramedRead::new(there, requests())).await;
                });
                let mut link = PeerLink::to(member.clone(), Box::new(stream));
                let is_mapped = match self.way {
                    Way::Memory => true,
                    Way::PartlyMapped => rank == 0,
                    _ => false,
                };
                let mapped = is_mapped.then(|| PeerMemory::map(memory.shareable().unwrap()));
                link.memory = mapped.map(|memory| Arc::new(memory.unwrap()));
                reader.keep(RankPlace { host: "there".to_owned(), seat }, link);
            }
            let into = HeadShare::new(rank, 2).unwrap();
            sources.push(PullSource { seat, give: HeadShare::WHOLE, into });
        }
        (reader, sources)
    }

    /// Pulls blocks by their positions, of slots in this life of them: how each of their copies ended.
    async fn pull(&self, positions: &[usize], life_of: impl Fn(usize) -> u32) -> Ends {
        self.pull_as(positions, life_of, |from| from).await
    }

    /// The same, by an order that is not what it should be.
    async fn pull_as(
        &self,
        positions: &[usize],
        life_of: impl Fn(usize) -> u32,
        change: impl FnOnce(PullFrom) -> PullFrom,
    ) -> Ends {
        let (done, ends) = told();
        let (reader, sources) = self.reader();
        let theirs = &self.holders[0].0.credentials.member;
        let conversion = Conversion::of_given_shares(&self.ours.member, theirs, &sources[0]);
        let mut place = 0;
        let slot = |position: &usize| {
            let itself = *position..*position + 1;
            let from = conversion.as_ref().map_or(itself, |of| of.sources_of(*position));
            let from: Vec<_> = from.map(|slot| life(slot, life_of(slot))).collect();
            let pulled =
                PulledBlock { op: op(from[0], *position), from, position: *position as u32 };
            let first = place;
            place += pulled.from.len();
            pulled_slot_of(&self.here, pulled, first, done.clone())
        };
        let slots = positions.iter().map(slot).collect();
        reader.bring(change(pull_from(theirs, sources)), slots).await;
        drop(done);
        let mut ends = std::mem::take(&mut *ends.lock());
        ends.sort_unstable_by_key(|(place, _)| *place);
        ends
    }

    fn assert_right(&self, positions: &[usize]) {
        for &position in positions {
            // Others may be told of it. What may be written has none.
            let known = self.here.checksums().unwrap().get(SlotId(position as u32));
            let filled = op(life(0, 0), position);
            let mut slot = pulled_slot(&self.here, filled, 0, Done::new(|_| ()));
            assert_eq!(slot.bytes(), self.ours.slices[position], "block {position}");
            assert_eq!(known, Some(checksum(slot.bytes())));
        }
    }
}

#[tokio::test]
async fn a_missing_slice_costs_only_the_blocks_made_of_it() {
    let gone = Some(CopyErrorKind::Unavailable);
    for way in Way::ALL {
        // Four make one.
        let ranks = ReadRanks::new(64, 16, way);
        let came = ranks.pull(&[0, 1], |_| LIFE).await;
        assert_eq!(came, (0..8).map(|place| (place, None)).collect::<Vec<_>>());
        ranks.assert_right(&[0, 1]);
        let came = ranks.pull(&[0, 1], |slot| LIFE + u32::from(slot == 2)).await;
        let expected = (0..8).map(|place| (place, gone.filter(|_| place < 4)));
        assert_eq!(came, expected.collect::<Vec<_>>(), "{way:?}");
        // One makes four, not all of which are wanted.
        let ranks = ReadRanks::new(16, 64, way);
        let wanted = [0, 2, 3, 5];
        let came = ranks.pull(&wanted, |_| LIFE).await;
        assert_eq!(came, (0..4).map(|place| (place, None)).collect::<Vec<_>>());
        ranks.assert_right(&wanted);
        let came = ranks.pull(&wanted, |slot| LIFE + u32::from(slot == 0)).await;
        let expected = (0..4).map(|place| (place, gone.filter(|_| place < 3)));
        assert_eq!(came, expected.collect::<Vec<_>>(), "{way:?}");
        ranks.assert_right(&wanted[3..]);
    }
}

#[tokio::test]
async fn a_damaged_slice_becomes_no_block() {
    // A rank looks at what it sends; of its memory it says what was there.
    for way in Way::ALL {
        let is_sent = matches!(way, Way::Tcp | Way::PartlyNixl);
        let why = if is_sent { CopyErrorKind::Unavailable } else { CopyErrorKind::Corrupt };
        let ranks = ReadRanks::new(64, 16, way);
        let (memory, damaged) = (&ranks.holders[1].1, 5);
        let known = memory.checksums().unwrap();
        let sum = known.get(SlotId(damaged as u32)).unwrap();
        let mut slot = pulled_slot(memory, op(life(0, LIFE), damaged), 0, Done::new(|_| ()));
        slot.bytes()[9] ^= 1;
        known.record(SlotId(damaged as u32), sum);
        let came = ranks.pull(&[0, 1], |_| LIFE).await;
        let expected = (0..8).map(|place| (place, Some(why).filter(|_| place >= 4)));
        assert_eq!(came, expected.collect::<Vec<_>>(), "{way:?}");
        ranks.assert_right(&[0]);
    }
}

/// Into all of these slots, of the slot of the same number at the one rank that there is.
async fn pull_plain(ranks: &ReadRanks, give: HeadShare, slots: &[(usize, usize)]) {
    let (reader, mut sources) = ranks.reader();
    sources[0] = PullSource { give, into: HeadShare::WHOLE, ..sources[0] };
    let from = pull_from(&ranks.holders[0].0.credentials.member, sources);
    let slot = |&(from, to): &(usize, usize)| {
        pulled_slot(&ranks.here, op(life(from, LIFE), to), 0, Done::new(|_| ()))
    };
    reader.bring(from, slots.iter().map(slot).collect()).await;
}

#[tokio::test]
async fn a_share_of_heads_comes_any_way() {
    for way in Way::ALL {
        // The second of four ranks has half of the heads that the first of two has.
        let ours = ranks_of(RANK_ORDERS[0], 16, 4).remove(1);
        let ranks = ReadRanks::of(ours, &ranks_of(RANK_ORDERS[0], 16, 2)[..1], way);
        let all: Vec<_> = (0..PROMPT / 16).collect();
        let slots: Vec<_> = all.iter().map(|slot| (*slot, *slot)).collect();
        pull_plain(&ranks, HeadShare::new(1, 2).unwrap(), &slots).await;
        ranks.assert_right(&all);
    }
}

/// Two ranks there hold the heads of each slot, in the order they have here.
#[tokio::test]
async fn slots_are_joined_from_shares_of_several_ranks() {
    let all: Vec<_> = (0..PROMPT / 16).collect();
    let (gone, damaged) = (2, 4);
    for way in Way::ALL {
        let ours = ranks_of(RANK_ORDERS[0], 16, 2).remove(1);
        let ranks = ReadRanks::of(ours, &ranks_of(RANK_ORDERS[0], 16, 4)[2..], way);
        let memory = &ranks.holders[1].1;
        let known = memory.checksums().unwrap();
        let sum = known.get(SlotId(damaged)).unwrap();
        let life = life(damaged as usize, LIFE);
        let mut slot = pulled_slot(memory, op(life, damaged as usize), 0, Done::new(|_| ()));
        slot.bytes()[9] ^= 1;
        known.record(SlotId(damaged), sum);
        let came = ranks.pull(&all, |slot| LIFE + u32::from(slot == gone)).await;
        let failed = |at: &usize| *at == gone || *at == damaged as usize;
        assert!(came.iter().all(|(at, end)| end.is_some() == failed(at)), "{way:?}: {came:?}");
        let right: Vec<_> = all.iter().copied().filter(|at| !failed(at)).collect();
        ranks.assert_right(&right);
    }
}

/// Each pull needs more scratch of both ranks than there is.
#[test]
fn pulls_from_several_ranks_do_not_deadlock() {
    simulated(async {
        let all: Vec<_> = (0..PROMPT / 16).collect();
        let ours = ranks_of(RANK_ORDERS[0], 16, 2).remove(1);
        let ranks = ReadRanks::of(ours, &ranks_of(RANK_ORDERS[0], 16, 4)[2..], Way::Nixl);
        let (reader, sources) = ranks.reader();
        let (done, ends) = told();
        let pulls = all.chunks(all.len().div_ceil(2)).map(|slots| {
            let slot = |slot: &usize| {
                pulled_slot(&ranks.here, op(life(*slot, LIFE), *slot), *slot, done.clone())
            };
            let from = pull_from(&ranks.holders[0].0.credentials.member, sources.clone());
            reader.bring(from, slots.iter().map(slot).collect())
        });
        join_all(pulls).await;
        assert!(ends.lock().iter().all(|(_, end)| end.is_none()), "{:?}", ends.lock());
        ranks.assert_right(&all);
    });
}

/// bfloat16 here, float16 there.
#[tokio::test]
async fn numbers_of_ranks_get_the_type_that_they_have_here() {
    let of_type = |rank: &mut RankSlices, dtype: &str| {
        rank.member.fingerprint.dtype = dtype.to_owned();
    };
    let mut pairs = [
        // The second of two ranks has the heads of the third and the fourth of four.
        (ranks_of(RANK_ORDERS[0], 64, 2).remove(1), ranks_of(RANK_ORDERS[1], 16, 4).split_off(2)),
        // The second of four ranks has half of those that the first of two has.
        (
            ranks_of(RANK_ORDERS[0], 16, 4).remove(1),
            vec![ranks_of(RANK_ORDERS[0], 16, 2).remove(0)],
        ),
    ];
    for (ours, theirs) in &mut pairs {
        of_type(ours, "bf16");
        ours.slices.iter_mut().for_each(|slice| _ = halves_to_halves(slice, HalfType::F16));
        theirs.iter_mut().for_each(|rank| of_type(rank, "fp16"));
    }
    let [joined, shared] = pairs;
    for way in Way::ALL {
        let copy =
            |of: &RankSlices| RankSlices { member: of.member.clone(), slices: of.slices.clone() };
        let ranks = ReadRanks::of(copy(&joined.0), &joined.1, way);
        assert!(ranks.pull(&[0, 1], |_| LIFE).await.iter().all(|(_, end)| end.is_none()));
        ranks.assert_right(&[0, 1]);
        let ranks = ReadRanks::of(copy(&shared.0), &shared.1, way);
        pull_plain(&ranks, HeadShare::new(1, 2).unwrap(), &[(0, 0), (5, 5)]).await;
        ranks.assert_right(&[0, 5]);
    }
}

/// A leader may name one slice for several slots.
#[tokio::test]
async fn one_slice_fills_every_slot_that_it_is_for() {
    for way in Way::ALL {
        let mut ours = ranks_of(RANK_ORDERS[0], 16, 2).remove(1);
        let mut there = ranks_of(RANK_ORDERS[0], 16, 2).remove(1);
        there.member.incarnation += 1;
        ours.slices = vec![there.slices[3].clone(); 3];
        let ranks = ReadRanks::of(ours, &[there], way);
        pull_plain(&ranks, HeadShare::WHOLE, &[(3, 0), (3, 1), (3, 2)]).await;
        ranks.assert_right(&[0, 1, 2]);
    }
}

#[tokio::test]
async fn nothing_comes_from_a_rank_unlike_what_its_leader_says() {
    for way in Way::ALL {
        let ranks = ReadRanks::new(64, 16, way);
        let other: [fn(PullFrom) -> PullFrom; 2] =
            [|from| PullFrom { block_tokens: 64, ..from }, |from| PullFrom { ranks: 2, ..from }];
        for change in other {
            let came = ranks.pull_as(&[0], |_| LIFE, change).await;
            assert!(
                came.iter().all(|(_, end)| *end == Some(CopyErrorKind::Unavailable)),
                "{came:?}"
            );
        }
        // Of one slice, not of four.
        let (reader, sources) = ranks.reader();
        let (done, ends) = told();
        let slot = pulled_slot(&ranks.here, op(life(0, LIFE), 0), 0, done);
        let from = pull_from(&ranks.holders[0].0.credentials.member, sources);
        reader.bring(from, [slot].into()).await;
        assert_eq!(*ends.lock(), [(0, Some(CopyErrorKind::Unavailable))]);
        // And then it heals.
        assert!(ranks.pull(&[0], |_| LIFE).await.iter().all(|(_, end)| end.is_none()));
        ranks.assert_right(&[0]);
    }
}

#[tokio::test]
async fn what_is_to_lie_encrypted_is_not_converted() {
    for way in Way::ALL {
        let ranks = ReadRanks::new(64, 16, way);
        let (mut reader, sources) = ranks.reader();
        reader.seal = Some(sealing(1).0);
        let (done, ends) = told();
        let from = (0..4).map(|slot| life(slot, LIFE)).collect();
        let pulled = PulledBlock { op: op(life(0, LIFE), 0), from, position: 0 };
        let slot = pulled_slot_of(&ranks.here, pulled, 0, done);
        let from = pull_from(&ranks.holders[0].0.credentials.member, sources);
        reader.bring(from, [slot].into()).await;
        let ends = ends.lock();
        assert_eq!(ends.len(), 4);
        assert!(ends.iter().all(|(_, end)| *end == Some(CopyErrorKind::Unavailable)), "{ends:?}");
    }
}

#[test]
fn where_nixl_fails_slices_are_converted_from_the_connection() {
    simulated(async {
        let gone = Some(CopyErrorKind::Unavailable);
        let ways = [(Way::NixlOrTcp, None), (Way::Nixl, gone)];
        let reads = [Reads::Fail, Reads::FailBehind(3)];
        for ((way, came), reads) in ways.iter().flat_map(|way| reads.map(|reads| (*way, reads))) {
            let ranks = ReadRanks::new(64, 16, way);
            ranks.double.set(reads);
            let ends = ranks.pull(&[0, 1], |_| LIFE).await;
            assert_eq!(ends, (0..8).map(|place| (place, came)).collect::<Vec<_>>(), "{way:?}");
            if came.is_none() {
                ranks.assert_right(&[0, 1]);
            }
            // And then it heals.
            ranks.double.set(Reads::Whole);
            let ends = ranks.pull(&[0, 1], |_| LIFE).await;
            assert_eq!(ends, (0..8).map(|place| (place, None)).collect::<Vec<_>>(), "{way:?}");
            ranks.assert_right(&[0, 1]);
        }
    });
}

/// Slots end in time all the same: nothing but scratch is written late.
#[test]
fn late_reads_land_in_scratch_that_nothing_else_uses() {
    simulated(async {
        for reads in [Reads::NeverEnd, Reads::Hang, Reads::Forget] {
            let ranks = ReadRanks::new(16, 64, Way::NixlOrTcp);
            ranks.double.set(reads);
            let ends = ranks.pull(&[0, 2, 3, 5], |_| LIFE).await;
            let is_over = |(_, end): &(usize, _)| *end == Some(CopyErrorKind::Unavailable);
            // What never comes back is told so, and comes over the connection.
            let fails = reads != Reads::Forget;
            assert!(ends.len() == 4 && ends.iter().all(|end| is_over(end) == fails), "{ends:?}");
            let late = if reads == Reads::NeverEnd { ranks.holders.len() } else { 0 };
            assert_eq!(ranks.double.scratches(), late, "they go with their last reads");
            ranks.double.set(Reads::Whole);
            assert!(ranks.pull(&[0, 2, 3, 5], |_| LIFE).await.iter().all(|end| !is_over(end)));
            assert_eq!(ranks.double.scratches(), late);
            ranks.double.end_kept();
            assert_eq!(ranks.double.scratches(), 0);
            ranks.assert_right(&[0, 2, 3, 5]);
        }
    });
}
