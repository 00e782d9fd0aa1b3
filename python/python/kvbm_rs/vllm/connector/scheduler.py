"""The scheduler's role: look-ups, loads and saves, and which of the engine's blocks are held for them."""

import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvbm_rs import Chain, EngineMemory, Hints, Lease, Load, LoadEnd, Manager, Save
from kvbm_rs.errors import KvbmError
from kvbm_rs.vllm.connector.config import Config
from kvbm_rs.vllm.connector.events import Publisher
from kvbm_rs.vllm.connector.hints import Asked, Limits, asked_by
from kvbm_rs.vllm.connector.stats import Reader, Stats
from kvbm_rs.vllm.connector.worker import Ended, Stepped, adopted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# Seconds. An engine with nothing to do has time for the last blocks: memory takes them in milliseconds.
_IDLE_WAIT = 0.05
_CLOSE_WAIT = 5.0
_RESET_WAIT = 1.0

# One block of so many may be pinned: what is pinned makes no room.
_MAX_PINNED_SHARE = 4

# More blocks than any request has: of one that is not saved any more.
_ALL = 1 << 62

_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


@dataclass
class _Request:
    """What is known of one of the engine's requests while it lives."""

    number: int
    request: "Request"
    asked: Asked
    hints: Hints | None
    chain: Chain = field(default_factory=Chain)
    # From a look-up, until its blocks are loaded.
    lease: Lease | None = None
    sources: dict[CacheHitSource, int] = field(default_factory=dict)
    # A load failed: what it was offered is not offered again.
    has_failed: bool = False
    # Leading blocks that were handed to saves.
    saved: int = 0
    # Steps that are under way, each with the leading tokens whose keys and values are there when it has ended.
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    computed: int = 0


@dataclass
class _Loading:
    load: Load
    slots: list[int]
    end: LoadEnd | None = None
    # Of the slots, those that hold nothing that can be used.
    failed: set[int] = field(default_factory=set)


@dataclass
class _Saving:
    """A save, and the engine's blocks that must not be written before it has ended."""

    number: int
    save: Save
    blocks: list["KVCacheBlock"]


@dataclass
class _Ending:
    """A request that has ended while its last step was not known to have."""

    request: _Request
    first: int
    blocks: list["KVCacheBlock"]


@dataclass
class _Pinning:
    """A request that has ended and wants its chain to stay, once it is saved."""

    known: _Request
    blocks: int


class Scheduler:
    def __init__(self, config: Config) -> None:
        self._config = config
        if config.is_alone:
            memory, ranks = adopted(config.engine), None
        else:
            memory, ranks = EngineMemory.in_ranks(config.slots, len(config.layers)), config.ranks()
        self.manager = Manager(
            config.settings,
            memory,
            block_tokens=config.block_tokens,
            fingerprint=config.fingerprint,
            ranks=ranks,
        )
        self._reader = Reader(self.manager)
        self._publisher = Publisher(self.manager, config.block_tokens) if config.publishes else None
        self._numbers = itertools.count(1)
        self._requests: dict[str, _Request] = {}
        self._loading: dict[str, _Loading] = {}
        self._saving: list[_Saving] = []
        self._ending: list[_Ending] = []
        self._pinning: list[_Pinning] = []
        # Until when so many blocks are pinned.
        self._pinned: list[tuple[float, int]] = []
        tiers = self.manager.occupancy()
        self._limits = Limits(config.max_tokens, can_prefetch="host" in tiers and len(tiers) > 1)
        self._max_pinned = min(slots for slots, _ in tiers.values()) // _MAX_PINNED_SHARE
        self._step = 0
        self._kv: KVCacheManager | None = None
        for tier, blocks in self.manager.recovered().items():
            logger.info("%s: %d blocks of an earlier process", tier, blocks)

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        self._kv = kv_cache_manager
        # vLLM cannot empty its cache while blocks are held, and takes that for a defect where it has stopped all
        # requests (sleep, weight updates). It says nothing before, so this is where saves are waited for.
        reset = kv_cache_manager.reset_prefix_cache

        def reset_when_saved() -> bool:
            self._wait(_RESET_WAIT)
            return reset()

        kv_cache_manager.reset_prefix_cache = reset_when_saved

    # Look-ups and loads.

    def arrive(self, request: "Request") -> None:
        """A request waits for its turn."""
        known = self._known(request)
        if known.asked.prefetch:
            lease = self.manager.lease(self._chain(known), request=known.number, hints=known.hints)
            if lease.blocks > lease.by_tier.get("host", 0):
                self.manager.prefetch(lease)

    def look_up(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens the tiers have beyond those that the engine has.

        This is also where a chain's use is noted, so it happens for requests that need nothing from below as well.
        """
        known = self._known(request)
        if known.has_failed:
            return 0, False
        known.lease = self.manager.lease(self._chain(known), request=known.number, hints=known.hints)
        if self._publisher:
            self._publisher.find(known.chain)
        # The last token is always computed: it gives the next one.
        blocks = min(known.lease.blocks, (request.num_tokens - 1) // self._config.block_tokens)
        more = blocks * self._config.block_tokens - num_computed_tokens
        if more <= 0:
            known.lease = None
            return 0, False
        return more, True

    def load(self, request: "Request", slots: list[int], num_external_tokens: int) -> None:
        known = self._known(request)
        lease, known.lease = known.lease, None
        if lease is None:
            # The call after the load: it has been asked for already.
            return
        blocks = num_external_tokens // self._config.block_tokens
        if not blocks:
            # Another connector loads, or nobody does.
            return
        end = min(lease.blocks, (request.num_tokens - 1) // self._config.block_tokens)
        first = end - blocks
        known.sources = self._split(lease.by_tier, first, end)
        wanted = slots[first:end]
        self._loading[request.request_id] = _Loading(self.manager.load_into(lease, first, wanted), wanted)

    def sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        found = self._known(request).sources
        if sum(found.values()) != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return found

    def _split(self, by_tier: dict[str, int], first: int, end: int) -> dict[CacheHitSource, int]:
        sources: dict[CacheHitSource, int] = {}
        start = 0
        for tier in ("host", "disk", "object"):
            stop = start + by_tier.get(tier, 0)
            wanted = min(stop, end) - max(start, first)
            if wanted > 0:
                source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
                sources[source] = sources.get(source, 0) + wanted * self._config.block_tokens
            start = stop
        return sources

    # Steps.

    def step(self, output: Any) -> Ended:
        """Begins a step: notes what it computes, and tells the workers which loads have ended."""
        self._step += 1
        for name in output.preempted_req_ids or ():
            if name in self._requests:
                # Its blocks are not its own any more.
                self._requests[name].steps.clear()
        new = output.scheduled_new_reqs
        cached = output.scheduled_cached_reqs
        before = {request.req_id: request.num_computed_tokens for request in new}
        before.update(zip(cached.req_ids, cached.num_computed_tokens))
        for name, scheduled in output.num_scheduled_tokens.items():
            known = self._requests.get(name)
            if known is not None and name in before:
                drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                computed = min(before[name] + scheduled - drafts, known.request.num_tokens)
                known.steps.append((self._step, computed))
        told = Ended(self._step)
        for name, loading in list(self._loading.items()):
            if self._has_ended(loading):
                del self._loading[name]
                told.loaded.add(name)
                told.failed |= loading.failed
                if loading.failed and name in self._requests:
                    self._requests[name].has_failed = True
        return told

    @staticmethod
    def _has_ended(loading: _Loading) -> bool:
        if loading.end is None:
            try:
                loading.end = loading.load.poll()
            except KvbmError:
                # It was never begun: a reset, or a shutdown, came first.
                logger.exception("a load was refused")
                loading.failed = set(loading.slots)
                return True
            if loading.end is None:
                return False
            loading.failed = set(loading.slots[loading.end.arrived :])
        # A medium that hangs may still write there.
        return not loading.failed or loading.end.slots_are_free()

    def stepped(self, stepped: Stepped | None) -> None:
        """A step has ended, with those before it: saves what it filled."""
        if stepped is not None:
            for known in self._requests.values():
                if self._advance(known, stepped.step):
                    self._save(known)
            self._ending = [ending for ending in self._ending if not self._end(ending, stepped.step)]
        self._release()
        if not self._requests and self._saving:
            self._wait(_IDLE_WAIT)

    @staticmethod
    def _advance(known: _Request, step: int) -> bool:
        has_ended = False
        while known.steps and known.steps[0][0] <= step:
            # The engine takes back what it computed behind blocks that another connector could not load.
            known.computed = min(known.steps.popleft()[1], known.request.num_computed_tokens)
            has_ended = True
        return has_ended

    # Saves.

    def _full(self, known: _Request, computed: int) -> int:
        """Leading blocks that can be saved once so many tokens are computed."""
        request = known.request
        tokens = computed if self._config.save_generated else min(computed, request.num_prompt_tokens)
        return min(tokens // self._config.block_tokens, len(request.block_hashes))

    def _save(self, known: _Request) -> None:
        full = self._full(known, known.computed)
        if full <= known.saved:
            return
        # From the chain's root at first: what the tiers lack there is filled with the engine's own blocks.
        held = self._kv.get_blocks(known.request.request_id).blocks[0][known.saved : full]
        self._start(known, known.saved, _until_gone(held))

    def _start(self, known: _Request, first: int, blocks: list["KVCacheBlock"]) -> None:
        known.saved = first + len(blocks)
        if not blocks:
            return
        slots = [block.block_id for block in blocks]
        save = self.manager.save_from(self._chain(known), first, slots, request=known.number, hints=known.hints)
        self._kv.block_pool.touch(blocks)
        self._saving.append(_Saving(known.number, save, blocks))

    def _release(self) -> None:
        """Gives back the blocks of saves that have ended."""
        still = []
        for saving in self._saving:
            if self._has_saved(saving):
                # The last ones are wanted least, and are given back to be taken first.
                self._kv.block_pool.free_blocks(reversed(saving.blocks))
            else:
                still.append(saving)
        self._saving = still
        if self._pinning:
            self._pin()

    @staticmethod
    def _has_saved(saving: _Saving) -> bool:
        try:
            return saving.save.poll() is not None
        except KvbmError:
            logger.exception("a save was refused")
            return True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._saving and time.monotonic() < until:
            time.sleep(0.0005)
            self._release()

    def is_saving(self) -> bool:
        return bool(self._saving or self._ending)

    def events(self) -> "Iterable[KVCacheEvent]":
        """What came to the tiers and left them since the last call."""
        return self._publisher.take() if self._publisher else ()

    def stats(self) -> Stats | None:
        """What was counted since the last call, or `None` if it is not yet time."""
        return self._reader.read(is_at_rest=not self._requests and not self.is_saving())

    # The end.

    def finish(self, request: "Request", block_ids: list[int]) -> dict[str, Any] | None:
        """A request has ended; the step that computed its last blocks may not be known to have. Returns what it is
        answered."""
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return None
        known.lease = None
        computed = known.steps[-1][1] if known.steps else known.computed
        full = min(self._full(known, computed), len(block_ids))
        # An error may be one of its blocks.
        if full > known.saved and request.status != RequestStatus.FINISHED_ERROR:
            blocks = [self._kv.block_pool.blocks[block] for block in block_ids[known.saved : full]]
            blocks = _until_gone(blocks)
            if known.steps:
                self._kv.block_pool.touch(blocks)
                self._ending.append(_Ending(known, known.saved, blocks))
            else:
                self._start(known, known.saved, blocks)
        self.manager.finished(known.number, request.num_output_tokens, for_good=known.asked.will_not_return)
        if known.asked.pin_seconds:
            self._ask_pin(known, full)
        return known.asked.answers()

    def _ask_pin(self, known: _Request, blocks: int) -> None:
        now = time.monotonic()
        self._pinned = [(until, pinned) for until, pinned in self._pinned if until > now]
        pinned = sum(pinned for _, pinned in self._pinned)
        room = self._max_pinned - pinned
        if blocks > room:
            known.asked.clip_pin(f"{max(room, 0)} of its {blocks} blocks: no more may be pinned at a time")
            blocks = max(room, 0)
        if blocks:
            self._pinned.append((now + known.asked.pin_seconds, blocks))
            self._pinning.append(_Pinning(known, blocks))
            self._pin()

    def _pin(self) -> None:
        """Pins the chains of requests whose saves have ended."""
        busy = {saving.number for saving in self._saving} | {ending.request.number for ending in self._ending}
        still = []
        for pinning in self._pinning:
            known = pinning.known
            if known.number in busy:
                still.append(pinning)
                continue
            chain = Chain(known.request.block_hashes[: pinning.blocks])
            try:
                self.manager.pin(self.manager.lease(chain), known.asked.pin_seconds)
            except KvbmError:
                logger.exception("a request's blocks cannot be pinned")
        self._pinning = still

    def _end(self, ending: _Ending, step: int) -> bool:
        known = ending.request
        self._advance(known, step)
        if known.steps:
            return False
        self._start(known, ending.first, ending.blocks)
        # The save holds them itself.
        self._kv.block_pool.free_blocks(reversed(ending.blocks))
        return True

    def reset(self) -> bool:
        """Forgets all, since the weights may be others; unless they never are."""
        if self._config.weights_never_change:
            return True
        self.manager.reset()
        # What was computed with the weights of before must not come into the new epoch.
        for known in self._requests.values():
            begins_anew = known.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            known.saved = 0 if begins_anew else _ALL
        for ending in self._ending:
            self._kv.block_pool.free_blocks(reversed(ending.blocks))
        self._ending = []
        self._pinning, self._pinned = [], []
        return True

    def shutdown(self) -> None:
        self._wait(_CLOSE_WAIT)
        if not self.manager.close(_CLOSE_WAIT):
            logger.warning("copies are still under way that no medium ends")

    def _chain(self, known: _Request) -> Chain:
        """Its chain, with the blocks that have become full."""
        first = len(known.chain)
        known.chain.extend(known.request.block_hashes[first:])
        if self._publisher and len(known.chain) > first:
            self._publisher.note(known.request, known.chain, first)
        return known.chain

    def _known(self, request: "Request") -> _Request:
        known = self._requests.get(request.request_id)
        if known is None:
            asked = asked_by(request, self._limits)
            known = _Request(next(self._numbers), request, asked, asked.for_manager())
            self._requests[request.request_id] = known
        return known


def _until_gone(blocks: "Iterable[KVCacheBlock]") -> list["KVCacheBlock"]:
    """Those before the first one that left a sliding window: without it, nothing behind it can be kept."""
    return list(itertools.takewhile(lambda block: not block.is_null, blocks))
