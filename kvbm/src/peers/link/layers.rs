//! Takes blocks layer by layer while the holder's engine saves them.

use std::num::NonZeroU16;
use std::ops::Range;
use std::time::Duration;

use kvbm_tiers::checksum::RunningChecksum;
use kvbm_tiers::layers::bytes_of_layer;
use kvbm_tiers::sealed::HostSeal;
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, timeout};

use super::{NamedBlocks, PeerFault, PeerLink, Wanted};
use crate::api::filling::FillingSlots;
use crate::peers::parts;
use crate::peers::protocol::{
    BrokenLink, LayersAnswer, LayersRequest, MAX_WAIT_MS, ToHolder, ToReader,
};

/// What is taken from the connection at a time: it is in the caches when it is copied and summed.
const BUFFER_BYTES: usize = 256 << 10;

/// Blocks that come layer by layer. Their checksums come with the layers.
#[derive(Clone, Copy, Debug)]
pub(in crate::peers) struct NamedLayers {
    pub(super) count: NonZeroU16,
    pub(super) blocks: usize,
    /// How long the next layer is waited for.
    pub(super) wait: Duration,
}

/// Slots into which layers come.
struct ArrivingLayers<'a, 'f> {
    filling: &'a mut FillingSlots<'f>,
    /// The first of the named blocks that is wanted.
    first: usize,
    /// By wanted block, the checksum of what has come of it.
    sums: Vec<u32>,
}

impl ArrivingLayers<'_, '_> {
    /// Has `write` write some bytes of a named block, and compares the checksum up to there.
    fn take(
        &mut self,
        block: usize,
        bytes: Range<usize>,
        expected: [u8; 4],
        write: impl FnOnce(&mut [u8], &mut RunningChecksum) -> bool,
    ) -> Result<(), PeerFault> {
        let at = block.checked_sub(self.first);
        let Some((at, sum)) = at.and_then(|at| Some((at, self.sums.get_mut(at)?))) else {
            return Ok(());
        };
        let (part, mut running) = (self.filling.part(at, bytes), RunningChecksum::after(*sum));
        let is_written = part.is_some_and(|part| write(part, &mut running));
        *sum = running.value();
        let is_right = is_written && *sum == u32::from_le_bytes(expected);
        if is_right { Ok(()) } else { Err(PeerFault::Wrong) }
    }
}

impl PeerLink {
    /// Whether blocks may come layer by layer: as they are, and not by NIXL, which reads whole ones.
    pub(super) fn takes_layers(&self, wanted: &Wanted<'_>) -> bool {
        !wanted.wait.is_zero()
            && wanted.group == 0
            && self.holder.ranks == 0
            && self.holder.groups.is_empty()
            && self.conversion.is_none()
            && !wanted.seal.is_some_and(HostSeal::is_of_memory)
            && self.reads().is_none()
            && !self.needs_nixl
    }

    /// Brings all layers of blocks into slots, as many as there are. None is kept before all layers
    /// of all of them have come, and have landed at the holder.
    pub(super) async fn bring_layers(
        &mut self,
        named: &NamedBlocks,
        layers: NamedLayers,
        filling: &mut FillingSlots<'_>,
    ) -> Result<(), PeerFault> {
        let first = filling.kept().checked_sub(named.before).ok_or(PeerFault::Behind)?;
        if filling.left() == 0 {
            return Ok(());
        }
        let sums = vec![0; filling.left()];
        let arriving = &mut ArrivingLayers { filling, first, sums };
        let (mut came, mut since) = (0, Instant::now());
        loop {
            let wait = layers.wait.saturating_sub(since.elapsed());
            let wait_ms = wait.as_millis().min(MAX_WAIT_MS.into()) as u16;
            let request =
                LayersRequest { first: came, wait_ms, wants_bytes: self.memory.is_none() };
            let request = ToHolder::Layers(request);
            let answer = timeout(named.ttl + wait, self.exchange(&request)).await;
            match answer.unwrap_or(Err(BrokenLink::Late))? {
                ToReader::Layers(LayersAnswer { count: 0, .. }) => {
                    if since.elapsed() >= layers.wait {
                        return Err(PeerFault::Stalled);
                    }
                }
                ToReader::Layers(answer) => {
                    let taking = self.take_layers(named, (layers, came), &answer, arriving);
                    let taken = timeout(named.ttl, taking).await;
                    taken.unwrap_or(Err(BrokenLink::Late.into()))?;
                    (came, since) = (came + answer.count, Instant::now());
                }
                ToReader::Landed if came == layers.count.get() => break,
                ToReader::Ended(why) => return Err(PeerFault::Ended(why)),
                _ => return Err(BrokenLink::Unexpected("no answer to a request for layers").into()),
            }
        }
        let ArrivingLayers { filling, sums, .. } = arriving;
        sums.iter().for_each(|&sum| filling.keep_summed(sum));
        Ok(())
    }

    /// Takes the layers of an answer, behind the `came` that have come.
    async fn take_layers(
        &mut self,
        named: &NamedBlocks,
        (layers, came): (NamedLayers, u16),
        answer: &LayersAnswer,
        arriving: &mut ArrivingLayers<'_, '_>,
    ) -> Result<(), PeerFault> {
        let is_sound = usize::from(answer.count) <= usize::from(layers.count.get() - came)
            && answer.checksums.len() == usize::from(answer.count) * layers.blocks;
        if !is_sound {
            return Err(BrokenLink::Unexpected("other layers than were asked for").into());
        }
        let block_bytes = arriving.filling.block_bytes();
        let mut taken = Ok(());
        for (layer, checksums) in (came..).zip(answer.checksums.chunks(layers.blocks.max(1))) {
            let bytes = bytes_of_layer(block_bytes, layer, layers.count);
            if self.memory.is_some() {
                self.copy_layer(named, bytes, checksums, arriving)?;
                // Others have this thread too.
                tokio::task::yield_now().await;
            } else {
                let came = self.receive_layer(bytes, checksums, arriving).await?;
                // The others are taken from the connection all the same.
                taken = taken.and(came);
            }
        }
        taken
    }

    /// Copies a layer from a neighbour's memory.
    fn copy_layer(
        &self,
        named: &NamedBlocks,
        bytes: Range<usize>,
        checksums: &[[u8; 4]],
        arriving: &mut ArrivingLayers<'_, '_>,
    ) -> Result<(), PeerFault> {
        let memory = self.memory.as_ref().ok_or(PeerFault::Wrong)?;
        for (block, &expected) in checksums.iter().enumerate() {
            let &slot = named.slots.get(block).ok_or(PeerFault::Wrong)?;
            arriving.take(block, bytes.clone(), expected, |part, sum| {
                memory.copy_part(slot, bytes.clone(), part, sum).is_ok()
            })?;
        }
        Ok(())
    }

    /// Takes a layer from the connection: all of it, whether it is right or not.
    async fn receive_layer(
        &mut self,
        bytes: Range<usize>,
        checksums: &[[u8; 4]],
        arriving: &mut ArrivingLayers<'_, '_>,
    ) -> Result<Result<(), PeerFault>, BrokenLink> {
        let (mut taken, mut buffer) = (Ok(()), Vec::new());
        let most = (BUFFER_BYTES / bytes.len().max(1)).max(1);
        for part in parts(0..checksums.len(), most) {
            buffer.resize(part.len() * bytes.len(), 0);
            self.stream.read_exact(&mut buffer).await?;
            for (block, came) in part.zip(buffer.chunks(bytes.len().max(1))) {
                if taken.is_ok() {
                    taken = arriving.take(block, bytes.clone(), checksums[block], |part, sum| {
                        part.copy_from_slice(came);
                        sum.add(came);
                        true
                    });
                }
            }
        }
        Ok(taken)
    }
}
