//! Blocks that are leased while an engine here saves them layer by layer.
//!
//! Nothing pins their slots before they have landed, and nothing needs to: what was given up in
//! between is not what its checksums say. The reader hears whether the blocks have landed, and
//! publishes none of its own before that.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvbm_policies::Hints;
use kvbm_tiers::Tier;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::Span;

use super::{HeldLease, Holder, LENT, Leased, Session, next};
use crate::api::allocation::LentSlot;
use crate::api::layers::LayeredBlocks;
use crate::metrics::PeerLeaseEnd;
use crate::peers::book::PeerUse;
use crate::peers::parts;
use crate::peers::protocol::{
    BrokenLink, LayersAnswer, LayersRequest, LeaseEnd, LeaseRequest, MAX_BLOCKS, Probe, SlotRun,
    ToReader, send,
};
use crate::table::RequestInfo;

/// What follows an answer of several layers. A whole layer comes in one, whatever it has.
const ANSWER_BYTES: usize = 4 << 20;
/// What is gathered before it is sent.
const GATHERED_BYTES: usize = 256 << 10;

impl Holder {
    /// What is being saved of a chain that is asked for, if the reader takes layers, and how many
    /// leading blocks of the chain that is.
    pub(super) fn in_layers(&self, request: &LeaseRequest) -> Option<(Arc<LayeredBlocks>, usize)> {
        let is_here = self.host.memory().is_some() && self.host.sealed().is_none();
        if !request.form.takes_layers || self.group > 0 || !is_here || !self.checkpoints.is_empty()
        {
            return None;
        }
        let namespace = {
            let table = self.core.table();
            (table.epoch_digest() == request.epoch).then(|| table.namespace())?
        };
        let held = request.held as usize;
        self.core.layered_saves().find(|saved| {
            let is_of = |probe: &&Probe| {
                let blocks = probe.blocks as usize;
                blocks > held && saved.chain.get(blocks - 1) == Some(&probe.last())
            };
            let longest = request.probes.iter().rev().find(is_of)?;
            let follows = saved.namespace == namespace && saved.before <= held;
            follows.then_some(longest.blocks as usize)
        })
    }

    /// Leases the first `blocks` blocks of a chain, of which the reader has all that are not being
    /// saved.
    pub(super) fn lease_layers(
        &self,
        reader: &str,
        saved: Arc<LayeredBlocks>,
        blocks: usize,
        request: &LeaseRequest,
    ) -> Leased {
        let share = Arc::new(self.leased.take(blocks));
        let named = request.held as usize..share.blocks;
        if named.is_empty() {
            return self.refusal(LeaseEnd::Busy);
        }
        let is_cut = share.blocks < blocks;
        let mut answer = self.answer(named.end, &[], request, is_cut);
        answer.layers = saved.slots.layers().get();
        if request.form.wants_slots {
            let slots = saved.slots.slot_ids();
            let Some(slots) = slots.get(behind(&saved, &named)) else {
                // It has ended just now.
                return self.nothing(request);
            };
            answer.slots = SlotRun::all(slots.iter().copied());
        }
        if is_cut {
            self.metrics.cut();
        }
        let chain = saved.chain[..named.end].to_vec();
        let open = self.book.open(reader, PeerUse::LeasedOut, share.blocks);
        let hints = Hints { tenant: request.tenant, ..Hints::default() };
        let info = RequestInfo { hints, has_asked: true, ..RequestInfo::default() };
        let held = HeldLease {
            group: self.group,
            lease: self.core.lease(self.chain(&chain), info),
            _checkpoints: None,
            chain,
            named,
            until: Instant::now() + self.ttl,
            layers: Some(saved),
            sent: 0,
            counted: self.metrics.lease_out(),
            _taken: (vec![share], open),
            span: Span::current(),
        };
        (ToReader::Leased(answer), Some(held))
    }

    /// Waits until there is anything to tell to a reader that has `layers` layers.
    async fn until_news(&self, saved: &LayeredBlocks, layers: u16, limit: Duration) {
        let _ = timeout(limit, self.core.until_landed(|| saved.has_news(layers))).await;
    }
}

/// Which of the blocks that are saved these are.
fn behind(saved: &LayeredBlocks, named: &Range<usize>) -> Range<usize> {
    named.start - saved.before..named.end - saved.before
}

impl<S: AsyncRead + AsyncWrite + Unpin> Session<'_, S> {
    /// Gives the next layers of what is leased, once there are any, or says how it ended.
    pub(super) async fn layers(&mut self, request: LayersRequest) -> Result<(), BrokenLink> {
        let Some(saved) = self.held.as_ref().and_then(|held| held.layers.clone()) else {
            return self.send(&ToReader::Ended(LeaseEnd::Expired)).await;
        };
        let all = saved.slots.layers().get();
        if request.first > all {
            return Err(BrokenLink::Unexpected("it asks for layers that there are not"));
        }
        let limit = Duration::from_millis(request.wait_ms.into()).min(self.holder.ttl);
        tokio::select! {
            biased;
            () = self.holder.until_news(&saved, request.first, limit) => {}
            said = next(&mut self.link) => {
                // It is gone, or takes no answer.
                said?;
                return Err(BrokenLink::Unexpected("it asks again before it is answered"));
            }
        }
        let Some(held) = &mut self.held else { return Ok(()) };
        // A reader that asks keeps its lease.
        held.until = Instant::now() + self.holder.ttl;
        if !self.holder.core.table().is_present(held.lease.pins()) {
            return self.end_void(true).await;
        }
        let (until, left) = (held.until, saved.slots.written().saturating_sub(request.first));
        match saved.is_published() {
            Some(false) => {
                if let Some(held) = self.held.take() {
                    held.end(PeerLeaseEnd::Void);
                }
                return self.send(&ToReader::Ended(LeaseEnd::Unfinished)).await;
            }
            // Blocks before them may still be on their way here.
            Some(true) if self.until_resident(limit).await && request.first == all => {
                return self.send(&ToReader::Landed).await;
            }
            _ => {}
        }
        let sent = timeout_at(until, self.send_layers(&saved, request, left)).await;
        sent.unwrap_or(Err(BrokenLink::Late))
    }

    /// Waits until the blocks have landed: then they are leased as any others.
    async fn until_resident(&mut self, limit: Duration) -> bool {
        let core = &self.holder.core;
        let is_resident = |held: &HeldLease| {
            core.matches(self.holder.chain(&held.chain)).blocks(Tier::Host) >= held.named.end
        };
        if let Some(held) = &self.held {
            let _ = timeout(limit, core.until_landed(|| is_resident(held))).await;
        }
        self.lease_landed()
    }

    /// Leases the blocks as any others, if they have landed.
    fn lease_landed(&mut self) -> bool {
        let Some(held) = &mut self.held else { return false };
        if held.lease.blocks(Tier::Host) < held.named.end {
            let info = RequestInfo { has_asked: true, ..held.lease.pins().context().info };
            held.lease = self.holder.core.lease(self.holder.chain(&held.chain), info);
        }
        held.lease.blocks(Tier::Host) >= held.named.end
    }

    /// Sends some of `left` layers.
    async fn send_layers(
        &mut self,
        saved: &LayeredBlocks,
        LayersRequest { first, wants_bytes, .. }: LayersRequest,
        left: u16,
    ) -> Result<(), BrokenLink> {
        let Some(held) = &self.held else { return Ok(()) };
        let (named, blocks) = (held.named.clone(), behind(saved, &held.named));
        let layer_bytes = saved.slots.bytes_of(0).len() * blocks.len();
        let most = if wants_bytes { ANSWER_BYTES / layer_bytes.max(1) } else { usize::MAX };
        let most = most.min(MAX_BLOCKS as usize / blocks.len());
        let count = usize::from(left).min(most.max(1)) as u16;
        let layers = first..first + count;
        let sums = layers.clone().flat_map(|layer| saved.slots.checksums(layer, blocks.clone()));
        let checksums = sums.map(u32::to_le_bytes).collect();
        send(self.link.get_mut(), &ToReader::Layers(LayersAnswer { count, checksums })).await?;
        let mut gathered = Vec::new();
        for layer in layers.clone().filter(|_| wants_bytes) {
            for part in parts(named.clone(), LENT) {
                if !saved.slots.read(layer, behind(saved, &part), &mut gathered)
                    && !self.read_landed(saved, layer, part, &mut gathered).await
                {
                    return self.end_void(false).await;
                }
                if gathered.len() >= GATHERED_BYTES {
                    self.link.get_mut().write_all(&gathered).await?;
                    gathered.clear();
                }
            }
        }
        self.link.get_mut().write_all(&gathered).await?;
        if wants_bytes && count > 0 && layers.end == saved.slots.layers().get() {
            self.holder.metrics.sent(named.len() as u64);
            self.held.iter_mut().for_each(|held| held.sent += named.len());
        }
        Ok(self.link.get_mut().flush().await?)
    }

    /// [`LayeredSlots::read`](kvbm_tiers::LayeredSlots::read), of blocks whose slots the engine has
    /// given back since: it waits until they have landed.
    async fn read_landed(
        &mut self,
        saved: &LayeredBlocks,
        layer: u16,
        blocks: Range<usize>,
        to: &mut Vec<u8>,
    ) -> bool {
        self.holder.core.until_landed(|| saved.is_published().is_some()).await;
        if saved.is_published() != Some(true) || !self.lease_landed() {
            return false;
        }
        let (Holder { core, host, .. }, Some(held)) = (self.holder, &self.held) else {
            return false;
        };
        let chain = self.holder.chain(&held.chain);
        let lent = LentSlot::leading(core, Tier::Host, &held.lease, chain, blocks.clone());
        let bytes = saved.slots.bytes_of(layer);
        let read = lent.loans().iter().map_while(|loan| {
            let block = host.memory()?.read_loan(loan)?;
            to.extend_from_slice(block.get(bytes.clone())?);
            Some(())
        });
        read.count() == blocks.len()
    }
}
