//! Brings slices of other workers' ranks, as the leader orders: straight into slots, or by way of
//! [`wanted`], and in the first way that serves.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use futures::future::join_all;
use kvbm_tiers::ranks::{PeerSeat, PullFrom, PullSource, PulledSlot};
use kvbm_tiers::sealed::HostSeal;
use kvbm_tiers::{CopyError, CopyErrorKind, PeerMemory};
use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, timeout_at};

use super::by_connection::ConnectionSlices;
use super::by_memory::MemorySlices;
use super::by_nixl::NixlSlices;
use super::coming::{ComingSlots, SliceSums, goals_of, sums_of_all};
use super::wanted::{ComingSlices, GivingRank, SliceParts};
use super::{by_connection, by_memory, by_nixl, wanted};
use crate::peers::conversion::Conversion;
use crate::peers::greeting::Credentials;
use crate::peers::link::{PeerFault, PeerLink};
use crate::peers::neighbour::Neighbours;
use crate::peers::nixl::{HolderReads, NixlHolders, ReadInto};
use crate::peers::protocol::{BrokenLink, SlotLife};
use crate::peers::reader::{MAX_WAIT, MAX_WAITING};
use crate::peers::sealed::{NOT_CONVERTED, SliceSeals};
use crate::sync::Mutex;

/// Which rank did not give what it should, and why.
type FailedRank = (PeerSeat, PeerFault);

/// Where a rank of another worker is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct RankPlace {
    pub(super) host: String,
    pub(super) seat: PeerSeat,
}

/// A connection, and since when it waits for its next use.
type WaitingLink = (PeerLink, Instant);

/// Brings slices.
pub(super) struct SliceReader {
    pub(super) credentials: Arc<Credentials>,
    pub(super) waiting: Mutex<HashMap<RankPlace, Vec<WaitingLink>>>,
    /// How slices that come sealed, or are to lie sealed, do so. `None`: no key is given.
    pub(super) seal: Option<Arc<HostSeal>>,
    /// `None`: others' memory is not to be mapped.
    pub(super) neighbours: Option<Neighbours>,
    pub(super) nixl: Option<NixlHolders>,
}

const OTHER_BLOCKS: &str = "another number of ranks or tokens than its leader says";
const OTHER_SLICES: &str = "our leader names another number of slices for a block";
pub(super) const NO_SUCH_SHARES: &str = "shares of its heads cannot be made into ours";

/// A rank that is read.
pub(super) struct ReadRank<'a> {
    pub(super) source: &'a PullSource,
    place: RankPlace,
    pub(super) link: PeerLink,
    /// Of what it gives over the connection; `None`: that lies there as it does here.
    pub(super) conversion: Option<Conversion>,
}

impl ReadRank<'_> {
    /// Whether whole slices come, as they are.
    fn is_plain(&self) -> bool {
        self.source.has_all_heads() && self.conversion.is_none()
    }

    /// Where NIXL puts its slices.
    fn reads_into(&self) -> ReadInto {
        if self.is_plain() { ReadInto::Slots } else { ReadInto::Scratch }
    }

    /// How many slices there each of ours takes bytes from.
    fn sources(&self) -> usize {
        self.conversion.as_ref().map_or(1, Conversion::sources)
    }
}

impl SliceReader {
    pub(super) async fn bring(&self, from: PullFrom, slots: VecDeque<PulledSlot>) {
        let seals = SliceSeals::new(self.seal.clone(), from.renamed);
        let mut slots = ComingSlots { left: slots, came: VecDeque::new(), seals, saturated: 0 };
        let until = Instant::now() + from.limit;
        let late =
            |_| Err(CopyError::new(CopyErrorKind::Unavailable, "its key does not come in time"));
        if let Err(why) = timeout_at(until, slots.prepare()).await.unwrap_or_else(late) {
            return slots.fail(&why);
        }
        match self.bring_from_all(&from, &mut slots, until).await {
            Ok(()) => slots.end(),
            Err((seat, why)) => {
                let why = format!("of the rank at {}:{}: {why}", from.host, seat.port);
                slots.fail(&CopyError::new(CopyErrorKind::Unavailable, why));
            }
        }
    }

    async fn bring_from_all(
        &self,
        from: &PullFrom,
        slots: &mut ComingSlots,
        until: Instant,
    ) -> Result<(), FailedRank> {
        let mut ranks = self.meet_all(from, slots, until).await?;
        let brought = match &mut ranks[..] {
            [rank] if rank.is_plain() => {
                let brought = self.bring_plain(rank, slots, until).await;
                brought.map_err(|why| (rank.source.seat, why))
            }
            ranks => self.bring_wanted(ranks, slots, until).await,
        };
        let failed = brought.as_ref().err();
        if let Some(nixl) = &self.nixl {
            for rank in &mut ranks {
                let fault = failed.filter(|(seat, _)| *seat == rank.source.seat);
                nixl.look_back(&mut rank.link, fault.map(|(_, why)| why)).await;
            }
        }
        self.keep_all(ranks);
        brought
    }

    async fn meet_all<'a>(
        &self,
        from: &'a PullFrom,
        slots: &ComingSlots,
        until: Instant,
    ) -> Result<Vec<ReadRank<'a>>, FailedRank> {
        // Together: a first contact by NIXL takes a while, and there is one time for all.
        let meeting = from.sources.iter().map(|source| self.meet(from, source, until));
        let (mut ranks, mut failed) = (Vec::with_capacity(from.sources.len()), None);
        for (source, met) in from.sources.iter().zip(join_all(meeting).await) {
            let met = met.map(|rank| {
                let are_as_told = slots.are_made_of(rank.sources());
                ranks.push(rank);
                are_as_told
            });
            let why = match met {
                Ok(true) => continue,
                Ok(false) => PeerFault::Ranks(OTHER_SLICES.to_owned()),
                Err(why) => why,
            };
            failed.get_or_insert((source.seat, why));
        }
        if let Some(failed) = failed {
            self.keep_all(ranks);
            return Err(failed);
        }
        Ok(ranks)
    }

    async fn meet<'a>(
        &self,
        from: &PullFrom,
        source: &'a PullSource,
        until: Instant,
    ) -> Result<ReadRank<'a>, PeerFault> {
        let place = RankPlace { host: from.host.clone(), seat: source.seat };
        let link = match self.waiting(&place) {
            Some(link) => link,
            None => in_time(until, self.connect(&place)).await?,
        };
        let (ours, theirs) = (&self.credentials.member, &link.holder);
        let told = (from.ranks, from.block_tokens);
        if told != (theirs.ranks, theirs.fingerprint.block_tokens) {
            return Err(BrokenLink::Unexpected(OTHER_BLOCKS).into());
        }
        let conversion = Conversion::of_given_shares(ours, theirs, source);
        if conversion.is_none() && Conversion::is_needed(ours, theirs) {
            self.keep(place, link);
            return Err(PeerFault::Ranks(NO_SUCH_SHARES.to_owned()));
        }
        let mut rank = ReadRank { source, place, link, conversion };
        if let Some(nixl) = &self.nixl {
            let into = rank.reads_into();
            nixl.equip(&mut rank.link, into).await?;
            if Instant::now() >= until {
                // It took longer than there was: the next order need not meet this holder again.
                self.keep(rank.place, rank.link);
                return Err(BrokenLink::Late.into());
            }
        }
        Ok(rank)
    }

    /// Keeps the connections on which no answer is under way.
    fn keep_all(&self, ranks: Vec<ReadRank<'_>>) {
        let ranks = ranks.into_iter().filter(|rank| !rank.link.is_asked);
        ranks.for_each(|ReadRank { place, link, .. }| self.keep(place, link));
    }

    /// Slices that go into slots as they are, of the one rank that has them.
    async fn bring_plain(
        &self,
        rank: &mut ReadRank<'_>,
        slots: &mut ComingSlots,
        until: Instant,
    ) -> Result<(), PeerFault> {
        let link = &mut rank.link;
        if let Some(memory) = link.memory.clone() {
            return by_memory::take(link, &memory, slots, until).await;
        }
        if let Some(nixl) = &self.nixl {
            match by_nixl::take(link, slots, until).await {
                Err(PeerFault::Nixl(_)) if !nixl.is_required() => {}
                taken => return taken,
            }
        }
        link.is_asked = true;
        in_time(until, by_connection::take(&mut link.stream, slots)).await?;
        link.is_asked = false;
        Ok(())
    }

    /// Brings slots made of these ranks' slices, in one way for all ranks.
    async fn bring_wanted(
        &self,
        ranks: &mut [ReadRank<'_>],
        slots: &mut ComingSlots,
        until: Instant,
    ) -> Result<(), FailedRank> {
        let Some(first) = ranks.first().map(|rank| rank.source.seat) else { return Ok(()) };
        if slots.seals.own().is_some() {
            return Err((first, BrokenLink::Unexpected(NOT_CONVERTED).into()));
        }
        let memories: Option<Vec<_>> = ranks.iter().map(|rank| rank.link.memory.clone()).collect();
        if let Some(memories) = memories {
            return self.bring_by_memory(ranks, memories, slots, until).await;
        }
        if let Some(nixl) = &self.nixl {
            // Some could not be mapped, so NIXL reads all of them.
            let mapped = ranks.iter_mut().filter_map(|rank| rank.link.memory.take().map(|_| rank));
            let equipping = mapped.map(async |rank| {
                let equipped = nixl.equip(&mut rank.link, ReadInto::Scratch).await;
                equipped.map_err(|why| (rank.source.seat, why))
            });
            join_all(equipping).await.into_iter().collect::<Result<(), _>>()?;
            match self.bring_by_nixl(ranks, slots, until).await {
                Err((_, PeerFault::Nixl(_))) if !nixl.is_required() => {}
                brought => return brought,
            }
        }
        self.bring_by_connection(ranks, slots, until).await
    }

    async fn bring_by_memory(
        &self,
        ranks: &mut [ReadRank<'_>],
        memories: Vec<Arc<PeerMemory>>,
        slots: &mut ComingSlots,
        until: Instant,
    ) -> Result<(), FailedRank> {
        let (lives, goals) = goals_of(&slots.left);
        let sums = sums_of_ranks(ranks, &lives, until).await?;
        let mut giving = Vec::with_capacity(ranks.len());
        for ((rank, memory), sums) in ranks.iter().zip(memories).zip(sums) {
            let (seat, parts) = (rank.source.seat, self.whole_parts(rank)?);
            let slices = ComingSlices::Memory(MemorySlices::new(memory, &lives, sums));
            giving.push(GivingRank { seat, slices, parts });
        }
        wanted::take(&mut giving, goals, slots, until).await
    }

    async fn bring_by_nixl(
        &self,
        ranks: &mut [ReadRank<'_>],
        slots: &mut ComingSlots,
        until: Instant,
    ) -> Result<(), FailedRank> {
        let reads = ranks.iter().map(|rank| {
            let reads = rank.link.reads().map(Arc::clone);
            reads.ok_or_else(|| (rank.source.seat, PeerFault::nixl_is_gone()))
        });
        let reads = reads.collect::<Result<Vec<_>, _>>()?;
        let (lives, goals) = goals_of(&slots.left);
        let sums = sums_of_ranks(ranks, &lives, until).await?;
        let turn = turn_of(ranks, &reads, until).await?;
        let mut giving = Vec::with_capacity(ranks.len());
        for ((rank, reads), sums) in ranks.iter().zip(&reads).zip(sums) {
            let (seat, parts) = (rank.source.seat, self.whole_parts(rank)?);
            let slices = NixlSlices::new(reads, &lives, sums, turn.clone());
            let slices = ComingSlices::Nixl(slices.map_err(|why| (seat, why))?);
            giving.push(GivingRank { seat, slices, parts });
        }
        drop(turn);
        let taken = wanted::take(&mut giving, goals, slots, until).await;
        if let Err((failed, _)) = &taken {
            let now = Instant::now();
            let until_of = |seat| if seat == *failed { now } else { until };
            join_all(giving.into_iter().map(|rank| rank.slices.end(until_of(rank.seat)))).await;
        }
        taken
    }

    async fn bring_by_connection(
        &self,
        ranks: &mut [ReadRank<'_>],
        slots: &mut ComingSlots,
        until: Instant,
    ) -> Result<(), FailedRank> {
        let ours = &self.credentials.member;
        let (lives, goals) = goals_of(&slots.left);
        let mut giving = Vec::with_capacity(ranks.len());
        for rank in &mut *ranks {
            let (seat, give) = (rank.source.seat, rank.source.give);
            let parts = SliceParts::of_shares(rank, ours);
            let PeerLink { stream, holder, is_asked, .. } = &mut rank.link;
            *is_asked = true;
            let stream = &mut **stream;
            let slices = ConnectionSlices::new(stream, lives.clone(), give, holder.block_bytes);
            giving.push(GivingRank { seat, slices: ComingSlices::Connection(slices), parts });
        }
        wanted::take(&mut giving, goals, slots, until).await?;
        drop(giving);
        // All that was asked for was taken.
        ranks.iter_mut().for_each(|rank| rank.link.is_asked = false);
        Ok(())
    }

    fn whole_parts(&self, rank: &ReadRank<'_>) -> Result<SliceParts, FailedRank> {
        let parts = SliceParts::of_whole(rank, &self.credentials.member);
        let seat = rank.source.seat;
        parts.ok_or_else(|| (seat, PeerFault::Ranks(NO_SUCH_SHARES.to_owned())))
    }

    async fn connect(&self, RankPlace { host, seat }: &RankPlace) -> Result<PeerLink, BrokenLink> {
        let address = format!("{host}:{}", seat.port);
        let mut link = PeerLink::connect(&address, &self.credentials).await?;
        if link.holder.incarnation != seat.incarnation {
            return Err(BrokenLink::Unexpected("another process is that rank now"));
        }
        if let Some(neighbours) = &self.neighbours {
            link.memory = neighbours.memory_of(&link.holder, link.holder.block_bytes).await;
        }
        Ok(link)
    }

    /// One that waits. If its rank is gone by now it fails, and rightly so: another process in its
    /// place has another seat.
    fn waiting(&self, place: &RankPlace) -> Option<PeerLink> {
        self.tidy();
        self.waiting.lock().get_mut(place)?.pop().map(|(link, _)| link)
    }

    /// Lets go of connections that were not used for long.
    pub(super) fn tidy(&self) {
        let mut waiting = self.waiting.lock();
        let is_old = |(_, since): &mut WaitingLink| since.elapsed() >= MAX_WAIT;
        let old: Vec<_> =
            waiting.values_mut().flat_map(|links| links.extract_if(.., is_old)).collect();
        waiting.retain(|_, links| !links.is_empty());
        drop(waiting);
        // With a link a mapping may end, or an agent of NIXL: others need not wait for that.
        drop(old);
    }

    pub(super) fn keep(&self, place: RankPlace, link: PeerLink) {
        let mut waiting = self.waiting.lock();
        let links = waiting.entry(place).or_default();
        if links.len() < MAX_WAITING {
            links.push((link, Instant::now()));
        }
    }
}

/// The checksums of slices at each of these ranks, which say them at once.
async fn sums_of_ranks(
    ranks: &mut [ReadRank<'_>],
    lives: &[SlotLife],
    until: Instant,
) -> Result<Vec<SliceSums>, FailedRank> {
    let asked = ranks.iter_mut().map(async |rank| {
        let sums = sums_of_all(&mut rank.link, lives, until).await;
        sums.map_err(|why| (rank.source.seat, why))
    });
    join_all(asked).await.into_iter().collect()
}

/// The turn to read at all of these ranks. `None`: there is only one.
async fn turn_of(
    ranks: &[ReadRank<'_>],
    reads: &[Arc<HolderReads>],
    until: Instant,
) -> Result<Option<Arc<OwnedMutexGuard<()>>>, FailedRank> {
    let ([rank, _, ..], [reads, ..]) = (ranks, reads) else { return Ok(None) };
    let failed = |why| (rank.source.seat, why);
    let scratch = reads.scratch().map_err(failed)?;
    let turn = timeout_at(until, scratch.turn()).await;
    turn.map(|turn| Some(Arc::new(turn))).map_err(|_| failed(BrokenLink::Late.into()))
}

/// What has not happened by then is late.
pub(super) async fn in_time<T>(
    until: Instant,
    work: impl Future<Output = Result<T, BrokenLink>>,
) -> Result<T, PeerFault> {
    Ok(timeout_at(until, work).await.unwrap_or(Err(BrokenLink::Late))?)
}
