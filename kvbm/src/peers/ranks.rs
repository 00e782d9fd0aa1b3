//! A rank's part: it gives slices of blocks to ranks of other workers, and brings theirs, as its
//! leader says.
//!
//! What is leased is the leaders' business. A rank that reads names slots, and the life of each
//! that its leader was told of. A rank that is read says a slice's checksum, and over the connection
//! gives the slice, only while its slot is in that life. A slice that is read out of its memory counts
//! only if it has that checksum. So what came is right, or it does not count; and when it does not come
//! in any rank, it does not count in all.
//!
//! A rank reads all others in one way: out of their memory, if all of it can be mapped; else by
//! NIXL, if it reaches all of them; else over connections. Out of memory a slice comes whole, since
//! its checksum covers all of it, even if only a share of its heads is wanted.
//!
//! A slice that has the same form in both workers goes straight into its slot. Other slots are put
//! together from the slices of several ranks, or from a part of a slice.
//!
//! | module | |
//! |---|---|
//! | `holder` | gives slices |
//! | `reader` | brings slices, and chooses the way |
//! | `coming` | slots that slices come into, and the slices they need |
//! | `by_connection` | takes slices over the connection |
//! | `by_memory` | copies them out of the memory of a rank on this host |
//! | `by_nixl` | has NIXL read them out of the other's memory |
//! | `wanted` | puts slots together from slices |

mod by_connection;
mod by_memory;
mod by_nixl;
mod coming;
mod holder;
mod reader;
mod wanted;

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use kvbm_settings::{PeerNixl, Settings};
use kvbm_tiers::ranks::{PeerSeat, PullSlots, RankSlots};
use kvbm_tiers::sealed::HostSeal;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use self::holder::SliceHolder;
use self::reader::SliceReader;
use super::greeting::{Credentials, random};
use super::neighbour::{self, Neighbours};
use super::nixl::{NixlHolders, agent_name};
use super::protocol::Member;
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
        rank: u16,
        world: u16,
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

#[cfg(test)]
mod tests;
