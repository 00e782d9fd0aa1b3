"""TensorRT-LLM's KV cache connector, for engines of one rank.

Set `connector_module="kvbm_rs.trtllm.connector"`, `connector_scheduler_class="KvbmScheduler"` and
`connector_worker_class="KvbmWorker"` in `KvCacheConnectorConfig`. Tiers are set by `DYN_KVBM_*` variables.

TensorRT-LLM cannot be told that a load failed. So a request is promised only what is in memory, verified and pinned; if even
that does not come, the engine is stopped by an error rather than served wrong bytes.
"""

import itertools
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import torch

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
        SchedulerOutput,
    )
except ImportError:
    # Up to 1.2 it was there.
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
        SchedulerOutput,
    )

from kvbm_rs import Lease
from kvbm_rs.errors import KvbmError
from kvbm_rs.trtllm.engine import PlannedSave, engine_of
from kvbm_rs.trtllm.names import Names, is_known_by_tokens

logger = logging.getLogger(__name__)


@dataclass
class Step:
    """What a step's worker is told."""

    saves: list[PlannedSave] = field(default_factory=list)


@dataclass
class _Request:
    # Among the manager's.
    number: int
    names: Names
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # Leading blocks that were saved, or are being.
    saved: int = 0
    # Blocks that it was promised: a lease on its chain, the first and the one behind the last.
    promised: tuple[Lease, int, int] | None = None
    prompt: int = 0


class KvbmScheduler(KvCacheConnectorScheduler):
    """Says what can be loaded, and has what is computed saved."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._engine = engine_of(llm_args)
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        # Tells this engine from all others.
        self._engine_id = os.urandom(16)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        known = self._arrive(request)
        size = self._engine.block_tokens
        if known is None or num_computed_tokens % size:
            return 0, False
        try:
            found = self._engine.find(known.names.chain, known.number)
        except KvbmError:
            logger.exception("request %s cannot be looked up", request.request_id)
            return 0, False
        first = num_computed_tokens // size
        # The last token is computed in any case: without it there is nothing to go on from.
        end = min(found[1] if found else 0, (known.prompt - 1) // size)
        if end <= first:
            return 0, False
        known.promised = (found[0], first, end)
        return (end - first) * size, True

    def _arrive(self, request: Any) -> _Request | None:
        """Also of one that comes anew, since its blocks were taken from it. `None`: its tokens do not say what its KV is."""
        self._requests.pop(request.request_id, None)
        if not is_known_by_tokens(request):
            return None
        tokens = list(request.get_tokens(0))
        names = Names(request, self._engine.block_tokens, self._engine_id)
        known = _Request(next(self._numbers), names, prompt=len(tokens))
        known.names.extend(tokens)
        self._requests[request.request_id] = known
        return known

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        known = self._requests.get(request.request_id)
        if known is None or known.promised is None:
            return
        (lease, first, end), known.promised = known.promised, None
        # It waits until `get_finished` of the worker names it.
        self._engine.load(request.request_id, lease, first, block_ids[first:end])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        step = Step()
        for data in itertools.chain(scheduler_output.new_requests, scheduler_output.cached_requests):
            known = self._requests.get(data.request_id)
            if known is not None:
                known.tokens += data.new_tokens
                known.slots += data.new_block_ids
                computed = min(data.computed_position + data.num_scheduled_tokens, len(known.tokens))
                step.saves += self._plan(data.request_id, known, computed)
        return step

    def _plan(self, request: int, known: _Request, computed: int) -> list[PlannedSave]:
        """Saves the blocks that are full once `computed` tokens are, from the chain's root on."""
        known.names.extend(known.tokens)
        full = min(computed // self._engine.block_tokens, len(known.slots))
        slots = known.slots[known.saved : full]
        if -1 in slots:
            # It left a window: nothing can hang on it.
            slots = slots[: slots.index(-1)]
        if not slots:
            return []
        save = PlannedSave(request, known.names.chain, known.saved, slots)
        known.saved += len(slots)
        return [save]

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        known = self._requests.pop(request.request_id, None)
        if known is None or self._engine.manager is None:
            return False
        # All that was computed is being saved by now, step by step; of an aborted prompt the rest never was.
        generated = len(request.get_tokens(0)) - known.prompt
        self._engine.manager.finished(known.number, max(generated, 0))
        return self._engine.is_saving(request.request_id)


class KvbmWorker(KvCacheConnectorWorker):
    """Adopts the KV cache, and says which copies have ended."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._engine = engine_of(llm_args)
        self._saving: list[int] = []
        self._loading: list[int] = []

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self._engine.adopt(kv_cache_tensor)

    def start_load_kv(self, stream: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        pass

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        pass

    def wait_for_save(self, stream: Any) -> None:
        step = self.get_connector_meta()
        if step is not None:
            self._engine.compute(step.saves, stream)
            step.saves = []

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        self._saving += finished_gen_req_ids
        self._loading += started_loading_req_ids
        self._engine.poll()
        saved = [request for request in self._saving if not self._engine.is_saving(request)]
        loaded = [request for request in self._loading if self._engine.has_loaded(request)]
        self._saving = [request for request in self._saving if request not in saved]
        self._loading = [request for request in self._loading if request not in loaded]
        return saved, loaded
