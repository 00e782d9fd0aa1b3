//! The manager.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvbm::{
    Elements, Fence, FollowRequest, Options, RequestEnd, RequestId, RequestInfo, SaveRequest,
    ShadowSample, ShadowVerdict, Tier,
};
use prometheus::Registry;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{classes, of_manager};
use crate::memory::{self, Behind, CacheGroup, EngineMemory, MeetingPlace, NamedSlots};
use crate::names::{Chain, Hints, OtherChain, fingerprint, names, request_info};
use crate::observe::{self, Events, Samples};
use crate::peers::{
    AnyLease, KvTransfer, PeerLease, PeerLeasing, Place, Pull, kv_place, slots_of, tell,
};
use crate::settings::Settings;
use crate::transfer::{LayeredSave, Lease, Load, NamedLoad, Save, duration};

/// Keeps an engine's KV blocks in tiers of DRAM, disk and objects, and gives them back.
///
/// Args: settings: its tiers. `block_bytes` is that of the engine's memory, or of one rank's slice
/// of it. memory: the engine's KV tensors. block_tokens: tokens in a block. fingerprint: what the
/// bytes depend on besides tokens, such as `{"model": …, "weights": …}`. Without one nothing is
/// found again after a restart. ranks: `(directory, world, seconds)` for the leader of `world`
/// ranks: where they meet, and how long it waits for them. groups: of a hybrid model, its layers
/// that do not keep every block; `memory` is of those that do. They are numbered from 1 on.
///
/// Opening takes memory and files, and blocks meanwhile.
///
/// `ready` and `after` of its calls are events of CUDA's, such as `torch.cuda.Event`: of the GPU
/// that the memory is on, recorded behind the engine's work and outside of captures, and not
/// recorded again before the transfer has ended. What is not on this process's GPU takes none.
#[pyclass(module = "kvbm_rs", frozen)]
#[derive(Debug)]
pub(crate) struct Manager {
    inner: Arc<kvbm::Manager>,
    registry: Registry,
    takes_events: bool,
}

#[pymethods]
impl Manager {
    #[new]
    #[pyo3(signature = (settings, memory, *, block_tokens, fingerprint=None, ranks=None, groups=Vec::new()))]
    fn new(
        py: Python<'_>,
        settings: &Settings,
        memory: &EngineMemory,
        block_tokens: u64,
        fingerprint: Option<&Bound<'_, PyDict>>,
        ranks: Option<MeetingPlace>,
        groups: Vec<Bound<'_, CacheGroup>>,
    ) -> PyResult<Self> {
        let (registry, memory_is_on_gpu) = (Registry::new(), memory.is_on_gpu);
        let options = Options {
            registry: registry.clone(),
            block_tokens,
            fingerprint: fingerprint
                .map(|values| self::fingerprint(values, block_tokens))
                .transpose()?,
            ranks: ranks.map(|MeetingPlace(group)| group),
            engine: Some(memory.memory.clone()),
            groups: memory::plain(&groups),
            ..Options::default()
        };
        let settings = settings.for_fingerprint(fingerprint)?;
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let opened = py.detach(|| runtime.block_on(kvbm::Manager::open(settings, options)));
        let manager = Arc::new(opened.map_err(|error| of_manager(&error))?);
        Ok(Self { inner: manager, registry, takes_events: memory_is_on_gpu })
    }

    /// Pins the leading blocks of `chain`, the first `most` at most, that all cache groups can give
    /// back, wherever they are, and counts as their use by `request`. With `again`, which has asked
    /// before, metrics do not count it once more.
    ///
    /// A peer gave the first `from_peer` blocks straight to the engine: metrics count these as found
    /// in the host tier.
    #[pyo3(signature = (chain, *, most=None, request=None, hints=None, again=false, from_peer=0))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn lease(
        &self,
        py: Python<'_>,
        chain: &Chain,
        most: Option<usize>,
        request: Option<u64>,
        hints: Option<&Bound<'_, Hints>>,
        again: bool,
        from_peer: u32,
    ) -> Lease {
        let info = request_info(request, hints.map(Bound::get));
        let info = RequestInfo { has_asked: again, from_peer, ..info };
        let chain = &chain.hashes[..chain.hashes.len().min(most.unwrap_or(usize::MAX))];
        Lease::new(py.detach(|| self.inner.lease_for(info, chain)))
    }

    /// How many leading blocks of `chain` each tier holds, without counting as their use.
    fn matches(&self, py: Python<'_>, chain: &Chain) -> BTreeMap<&'static str, usize> {
        observe::matches(py, &self.inner, chain)
    }

    /// Keeps what `lease` holds where it is, for `seconds` or until the next reset. The lease is
    /// used up.
    fn pin(&self, py: Python<'_>, lease: &mut Lease, seconds: f64) -> PyResult<()> {
        let lease = lease.take()?;
        let ttl_ms = u64::try_from(duration(seconds).as_millis()).unwrap_or(u64::MAX);
        py.detach(|| self.inner.pin(lease, ttl_ms)).map_err(|error| of_manager(&error))
    }

    /// Brings what `lease` holds further down up to the host tier, when nothing more urgent is to
    /// be done. The lease is used up.
    fn prefetch(&self, py: Python<'_>, lease: &mut Lease) -> PyResult<()> {
        let lease = lease.take()?;
        // A later call for the blocks finds out what became of it.
        drop(py.detach(|| self.inner.prefetch(lease, Tier::Host)));
        Ok(())
    }

    /// The other workers that are known, by name, with their addresses. Empty too if the settings
    /// want none (`peers.enabled`).
    fn peers(&self) -> BTreeMap<String, String> {
        self.inner.peers().map(|peers| peers.known().into_iter().collect()).unwrap_or_default()
    }

    /// This worker's own name among its peers, and where they reach it; `None`: the settings want
    /// none.
    fn peer(&self) -> Option<(String, String)> {
        self.inner.peers().map(|peers| (peers.name().to_owned(), peers.reached_at().to_owned()))
    }

    /// Asks `peer` for a lease of what the tiers here lack of `chain`, of its first `most` blocks.
    /// `there` is for a peer whose blocks have another number of tokens: that number, and the chain
    /// of the same tokens in such blocks.
    #[pyo3(signature = (peer, chain, *, most=None, there=None, request=None, hints=None))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn lease_at(
        &self,
        py: Python<'_>,
        peer: &str,
        chain: &Chain,
        most: Option<usize>,
        there: Option<OtherChain>,
        request: Option<u64>,
        hints: Option<&Bound<'_, Hints>>,
    ) -> PyResult<PeerLeasing> {
        let info = request_info(request, hints.map(Bound::get));
        let peers = self.reading_peers()?;
        let names = names(chain, most, there);
        Ok(PeerLeasing(py.detach(|| peers.lease(peer, names, info))))
    }

    /// Brings what `lease` names into the host tier. The lease is used up.
    fn pull(&self, py: Python<'_>, lease: &mut PeerLease) -> PyResult<Pull> {
        let (peers, lease) = (self.reading_peers()?, lease.take()?);
        Ok(Pull(py.detach(|| peers.pull(lease))))
    }

    /// Brings what `peer` has of `chain`, of its first `most` blocks, into the host tier, and goes
    /// on while it comes to have more, as one does that computes it now. It ends with all of it, or
    /// once nothing more has come for `seconds`. `there` is as in `lease_at`.
    #[pyo3(signature = (peer, chain, *, seconds, most=None, there=None, request=None, hints=None))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn follow(
        &self,
        py: Python<'_>,
        peer: &str,
        chain: &Chain,
        seconds: f64,
        most: Option<usize>,
        there: Option<OtherChain>,
        request: Option<u64>,
        hints: Option<&Bound<'_, Hints>>,
    ) -> PyResult<Pull> {
        let (peers, info) = (self.reading_peers()?, request_info(request, hints.map(Bound::get)));
        let (chain, patience) = (names(chain, most, there), duration(seconds));
        let asked = FollowRequest { peer: peer.to_owned(), chain, info, patience };
        Ok(Pull(py.detach(|| peers.follow(asked))))
    }

    /// `follow`, and what comes goes on into an engine's slots at once: `slots` and `after` are as in
    /// `load_into`. Not of a hybrid model.
    #[pyo3(signature = (peer, chain, slots, *, seconds, most=None, there=None, request=None, hints=None, after=None))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn follow_into(
        &self,
        py: Python<'_>,
        peer: &str,
        chain: &Chain,
        slots: Vec<memory::Slots>,
        seconds: f64,
        most: Option<usize>,
        there: Option<OtherChain>,
        request: Option<u64>,
        hints: Option<&Bound<'_, Hints>>,
        after: Option<Behind>,
    ) -> PyResult<Load> {
        let (after, slots) = (self.fence(after)?, NamedSlots::new(slots));
        let info = request_info(request, hints.map(Bound::get));
        let (chain, patience) = (names(chain, most, there), duration(seconds));
        let asked = FollowRequest { peer: peer.to_owned(), chain, info, patience };
        let begin = || self.inner.follow_into(asked, &slots.slots(), &after);
        Ok(Load(py.detach(begin)))
    }

    /// Moves the blocks of `chain`, and calls `on_done(moved, error)` on a thread of its own; one
    /// of the two is `None`. `source` and `destination` are `None` for the tiers of this manager, a
    /// peer's name (as the source), or slots of the engine's memory, one for each block. What uses
    /// or fills the slots must have ended before, and nothing else may use them until `on_done`.
    fn transfer_kv_cache(
        &self,
        py: Python<'_>,
        source: Option<Place>,
        destination: Option<Place>,
        chain: &Chain,
        on_done: Py<PyAny>,
    ) -> PyResult<KvTransfer> {
        let (from, to) = (slots_of(source.as_ref()), slots_of(destination.as_ref()));
        let source = kv_place(source.as_ref(), &from);
        let destination = kv_place(destination.as_ref(), &to);
        let told = move |moved| tell(&on_done, moved);
        let begin = || self.inner.transfer_kv_cache(source, destination, &chain.hashes, told);
        py.detach(begin).map(KvTransfer).map_err(|error| of_manager(&error))
    }

    /// Copies what `lease` holds into an engine's slots, which nothing else may use until it has
    /// ended. What it names at a peer comes by the host tier, and stays there; from a neighbour's
    /// memory it comes straight to slots that the CPU can write, and is in no tier here before it is
    /// saved. `slots` has of each cache group its number (0: full attention), the position of the
    /// first block and a slot for each from there on. Of a hybrid model they go to the lease's last
    /// block: `Lease.wanted` says from where on, or later. Work on a GPU that still uses the slots is
    /// behind `after`, a `torch.cuda.Event`. The lease is used up.
    #[pyo3(signature = (lease, slots, *, after=None))]
    fn load_into(
        &self,
        py: Python<'_>,
        mut lease: AnyLease<'_>,
        slots: Vec<memory::Slots>,
        after: Option<Behind>,
    ) -> PyResult<Load> {
        let after = self.fence(after)?;
        let (taken, named) = (lease.take()?, NamedSlots::new(slots));
        Ok(Load(py.detach(|| self.inner.load_into(taken, &named.slots(), &after))))
    }

    /// `load_into` of a leader, in ranks whose engines begin with a layer before the last one is
    /// there: each waits for its slice of the load that is named, `Rank.slice_of`. Nothing uses the
    /// slots before. The lease is used up.
    fn load_in_ranks(
        &self,
        py: Python<'_>,
        lease: &mut Lease,
        slots: Vec<memory::Slots>,
    ) -> PyResult<(NamedLoad, Load)> {
        let (taken, named) = (lease.take()?, NamedSlots::new(slots));
        let begun = py.detach(|| self.inner.load_in_ranks(taken, &named.slots()));
        let (load, transfer) = begun.map_err(|error| of_manager(&error))?;
        Ok(((load.number, load.layers.get(), load.blocks), Load(transfer)))
    }

    /// Which blocks of `lease` the engine should compute again, for `shadow_compare`: position and
    /// tier. Those of a share of the leases, `transfer.shadow_share`, and of the others none.
    fn shadow_sample(&self, lease: &Lease) -> PyResult<Vec<(usize, &'static str)>> {
        let samples = self.inner.admin().shadow_sample(lease.held()?);
        Ok(samples.into_iter().map(|sample| (sample.position, sample.tier.name())).collect())
    }

    /// Compares a block of `chain` that was served from `tier` with what the engine computed for
    /// the same tokens, both as they lie in its memory, in numbers of type `elements`: `f32`, `f16`
    /// or `bf16`. How far apart they are, as a share of their length, if it is not the same block:
    /// then it leaves every tier. `None`: it is.
    fn shadow_compare(
        &self,
        py: Python<'_>,
        chain: &Chain,
        sample: (usize, String),
        elements: &str,
        served: &[u8],
        computed: &[u8],
    ) -> PyResult<Option<f64>> {
        let (position, tier) = sample;
        let tier = named(&tier, &Tier::ALL.map(|tier| (tier.name(), tier)))?;
        let elements = named(elements, &ELEMENTS)?;
        let sample = ShadowSample { position, tier };
        let compare = || {
            let admin = self.inner.admin();
            admin.shadow_compare(&chain.hashes, &sample, elements, served, computed)
        };
        match py.detach(compare).map_err(|error| of_manager(&error))? {
            ShadowVerdict::Same => Ok(None),
            ShadowVerdict::Wrong { distance } => Ok(Some(distance)),
        }
    }

    /// Copies what a request has computed of `chain` out of `slots`, which must not change until it
    /// has ended: of full attention the blocks, of the other cache groups checkpoints. `slots` has
    /// of each group its number (0: full attention), the position of the first block and a slot for
    /// each from there on. Blocks that are there already are not copied again; what has no block
    /// before it there is not kept. With `is_end` a prompt or a turn ends with the last one of
    /// group 0. Work on a GPU that still fills the slots is before `ready`, a `torch.cuda.Event`.
    #[pyo3(signature = (chain, slots, *, is_end=false, request=None, hints=None, ready=None))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn save_from(
        &self,
        py: Python<'_>,
        chain: &Chain,
        slots: Vec<memory::Slots>,
        is_end: bool,
        request: Option<u64>,
        hints: Option<&Bound<'_, Hints>>,
        ready: Option<Behind>,
    ) -> PyResult<Save> {
        let ready = self.fence(ready)?;
        let info = request_info(request, hints.map(Bound::get));
        let named = NamedSlots::new(slots);
        let slots = named.slots();
        let chain = &chain.hashes[..named.end_of_full().min(chain.hashes.len())];
        let save = SaveRequest { info, chain: chain.into(), slots: &slots, is_end, ready };
        Ok(Save(py.detach(|| self.inner.save_from(&save))))
    }

    /// `save_from`, of blocks that are being computed: `LayeredSave.layer_is_ready` says of each
    /// layer when it has been, and peers that follow read it then. The memory is on a CPU, in this
    /// process, and the model has no cache groups beside full attention; the host tier is not
    /// encrypted. An error says why nothing is begun: use `save_from`.
    #[pyo3(signature = (chain, slots, *, request=None, hints=None))]
    fn save_in_layers(
        &self,
        py: Python<'_>,
        chain: &Chain,
        slots: Vec<memory::Slots>,
        request: Option<u64>,
        hints: Option<&Bound<'_, Hints>>,
    ) -> PyResult<LayeredSave> {
        let info = request_info(request, hints.map(Bound::get));
        let named = NamedSlots::new(slots);
        let slots = named.slots();
        let chain = &chain.hashes[..named.end_of_full().min(chain.hashes.len())];
        let save = SaveRequest { info, ..SaveRequest::of(chain, &slots) };
        let begun = py.detach(|| self.inner.save_in_layers(&save));
        begun.map(|saving| LayeredSave(Some(saving))).map_err(|error| of_manager(&error))
    }

    /// Says that a request has ended, and how many tokens it generated: policies learn from it.
    /// With `for_good`, that no request will continue it.
    #[pyo3(signature = (request, output_tokens, *, for_good=false))]
    fn finished(&self, py: Python<'_>, request: u64, output_tokens: u32, for_good: bool) {
        let end = RequestEnd { output_tokens, will_not_return: for_good };
        py.detach(|| self.inner.finished(RequestId(request), end));
    }

    /// Begins the next epoch: no block that was there before is found again. Returns its number. A
    /// later process goes on in this epoch: blocks of weights that only this one has want names of
    /// their own (`Chain(salt=…)`). `weights` names the new weights, the same in all workers that
    /// have them; without it peers read no blocks of this epoch.
    #[pyo3(signature = (*, weights=None))]
    fn reset(&self, py: Python<'_>, weights: Option<&str>) -> PyResult<u64> {
        reset(py, &self.inner, weights)
    }

    /// Writes what is to be written to the lower tiers, and waits for it, `seconds` at most.
    /// Whether nothing is left.
    fn drain(&self, py: Python<'_>, seconds: f64) -> bool {
        let limit = duration(seconds);
        py.detach(|| self.inner.drain(limit)).is_complete()
    }

    /// Blocks of each tier that were found at the start, left there by an earlier process.
    fn recovered(&self) -> BTreeMap<&'static str, usize> {
        self.inner
            .admin()
            .recovered()
            .iter()
            .map(|report| (report.tier.name(), report.blocks))
            .collect()
    }

    /// What it has, in lines for a log: tiers, what an earlier process left in them, and the routes
    /// between them. Of a hybrid model that is full attention's.
    fn opened(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| observe::opened(&self.inner))
    }

    /// Slots of each tier: in all, and with a block that can be read.
    fn occupancy(&self) -> BTreeMap<&'static str, (u32, u32)> {
        let tiers =
            Tier::ALL.into_iter().map(|tier| (tier.name(), self.inner.admin().counts(tier)));
        tiers
            .filter(|(_, counts)| counts.total > 0)
            .map(|(tier, counts)| (tier, (counts.total, counts.resident)))
            .collect()
    }

    /// What comes to its tiers and leaves them from here on.
    fn events(&self) -> Events {
        Events(self.inner.events())
    }

    /// Its counters and gauges of docs/metrics.md: name, meaning, whether it only grows, and values
    /// by labels.
    fn samples(&self, py: Python<'_>) -> Vec<Samples> {
        py.detach(|| observe::samples(&self.registry))
    }

    /// Its metrics as Prometheus reads them: docs/metrics.md.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        observe::text(py, &self.registry)
    }

    /// Ends everything, and waits `seconds` at most for what the media work on. `True`: nothing
    /// touches the memory any more.
    fn close(&self, py: Python<'_>, seconds: f64) -> bool {
        let limit = duration(seconds);
        py.detach(|| self.inner.close(limit)).is_complete()
    }
}

impl Manager {
    fn reading_peers(&self) -> PyResult<&kvbm::Peers> {
        self.inner.peers().ok_or_else(|| {
            classes::InvalidError::new_err(
                "the settings want no peers: set peers.enabled (DYN_KVBM_PEERS)",
            )
        })
    }

    /// Without an event the work has ended: on a CPU it has when the engine says so.
    fn fence(&self, behind: Option<Behind>) -> PyResult<Fence> {
        match behind {
            None => Ok(Fence::Done),
            Some(behind) if self.takes_events => Ok(behind.0),
            Some(_) => Err(classes::InvalidError::new_err(
                "the memory is not on a GPU of this process: call when the work has ended, without an event",
            )),
        }
    }
}

const ELEMENTS: [(&str, Elements); 3] =
    [("f32", Elements::F32), ("f16", Elements::F16), ("bf16", Elements::Bf16)];

fn named<T: Copy>(name: &str, all: &[(&str, T)]) -> PyResult<T> {
    all.iter().find(|(known, _)| *known == name).map(|&(_, one)| one).ok_or_else(|| {
        let valid: Vec<_> = all.iter().map(|&(known, _)| known).collect();
        let message = format!("there is no {name:?}; valid: {}", valid.join(", "));
        classes::InvalidError::new_err(message)
    })
}

/// Begins the next epoch, and returns it.
pub(crate) fn reset(
    py: Python<'_>,
    manager: &kvbm::Manager,
    weights: Option<&str>,
) -> PyResult<u64> {
    let number = manager.admin().epoch() + 1;
    let epoch = kvbm::NewEpoch { number, weights };
    py.detach(|| manager.reset(epoch)).map_err(|error| of_manager(&error))?;
    Ok(number)
}
