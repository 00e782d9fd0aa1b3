//! A rank's part: it gives slices of blocks to ranks of other workers, and brings theirs, as its
//! leader says.
//!
//! What is leased is the leaders' business. A rank that reads names slots, and the life of each
//! that its leader was told of. A rank that is read says a slice's checksum, and over the connection
//! gives the slice, only while its slot is in that life. A slice that is read out of its memory counts
//! only if it has that checksum. So what came is right, or it does not count; and when it does not come
//! in any rank, it does not count in all.
//!
//! Slices are copied out of the other ranks' memory, if all of them can be mapped; else they are read
//! by NIXL, where both have it; else they come over the connection. Out of memory a slice comes whole,
//! since its checksum covers all of it, even if only a share of its heads is wanted.
//!
//! What is here as it is there goes straight into its slot. All else is put together of what the ranks
//! that have it give.
//!
//! | module | |
//! |---|---|
//! | `holder` | gives slices |
//! | `coming` | slots that they come into, and what they are made of |
//! | `by_connection` | takes slices over the connection |
//! | `by_memory` | copies them out of the memory of a rank on this host |
//! | `by_nixl` | has NIXL read them out of the other's memory |
//! | `wanted` | puts slots together of what is wanted of slices |

mod by_connection;
mod by_memory;
mod by_nixl;
mod coming;
mod holder;
mod wanted;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use kvbm_settings::{PeerNixl, Settings};
use kvbm_tiers::ranks::{PeerSeat, PullFrom, PullSlots, PullSource, PulledSlot, RankSlots};
use kvbm_tiers::sealed::HostSeal;
use kvbm_tiers::{CopyError, CopyErrorKind, PeerMemory};
use tokio::runtime::Handle;
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::{Instant, timeout_at};

use self::by_connection::ConnectionSlices;
use self::by_memory::MemorySlices;
use self::by_nixl::{NixlSlices, NixlSource};
use self::coming::{ComingSlots, SliceSums, goals_of, sums_of_all};
use self::holder::SliceHolder;
use self::wanted::{ComingSlices, GivingRank, SliceParts};
use super::conversion::Conversion;
use super::greeting::{Credentials, random};
use super::link::{PeerFault, PeerLink};
use super::neighbour::{self, Neighbours};
use super::nixl::{HolderReads, NixlHolders, ReadInto, agent_name};
use super::protocol::{BrokenLink, Member, SlotLife};
use super::reader::{MAX_WAIT, MAX_WAITING};
use super::sealed::{NOT_CONVERTED, SliceSeals};
use super::{PeerRuntime, accept, bind, needs_fingerprint, proofs_of, refuse_sealed_nixl, tidy};
use crate::assemble::nixl_for_peers;
use crate::error::{Error, ErrorKind, Result};
use crate::names::fingerprint::Fingerprint;
use crate::sync::{JoinHandle, Mutex, spawn};

/// A rank's address, taken before its tiers are opened: connections wait until they are served.
#[derive(Debug)]
pub(crate) struct RankListener {
    socket: TcpListener,
    seat: PeerSeat,
    credentials: Arc<Credentials>,
    limit: Duration,
}

impl RankListener {
    /// `None`: there are to be no peers.
    ///
    /// # Errors
    /// Those of a leader's: see [`PeerListener::bind`](super::PeerListener::bind).
    pub(crate) fn bind(
        settings: &Settings,
        fingerprint: Option<&Fingerprint>,
        (rank, world): (u16, u16),
    ) -> Result<Option<Self>> {
        let peers = &settings.peers;
        if !peers.enabled {
            return Ok(None);
        }
        let fingerprint = fingerprint.cloned().ok_or_else(needs_fingerprint)?;
        refuse_sealed_nixl(settings)?;
        let (socket, address) = bind(SocketAddr::new(peers.host, port(peers.port, rank)?))?;
        let incarnation = u64::from_le_bytes(random()?);
        let member = Member {
            name: format!("rank {rank} at {address}"),
            incarnation,
            block_bytes: settings.block_bytes.unwrap_or_default(),
            fingerprint,
            ranks: world,
            rank: Some(rank),
            groups: String::new(),
        };
        Ok(Some(Self {
            socket,
            seat: PeerSeat { port: address.port(), incarnation },
            credentials: Arc::new(Credentials {
                member,
                proofs: proofs_of(peers)?,
                converts_types: peers.convert_types,
            }),
            limit: Duration::from_millis(peers.lease_ttl_ms),
        }))
    }

    /// What the leader tells others.
    pub(crate) const fn seat(&self) -> PeerSeat {
        self.seat
    }

    /// Serves others from these slots, and brings what they have, on a thread of its own. `seal`:
    /// how slices travel where they lie sealed, if there are keys.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the system refuses a thread, or NIXL is required and cannot
    /// start.
    pub(crate) fn serve(
        self,
        settings: &Settings,
        slots: RankSlots,
        seal: Option<Arc<HostSeal>>,
    ) -> Result<RankPeers> {
        let Self { socket, credentials, limit, seat } = self;
        let sealed = seal.clone().filter(|seal| seal.is_of_memory());
        let nixl = match sealed {
            None => nixl_for_peers(settings, &agent_name(seat.incarnation, 0), slots.memory())?,
            Some(_) => None,
        };
        let is_required = settings.peers.nixl == PeerNixl::Required;
        let refused = |error| Error::caused(ErrorKind::Unavailable, "cannot serve peers", error);
        let runtime = PeerRuntime::new(0).map_err(refused)?;
        let handle = runtime.handle();
        let entered = handle.enter();
        let socket = tokio::net::TcpListener::from_std(socket).map_err(refused)?;
        drop(entered);
        neighbour::share(slots.memory(), seat.incarnation, 0, &handle).map_err(refused)?;
        let maps = settings.peers.shared_memory && sealed.is_none();
        let reader = Arc::new(SliceReader {
            credentials: Arc::clone(&credentials),
            waiting: Mutex::default(),
            seal,
            neighbours: maps.then(|| Neighbours::new(0)),
            nixl: nixl.clone().map(|nixl| NixlHolders::new(nixl, is_required, 0)),
        });
        let tidied = Arc::clone(&reader);
        handle.spawn(tidy(move || tidied.tidy()));
        let holder = Arc::new(SliceHolder { slots, sealed, nixl, credentials, limit });
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            runtime.runtime().block_on(async {
                tokio::select! {
                    () = accept(socket, holder) => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = spawn("kvbm-rank-peers", serve).map_err(refused)?;
        Ok(RankPeers { reader, handle, thread: Some((stop, thread)) })
    }
}

/// Behind the leader's, in the order of their numbers.
fn port(leader: u16, rank: u16) -> Result<u16> {
    let port = (leader > 0).then(|| leader.checked_add(1)?.checked_add(rank));
    port.unwrap_or(Some(0)).ok_or_else(|| {
        Error::invalid(format!(
            "rank {rank} serves its peers on peers.port (DYN_KVBM_PEERS_PORT) + {}, and there is no such port: lower it",
            u32::from(rank) + 1
        ))
    })
}

/// The thread of a rank that serves those of other workers, and reads at them. It ends when this is
/// dropped.
pub(crate) struct RankPeers {
    reader: Arc<SliceReader>,
    handle: Handle,
    thread: Option<(oneshot::Sender<()>, JoinHandle)>,
}

impl fmt::Debug for RankPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RankPeers")
    }
}

impl RankPeers {
    /// Brings what the leader orders.
    pub(crate) fn puller(&self) -> Box<PullSlots> {
        let (reader, handle) = (Arc::clone(&self.reader), self.handle.clone());
        Box::new(move |from, slots| {
            let reader = Arc::clone(&reader);
            handle.spawn(async move { reader.bring(from, slots.into()).await });
        })
    }
}

impl Drop for RankPeers {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            drop(thread.join());
            drop(std::mem::take(&mut *self.reader.waiting.lock()));
            self.reader.nixl.iter().for_each(NixlHolders::close);
        }
    }
}

/// Which rank did not give what it should, and why.
type FailedRank = (PeerSeat, PeerFault);

/// Where a rank of another worker is.
type RankPlace = (String, PeerSeat);

/// A connection, and since when it waits for its next use.
type WaitingLink = (PeerLink, Instant);

/// Brings slices.
struct SliceReader {
    credentials: Arc<Credentials>,
    waiting: Mutex<HashMap<RankPlace, Vec<WaitingLink>>>,
    /// How slices that come sealed, or are to lie sealed, do so. `None`: no key is given.
    seal: Option<Arc<HostSeal>>,
    /// `None`: others' memory is not to be mapped.
    neighbours: Option<Neighbours>,
    nixl: Option<NixlHolders>,
}

const OTHER_BLOCKS: &str = "another number of ranks or tokens than its leader says";
const OTHER_SLICES: &str = "our leader names another number of slices for a block";
const NO_SUCH_SHARES: &str = "shares of its heads cannot be made into ours";

/// A rank that is read.
struct ReadRank<'a> {
    source: &'a PullSource,
    place: RankPlace,
    link: PeerLink,
    /// Of what it gives over the connection; `None`: that lies there as it does here.
    conversion: Option<Conversion>,
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

    /// Slices that each of ours is made of, or has a part of.
    fn sources(&self) -> usize {
        self.conversion.as_ref().map_or(1, Conversion::sources)
    }
}

impl SliceReader {
    async fn bring(&self, from: PullFrom, slots: VecDeque<PulledSlot>) {
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
        let place = (from.host.clone(), source.seat);
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

    /// Slots that are made of slices of these ranks, all of which give theirs in the same way.
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
            // Not all of them could be mapped, so none is.
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
        let sources = reads.into_iter().zip(sums);
        let sources: Vec<_> =
            sources.map(|(reads, sums)| NixlSource::new(reads, &lives, sums)).collect();
        let mut giving = Vec::with_capacity(ranks.len());
        for (rank, source) in ranks.iter().zip(&sources) {
            let (seat, parts) = (rank.source.seat, self.whole_parts(rank)?);
            let slices = NixlSlices::new(source, turn.clone()).map_err(|why| (seat, why))?;
            giving.push(GivingRank { seat, slices: ComingSlices::Nixl(slices), parts });
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

    async fn connect(&self, (host, seat): &RankPlace) -> Result<PeerLink, BrokenLink> {
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
    fn tidy(&self) {
        let mut waiting = self.waiting.lock();
        let is_old = |(_, since): &mut WaitingLink| since.elapsed() >= MAX_WAIT;
        let old: Vec<_> =
            waiting.values_mut().flat_map(|links| links.extract_if(.., is_old)).collect();
        waiting.retain(|_, links| !links.is_empty());
        drop(waiting);
        // With a link a mapping may end, or an agent of NIXL: others need not wait for that.
        drop(old);
    }

    fn keep(&self, place: RankPlace, link: PeerLink) {
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
async fn in_time<T>(
    until: Instant,
    work: impl Future<Output = Result<T, BrokenLink>>,
) -> Result<T, PeerFault> {
    Ok(timeout_at(until, work).await.unwrap_or(Err(BrokenLink::Late))?)
}

#[cfg(test)]
mod tests;
