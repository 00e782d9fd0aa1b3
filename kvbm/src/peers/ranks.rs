//! A rank's part: it gives slices of blocks to ranks of other workers, and brings theirs, as its
//! leader says.
//!
//! What is leased is the leaders' business. A rank that reads names slots, and the life of each
//! that its leader was told of. A rank that is read gives a slice only while its slot is in that
//! life, and with each the checksum. So what came is right, or it does not count; and when it does
//! not come in any rank, it does not count in all.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kvbm_settings::Settings;
use kvbm_tiers::ranks::{PeerSeat, PullFrom, PullSlots, PulledSlot, RankSlots};
use kvbm_tiers::{CopyError, CopyErrorKind, SlotRef};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::greeting::{Credentials, random};
use super::holder::{MAX_GREETING, MAX_IDLE, welcome};
use super::protocol::{
    BrokenLink, MAX_SLICES, Member, SlotLife, ToHolder, ToReader, decode, receive, send,
};
use super::reader::{MAX_WAIT, MAX_WAITING};
use super::stream::{self, PeerStream, connect};
use super::{PeerRuntime, Serves, accept, bind, needs_fingerprint, proofs_of};
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
            credentials: Arc::new(Credentials { member, proofs: proofs_of(peers)? }),
            limit: Duration::from_millis(peers.lease_ttl_ms),
        }))
    }

    /// What the leader tells others.
    pub(crate) const fn seat(&self) -> PeerSeat {
        self.seat
    }

    /// Serves others from these slots, and brings what they have, on a thread of its own.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the system refuses a thread.
    pub(crate) fn serve(self, slots: RankSlots) -> Result<RankPeers> {
        let Self { socket, credentials, limit, .. } = self;
        let refused = |error| Error::caused(ErrorKind::Unavailable, "cannot serve peers", error);
        let runtime = PeerRuntime::new().map_err(refused)?;
        let handle = runtime.handle();
        let entered = handle.enter();
        let socket = tokio::net::TcpListener::from_std(socket).map_err(refused)?;
        drop(entered);
        let reader = Arc::new(SliceReader {
            credentials: Arc::clone(&credentials),
            waiting: Mutex::default(),
        });
        let holder = Arc::new(SliceHolder { slots, credentials, limit });
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
        }
    }
}

/// Gives out slices.
struct SliceHolder {
    slots: RankSlots,
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
        let (member, mut link) = match timeout(MAX_GREETING, welcomed).await {
            Ok(Ok((Some(member), link))) => (member, link),
            Ok(Ok((None, _))) | Err(_) => return,
            Ok(Err(why)) => {
                return tracing::warn!(%why, "a rank of another worker that connected is not let in");
            }
        };
        greeted();
        let copy = |life, slice: &mut Vec<u8>| self.slots.copy(life, slice);
        while let Ok(Some(Ok(frame))) = timeout(MAX_IDLE, link.next()).await {
            let given = match decode(&frame) {
                Ok(ToHolder::Slices(lives)) => give(link.get_mut(), &lives, copy, self.limit).await,
                Ok(_) => Err(BrokenLink::Unexpected("a rank gives slices, and nothing else")),
                Err(why) => Err(why),
            };
            if let Err(why) = given {
                return tracing::debug!(reader = member.name, %why, "a rank of another worker is gone");
            }
        }
    }
}

/// Sends slices, each with its checksum, and says which of them are not there. `copy` reads one.
async fn give(
    stream: &mut (impl AsyncWrite + Unpin),
    lives: &[SlotLife],
    copy: impl Fn((kvbm_tiers::SlotId, u32), &mut Vec<u8>) -> Option<u32>,
    limit: Duration,
) -> Result<(), BrokenLink> {
    let mut slice = Vec::new();
    for life in lives {
        let crc = copy(life.get(), &mut slice);
        let sent = async {
            send(stream, &ToReader::Slice(crc.map(u32::to_le_bytes))).await?;
            if crc.is_some() {
                stream.write_all(&slice).await?;
            }
            Ok(())
        };
        timeout(limit, sent).await.unwrap_or(Err(BrokenLink::Late))?;
    }
    Ok(stream.flush().await?)
}

/// A slot that a slice comes into.
trait SliceSlot {
    fn from(&self) -> SlotRef;
    fn bytes(&mut self) -> &mut [u8];
    /// It is written: its checksum.
    fn written(&mut self) -> u32;
    fn end(self, result: Result<(), CopyError>);
}

impl SliceSlot for PulledSlot {
    fn from(&self) -> SlotRef {
        self.from()
    }

    fn bytes(&mut self) -> &mut [u8] {
        self.bytes()
    }

    fn written(&mut self) -> u32 {
        self.written()
    }

    fn end(self, result: Result<(), CopyError>) {
        self.end(result);
    }
}

/// Where a rank of another worker is.
type RankPlace = (String, PeerSeat);

/// A connection, and since when it waits for its next use.
type WaitingStream = (Box<dyn PeerStream>, Instant);

/// Brings slices.
struct SliceReader {
    credentials: Arc<Credentials>,
    waiting: Mutex<HashMap<RankPlace, Vec<WaitingStream>>>,
}

impl SliceReader {
    async fn bring(&self, from: PullFrom, mut slots: VecDeque<PulledSlot>) {
        let place = (from.host, from.seat);
        let brought = async {
            let waiting = self.waiting(&place);
            let mut stream = match waiting {
                Some(stream) => stream,
                None => self.connect(&place).await?,
            };
            take(&mut stream, &mut slots).await?;
            Ok(stream)
        };
        match timeout(from.limit, brought).await.unwrap_or(Err(BrokenLink::Late)) {
            Ok(stream) => self.keep(place, stream),
            Err(why) => {
                let (host, PeerSeat { port, .. }) = place;
                let error = CopyError::new(
                    CopyErrorKind::Unavailable,
                    format!("of the rank at {host}:{port}: {why}"),
                );
                slots.into_iter().for_each(|slot| slot.end(Err(error.clone())));
            }
        }
    }

    async fn connect(&self, (host, seat): &RankPlace) -> Result<Box<dyn PeerStream>, BrokenLink> {
        let address = format!("{host}:{}", seat.port);
        let mut stream = connect(&address, &self.credentials.proofs).await?;
        let member = self.credentials.greet(&mut stream).await?;
        if member.incarnation != seat.incarnation {
            return Err(BrokenLink::Unexpected("another process is that rank now"));
        }
        Ok(stream)
    }

    /// One that waits. If its rank is gone by now it fails, and rightly so: another process in its
    /// place has another seat.
    fn waiting(&self, place: &RankPlace) -> Option<Box<dyn PeerStream>> {
        let mut waiting = self.waiting.lock();
        waiting.retain(|_, links| {
            links.retain(|(_, since)| since.elapsed() < MAX_WAIT);
            !links.is_empty()
        });
        waiting.get_mut(place)?.pop().map(|(stream, _)| stream)
    }

    fn keep(&self, place: RankPlace, stream: Box<dyn PeerStream>) {
        let mut waiting = self.waiting.lock();
        let links = waiting.entry(place).or_default();
        if links.len() < MAX_WAITING {
            links.push((stream, Instant::now()));
        }
    }
}

/// Asks for slices, and takes them into slots. Those that are left have not come.
async fn take<S: SliceSlot>(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    slots: &mut VecDeque<S>,
) -> Result<(), BrokenLink> {
    let Some(first) = slots.front_mut() else { return Ok(()) };
    let part = (SLICE_BYTES / first.bytes().len().max(1)).clamp(1, MAX_SLICES);
    let mut asked = 0;
    loop {
        while asked <= (SLICE_READS - 1) * part && asked < slots.len() {
            let next = asked..slots.len().min(asked + part);
            asked = next.end;
            let lives = slots.range(next).map(|slot| SlotLife::of(slot.from())).collect();
            send(stream, &ToHolder::Slices(lives)).await?;
        }
        let Some(slot) = slots.front_mut() else { return Ok(()) };
        let came = match receive(stream).await? {
            ToReader::Slice(Some(crc)) => {
                stream.read_exact(slot.bytes()).await?;
                let is_right = slot.written() == u32::from_le_bytes(crc);
                let wrong =
                    || CopyError::new(CopyErrorKind::Corrupt, "it is not what its checksum says");
                is_right.then_some(()).ok_or_else(wrong)
            }
            ToReader::Slice(None) => {
                let why = "its slot holds something else by now";
                Err(CopyError::new(CopyErrorKind::Unavailable, why))
            }
            _ => return Err(BrokenLink::Unexpected("no answer to a request for slices")),
        };
        slots.pop_front().into_iter().for_each(|slot| slot.end(came.clone()));
        asked -= 1;
    }
}

#[cfg(test)]
mod tests;
