//! Blocks that are saved layer by layer while they are computed. A peer that follows reads each layer
//! once it is written; here, as there, a block is resident when it is whole.
//! docs/adr/0012-layers-that-travel.md says why.

use std::fmt;
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use kvbm_tiers::{DeviceRegion, DramRegion, LayerWriter, LayeredSlots, SlotId, Tier};

use crate::api::filling::FillingSlots;
use crate::api::groups::SaveRequest;
use crate::api::lease::Lease;
use crate::api::manager::Manager;
use crate::api::transfer::{Transfer, Transferred};
use crate::error::{Error, Result};
use crate::names::hash::{BlockHash, Chain};
use crate::scheduler::Core;
use crate::sync::Mutex;
use crate::table::{NamespaceId, RequestInfo, Reserved};

/// Blocks of a chain that an engine writes layer by layer into the slots of the host tier: see
/// [`Blocks::put_in_layers`](crate::blocking::Blocks::put_in_layers). Dropping it gives them up.
#[must_use = "dropping it gives its blocks up"]
pub struct LayeredPut {
    core: Arc<Core>,
    /// Positions of the blocks.
    blocks: Range<usize>,
    /// `None`: nothing is to be written, or it has ended.
    writing: Option<Writing>,
}

struct Writing {
    writer: LayerWriter,
    blocks: Arc<LayeredBlocks>,
    /// The writer has their frames.
    slots: (Reserved, Lease),
}

impl fmt::Debug for LayeredPut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayeredPut").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

impl LayeredPut {
    /// Takes the slots.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::ErrorKind::Stale): a reset came in between.
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable): blocks before `first` would have
    /// to be written.
    pub(crate) fn begin(
        core: &Arc<Core>,
        memory: &Arc<DramRegion>,
        chain: Chain<'_>,
        first: usize,
        info: RequestInfo,
        layers: NonZeroU16,
    ) -> Result<Self> {
        let filling = FillingSlots::take(core, memory, chain, info)?;
        let blocks = filling.kept()..filling.kept() + filling.left();
        if blocks.start < first && !blocks.is_empty() {
            let message = format!(
                "block {} is not in the host tier: save a chain from its root",
                blocks.start
            );
            return Err(Error::unavailable(message));
        }
        let mut put = Self { core: Arc::clone(core), blocks, writing: None };
        // As for a backend that writes a slot: see `Journal::after_removals`.
        if !put.blocks.is_empty() && core.removals_are_noted(Tier::Host) {
            put.writing = put.open(filling, memory, chain, layers);
        }
        match &put.writing {
            Some(Writing { blocks, .. }) => {
                core.layered_saves().add(blocks);
                core.wake_followers();
            }
            None => put.blocks.end = put.blocks.start,
        }
        Ok(put)
    }

    fn open(
        &self,
        mut filling: FillingSlots<'_>,
        memory: &Arc<DramRegion>,
        chain: Chain<'_>,
        layers: NonZeroU16,
    ) -> Option<Writing> {
        let namespace = filling.namespace()?;
        let writer = LayerWriter::new(Arc::clone(memory), filling.take_frames(), layers);
        let writer = writer.map_err(|frames| filling.return_frames(frames)).ok()?;
        let blocks = LayeredBlocks {
            chain: chain.hashes[..self.blocks.end].to_vec(),
            before: self.blocks.start,
            namespace,
            slots: Arc::clone(writer.slots()),
            is_published: OnceLock::new(),
        };
        Some(Writing { writer, blocks: Arc::new(blocks), slots: filling.into_slots()? })
    }

    /// Positions in the chain of the blocks to write: those that the host tier has or awaits are
    /// before them, and those for which it has no room behind. None: there is nothing to write.
    pub fn blocks(&self) -> Range<usize> {
        self.blocks.clone()
    }

    /// Has `fill` write the next layer of each block, by its position in the chain: all bytes of
    /// the layer, which have any content before. From then on peers may read it.
    ///
    /// # Errors
    /// Those of `fill`: write the layer again, or drop this. [`ErrorKind::Invalid`](crate::ErrorKind::Invalid)
    /// if all layers are written.
    pub fn write<E: From<Error>>(
        &mut self,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let first = self.blocks.start;
        let Some(Writing { writer, .. }) = &mut self.writing else { return Ok(()) };
        if !writer.write(|block, part| fill(first + block, part))? {
            return Err(Error::invalid("all layers of these blocks are written").into());
        }
        self.core.wake_followers();
        Ok(())
    }

    /// Makes the blocks resident. Returns how many leading blocks of the chain are kept, as
    /// [`Blocks::put`](crate::blocking::Blocks::put) does.
    ///
    /// # Errors
    /// Nothing is kept of these blocks then. [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): not
    /// all layers are written. [`ErrorKind::Closed`](crate::ErrorKind::Closed),
    /// [`ErrorKind::Stale`](crate::ErrorKind::Stale): the manager was closed, or reset, meanwhile.
    pub fn finish(mut self) -> Result<usize> {
        let Some(writing) = self.writing.take() else { return Ok(self.blocks.end) };
        let (blocks, is_whole) = (Arc::clone(&writing.blocks), writing.writer.is_whole());
        let (written, layers) = (blocks.slots.written(), blocks.slots.layers());
        let mut published = writing.publish(&self.core, is_whole);
        // No wait for what others bring before it.
        let failed = published.as_mut().and_then(Transfer::try_take).and_then(Result::err);
        let is_open = !self.core.is_closed();
        blocks.end(is_whole && failed.is_none() && is_open);
        self.core.wake_followers();
        match failed {
            _ if !is_whole => {
                let message = format!("{written} of {layers} layers are written: write all");
                Err(Error::invalid(message))
            }
            Some(error) => Err(error),
            None if !is_open => Err(Error::closed()),
            None => {
                self.core.metrics().saved_in_layers(self.blocks.len());
                Ok(self.blocks.end)
            }
        }
    }
}

impl Drop for LayeredPut {
    fn drop(&mut self) {
        if let Some(writing) = self.writing.take() {
            drop(writing.publish(&self.core, false));
            self.core.wake_followers();
        }
    }
}

impl Writing {
    /// Makes the blocks resident, if they are whole, or gives their slots back.
    fn publish(self, core: &Arc<Core>, is_whole: bool) -> Option<Transfer<Transferred>> {
        let (reserved, lease) = self.slots;
        let mut filling = FillingSlots::go_on(core, reserved, lease);
        filling.return_frames(self.writer.finish());
        if is_whole {
            filling.keep_all();
        } else {
            // Before others have the slots: who finds their bytes there learns why.
            self.blocks.end(false);
        }
        filling.publish()
    }
}

/// A save from an engine's slots, layer by layer: see [`Manager::save_in_layers`]. Dropping it gives
/// its blocks up.
#[must_use = "dropping it gives its blocks up"]
#[derive(Debug)]
pub struct LayeredSave {
    put: LayeredPut,
    memory: Arc<DeviceRegion>,
    /// Of the blocks to write.
    slots: Vec<SlotId>,
    layers: NonZeroU16,
    next: u16,
}

impl LayeredSave {
    /// Positions in the chain of the blocks that are copied, as of [`LayeredPut::blocks`].
    pub fn blocks(&self) -> Range<usize> {
        self.put.blocks()
    }

    /// The engine has written the next layer to its slots: copies it, on this thread. The layer must
    /// not change until this returns.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): all layers are copied.
    pub fn layer_is_ready(&mut self) -> Result<()> {
        if self.blocks().is_empty() {
            return Ok(());
        }
        let block_bytes = self.memory.segments().block_bytes();
        let bytes = kvbm_tiers::layers::bytes_of_layer(block_bytes, self.next, self.layers);
        let (memory, slots, first) = (&self.memory, &self.slots, self.put.blocks.start);
        self.put.write(|position, part| {
            let slot = slots[position - first];
            let is_copied = memory.copy_part(slot, bytes.clone(), part);
            is_copied.then_some(()).ok_or_else(|| {
                Error::unavailable(format!("slot {} of the engine cannot be read", slot.0))
            })
        })?;
        self.next += 1;
        Ok(())
    }

    /// Makes the blocks resident, as [`LayeredPut::finish`] does.
    ///
    /// # Errors
    /// Those of [`LayeredPut::finish`].
    pub fn finish(self) -> Result<usize> {
        self.put.finish()
    }
}

impl Manager {
    /// [`save_from`](Self::save_from), of blocks that are being computed: the engine says of each
    /// layer when it [is ready](LayeredSave::layer_is_ready), and peers that follow read it then.
    /// The engine's thread copies. `save.ready` and `save.is_end` mean nothing here.
    ///
    /// # Errors
    /// Nothing is begun then: use [`save_from`](Self::save_from).
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): the engine's memory is not in this process
    /// or on a GPU, the model has several cache groups, there is no host tier or it is encrypted, or
    /// what `save` names makes no sense. [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable):
    /// the blocks before its slots are neither in the host tier nor on their way.
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed), [`ErrorKind::Stale`](crate::ErrorKind::Stale).
    pub fn save_in_layers(&self, save: &SaveRequest<'_>) -> Result<LayeredSave> {
        let (engine, given) = (self.engine()?, self.checkpoints().check_plain(save)?);
        engine.check(given.slots)?;
        let memory = engine.region()?;
        if memory.space() != kvbm_tiers::Space::Host {
            return Err(Error::invalid("layers are saved by the CPU, and the engine is on a GPU"));
        }
        let tier = self.host_tier().filter(|_| !self.is_host_sealed());
        let (core, host) = tier.ok_or_else(|| {
            Error::invalid("layers are saved to a host tier that is not encrypted: there is none")
        })?;
        if core.is_closed() {
            return Err(Error::closed());
        }
        let (chain, layers) = (save.chain.prefix(given.end()), engine.layers());
        let put = LayeredPut::begin(core, host, chain, given.first, save.info, layers)?;
        let slots = put.blocks().map(|position| given.slots[position - given.first]).collect();
        Ok(LayeredSave { put, memory, slots, layers, next: 0 })
    }
}

/// Blocks that are being saved layer by layer, as peers find them.
#[derive(Debug)]
pub(crate) struct LayeredBlocks {
    /// Up to the last of the blocks.
    pub(crate) chain: Vec<BlockHash>,
    /// Blocks of the chain that are not among them.
    pub(crate) before: usize,
    pub(crate) namespace: NamespaceId,
    pub(crate) slots: Arc<LayeredSlots>,
    /// Once it has ended: whether the blocks were made resident.
    is_published: OnceLock<bool>,
}

impl LayeredBlocks {
    fn end(&self, is_published: bool) {
        self.is_published.get_or_init(|| is_published);
    }

    /// `None`: it goes on.
    pub(crate) fn is_published(&self) -> Option<bool> {
        self.is_published.get().copied()
    }

    /// Whether there is anything to tell to a peer that has `layers` layers: more of them, or the
    /// end.
    pub(crate) fn has_news(&self, layers: u16) -> bool {
        self.slots.written() > layers || self.is_published().is_some()
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct LayeredSaves(Mutex<Vec<Weak<LayeredBlocks>>>);

impl LayeredSaves {
    fn add(&self, blocks: &Arc<LayeredBlocks>) {
        let mut known = self.0.lock();
        known.retain(|blocks| blocks.strong_count() > 0);
        known.push(Arc::downgrade(blocks));
    }

    /// The first that `find` finds something in, and that.
    pub(crate) fn find<T>(
        &self,
        find: impl Fn(&LayeredBlocks) -> Option<T>,
    ) -> Option<(Arc<LayeredBlocks>, T)> {
        let known = self.0.lock();
        let going_on = known.iter().filter_map(Weak::upgrade);
        let mut going_on = going_on.filter(|blocks| blocks.is_published().is_none());
        going_on.find_map(|blocks| find(&blocks).map(|found| (blocks, found)))
    }
}
