"""vLLM's `TieringOffloadingManager` without an engine: the test is the engine's scheduler and worker."""

import hashlib
import itertools
import time
import uuid
from collections.abc import Iterable, Sequence

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

# Tokens in a chunk.
TOKENS = 16
PAGE = 4096


def chain(number: int, chunks: int, group: int = 0) -> list[bytes]:
    """The keys of a prompt that is like no other."""
    digest, keys = str(number).encode(), []
    for _ in range(chunks):
        digest = hashlib.sha256(digest).digest()
        keys.append(make_offload_key(digest, group))
    return keys


def pattern(key: bytes, size: int) -> np.ndarray:
    """The bytes of a chunk, which tell it from others at every place."""
    seed = np.frombuffer(key[:32], np.uint64)
    places = np.arange(size // 8, dtype=np.uint64)
    return (places * np.uint64(0x9E3779B97F4A7C15) ^ seed[places % np.uint64(4)]).view(np.int8)


class Offloading:
    """A manager with tiers below its primary one. A context manager: leaving it shuts down."""

    def __init__(
        self, *tiers: dict, chunks: int = 64, row: int = PAGE, groups: int = 1, model: str = "made-up", replica: int = 0
    ):
        """`replica` is its number among those of data parallelism."""
        self.row, self.model = row, model
        self.spec = TieringOffloadingSpec(configuration(tiers, chunks, row, groups, model, replica))
        self.manager = self.spec.get_manager()
        self.tiers = self.manager.secondary_tiers
        self.names = (f"request-{number}" for number in itertools.count())

    def __enter__(self) -> "Offloading":
        return self

    def __exit__(self, *_) -> None:
        self.manager.shutdown()

    @property
    def tier(self):
        """The only tier below."""
        (tier,) = self.tiers
        return tier

    def view(self) -> np.ndarray:
        """The primary tier's memory. A reference to it keeps the manager from giving it back."""
        return np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def begin(self, *chains: Sequence[bytes]) -> ReqContext:
        """A request with these keys, one chain for each cache group."""
        request = ReqContext(next(self.names))
        self.manager.on_new_request(request)
        for keys in chains:
            for place, key in enumerate(keys):
                request.set_offload_key_position(key, (place + 1) * TOKENS)
        return request

    def end(self, request: ReqContext) -> None:
        self.manager.on_request_finished(request)

    def step(self, *scheduled: ReqContext) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([request.req_id for request in scheduled], []))

    def settle(self, limit: float = 20.0) -> None:
        """Steps until nothing is under way."""
        began = time.monotonic()
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() - began < limit, "jobs do not end"
            time.sleep(0.0005)
            self.step()

    def store(self, request: ReqContext, keys: Iterable[bytes]) -> int:
        """Computes chunks and stores them. Returns how many the primary tier took."""
        stored = self.manager.prepare_store(list(keys), request)
        if stored is None:
            return 0
        view = self.view()
        for key, chunk in zip(stored.keys_to_store, stored.store_spec.chunk_ids):
            view[chunk] = pattern(key, self.row)
        if stored.keys_to_store:
            # The engine brings a set.
            self.manager.complete_store(set(stored.keys_to_store), request)
        return len(stored.keys_to_store)

    def save(self, *chains: Sequence[bytes]) -> None:
        """A request from its beginning to its end, everything stored."""
        request = self.begin(*chains)
        for keys in chains:
            self.store(request, keys)
        self.settle()
        self.end(request)

    def look_up(self, request: ReqContext, keys: Sequence[bytes], limit: float = 20.0) -> int:
        """Leading keys that are in the primary tier, once everything that can come has come."""
        began = time.monotonic()
        while True:
            hits, is_deferred = self.look_up_once(request, keys)
            if not is_deferred:
                return hits
            assert time.monotonic() - began < limit, "the request is deferred forever"
            self.step()
            time.sleep(0.0005)

    def look_up_once(self, request: ReqContext, keys: Sequence[bytes]) -> tuple[int, bool]:
        """As the engine's scheduler does in a step: how many leading keys are hits, and whether to ask again."""
        hits, is_deferred = 0, False
        for key in keys:
            match self.manager.lookup(key, request):
                case LookupResult.HIT:
                    hits += 1
                case LookupResult.HIT_PENDING:
                    hits, is_deferred = hits + 1, True
                case LookupResult.RETRY:
                    is_deferred = True
                case LookupResult.MISS:
                    break
        return hits, is_deferred

    def wrong(self, request: ReqContext, keys: Sequence[bytes]) -> list[int]:
        """Loads chunks that are in the primary tier. Returns the places of those whose bytes are not theirs."""
        loaded = self.manager.prepare_load(list(keys), request)
        view = self.view()
        wrong = [
            place
            for place, (key, chunk) in enumerate(zip(keys, loaded.chunk_ids))
            if not np.array_equal(view[chunk], pattern(key, self.row))
        ]
        self.manager.complete_load(list(keys), request)
        return wrong

    def serves(self, keys: Sequence[bytes]) -> int:
        """A request for `keys`: how many leading ones are served, all with the right bytes."""
        request = self.begin(keys)
        hits = self.look_up(request, keys)
        assert self.wrong(request, keys[:hits]) == []
        self.step(request)
        self.end(request)
        return hits

    def reset(self) -> None:
        """As the engine does where it resets its caches, and no worker copies any more."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            # vLLM 0.33 loads nothing from below before that.
            self.manager.on_reset_flushed()

    def forget_primary(self) -> None:
        """Empties the primary tier alone: vLLM's own reset also drains what is below."""
        self.settle()
        self.manager.primary_tier.reset_cache()


def configuration(
    tiers: Sequence[dict], chunks: int, row: int, groups: int, model: str, replica: int = 0
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(TOKENS, (f"layer.{group}",), group) for group in range(groups)),
        worker_kv_bytes_per_block=row,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": chunks * row, "secondary_tiers": list(tiers)},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=replica,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
