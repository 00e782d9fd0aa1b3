//! A rank's part: it gives slices of blocks to ranks of other workers, and brings theirs, as its
//! leader says.
//!
//! What is leased is the leaders' business. A rank that reads names slots, and the life of each
//! that its leader was told of. A rank that is read says a slice's checksum, and over the connection
//! gives the slice, only while its slot is in that life. So what came is right, or it does not count; and when it does
//! not come in any rank, it does not count in all.
//!
//! Slices come over the connection of two ranks, or where both have NIXL by that (`by_nixl`).

mod by_nixl;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kvbm_settings::{PeerNixl, Settings};
use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::{
    HeadLayout, HeadShare, PeerSeat, PullFrom, PullSlots, PullSource, PulledSlot, RankSlots,
};
use kvbm_tiers::sealed::{ArrivingBlock, HostSeal, KeyId, OtherSeal, SEAL_BYTES};
use kvbm_tiers::{CopyError, CopyErrorKind, CopyOp, OneSided};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::greeting::{Credentials, random};
use super::holder::{MAX_GREETING, MAX_IDLE, Requests, welcome};
use super::link::{PeerFault, PeerLink};
use super::nixl::{self, NixlHolders, agent_name};
use super::protocol::{
    BrokenLink, MAX_SLICES, Member, SlotLife, ToHolder, ToReader, decode, receive, send,
};
use super::reader::{MAX_WAIT, MAX_WAITING};
use super::sealed::{self, NOT_CONVERTED, SliceSeals};
use super::stream;
use super::{
    PeerRuntime, Serves, accept, bind, needs_fingerprint, proofs_of, refuse_sealed_nixl, shares,
    tidy,
};
use crate::assemble::nixl_for_peers;
use crate::error::{Error, ErrorKind, Result};
use crate::names::fingerprint::Fingerprint;
use crate::sync::{JoinHandle, Mutex, spawn};

/// What a request for slices asks for, and requests that are on their way at once.
const SLICE_BYTES: usize = 4 << 20;
const SLICE_READS: usize = 2;

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
                converts_types: false,
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
        let reader = Arc::new(SliceReader {
            credentials: Arc::clone(&credentials),
            waiting: Mutex::default(),
            seal,
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

/// Gives out slices.
struct SliceHolder {
    slots: RankSlots,
    /// What slices lie sealed with; `None`: they lie in the clear.
    sealed: Option<Arc<HostSeal>>,
    nixl: Option<Arc<dyn OneSided>>,
    credentials: Arc<Credentials>,
    /// A reader that takes nothing for so long is gone.
    limit: Duration,
}

impl Serves for SliceHolder {
    async fn serve(&self, stream: TcpStream, greeted: impl FnOnce() + Send) {
        let welcomed = async {
            let stream = stream::accept(stream, self.credentials.proofs.tls.as_ref()).await?;
            welcome(stream, &self.credentials).await
        };
        let (member, link) = match timeout(MAX_GREETING, welcomed).await {
            Ok(Ok((Some(member), link))) => (member, link),
            Ok(Ok((None, _))) | Err(_) => return,
            Ok(Err(why)) => {
                return tracing::warn!(%why, "a rank of another worker that connected is not let in");
            }
        };
        greeted();
        self.answer(&member.name, link).await;
    }
}

impl SliceHolder {
    /// Answers a rank of another worker, until it is gone.
    async fn answer(
        &self,
        reader: &str,
        mut link: Requests<impl AsyncRead + AsyncWrite + Unpin + Send>,
    ) {
        let copy = |life, slice: &mut Vec<u8>| self.slots.copy(life, slice);
        let heads = shares::heads_of(&self.credentials.member);
        while let Ok(Some(Ok(frame))) = timeout(MAX_IDLE, link.next()).await {
            let given = match decode(&frame) {
                Ok(ToHolder::Slices(_, lives) | ToHolder::SliceSums(lives))
                    if lives.len() > MAX_SLICES =>
                {
                    Err(BrokenLink::Unexpected("more slices than may be asked for at once"))
                }
                Ok(ToHolder::Slices(share, _))
                    if self.sealed.is_some() && share != HeadShare::WHOLE =>
                {
                    let refused = ToReader::Refused(NOT_CONVERTED.to_owned());
                    let told = say(link.get_mut(), &refused, self.limit).await;
                    told.and(Err(BrokenLink::Unexpected(NOT_CONVERTED)))
                }
                Ok(ToHolder::Slices(share, lives)) => {
                    let copy =
                        |life, slice: &mut Vec<u8>| cut(copy(life, slice)?, share, heads, slice);
                    let sealed = self.sealed.as_ref();
                    give(link.get_mut(), &lives, copy, sealed, self.limit).await
                }
                Ok(ToHolder::Nixl(0, asked)) => {
                    let answer = nixl::answer(self.nixl.as_ref(), &asked).await;
                    say(link.get_mut(), &answer, self.limit).await
                }
                Ok(ToHolder::SliceSums(lives)) => {
                    let sums = ToReader::SliceSums(self.sums(&lives).await);
                    say(link.get_mut(), &sums, self.limit).await
                }
                Ok(_) => Err(BrokenLink::Unexpected("a rank gives slices, and nothing else")),
                Err(why) => Err(why),
            };
            if let Err(why) = given {
                return tracing::debug!(reader, %why, "a rank of another worker is gone");
            }
        }
    }

    async fn sums(&self, lives: &[SlotLife]) -> Vec<Option<[u8; 4]>> {
        let (mut scratch, mut sums) = (Vec::new(), Vec::with_capacity(lives.len()));
        for life in lives {
            sums.push(self.slots.sum(life.get(), &mut scratch).map(u32::to_le_bytes));
            // It may have read a whole slice: others have their turn.
            yield_now().await;
        }
        sums
    }
}

/// Leaves of a slice the share of its heads that is wanted, and returns the checksum of that; `crc`
/// is the whole slice's. `None`: heads do not lie so that there were such a share.
fn cut(crc: u32, share: HeadShare, heads: Option<HeadLayout>, slice: &mut Vec<u8>) -> Option<u32> {
    if share == HeadShare::WHOLE {
        return Some(crc);
    }
    heads?.cut(share, slice)?;
    Some(checksum(slice))
}

async fn say(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &ToReader,
    limit: Duration,
) -> Result<(), BrokenLink> {
    timeout(limit, send(stream, message)).await.unwrap_or(Err(BrokenLink::Late))
}

/// Sends slices, each with its checksum, and says which of them are not there. `copy` reads one,
/// which lies `sealed` if there is something that seals.
async fn give(
    stream: &mut (impl AsyncWrite + Unpin),
    lives: &[SlotLife],
    copy: impl Fn((kvbm_tiers::SlotId, u32), &mut Vec<u8>) -> Option<u32>,
    sealed: Option<&Arc<HostSeal>>,
    limit: Duration,
) -> Result<(), BrokenLink> {
    let mut slice = Vec::new();
    let mut keys = sealed.map(|seal| SentKeys { seal, is_sent: HashMap::new() });
    for (place, life) in lives.iter().enumerate() {
        let head = match (copy(life.get(), &mut slice), &mut keys) {
            (Some(crc), Some(keys)) => keys.head(place, crc, &slice, limit).await,
            (crc, _) => crc.map(|crc| ToReader::Slice(Some(crc.to_le_bytes()))),
        };
        let sent = async {
            send(stream, head.as_ref().unwrap_or(&ToReader::Slice(None))).await?;
            if head.is_some() {
                stream.write_all(&slice).await?;
            }
            Ok(())
        };
        timeout(limit, sent).await.unwrap_or(Err(BrokenLink::Late))?;
    }
    Ok(stream.flush().await?)
}

/// The keys of a request's slices.
struct SentKeys<'a> {
    seal: &'a Arc<HostSeal>,
    /// Whether the reader has it, or it cannot be had.
    is_sent: HashMap<KeyId, bool>,
}

impl SentKeys<'_> {
    /// What goes before a slice that lies sealed. `None`: its key cannot be had.
    async fn head(
        &mut self,
        place: usize,
        crc: u32,
        slice: &[u8],
        limit: Duration,
    ) -> Option<ToReader> {
        let id = HostSeal::key_of(slice)?;
        let key = match self.is_sent.get(&id) {
            Some(true) => None,
            Some(false) => return None,
            None => {
                let named = timeout(limit, sealed::named_keys(self.seal, &[(place, id)])).await;
                let key = named.unwrap_or_default().pop();
                self.is_sent.insert(id, key.is_some());
                Some(key?)
            }
        };
        Some(ToReader::SealedSlice(crc.to_le_bytes(), key))
    }
}

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
    nixl: Option<NixlHolders>,
}

impl SliceReader {
    async fn bring(&self, from: PullFrom, slots: VecDeque<PulledSlot>) {
        let heads = shares::heads_of(&self.credentials.member);
        let seals = SliceSeals::new(self.seal.clone(), from.renamed);
        let mut slots = ComingSlots { left: slots, came: VecDeque::new(), heads, seals };
        let until = Instant::now() + from.limit;
        let late =
            |_| Err(CopyError::new(CopyErrorKind::Unavailable, "its key does not come in time"));
        if let Err(why) = timeout_at(until, slots.prepare()).await.unwrap_or_else(late) {
            return slots.fail(&why);
        }
        for source in &from.sources {
            let place = (from.host.clone(), source.seat);
            slots.begin();
            if let Err(why) = self.bring_from(&place, source, &mut slots, until).await {
                let (host, PeerSeat { port, .. }) = place;
                let why = format!("of the rank at {host}:{port}: {why}");
                return slots.fail(&CopyError::new(CopyErrorKind::Unavailable, why));
            }
        }
        slots.end();
    }

    async fn bring_from(
        &self,
        place: &RankPlace,
        source: &PullSource,
        slots: &mut ComingSlots,
        until: Instant,
    ) -> Result<(), PeerFault> {
        let mut link = match self.waiting(place) {
            Some(link) => link,
            None => in_time(until, self.connect(place)).await?,
        };
        let nixl = self.nixl.as_ref();
        if let Some(nixl) = nixl.filter(|_| source.is_whole()) {
            nixl.equip(&mut link).await?;
            if Instant::now() >= until {
                // It took longer than there was: the next order need not meet this holder again.
                self.keep(place.clone(), link);
                return Err(BrokenLink::Late.into());
            }
        }
        let brought = self.bring_over(&mut link, source, slots, until).await;
        if let Some(nixl) = nixl {
            nixl.look_back(&mut link, brought.as_ref().err()).await;
        }
        brought?;
        self.keep(place.clone(), link);
        Ok(())
    }

    /// By NIXL if it can be, else over the connection.
    async fn bring_over(
        &self,
        link: &mut PeerLink,
        source: &PullSource,
        slots: &mut ComingSlots,
        until: Instant,
    ) -> Result<(), PeerFault> {
        if let Some(nixl) = &self.nixl {
            if source.is_whole() {
                match by_nixl::take(link, slots, until).await {
                    Err(PeerFault::Nixl(_)) if !nixl.is_required() => {}
                    taken => return taken,
                }
            } else if nixl.is_required() {
                let why = "shares of heads do not come by it, which peers.nixl \
                           (DYN_KVBM_PEERS_NIXL) requires";
                return Err(PeerFault::Nixl(why.to_owned()));
            }
        }
        in_time(until, take(&mut link.stream, source, slots)).await
    }

    async fn connect(&self, (host, seat): &RankPlace) -> Result<PeerLink, BrokenLink> {
        let link = PeerLink::connect(&format!("{host}:{}", seat.port), &self.credentials).await?;
        if link.holder.incarnation != seat.incarnation {
            return Err(BrokenLink::Unexpected("another process is that rank now"));
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
        // With a link an agent of NIXL may end: others need not wait for that.
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

/// What has not happened by then is late.
async fn in_time<T>(
    until: Instant,
    work: impl Future<Output = Result<T, BrokenLink>>,
) -> Result<T, PeerFault> {
    Ok(timeout_at(until, work).await.unwrap_or(Err(BrokenLink::Late))?)
}

/// Slots that slices come into, from one rank after the other.
struct ComingSlots {
    /// What the present rank has yet to give.
    left: VecDeque<PulledSlot>,
    /// Those that have what all ranks before gave, and it.
    came: VecDeque<PulledSlot>,
    heads: Option<HeadLayout>,
    seals: SliceSeals,
}

impl ComingSlots {
    /// Sees to it that slices can be sealed here without a wait: all of an order are one tenant's.
    async fn prepare(&self) -> Result<(), CopyError> {
        match self.seals.own().zip(self.left.front()) {
            Some((seal, first)) => sealed::prepare(seal, first.op().owner).await,
            None => Ok(()),
        }
    }

    /// Another rank is to give what it has of those that have all that came before.
    fn begin(&mut self) {
        self.left.append(&mut self.came);
    }

    /// The next slot has come or failed as far as this rank goes.
    fn next(&mut self, came: Result<(), CopyError>) {
        let Some(slot) = self.left.pop_front() else { return };
        match came {
            Ok(()) => self.came.push_back(slot),
            Err(error) => slot.end(Err(error)),
        }
    }

    /// All ranks gave what they have.
    fn end(self) {
        self.came.into_iter().for_each(|slot| slot.end(Ok(())));
    }

    fn fail(self, error: &CopyError) {
        let slots = self.left.into_iter().chain(self.came);
        slots.for_each(|slot| slot.end(Err(error.clone())));
    }
}

/// Asks a rank for slices, and takes them into slots.
async fn take(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    source: &PullSource,
    slots: &mut ComingSlots,
) -> Result<(), BrokenLink> {
    let Some(first) = slots.left.front_mut() else { return Ok(()) };
    let is_whole = source.into == HeadShare::WHOLE;
    let seal_bytes = if slots.seals.own().is_some() { SEAL_BYTES } else { 0 };
    if seal_bytes > 0 && !source.is_whole() {
        return Err(BrokenLink::Unexpected(NOT_CONVERTED));
    }
    let (_, shares) = source.into.get();
    let bytes = (first.bytes().len() - seal_bytes) / usize::from(shares);
    // What does not come straight into its slot.
    let mut part = Vec::new();
    let at_once = (SLICE_BYTES / bytes.max(1)).clamp(1, MAX_SLICES);
    let mut asked = 0;
    loop {
        while asked <= (SLICE_READS - 1) * at_once && asked < slots.left.len() {
            let next = asked..slots.left.len().min(asked + at_once);
            asked = next.end;
            let lives = slots.left.range(next).map(|slot| SlotLife::of(slot.op().from)).collect();
            send(stream, &ToHolder::Slices(source.give, lives)).await?;
        }
        let ComingSlots { left, heads, seals, .. } = &mut *slots;
        let Some(slot) = left.front_mut() else { return Ok(()) };
        let came = match receive(stream).await? {
            ToReader::Slice(Some(crc)) if is_whole && seal_bytes == 0 => {
                stream.read_exact(slot.bytes()).await?;
                expect(slot.written(), crc)
            }
            ToReader::Slice(Some(crc)) => {
                part.resize(bytes, 0);
                stream.read_exact(&mut part).await?;
                expect(Some(checksum(&part)), crc).and_then(|()| match seals.own() {
                    Some(seal) => take_in(slot, (seal, None), crc, &mut part),
                    None => join(slot, *heads, source.into, &part),
                })
            }
            ToReader::SealedSlice(crc, key) => {
                part.resize(bytes + SEAL_BYTES, 0);
                stream.read_exact(&mut part).await?;
                expect(Some(checksum(&part)), crc).and_then(|()| {
                    if !is_whole {
                        return Err(CopyError::refused(NOT_CONVERTED));
                    }
                    let (seal, other) = seals.opening(key.as_ref())?;
                    take_in(slot, (seal, Some(other)), crc, &mut part)
                })
            }
            ToReader::Slice(None) => Err(another_life()),
            ToReader::Refused(why) => return Err(BrokenLink::refused(&why)),
            _ => return Err(BrokenLink::Unexpected("no answer to a request for slices")),
        };
        slots.next(came);
        asked -= 1;
    }
}

/// Puts a slice into its slot as slices lie here: `other` opens it, if it came sealed.
fn take_in(
    slot: &mut PulledSlot,
    (seal, other): (&HostSeal, Option<&OtherSeal>),
    crc: [u8; 4],
    arrived: &mut [u8],
) -> Result<(), CopyError> {
    let CopyOp { block: name, owner, .. } = *slot.op();
    let block = ArrivingBlock { name, owner, crc: u32::from_le_bytes(crc) };
    seal.take_in(other, block, arrived, slot.bytes())?;
    // Of what lies there: an index may tell it to others.
    slot.written();
    Ok(())
}

/// Puts a share of a slice into its slot, which is written when the last one has come.
fn join(
    slot: &mut PulledSlot,
    heads: Option<HeadLayout>,
    share: HeadShare,
    part: &[u8],
) -> Result<(), CopyError> {
    let put = heads.and_then(|heads| heads.put(share, part, slot.bytes()));
    put.ok_or_else(|| CopyError::refused("heads are not split so that a share came"))?;
    if share.is_last() {
        slot.written();
    }
    Ok(())
}

/// Whether what came has the checksum that came with it.
fn expect(crc: Option<u32>, sent: [u8; 4]) -> Result<(), CopyError> {
    let wrong = || CopyError::new(CopyErrorKind::Corrupt, "it is not what its checksum says");
    (crc == Some(u32::from_le_bytes(sent))).then_some(()).ok_or_else(wrong)
}

fn another_life() -> CopyError {
    CopyError::new(CopyErrorKind::Unavailable, "its slot holds something else by now")
}

#[cfg(test)]
mod tests;
