"""The worker's role: adopts the KV tensors, and passes on what has ended."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvbm_rs import Chain, EngineMemory, Hints, LayeredSave, Lease, Load, Manager, Rank, SliceLoad
from kvbm_rs.errors import InvalidError, KvbmError
from kvbm_rs.vllm import logger
from kvbm_rs.vllm.connector.config import Config
from kvbm_rs.vllm.connector.tensors import adopt, block_dimension, by_blocks
from kvbm_rs.vllm.versions import KVConnectorTransferResults

# Of engines whose only worker is in this process: for their schedulers, which vLLM makes later.
_adopted: dict[str, "Adopted"] = {}


@dataclass(frozen=True)
class Adopted:
    """What the only worker of an engine adopted, by cache group: tensors, one for each layer, and the memory that they are; and
    what it says that blocks are."""

    tensors: list[list[torch.Tensor]]
    memories: list[EngineMemory]
    fingerprint: dict[str, Any]


def adopted(engine: str) -> Adopted:
    return _adopted[engine]


# Seconds. A load ends by itself: the manager gives up what is overdue.
_FOREVER = float("inf")


class LayeredLoad:
    """A load that the step waits for, layer by layer, while it computes. Scheduler and worker are in one process."""

    def __init__(self, request: str, manager: Manager, lease: Lease, first: int, slots: list[int]) -> None:
        self.request = request
        self._manager = manager
        self._lease = lease
        self._first = first
        self._slots = slots
        self._load: Load | None = None

    def begin(self, _: Rank | None, after: torch.cuda.Event | None) -> None:
        """Begins behind `after`: what a GPU has not computed yet of the steps before."""
        self._load = self._manager.load_into(self._lease, [(0, self._first, self._slots)], after=after)

    def wait_layers(self, layers: int) -> None:
        self._load.wait_layers(layers, _FOREVER)

    def end(self) -> list[int]:
        """Waits for its end. Returns the slots that hold nothing that can be used."""
        try:
            end = self._load.wait(_FOREVER)
        except KvbmError:
            # It was never begun: a reset, or a shutdown, came first.
            logger.exception("a load was refused")
            return self._slots
        while not end.slots_are_free():
            # The engine is about to write there.
            time.sleep(0.001)
        return [] if end.is_whole else self._slots[end.usable - self._first :]


class SlicedLoad:
    """The same where workers are ranks: the scheduler begins it, and each of them waits for its slice. It is sent to them."""

    def __init__(self, request: str, manager: Manager, lease: Lease, first: int, slots: list[int]) -> None:
        self.request = request
        self._slots = slots
        self._named: tuple[int, int, int] | None = None
        # In a worker.
        self._slice: SliceLoad | None = None
        try:
            self._named, _ = manager.load_in_ranks(lease, [(0, first, slots)])
        except KvbmError:
            # A reset, or a shutdown, came first.
            logger.exception("a load was refused")

    def begin(self, rank: Rank | None, _: torch.cuda.Event | None) -> None:
        if rank is not None and self._named is not None:
            self._slice = rank.slice_of(self._named)

    def wait_layers(self, layers: int) -> None:
        if self._slice is not None:
            self._slice.wait_layers(layers, _FOREVER)

    def end(self) -> list[int]:
        """Waits for its end in all workers. Returns the slots that hold nothing that can be used, which are the same in each."""
        came, self._slice = self._slice, None
        return self._slots if came is None else self._slots[came.wait(_FOREVER) :]


class StepSave:
    """A save of blocks that the step computes, layer by layer. Scheduler and worker are in one process."""

    def __init__(
        self, manager: Manager, chain: Chain, first: int, slots: list[int], number: int, hints: Hints | None
    ) -> None:
        # Leading blocks of the chain that are kept, once it has ended well.
        self.kept = 0
        self._begin = lambda: manager.save_in_layers(chain, [(0, first, slots)], request=number, hints=hints)
        self._saving: LayeredSave | None = None
        self._layers = 0

    def begin(self) -> None:
        self._saving = self._begin()

    def layer_is_ready(self, number: int) -> None:
        self._layers += 1
        if number != self._layers:
            raise InvalidError(f"the step computes layer {number} where layer {self._layers} of the KV cache is wanted")
        self._saving.layer_is_ready()

    def end(self) -> None:
        self.kept = self._saving.finish()

    def give_up(self) -> None:
        self._saving = None


@dataclass
class Ended(KVConnectorMetadata):
    """What a step's workers are told."""

    step: int
    # Loads that the step waits for.
    layered: list[LayeredLoad | SlicedLoad] = field(default_factory=list)
    # What the step saves while it computes.
    saves: list[StepSave] = field(default_factory=list)
    # Blocks that came to each stage's first worker, where they are all workers'.
    shared: list[int] = field(default_factory=list)
    # Requests whose loads have ended, those of them whose loads failed, and the blocks of these that did not arrive, by
    # cache group.
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad: list[set[int]] = field(default_factory=list)


@dataclass
class Stepped(KVConnectorWorkerMetadata):
    """A step has ended: what it computed is in the KV tensors."""

    step: int
    # Requests whose loads the step waited for and that failed, and the blocks that did not arrive.
    failed: set[str] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Stepped":
        return Stepped(min(self.step, other.step), self.failed | other.failed, self.bad | other.bad)


def _number() -> int:
    """The worker's, among those that share each layer."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def _stage() -> int:
    """The number of those, among all in the pipeline."""
    from vllm.distributed import get_pp_group

    return get_pp_group().rank_in_group


class Worker:
    def __init__(self, config: Config) -> None:
        self._config = config
        # By cache group, one for each layer.
        self._tensors: list[list[torch.Tensor]] = []
        self._rank: Rank | None = None
        self._joining: threading.Thread | None = None
        self._told: Ended | None = None
        self._stepped: Stepped | None = None
        # Loads of the step under way that it waits for, and the layers of the one group that they are of, by name.
        self._layered: list[LayeredLoad | SlicedLoad] = []
        self._layers = {name: number for number, name in enumerate(config.groups[0].layers, 1)}
        # Saves of the step under way, layer by layer; and whether there may be any.
        self._saves: list[StepSave] = []
        self._saves_layers = True

    def adopt(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._config
        self._tensors = [
            [by_blocks(kv_caches[name], config.slots) for name in group.layers] for group in config.groups
        ]
        memories = [
            adopt(tensors, config.slots, group.layer_bytes, group.shares)
            for tensors, group in zip(self._tensors, config.groups)
        ]
        if config.is_alone:
            _adopted[config.engine] = Adopted(self._tensors, memories, config.scaled_fingerprint())
        elif not config.is_shared or _number() == 0:
            rank = _stage() * config.slices + _number()
            # The leader comes later: the worker must go on.
            self._joining = threading.Thread(target=self._join, args=(rank, memories), name="kvbm-join", daemon=True)
            self._joining.start()

    def _join(self, rank: int, memories: list[EngineMemory]) -> None:
        config = self._config
        try:
            self._rank = Rank(
                config.settings,
                memories[0],
                group=config.ranks(),
                rank=rank,
                fingerprint=config.fingerprint,
                groups=config.others(memories[1:]),
            )
        except Exception:
            # The leader says which rank did not come, and ends the start.
            logger.exception("this rank cannot join its leader")

    def _joined(self) -> Rank | None:
        """The leader may be ready a moment before the rank is."""
        if self._joining is not None:
            self._joining.join()
        return self._rank

    def begin(self, told: Ended) -> None:
        self._told, self._stepped = told, Stepped(told.step)
        self._layered = told.layered
        if self._layered:
            rank, after = self._joined(), self._computing()
            for load in self._layered:
                load.begin(rank, after)
        if told.shared:
            self._share(told.shared)
        # Whatever a load that failed left there must not be taken for keys and values.
        self._zero(told.bad)

    def _share(self, blocks: list[int]) -> None:
        """Gives what the stage's first worker loaded to its others, which take this step as well."""
        from vllm.distributed import get_tp_group

        (tensors,) = self._tensors
        index = torch.tensor(blocks, device=tensors[0].device)
        for tensor in tensors:
            dimension, whole = block_dimension(tensor, self._config.slots), tensor.view(torch.uint8)
            loaded = whole.index_select(dimension, index)
            get_tp_group().broadcast(loaded, 0)
            if _number() > 0:
                whole.index_copy_(dimension, index, loaded)

    def _computing(self) -> torch.cuda.Event | None:
        """Behind what a GPU still computes; on a CPU the steps before have ended."""
        device = self._tensors[0][0].device
        if device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def _zero(self, bad: list[set[int]]) -> None:
        for tensors, blocks in zip(self._tensors, bad):
            for tensor in tensors:
                dimension = block_dimension(tensor, self._config.slots)
                for block in blocks:
                    tensor.select(dimension, block).zero_()
        if any(bad):
            # The step may be known to have ended before a GPU gets to it, and the blocks be another load's.
            computing = self._computing()
            if computing is not None:
                computing.synchronize()

    def wait_for_layer(self, name: str) -> None:
        """The layer is about to be computed."""
        # Where layers share keys and values, only one of them has a name here.
        number = self._layers.get(name, len(self._layers))
        for load in self._layered:
            load.wait_layers(number)

    def finish_loads(self) -> None:
        """The step has computed its last layer."""
        layered, self._layered = self._layered, []
        for load in layered:
            bad = load.end()
            if bad:
                self._stepped.failed.add(load.request)
                self._stepped.bad.update(bad)
                self._zero([set(bad)])

    def begin_saves(self, told: Ended) -> None:
        """The step is about to compute: it has the metadata before, and `begin` may come after."""
        self._saves = told.saves if self._saves_layers else []
        self._each_save(StepSave.begin)

    def save_layer(self, name: str) -> None:
        """The layer is computed."""
        number = self._layers.get(name)
        if number is not None:
            self._each_save(lambda save: save.layer_is_ready(number))

    def finish_saves(self) -> None:
        """The step has computed its last layer, or has failed."""
        self._each_save(StepSave.end)
        self._saves = []

    def _each_save(self, go_on: Callable[[StepSave], None]) -> None:
        """Goes on with the saves of the step. The scheduler saves what one of them does not keep."""
        for save in list(self._saves):
            try:
                go_on(save)
            except KvbmError as error:
                save.give_up()
                self._saves.remove(save)
                logger.warning("a prompt is not saved layer by layer, but when its step has ended: %s", error)
                # The next one would end so too: nothing follows it in vain.
                self._saves_layers = self._saves_layers and not isinstance(error, InvalidError)

    def results(self) -> KVConnectorTransferResults:
        if self._told is None:
            return KVConnectorTransferResults()
        # A window is as of one position, so vLLM takes such loads as a whole.
        failed = self._told.failed if self._config.is_windowed else set()
        return KVConnectorTransferResults(finished_recving=self._told.loaded, failed_recving=failed)

    def bad_blocks(self) -> set[int]:
        if self._told is None or self._config.is_windowed:
            return set()
        return self._stepped.bad.union(*self._told.bad)

    def stepped(self) -> Stepped | None:
        return self._stepped

    def shutdown(self) -> None:
        self._rank = self._told = None
        self._tensors, self._saves = [], []
        _adopted.pop(self._config.engine, None)
