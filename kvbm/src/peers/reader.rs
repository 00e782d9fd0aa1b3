//! The reader's side: it leases at a peer what the tiers here lack, takes the blocks into slots of
//! the host tier (or of an engine: `straight`), and compares each with the checksum that came with
//! the lease.
//!
//! Nothing else writes these slots meanwhile, and no request sees them before they are verified. A
//! peer that sends damaged bytes, dies or does not answer costs a miss of what is missing, and time.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::{CopyError, Memory, Owner, Tier};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

use super::book::{OpenAtPeer, PeerBook, PeerUse};
use super::discovery::PeerList;
use super::greeting::Credentials;
use super::link::{NamedBlocks, Patience, PeerFault, PeerLink, Wanted};
use super::neighbour::Neighbours;
use super::nixl::{NixlHolders, ReadByNixl, ReadInto};
use super::protocol::{BrokenLink, LeaseEnd, ReadEnd};
use super::sealed::Intake;
use super::slices::{self, HostBytes, WantedSlices};
use super::{ChainNames, FollowRequest, sealed, spans};
use crate::api::filling::FillingSlots;
use crate::api::groups::{CheckpointGroups, NamedCheckpoint};
use crate::api::lease::Lease;
use crate::api::transfer::{Transfer, Transferred};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{CountedLease, PeerLeaseEnd, PeerMetrics, PeerWay};
use crate::names::epoch::EpochDigest;
use crate::names::hash::{BlockHash, Chain};
use crate::observe::requests::FromPeer;
use crate::scheduler::Core;
use crate::sync::Mutex;
use crate::table::{EpochNames, NamespaceId, RequestInfo};
use crate::task::Class;
use crate::traces::TraceParent;

/// Connections to a peer that wait for their next use, and how long they do.
pub(super) const MAX_WAITING: usize = 4;
pub(super) const MAX_WAIT: Duration = Duration::from_mins(1);

/// Reads what others hold.
pub(super) struct Reader {
    pub(super) core: Arc<Core>,
    pub(super) host: HostBytes,
    pub(super) credentials: Arc<Credentials>,
    pub(super) known: watch::Receiver<Arc<PeerList>>,
    /// By address.
    pub(super) waiting: Mutex<HashMap<String, Vec<WaitingLink>>>,
    /// `None`: their memory is not to be mapped.
    pub(super) neighbours: Option<Neighbours>,
    /// `None`: nothing comes by NIXL.
    pub(super) nixl: Option<NixlHolders>,
    /// How long it waits for an answer, at most.
    pub(super) limit: Duration,
    /// Threads that copy into an engine's slots, or have its GPU do so.
    pub(super) copy_threads: usize,
    pub(super) book: Arc<PeerBook>,
    pub(super) metrics: PeerMetrics,
    /// Which cache group's; 0: full attention's.
    pub(super) group: u8,
    /// Of the reader of full attention: checkpoints of the other groups, and their readers.
    pub(super) checkpoints: Arc<CheckpointGroups>,
    pub(super) others: Vec<Self>,
}

/// A connection that waits for its next use.
pub(super) struct WaitingLink {
    pub(super) link: PeerLink,
    pub(super) since: Instant,
}

/// The right to read the leading blocks of a chain at a peer, for a while. It ends when it is
/// dropped.
#[must_use = "dropping a lease ends it"]
pub struct PeerLease {
    /// Those of the reader that asked for it.
    of: Arc<Credentials>,
    pub(super) link: PeerLink,
    peer: String,
    address: String,
    pub(super) chain: Vec<BlockHash>,
    info: RequestInfo,
    /// What the blocks are blocks of.
    pub(super) namespace: NamespaceId,
    /// In blocks of the peer's.
    pub(super) named: NamedBlocks,
    /// Leading blocks that are here, and with those that the peer has.
    before: usize,
    blocks: usize,
    /// It was asked for then, or what it names was.
    pub(super) asked: Instant,
    counted: CountedLease,
    _open: OpenAtPeer,
}

impl fmt::Debug for PeerLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerLease")
            .field("peer", &self.peer)
            .field("blocks", &self.blocks())
            .finish_non_exhaustive()
    }
}

impl PeerLease {
    /// The peer that gave it.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Leading blocks of the chain that are here or at the peer.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Whether the peer has more of the chain, which it does not lease: what it leased to all reaches
    /// its `peers.lease_share`.
    pub const fn is_cut(&self) -> bool {
        self.named.is_cut
    }

    /// Why it is not of the whole chain, if it is not.
    fn shortage(&self) -> Option<&'static str> {
        match (self.blocks() < self.chain.len(), self.is_cut()) {
            (true, true) => Some("the peer has more, but peers.lease_share there leaves no room"),
            (true, false) => Some("the peer has no more"),
            (false, _) => None,
        }
    }

    /// The host at which the peer is reached.
    fn host(&self) -> &str {
        self.address.rsplit_once(':').map_or(&*self.address, |(host, _)| host)
    }

    /// How many of them only the peer has.
    pub const fn only_there(&self) -> usize {
        self.blocks - self.before
    }
}

/// How a load from a peer ended. Counts are in blocks.
#[derive(Debug)]
pub struct Pulled {
    /// Holds as much of the chain as the tiers have now.
    pub lease: Lease,
    /// Leading blocks of the chain that the host tier has now, of full attention: of a hybrid model,
    /// see [`Lease::usable`].
    pub blocks: usize,
    /// Brought from the peer by this load, of full attention.
    pub copied: usize,
    /// Why the others are missing, if it is not that they found no room.
    pub fault: Option<String>,
}

/// Gets a lease of what is in the host tier by now, after each part of a pull but the last. `None`:
/// it comes in one part.
pub(super) type OnPart<'a> = Option<&'a mut (dyn FnMut(Lease) + Send)>;

/// How a part of a pull ended.
pub(super) struct PulledPart {
    pub(super) held: Lease,
    /// Leading blocks of the chain that the host tier has now, or the engine.
    pub(super) blocks: usize,
    pub(super) copied: usize,
    pub(super) fault: Option<PeerFault>,
}

/// What came of a lease, which is still to be ended at its holder.
pub(super) struct PulledLease {
    pulled: Pulled,
    lease: PeerLease,
    fault: Option<PeerFault>,
}

impl Reader {
    /// Leases at a peer what the tiers here lack of a chain, behind the `held` leading blocks that an
    /// engine has. A peer that has nothing of that may wait for it, as long as is `left` of the
    /// request's patience.
    pub(super) async fn lease(
        &self,
        asked: FollowRequest,
        left: Duration,
        held: usize,
    ) -> Result<PeerLease> {
        let span = spans::of_lease(&asked.peer, &asked.info);
        let trace = TraceParent::of(&span);
        let leased = self.lease_traced(asked, left, held, trace);
        let leased = leased.instrument(span.clone()).await;
        spans::leased(&span, &leased);
        leased
    }

    async fn lease_traced(
        &self,
        FollowRequest { peer, chain, info, patience: whole }: FollowRequest,
        left: Duration,
        held: usize,
        trace: Option<TraceParent>,
    ) -> Result<PeerLease> {
        let (ChainNames { here: chain, there }, wait) = (chain, Patience { left, whole });
        let address = self.known.borrow().get(&peer).map(str::to_owned);
        let address = address.ok_or_else(|| Error::invalid(format!("no peer {peer} is known")))?;
        let before = self.bring_ours(&chain, info).await?.max(held);
        let (epoch, namespace, naming) = self.present();
        let (tenant, limit) = (info.hints.tenant, self.limit);
        let group = self.group;
        let seal = self.host.seal().map(|seal| &**seal);
        let there = there.as_ref();
        let block_tokens = self.credentials.member.fingerprint.block_tokens;
        let wanted = Wanted {
            chain: &chain,
            block_tokens,
            there,
            group,
            before,
            epoch,
            naming,
            tenant,
            wait,
            limit,
            trace,
            seal,
        };
        let mut counted = self.metrics.lease_in();
        match self.lease_at(&peer, &address, &wanted).await {
            Ok((link, named)) => {
                let of = Arc::clone(&self.credentials);
                let asked = named.asked;
                let blocks = link.whole_here(named.before + named.count());
                let blocks = blocks.clamp(before, chain.len().max(before));
                let open = self.book.open(&peer, PeerUse::LeasedIn, blocks - before);
                let lease = PeerLease {
                    of,
                    link,
                    peer,
                    address,
                    chain,
                    info,
                    namespace,
                    named,
                    before,
                    blocks,
                    asked,
                    counted,
                    _open: open,
                };
                self.note(&lease, 0, lease.shortage());
                Ok(lease)
            }
            Err(fault) => {
                counted.end = (&fault).into();
                self.note_refusal(&peer, &chain, &info, &fault);
                let message = format!("the peer {peer} ({address}) gives no lease: {fault}");
                // Leases of others end, so that it may be asked again.
                let is_full = matches!(fault, PeerFault::Ended(LeaseEnd::Busy));
                let kind = if is_full { ErrorKind::Full } else { ErrorKind::Unavailable };
                Err(Error::new(kind, message))
            }
        }
    }

    /// For people: a peer gave no lease.
    fn note_refusal(&self, peer: &str, chain: &[BlockHash], info: &RequestInfo, fault: &PeerFault) {
        let why = fault.to_string();
        self.book.failed(peer, &why);
        if let Some(request) = info.request {
            let peer = peer.to_owned();
            let (way, leased_blocks, copied_blocks, why) = (None, 0, 0, Some(why));
            let taken = FromPeer { peer, way, leased_blocks, copied_blocks, why };
            self.core.note_from_peer(request, Chain::from(chain), &taken);
        }
    }

    /// For people: what came of a lease, and that is all.
    fn note_pull(&self, lease: &PeerLease, here: usize, copied: usize, fault: Option<&PeerFault>) {
        let fault = fault.map(|fault| (fault.is_of_peer(), fault.to_string()));
        if let Some((true, why)) = &fault {
            self.book.failed(&lease.peer, why);
        }
        let no_room = (here < lease.blocks()).then_some("the host tier has no room for more");
        let fault = fault.as_ref().map(|(_, why)| &**why);
        self.note(lease, copied, fault.or(no_room).or_else(|| lease.shortage()));
    }

    /// For people: what a request has of a lease, if it has a name.
    fn note(&self, lease: &PeerLease, copied_blocks: usize, why: Option<&str>) {
        let Some(request) = lease.info.request else { return };
        let (peer, way) = (lease.peer.clone(), Some(lease.link.way().name()));
        let (leased_blocks, why) = (lease.only_there(), why.map(str::to_owned));
        let taken = FromPeer { peer, way, leased_blocks, copied_blocks, why };
        self.core.note_from_peer(request, Chain::from(&lease.chain), &taken);
    }

    /// The epoch here, what blocks are blocks of in it, and what they are called.
    fn present(&self) -> (EpochDigest, NamespaceId, EpochNames) {
        let table = self.core.table();
        (table.epoch_digest(), table.namespace(), table.epoch_names())
    }

    async fn lease_at(
        &self,
        peer: &str,
        address: &str,
        wanted: &Wanted<'_>,
    ) -> Result<(PeerLink, NamedBlocks), PeerFault> {
        if let Some(mut link) = self.waiting_link(address) {
            match self.lease_over(&mut link, wanted).await {
                // The peer has another process now, or ended the connection.
                Err(PeerFault::Link(BrokenLink::Closed(_))) => {
                    let gone = self.waiting.lock().remove(address);
                    drop(gone);
                }
                leased => return self.keep_refused(address, link, leased),
            }
        }
        let mut link = in_time(self.limit, self.connect(address)).await?;
        let leased = self.lease_over(&mut link, wanted).await;
        link.open = Some(self.book.open(peer, PeerUse::Link(link.way()), 1));
        self.keep_refused(address, link, leased)
    }

    async fn connect(&self, address: &str) -> Result<PeerLink, PeerFault> {
        let mut link = PeerLink::connect(address, &self.credentials).await?;
        if let Some(neighbours) = &self.neighbours {
            // Those of further groups are as they are here.
            let is_first = self.group == 0;
            let bytes = if is_first { link.holder.block_bytes } else { self.block_bytes() as u64 };
            link.memory = neighbours.memory_of(&link.holder, bytes).await;
        }
        Ok(link)
    }

    async fn lease_over(
        &self,
        link: &mut PeerLink,
        wanted: &Wanted<'_>,
    ) -> Result<NamedBlocks, PeerFault> {
        if let Some(nixl) = &self.nixl {
            let into = match link.conversion {
                Some(_) => ReadInto::Scratch,
                None => ReadInto::Slots,
            };
            nixl.equip(link, into).await?;
        }
        // Its time counts from here: the first contact by NIXL takes a while.
        in_time(self.limit + wanted.wait.left, link.lease(wanted)).await
    }

    /// A peer that answered that it gives no lease may give another.
    fn keep_refused(
        &self,
        address: &str,
        link: PeerLink,
        leased: Result<NamedBlocks, PeerFault>,
    ) -> Result<(PeerLink, NamedBlocks), PeerFault> {
        match leased {
            Ok(named) => Ok((link, named)),
            Err(fault) => {
                if matches!(fault, PeerFault::Ended(_)) {
                    self.keep(address, link);
                }
                Err(fault)
            }
        }
    }

    fn waiting_link(&self, address: &str) -> Option<PeerLink> {
        self.tidy();
        self.waiting.lock().get_mut(address)?.pop().map(|waiting| waiting.link)
    }

    pub(super) fn keep(&self, address: &str, link: PeerLink) {
        let known = self.known.borrow();
        let is_gone = |address: &String| !known.iter().any(|(_, known)| known == address);
        let mut waiting = self.waiting.lock();
        let gone: Vec<_> = waiting.extract_if(|address, _| is_gone(address)).collect();
        let links = waiting.entry(address.to_owned()).or_default();
        if links.len() < MAX_WAITING {
            links.push(WaitingLink { link, since: Instant::now() });
        }
        // With a link a mapping may end, or an agent of NIXL: others need not wait for that.
        drop(waiting);
        drop(gone);
    }

    /// Lets go of connections that were not used for long, and so of neighbours' memory.
    pub(super) fn tidy(&self) {
        self.others.iter().for_each(Self::tidy);
        let is_old = |waiting: &mut WaitingLink| waiting.since.elapsed() >= MAX_WAIT;
        let mut waiting = self.waiting.lock();
        let old = waiting.values_mut().flat_map(|links| links.extract_if(.., is_old));
        let old: Vec<_> = old.collect();
        waiting.retain(|_, links| !links.is_empty());
        drop(waiting);
        drop(old);
    }

    /// Lets go of all of them.
    pub(super) fn forget_links(&self) {
        self.others.iter().for_each(Self::forget_links);
        let links = std::mem::take(&mut *self.waiting.lock());
        drop(links);
    }

    /// Ends all agents of NIXL, so that their slots come back.
    pub(super) fn end_nixl(&self) {
        self.nixl.iter().for_each(NixlHolders::close);
        self.others.iter().for_each(Self::end_nixl);
    }

    /// Brings what a lease names into the host tier.
    pub(super) async fn pull(
        &self,
        lease: PeerLease,
        on_part: OnPart<'_>,
        cancelled: &CancellationToken,
    ) -> Result<Pulled> {
        let span = self.pull_span(&lease)?;
        // In its own place, or it would be in those of all that wait for it.
        let bringing = Box::pin(self.pull_in_parts(lease, on_part, cancelled));
        self.finish_pull(bringing, span, cancelled).await
    }

    /// # Errors
    /// `Invalid`: the lease is another manager's.
    pub(super) fn pull_span(&self, lease: &PeerLease) -> Result<Span> {
        if !Arc::ptr_eq(&lease.of, &self.credentials) {
            return Err(Error::invalid("the lease is of another manager's peer"));
        }
        Ok(spans::of_pull(&lease.peer, lease.link.way(), &lease.info))
    }

    /// Brings checkpoints after the blocks, and ends the lease.
    pub(super) async fn finish_pull(
        &self,
        bringing: impl Future<Output = Result<PulledLease>>,
        span: Span,
        cancelled: &CancellationToken,
    ) -> Result<Pulled> {
        let pulled = async {
            let PulledLease { mut pulled, lease, fault } = bringing.await?;
            if !self.checkpoints.is_empty() {
                self.pull_checkpoints(&mut pulled, &lease, cancelled).await?;
            }
            // The holder kept the checkpoints as long.
            self.release(lease, fault.as_ref()).await;
            Ok(pulled)
        };
        let pulled = pulled.instrument(span.clone()).await;
        spans::pulled(&span, &pulled);
        pulled
    }

    async fn pull_in_parts(
        &self,
        mut lease: PeerLease,
        mut on_part: OnPart<'_>,
        cancelled: &CancellationToken,
    ) -> Result<PulledLease> {
        let (blocks, started) = (lease.blocks(), Instant::now());
        // Layers come of all blocks together.
        let in_parts = on_part.is_some() && lease.named.layers.is_none();
        let most = if in_parts { self.part(lease.link.way()) } else { usize::MAX };
        let (mut until, mut copied) = (lease.before, 0);
        loop {
            until = until.saturating_add(most).min(blocks);
            let part = self.pull_part(&mut lease, until, cancelled).await?;
            copied += part.copied;
            if until == blocks || part.fault.is_some() || part.blocks < until {
                return Ok(self.pulled_lease(lease, PulledPart { copied, ..part }, started));
            }
            if let Some(on_part) = &mut on_part {
                on_part(part.held);
            }
        }
    }

    /// Counts what came of a lease.
    pub(super) fn pulled_lease(
        &self,
        mut lease: PeerLease,
        PulledPart { held, blocks, copied, fault }: PulledPart,
        started: Instant,
    ) -> PulledLease {
        self.metrics.pulled(lease.link.way(), started.elapsed());
        lease.counted.end = match &fault {
            Some(fault) => fault.into(),
            None if copied > 0 => PeerLeaseEnd::Whole,
            None => PeerLeaseEnd::GivenUp,
        };
        self.note_pull(&lease, blocks, copied, fault.as_ref());
        let why = fault.as_ref().map(ToString::to_string);
        PulledLease { pulled: Pulled { lease: held, blocks, copied, fault: why }, lease, fault }
    }

    /// What the tiers here have of a lease's chain.
    pub(super) fn lease_here(&self, lease: &PeerLease) -> Lease {
        self.core.lease(self.chain(&lease.chain), RequestInfo { has_asked: true, ..lease.info })
    }

    /// Blocks are there once those before them are, which others may bring. An error says why that
    /// is not waited for any longer. `link`: others bring all that the peer `named`.
    async fn await_others(
        &self,
        published: Transfer<Transferred>,
        link: Option<&mut PeerLink>,
        named: &NamedBlocks,
        cancelled: &CancellationToken,
    ) -> Result<Result<Transferred>, PeerFault> {
        let patience = async {
            if let Some(link) = link {
                // Layers take as long as the peer's engine does, and then they are here soon.
                let _ = link.await_layers(named).await;
            }
            sleep(self.limit).await;
        };
        tokio::select! {
            biased;
            told = published => Ok(told),
            () = cancelled.cancelled() => Err(PeerFault::Cancelled),
            () = patience => Err(PeerFault::Awaited),
        }
    }

    /// Brings the blocks up to `until`.
    async fn pull_part(
        &self,
        lease: &mut PeerLease,
        until: usize,
        cancelled: &CancellationToken,
    ) -> Result<PulledPart> {
        let chain = self.chain(&lease.chain).prefix(until);
        let mut filling = FillingSlots::take(&self.core, self.host.memory(), chain, lease.info)?;
        if filling.namespace() != Some(lease.namespace) {
            // A reset came since: what the peer has counts as old here.
            return Err(Error::stale());
        }
        let (before, began) = (filling.kept(), Instant::now());
        let mut by_nixl = ReadByNixl::default();
        let brought = if filling.left() > 0 && !self.are_removals_noted().await {
            Err(PeerFault::NoIndex)
        } else {
            let limit = lease.asked + lease.named.ttl;
            match &self.host {
                HostBytes::Here(..) => {
                    let (link, named) = (&mut lease.link, &lease.named);
                    match self.intake(chain, lease.namespace, lease.info, named).await {
                        Ok(intake) => {
                            let (filling, by_nixl) = (&mut filling, &mut by_nixl);
                            link.bring(named, limit, filling, intake, by_nixl, cancelled).await
                        }
                        Err(error) => Err(error.into()),
                    }
                }
                HostBytes::InRanks(leader) => {
                    let entered = self.entered(chain, lease.namespace, lease.info);
                    let (chain, owner) = entered.ok_or_else(Error::stale)?;
                    let conversion = lease.link.conversion.as_deref();
                    let block_tokens = lease.link.holder.fingerprint.block_tokens;
                    let named = &lease.named;
                    let wanted = WantedSlices { named, chain, owner, block_tokens, conversion };
                    let (host, bytes) = (lease.host(), self.block_bytes());
                    let brought = slices::bring(leader, host, &wanted, limit, &mut filling, bytes);
                    let brought = tokio::select! {
                        biased;
                        () = cancelled.cancelled() => Err(PeerFault::Cancelled),
                        brought = brought => brought,
                    };
                    let saturated = leader.upgrade().map_or(0, |leader| leader.take_saturated());
                    lease.link.saturated += saturated;
                    brought
                }
            }
        };
        if lease.link.way() == PeerWay::Tcp {
            // The holder saw what was asked for since, and renewed the lease.
            lease.asked = began;
        }
        let copied = filling.kept() - before;
        self.count(&mut lease.link, copied, by_nixl);
        if let Some(nixl) = &self.nixl {
            nixl.look_back(&mut lease.link, brought.as_ref().err()).await;
        }
        let published = filling.publish().ok_or_else(Error::closed)?;
        let of_others = (brought.is_ok() && copied == 0).then_some(&mut lease.link);
        match self.await_others(published, of_others, &lease.named, cancelled).await {
            Ok(told) => {
                let Transferred { lease: held, blocks, .. } = told?;
                Ok(PulledPart { held, blocks, copied, fault: brought.err() })
            }
            Err(why) => {
                let held = self.core.lease(chain, RequestInfo { has_asked: true, ..lease.info });
                let (blocks, fault) = (held.blocks(Tier::Host), brought.err().or(Some(why)));
                Ok(PulledPart { held, blocks, copied, fault })
            }
        }
    }

    /// How blocks become blocks of the host tier here, if they come sealed or are to lie sealed.
    async fn intake<'a>(
        &'a self,
        chain: Chain<'a>,
        namespace: NamespaceId,
        info: RequestInfo,
        named: &'a NamedBlocks,
    ) -> Result<Option<Intake<'a>>, CopyError> {
        let Some(seal) = self.host.seal() else { return Ok(None) };
        if named.seal.is_none() && !seal.is_of_memory() {
            return Ok(None);
        }
        let reset = || CopyError::refused("a reset came meanwhile");
        let (chain, owner) = self.entered(chain, namespace, info).ok_or_else(reset)?;
        sealed::prepare(seal, owner).await?;
        Ok(Some(Intake { seal, other: named.seal.as_ref(), chain, owner }))
    }

    /// A chain with the names that its blocks have now, and whose they will be. `None`: a reset came
    /// meanwhile.
    fn entered<'a>(
        &self,
        chain: Chain<'a>,
        namespace: NamespaceId,
        info: RequestInfo,
    ) -> Option<(Chain<'a>, Option<Owner>)> {
        let table = self.core.table();
        let is_present = table.namespace() == namespace;
        is_present.then(|| (table.enter(chain), table.present_owner(info.hints.tenant)))
    }

    /// Bytes of a block in one process.
    pub(super) fn block_bytes(&self) -> usize {
        let bytes = self.host.memory().map(|memory| memory.block_bytes());
        bytes.unwrap_or(self.credentials.member.block_bytes as usize).max(1)
    }

    pub(super) fn count(&self, link: &mut PeerLink, copied: usize, by_nixl: ReadByNixl) {
        self.metrics.saturated(std::mem::take(&mut link.saturated));
        let other = match link.way() {
            PeerWay::Nixl => PeerWay::Tcp,
            way => way,
        };
        let ways = [(PeerWay::Nixl, by_nixl.blocks), (other, copied - by_nixl.blocks)];
        for (way, blocks) in ways.into_iter().filter(|(_, blocks)| *blocks > 0) {
            self.metrics.received(way, blocks as u64);
        }
        self.metrics.read_by_nixl(by_nixl.descriptors as u64);
    }

    /// What a lower tier here has need not come from a peer. Returns how many leading blocks the
    /// host tier has then.
    ///
    /// Of a hybrid model, no more of it than all groups here can give back.
    async fn bring_ours(&self, chain: &[BlockHash], info: RequestInfo) -> Result<usize> {
        let (chain, info) = (self.chain(chain), RequestInfo { has_asked: true, ..info });
        let mut lease = self.checkpoints.lease_with(&self.core, chain, info);
        let checkpoints = lease.take_checkpoints();
        let usable = checkpoints.as_ref().map_or(usize::MAX, |groups| groups.blocks);
        if lease.blocks(Tier::Host) >= lease.held().longest() {
            return Ok(lease.blocks(Tier::Host).min(usable));
        }
        Ok(self.core.transfer(Class::Load, Tier::Host, lease).await?.blocks.min(usable))
    }

    fn chain<'a>(&self, hashes: &'a [BlockHash]) -> Chain<'a> {
        Chain::of_group(self.group, hashes)
    }

    fn other(&self, group: u8) -> Option<&Self> {
        self.others.get(usize::from(group).checked_sub(1)?)
    }

    /// Brings the checkpoints at the end of a lease that are not here, after the blocks that they
    /// hang on. Without all of them these blocks are there, and of no use at the end.
    async fn pull_checkpoints(
        &self,
        pulled: &mut Pulled,
        lease: &PeerLease,
        cancelled: &CancellationToken,
    ) -> Result<()> {
        // Of blocks that found no room there is nothing to go on from.
        let has_all = lease.only_there() > 0 && pulled.blocks >= lease.blocks();
        let wanted = self.checkpoints.checkpoints_at(&lease.chain, lease.blocks());
        for checkpoint in wanted.filter(|_| has_all) {
            if pulled.fault.is_none() {
                pulled.fault = self.pull_checkpoint(lease, &checkpoint, cancelled).await?;
            }
            self.checkpoints.let_go_orphan(&self.core, &checkpoint);
        }
        let info = RequestInfo { has_asked: true, ..lease.info };
        pulled.lease = self.checkpoints.lease_with(&self.core, Chain::from(&lease.chain), info);
        Ok(())
    }

    /// Each is a little chain in the table of its group: it has a lease of its own, over the
    /// connection of its group. Returns why it is not here then, if it is not.
    async fn pull_checkpoint(
        &self,
        lease: &PeerLease,
        checkpoint: &NamedCheckpoint,
        cancelled: &CancellationToken,
    ) -> Result<Option<String>> {
        let (group, names) = (self.other(checkpoint.group), &checkpoint.names);
        let Some(group) =
            group.filter(|group| group.core.matches(group.chain(names)).longest() < names.len())
        else {
            return Ok(None);
        };
        let info = RequestInfo { request: None, has_asked: true, ..lease.info };
        let (peer, chain, patience) = (lease.peer.clone(), names.into(), Duration::ZERO);
        let asked = FollowRequest { peer, chain, info, patience };
        let leasing = group.lease_traced(asked, Duration::ZERO, 0, None);
        let leased = tokio::select! {
            biased;
            () = cancelled.cancelled() => return Ok(Some(PeerFault::Cancelled.to_string())),
            leased = leasing => leased,
        };
        let leased = match leased {
            Ok(leased) => leased,
            Err(why) => return Ok(Some(format!("a checkpoint of another cache group: {why}"))),
        };
        let part = Box::pin(group.pull(leased, None, cancelled)).await?;
        let missing = || "a checkpoint of another cache group is missing".to_owned();
        let is_whole = part.blocks == names.len();
        Ok(part.fault.or_else(|| (!is_whole).then(missing)))
    }

    /// As for a backend that writes a slot: see `Journal::after_removals`.
    async fn are_removals_noted(&self) -> bool {
        let (told, noted) = oneshot::channel();
        self.core.after_removals(Tier::Host, move || _ = told.send(()));
        timeout(self.limit, noted).await.is_ok_and(|noted| noted.is_ok())
    }

    /// Ends a lease at its holder, which hears how. The connection waits for its next use unless
    /// something of this one may be left in it.
    pub(super) async fn release(&self, lease: PeerLease, fault: Option<&PeerFault>) {
        let PeerLease { mut link, address, .. } = lease;
        if link.is_asked {
            return;
        }
        let end = match fault {
            None => ReadEnd::Whole,
            Some(fault) if fault.is_wrong() => ReadEnd::Wrong,
            // Nothing of the blocks of ranks is in the connection of their leaders.
            Some(
                PeerFault::Behind
                | PeerFault::NoIndex
                | PeerFault::Awaited
                | PeerFault::Stalled
                | PeerFault::Ended(LeaseEnd::Unfinished)
                | PeerFault::Ranks(_)
                | PeerFault::Seal(_)
                | PeerFault::Gpu(_)
                | PeerFault::Stuck,
            ) => ReadEnd::GivenUp,
            Some(PeerFault::Cancelled) if link.memory.is_some() => ReadEnd::GivenUp,
            Some(_) => return,
        };
        if timeout(self.limit, link.release(end)).await.is_ok_and(|sent| sent.is_ok()) {
            self.keep(&address, link);
        }
    }
}

/// What a peer does not do in time it does not do.
async fn in_time<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, PeerFault>>,
) -> Result<T, PeerFault> {
    timeout(limit, work).await.unwrap_or(Err(BrokenLink::Late.into()))
}
