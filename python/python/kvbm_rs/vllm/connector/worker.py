"""The worker's role: adopts the KV tensors, and passes on what has ended."""

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from kvbm_rs import EngineMemory, Rank
from kvbm_rs.vllm.connector.config import Config
from kvbm_rs.vllm.connector.tensors import adopt, block_dimension

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Of engines whose only worker is in this process: for their schedulers, which vLLM makes later.
_adopted: dict[str, EngineMemory] = {}


def adopted(engine: str) -> EngineMemory:
    """The memory that the only worker of `engine` adopted."""
    return _adopted[engine]


@dataclass
class Ended(KVConnectorMetadata):
    """What a step's workers are told."""

    step: int
    # Requests whose loads have ended, and the blocks of these that did not arrive.
    loaded: set[str] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


@dataclass
class Stepped(KVConnectorWorkerMetadata):
    """A step has ended: what it computed is in the KV tensors."""

    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Stepped":
        return Stepped(min(self.step, other.step))


class Worker:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._tensors: list[torch.Tensor] = []
        self._rank: Rank | None = None
        self._joining: threading.Thread | None = None
        self._told: Ended | None = None

    def adopt(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        config = self._config
        self._tensors = [kv_caches[name] for name in config.layers]
        memory = adopt(self._tensors, config.slots, config.block_bytes)
        if config.is_alone:
            _adopted[config.engine] = memory
        else:
            # The leader comes later: the worker must go on.
            self._joining = threading.Thread(target=self._join, args=(memory,), name="kvbm-join", daemon=True)
            self._joining.start()

    def _join(self, memory: EngineMemory) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        config = self._config
        try:
            self._rank = Rank(
                config.settings,
                memory,
                group=config.ranks(),
                rank=get_tensor_model_parallel_rank(),
                fingerprint=config.fingerprint,
            )
        except Exception:
            # The leader says which rank did not come, and ends the start.
            logger.exception("this rank cannot join its leader")

    def begin(self, told: Ended) -> None:
        self._told = told
        # Whatever a load that failed left there must not be taken for keys and values.
        for block in told.failed:
            self._zero(block)

    def _zero(self, block: int) -> None:
        slots = self._config.slots
        for tensor in self._tensors:
            tensor.select(block_dimension(tensor, slots), block).zero_()

    def results(self) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(finished_recving=self._told.loaded if self._told else set())

    def bad_blocks(self) -> set[int]:
        return self._told.failed if self._told else set()

    def stepped(self) -> Stepped | None:
        return Stepped(self._told.step) if self._told else None

    def shutdown(self) -> None:
        self._rank = None
        self._tensors = []
        _adopted.pop(self._config.engine, None)
