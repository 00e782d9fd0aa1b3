//! What goes on with each peer now, for people: the live page shows it.
//!
//! It has what is open, and the last faults: a peer with neither takes no room here.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kvbm_tiers::clock;
use serde::Serialize;
use tokio::sync::watch;

use super::discovery::PeerList;
use super::protocol::shortened;
use crate::metrics::PeerWay;
use crate::sync::Mutex;

/// Peers that are shown, and faults that are remembered.
const MAX_SHOWN: usize = 64;

/// A worker's peers at a glance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeersState {
    /// The worker's own name.
    pub name: String,
    /// Where it serves others.
    pub address: SocketAddr,
    /// Peers that are known.
    pub known: usize,
    /// Up to 64 of them, those that are in use or failed before others. A worker that reads here
    /// may be one that is not known.
    pub peers: Vec<PeerState>,
}

/// What goes on with a peer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeerState {
    /// The peer's name.
    pub name: String,
    /// Where it serves others, if it is known.
    pub address: Option<String>,
    /// Connections to it, by the way that blocks come over them.
    pub links: BTreeMap<&'static str, usize>,
    /// Connections from it.
    pub readers: usize,
    /// Blocks that only it has and that are leased there.
    pub leased_in_blocks: usize,
    /// Blocks here that it has leased.
    pub leased_out_blocks: usize,
    /// Why it gave less than it should, the last time.
    pub fault: Option<PeerFaultState>,
}

/// Why a peer gave less than it should.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeerFaultState {
    /// When, in seconds since the manager was opened.
    pub at_s: f64,
    /// Why, for people.
    pub why: String,
}

/// What is open between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PeerUse {
    /// A connection to a peer, over which blocks come this way.
    Link(PeerWay),
    /// A connection from a peer.
    Reader,
    /// Blocks that are leased at a peer.
    LeasedIn,
    /// Blocks that a peer has leased.
    LeasedOut,
}

#[derive(Debug, Default)]
struct PeerEntry {
    open: BTreeMap<PeerUse, usize>,
    fault: Option<(Instant, String)>,
}

/// Entries by name.
pub(crate) struct PeerBook {
    name: String,
    address: SocketAddr,
    known: watch::Receiver<Arc<PeerList>>,
    entries: Mutex<BTreeMap<String, PeerEntry>>,
}

impl fmt::Debug for PeerBook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerBook").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Something that is open, until it is dropped.
pub(super) struct OpenAtPeer {
    book: Arc<PeerBook>,
    peer: String,
    what: PeerUse,
    count: usize,
}

impl PeerBook {
    pub(super) fn new(
        name: &str,
        address: SocketAddr,
        known: watch::Receiver<Arc<PeerList>>,
    ) -> Arc<Self> {
        let name = name.to_owned();
        Arc::new(Self { name, address, known, entries: Mutex::default() })
    }

    /// A connection, or leased blocks.
    pub(super) fn open(self: &Arc<Self>, peer: &str, what: PeerUse, count: usize) -> OpenAtPeer {
        let peer = shortened(peer);
        let mut entries = self.entries.lock();
        *entries.entry(peer.clone()).or_default().open.entry(what).or_default() += count;
        drop(entries);
        OpenAtPeer { book: Arc::clone(self), peer, what, count }
    }

    pub(super) fn failed(&self, peer: &str, why: &str) {
        let mut entries = self.entries.lock();
        entries.entry(shortened(peer)).or_default().fault = Some((clock::now(), shortened(why)));
        let faults = entries.values().filter_map(|entry| entry.fault.as_ref());
        if faults.clone().count() > MAX_SHOWN
            && let Some(oldest) = faults.map(|(at, _)| *at).min()
        {
            entries.retain(|_, entry| {
                entry.fault.take_if(|(at, _)| *at == oldest);
                entry.is_needed()
            });
        }
    }

    /// `opened`: when the manager was.
    pub(crate) fn state(&self, opened: Instant) -> PeersState {
        let known = self.known.borrow().clone();
        let entries = self.entries.lock();
        let in_use = entries.iter().map(|(name, entry)| entry.state(name, known.get(name), opened));
        let others = known
            .iter()
            .filter(|(name, _)| *name != self.name && !entries.contains_key(*name))
            .map(|(name, address)| PeerEntry::default().state(name, Some(address), opened));
        let peers = in_use.chain(others).take(MAX_SHOWN).collect();
        let known = known.iter().filter(|(name, _)| *name != self.name).count();
        PeersState { name: self.name.clone(), address: self.address, known, peers }
    }
}

impl PeerEntry {
    fn is_needed(&self) -> bool {
        self.fault.is_some() || !self.open.is_empty()
    }

    fn state(&self, name: &str, address: Option<&str>, opened: Instant) -> PeerState {
        let of = |what: PeerUse| self.open.get(&what).copied().unwrap_or_default();
        let link = |(what, count): (&PeerUse, &usize)| match what {
            PeerUse::Link(way) => Some((way.name(), *count)),
            _ => None,
        };
        PeerState {
            name: name.to_owned(),
            address: address.map(str::to_owned),
            links: self.open.iter().filter_map(link).collect(),
            readers: of(PeerUse::Reader),
            leased_in_blocks: of(PeerUse::LeasedIn),
            leased_out_blocks: of(PeerUse::LeasedOut),
            fault: self.fault.as_ref().map(|(at, why)| PeerFaultState {
                at_s: at.saturating_duration_since(opened).as_secs_f64(),
                why: why.clone(),
            }),
        }
    }
}

impl Drop for OpenAtPeer {
    fn drop(&mut self) {
        let mut entries = self.book.entries.lock();
        let Some(entry) = entries.get_mut(&self.peer) else { return };
        if let Some(open) = entry.open.get_mut(&self.what) {
            *open -= self.count;
        }
        entry.open.retain(|_, open| *open > 0);
        if !entry.is_needed() {
            entries.remove(&self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::discovery::PeerAddress;
    use super::*;

    #[test]
    fn the_book_has_what_is_open_and_the_last_faults() {
        let mut known = PeerList::default();
        for name in ["a", "b", "itself"] {
            known.insert(PeerAddress::new(name, format!("{name}:1")).unwrap());
        }
        let (list, known) = watch::channel(Arc::new(known));
        let book = PeerBook::new("itself", "127.0.0.1:1".parse().unwrap(), known);
        let opened = clock::now();
        let names = || {
            let peers = book.state(opened).peers.into_iter();
            peers.map(|peer| (peer.name, peer.address.is_some())).collect::<Vec<_>>()
        };
        let name = |name: &str, is_known| (name.to_owned(), is_known);
        let link = book.open("b", PeerUse::Link(PeerWay::Tcp), 1);
        let leased = book.open("b", PeerUse::LeasedIn, 7);
        let read = book.open("c", PeerUse::LeasedOut, 3);
        assert_eq!(names(), [name("b", true), name("c", false), name("a", true)]);
        let of_b = book.state(opened).peers.swap_remove(0);
        assert_eq!((of_b.links, of_b.leased_in_blocks), (BTreeMap::from([("tcp", 1)]), 7));
        drop((link, leased, read));
        assert_eq!(names(), [name("a", true), name("b", true)]);
        // Faults stay, the last ones; what is known of many is shown in part.
        (0..1_000).for_each(|n| book.failed(&format!("{n:03}"), "it is away"));
        assert_eq!(names().len(), MAX_SHOWN);
        assert!(book.entries.lock().len() <= MAX_SHOWN, "{}", book.entries.lock().len());
        assert_eq!(book.state(opened).peers.last().unwrap().name, "999");
        drop(list);
    }
}
