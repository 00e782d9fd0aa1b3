//! Takes blocks layer by layer while the holder's engine saves them.

use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvbm_tiers::PeerMemory;
use kvbm_tiers::checksum::RunningChecksum;
use kvbm_tiers::layers::bytes_of_layer;
use kvbm_tiers::sealed::HostSeal;
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, timeout, timeout_at};

use super::{NamedBlocks, Patience, PeerFault, PeerLink, READ_BYTES, Wanted};
use crate::api::filling::FillingSlots;
use crate::peers::nixl::{self, HolderReads, LayerBytes, ReadByNixl};
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
    pub(super) wait: Patience,
}

/// Slots into which layers come.
struct ArrivingLayers<'a, 'f> {
    filling: &'a mut FillingSlots<'f>,
    /// The first of the named blocks that is wanted.
    first: usize,
    /// By wanted block, the checksum of what has come of it.
    sums: Vec<u32>,
    /// They come by NIXL, unless that has failed.
    reads: Option<Arc<HolderReads>>,
    by_nixl: &'a mut ReadByNixl,
}

impl ArrivingLayers<'_, '_> {
    /// Has `write` write some bytes of a wanted block, and compares the checksum up to there.
    fn take(
        &mut self,
        at: usize,
        bytes: Range<usize>,
        expected: [u8; 4],
        write: impl FnOnce(&mut [u8], &mut RunningChecksum) -> bool,
    ) -> Result<(), PeerFault> {
        let Some(sum) = self.sums.get_mut(at) else { return Ok(()) };
        let (part, mut running) = (self.filling.part(at, bytes), RunningChecksum::after(*sum));
        let is_written = part.is_some_and(|part| write(part, &mut running));
        *sum = running.value();
        let is_right = is_written && *sum == u32::from_le_bytes(expected);
        if is_right { Ok(()) } else { Err(PeerFault::Wrong) }
    }
}

impl PeerLink {
    /// Whether blocks may come layer by layer: as they are.
    pub(super) fn takes_layers(&self, wanted: &Wanted<'_>) -> bool {
        !wanted.wait.left.is_zero()
            && wanted.group == 0
            && self.holder.ranks == 0
            && self.holder.groups.is_empty()
            && self.conversion.is_none()
            && !wanted.seal.is_some_and(HostSeal::is_of_memory)
            && (self.reads().is_some() || !self.needs_nixl)
    }

    /// Brings all layers of blocks into slots, as many as there are. None is kept before all layers
    /// of all of them have come, and have landed at the holder. `came`: what came by NIXL.
    pub(super) async fn bring_layers(
        &mut self,
        named: &NamedBlocks,
        layers: NamedLayers,
        filling: &mut FillingSlots<'_>,
        came: &mut ReadByNixl,
    ) -> Result<(), PeerFault> {
        let first = filling.kept().checked_sub(named.before).ok_or(PeerFault::Behind)?;
        if filling.left() == 0 {
            return Ok(());
        }
        let (sums, reads) = (vec![0; filling.left()], self.reads().cloned());
        if self.needs_nixl && self.memory.is_none() && reads.is_none() {
            return Err(PeerFault::nixl_is_gone());
        }
        let mut arriving = ArrivingLayers { filling, first, sums, reads, by_nixl: came };
        self.follow_layers(named, layers, Some(&mut arriving)).await?;
        let ArrivingLayers { filling, sums, reads, by_nixl, .. } = arriving;
        by_nixl.blocks += reads.map_or(0, |_| sums.len());
        sums.iter().for_each(|&sum| filling.keep_summed(sum));
        Ok(())
    }

    /// Waits until all layers have landed at the holder, as long as they come: something else brings
    /// them here.
    pub(in crate::peers) async fn await_layers(
        &mut self,
        named: &NamedBlocks,
    ) -> Result<(), PeerFault> {
        match named.layers {
            Some(layers) => self.follow_layers(named, layers, None).await,
            None => Ok(()),
        }
    }

    async fn follow_layers(
        &mut self,
        named: &NamedBlocks,
        layers: NamedLayers,
        mut arriving: Option<&mut ArrivingLayers<'_, '_>>,
    ) -> Result<(), PeerFault> {
        let (mut came, mut until) = (0, named.asked + layers.wait.left);
        loop {
            let wait = until.saturating_duration_since(Instant::now());
            let wants_bytes = self.memory.is_none()
                && arriving.as_ref().is_some_and(|arriving| arriving.reads.is_none());
            match self.ask_layers(named, came, wait, wants_bytes).await? {
                ToReader::Layers(LayersAnswer { count: 0, .. }) => {
                    if Instant::now() >= until {
                        return Err(PeerFault::Stalled);
                    }
                }
                ToReader::Layers(answer) => {
                    let is_sound = answer.count <= layers.count.get() - came
                        && answer.checksums.len() == usize::from(answer.count) * layers.blocks;
                    if !is_sound {
                        return Err(
                            BrokenLink::Unexpected("other layers than were asked for").into()
                        );
                    }
                    if let Some(arriving) = &mut arriving {
                        let taken = self.take_layers(named, layers, came, &answer, arriving);
                        match taken.await {
                            Ok(()) => {}
                            Err(PeerFault::Nixl(_))
                                if !self.needs_nixl && arriving.filling.lent() == 0 =>
                            {
                                // Over the connection then.
                                arriving.reads = None;
                                continue;
                            }
                            Err(PeerFault::Wrong) if !wants_bytes => {
                                return Err(self.why_wrong(named, came).await);
                            }
                            Err(fault) => return Err(fault),
                        }
                    }
                    (came, until) = (came + answer.count, Instant::now() + layers.wait.whole);
                }
                ToReader::Landed if came == layers.count.get() => return Ok(()),
                _ => return Err(BrokenLink::Unexpected("no answer to a request for layers").into()),
            }
        }
    }

    async fn ask_layers(
        &mut self,
        named: &NamedBlocks,
        first: u16,
        wait: Duration,
        wants_bytes: bool,
    ) -> Result<ToReader, PeerFault> {
        let wait_ms = wait.as_millis().min(MAX_WAIT_MS.into()) as u16;
        let request = ToHolder::Layers(LayersRequest { first, wait_ms, wants_bytes });
        let answer = timeout(named.ttl + wait, self.exchange(&request)).await;
        match answer.unwrap_or(Err(BrokenLink::Late))? {
            ToReader::Ended(why) => Err(PeerFault::Ended(why)),
            answer => Ok(answer),
        }
    }

    /// What was given up while it was copied is not what it was, and nothing is damaged: the holder
    /// knows.
    async fn why_wrong(&mut self, named: &NamedBlocks, came: u16) -> PeerFault {
        let answer = self.ask_layers(named, came, Duration::ZERO, false).await;
        answer.err().unwrap_or(PeerFault::Wrong)
    }

    /// Takes the layers of an answer, behind the `came` that have come.
    async fn take_layers(
        &mut self,
        named: &NamedBlocks,
        layers: NamedLayers,
        came: u16,
        answer: &LayersAnswer,
        arriving: &mut ArrivingLayers<'_, '_>,
    ) -> Result<(), PeerFault> {
        let block_bytes = arriving.filling.block_bytes();
        let bytes_of = |layer| bytes_of_layer(block_bytes, layer, layers.count);
        let mut by_layer =
            (came..layers.count.get()).zip(answer.checksums.chunks(layers.blocks.max(1)));
        let until = Instant::now() + named.ttl;
        if self.memory.is_none() && arriving.reads.is_none() {
            let receiving = async {
                let mut taken = Ok(());
                for (layer, checksums) in by_layer {
                    let came = self.receive_layer(bytes_of(layer), checksums, arriving).await?;
                    // The others are taken from the connection all the same.
                    taken = taken.and(came);
                }
                taken
            };
            return timeout_at(until, receiving).await.unwrap_or(Err(BrokenLink::Late.into()));
        }
        let Some((last, expected)) = by_layer.next_back() else { return Ok(()) };
        // The last checksum covers what came before.
        let bytes = bytes_of(came).start..bytes_of(last).end;
        let wanted = arriving.first..arriving.first + arriving.sums.len();
        let (Some(slots), Some(expected)) = (named.slots.get(wanted.clone()), expected.get(wanted))
        else {
            return Err(BrokenLink::Unexpected("it does not say where a block lies").into());
        };
        let layers = LayerBytes { bytes, slots, expected };
        match (&self.memory, arriving.reads.clone()) {
            (Some(memory), _) => {
                let copied = timeout_at(until, copy_layers(memory, layers, arriving)).await;
                copied.unwrap_or(Err(BrokenLink::Late.into()))
            }
            (None, Some(reads)) => {
                let ArrivingLayers { filling, sums, by_nixl, .. } = arriving;
                nixl::read_layers(&reads, layers, until, filling, sums, by_nixl).await
            }
            (None, None) => Ok(()),
        }
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
                if let Some(at) = block.checked_sub(arriving.first)
                    && taken.is_ok()
                {
                    taken = arriving.take(at, bytes.clone(), checksums[block], |part, sum| {
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

/// Copies layers from a neighbour's memory.
async fn copy_layers(
    memory: &PeerMemory,
    LayerBytes { bytes, slots, expected }: LayerBytes<'_>,
    arriving: &mut ArrivingLayers<'_, '_>,
) -> Result<(), PeerFault> {
    for part in parts(0..slots.len(), (READ_BYTES / bytes.len().max(1)).max(1)) {
        for at in part {
            arriving.take(at, bytes.clone(), expected[at], |part, sum| {
                memory.copy_part(slots[at], bytes.clone(), part, sum).is_ok()
            })?;
        }
        // Others have this thread too.
        tokio::task::yield_now().await;
    }
    Ok(())
}
