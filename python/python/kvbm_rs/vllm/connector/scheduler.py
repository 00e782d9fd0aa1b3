"""The scheduler's role: look-ups, loads and saves, and which of the engine's blocks are held for them."""

import itertools
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvbm_rs import (
    Chain,
    EngineMemory,
    Hints,
    Lease,
    Load,
    LoadEnd,
    Save,
    Manager,
    logs,
)
from kvbm_rs._native import vllm_request_numbers
from kvbm_rs.errors import KvbmError, UnavailableError
from kvbm_rs.vllm import logger
from kvbm_rs.vllm.connector.adapters import Adapters
from kvbm_rs.vllm.connector.config import Config
from kvbm_rs.vllm.connector.events import Publisher
from kvbm_rs.vllm.connector.hints import Asked, Limits, asked_by
from kvbm_rs.vllm.connector.peers import Prefilled, Prefills
from kvbm_rs.vllm.connector.shadow import Shadow, ShadowedHit
from kvbm_rs.vllm.connector.stats import Stats
from kvbm_rs.vllm.connector.worker import Ended, LayeredLoad, SlicedLoad, Stepped, StepSave, adopted
from kvbm_rs.vllm.samples import Reader
from kvbm_rs.vllm.versions import CacheHitSource, loads_amid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

# Seconds.
_CLOSE_WAIT = 5.0
_RESET_WAIT = 1.0

# Seconds that a step waits for a load where nothing computes. A step that finds nothing takes 2 ms of a processor, and so from the
# copy; a request that comes meanwhile waits as long.
_IDLE_WAIT = 0.005

# Seconds that a request which needs room waits for a save to free some. A save that takes longer waits for a slow medium.
_MAX_SAVE = 0.05

# Tokens whose blocks are saved together when a request has generated them. A preemption loses those that wait; of a model with windows
# or states none do, as these are gone soon.
_GENERATED = 128

# One block in four may be pinned: what is pinned makes no room.
_MAX_PINNED_SHARE = 4

# More blocks than any request has: of one that is not saved, or not any more.
_ALL = 1 << 62

# Why a request's blocks are neither pinned nor brought up. Of a hybrid model only full attention could be, which is of no use
# without the windows.
_NOT_HYBRID = "it is for models of one cache group, and this one has several"
_NOT_KEPT = "it is not known what its blocks are computed from, so they are not kept"

_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


@dataclass
class _Request:
    """What is known of one of the engine's requests while it lives."""

    number: int
    request: "Request"
    asked: Asked
    hints: Hints | None
    # What sets its blocks apart from others that vLLM names alike. `None`: that is not known, so it is neither served nor kept.
    salt: bytes | None
    chain: Chain = field(init=False)
    # The engine's name of the chain's last block.
    last: "BlockHash | None" = None
    # Its prompt was computed at a peer, and what that holds is still to come.
    prefilled: Prefilled | None = None
    # Another engine reads its prompt while it is computed; and what the step under way saves of it for that.
    is_followed: bool = False
    in_layers: StepSave | None = None
    # Leading blocks that a peer computed for it and without which it fails, until they are loaded.
    owed: int = 0
    # It was looked up, and counted.
    is_counted: bool = False
    # The engine computes again what the tiers have of it, until that is compared.
    shadowed: ShadowedHit | None = None
    # From a look-up, until its blocks are loaded.
    lease: Lease | None = None
    sources: dict[CacheHitSource, int] = field(default_factory=dict)
    # A load failed: what it was offered is not offered again.
    has_failed: bool = False
    # Leading blocks that were handed to saves, and the last block with which one of them ended a prompt or a turn.
    saved: int = 0
    end: int = 0
    # Steps that are under way and may fill a block, each with the leading tokens whose keys and values are there when it has ended.
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    # Of the last such step. Those since have filled no block.
    computed: int = 0
    # The step that may fill its next block, or 0: it is not known before it is scheduled anew.
    due: int = 0

    def __post_init__(self) -> None:
        self.forget_chain()
        if self.salt is None:
            self.keep_nothing()

    def keep_nothing(self) -> None:
        self.salt, self.saved = None, _ALL

    def forget_chain(self) -> None:
        self.chain = Chain(salt=self.salt or b"")

    def begin_anew(self) -> None:
        """Its blocks are not its own any more."""
        self.steps.clear()
        self.computed, self.due, self.shadowed = 0, 0, None
        self.in_layers = None


# The blocks of a cache group from a position of the chain on.
_Stretch = tuple[int, list["KVCacheBlock"]]


@dataclass
class _Loading:
    # By cache group its number, the position of the first block, and a slot for each.
    slots: list[tuple[int, int, list[int]]]
    # `None`: what it was to load is lost.
    start: "Callable[[], Load] | None"
    # The last step that may still write its slots.
    after: int
    # It comes from a peer.
    prefilled: Prefilled | None = None
    load: Load | None = None
    end: LoadEnd | None = None
    # By cache group the slots that hold nothing that can be used.
    bad: list[set[int]] = field(default_factory=list)


@dataclass
class _Saving:
    """A save, and the engine's blocks that must not be written before it has ended."""

    number: int
    save: Save
    blocks: list["KVCacheBlock"]
    since: float = field(default_factory=time.monotonic)


@dataclass
class _Ending:
    """A request that has ended while its last step was not known to have."""

    request: _Request
    # By cache group.
    held: list[_Stretch]


@dataclass
class _Pinning:
    """A request that has ended and wants its chain to stay, once it is saved."""

    known: _Request
    blocks: int


class Scheduler:
    # Where hits are computed again.
    _shadow: Shadow | None = None

    def __init__(self, config: Config) -> None:
        self._config = config
        own = adopted(config.engine) if config.is_alone else None
        memories = own.memories if own else _in_ranks(config)
        self.manager = Manager(
            config.settings,
            memories[0],
            block_tokens=config.block_tokens,
            fingerprint=own.fingerprint if own else config.fingerprint,
            ranks=None if config.is_alone else config.ranks(),
            groups=config.others(memories[1:]),
        )
        # A checkpoint of a window keeps what came after the one of the grid before it.
        self._grid = int(config.settings["hybrid.checkpoint_blocks"])
        self._reader = Reader(self.manager)
        self._adapters = Adapters(config.adapter_options)
        # Names the weights since a reset: only this process knows which they are.
        self._weights = b""
        # vLLM's names up to each block's end: the last one is the block's.
        self._hashes_per_block = config.block_tokens // config.hash_tokens
        self._publisher = None
        if config.publishes:
            self._publisher = Publisher(self.manager, config.block_tokens, config.groups[0].index)
        self._prefills = Prefills(self.manager, config)
        if config.shadow_elements:
            self._shadow = Shadow(self.manager, config.shadow_elements, own.tensors[0], config.slots)
        self._requests: dict[str, _Request] = {}
        # Those of requests that live.
        self._numbers: set[int] = set()
        # By step the requests that may fill a block in it, some of which may have gone; and those that were looked at in steps under way.
        self._due: dict[int, list[str]] = {}
        self._filling: deque[tuple[int, list[str]]] = deque()
        self._loading: dict[str, _Loading] = {}
        # Loads of the step that is being scheduled.
        self._layered: list[LayeredLoad | SlicedLoad] = []
        self._saving: list[_Saving] = []
        self._ending: list[_Ending] = []
        self._pinning: list[_Pinning] = []
        # Until when, and how many blocks are pinned.
        self._pinned: list[tuple[float, int]] = []
        tiers = self.manager.occupancy()
        can_prefetch = "host" in tiers and len(tiers) > 1
        self._limits = Limits(config.max_tokens, _NOT_HYBRID if config.is_hybrid else "", can_prefetch)
        self._max_pinned = min(slots for slots, _ in tiers.values()) // _MAX_PINNED_SHARE
        self._step = 0
        # The last step that computes anything, and the last one that is known to have ended.
        self._computing = self._ended = 0
        # The last step that was waited in for a peer.
        self._waited = -1
        self._pool: BlockPool | None = None
        # vLLM 0.29 does not show it: a request's blocks are known at its end only, and are saved then.
        self._kv: KVCacheManager | None = None
        logs.announce("KvbmConnector", self.manager, config.settings.remarks())

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        self._kv = kv_cache_manager

    def bind_pool(self, pool: "BlockPool") -> None:
        self._pool = pool
        # vLLM cannot empty its cache while blocks are held, and takes that for a defect where it has stopped all
        # requests (sleep, weight updates). It says nothing before, so this is where saves are waited for.
        reset = pool.reset_prefix_cache

        def reset_when_saved() -> bool:
            self._wait(_RESET_WAIT)
            return reset()

        pool.reset_prefix_cache = reset_when_saved

    # Look-ups and loads.

    def arrive(self, request: "Request") -> None:
        """A request waits for its turn."""
        known = self._known(request)
        if known.asked.prefetch:
            lease = self.manager.lease(self._chain(known), request=known.number, hints=known.hints)
            if lease.blocks > lease.by_tier.get("host", 0):
                self.manager.prefetch(lease)

    def look_up(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the tiers have beyond those that the engine has. `None`: something of it is on its way from a peer.

        This is also where a chain's use is noted, so it happens for requests that need nothing from below as well.
        """
        known = self._known(request)
        if known.has_failed or known.shadowed is not None or not self._still_has_its_salt(known):
            return 0, False
        most = self._config.loadable(request.num_tokens)
        chain = self._chain(known)
        if known.prefilled is not None:
            promised = self._prefills.promised(known.prefilled, most)
            more = self._more(request, promised, num_computed_tokens)
            if more > 0 and promised > max(self.manager.matches(chain).values(), default=0):
                return more, True
            if not promised and not self._has_come(known.prefilled, known, chain, most):
                return None, False
            known.owed = self._prefills.owed(known.prefilled, most)
            known.prefilled = None
        is_new = not known.is_counted
        known.lease = self._lease(known, chain, most)
        is_lost = known.lease.blocks < known.owed
        more = self._more(request, max(known.lease.blocks, known.owed), num_computed_tokens)
        if more > 0 and is_new and not known.owed:
            known.shadowed = self._shadow_of(known, num_computed_tokens)
            if known.shadowed is not None:
                known.lease = None
                return 0, False
        if is_lost or more <= 0:
            known.lease = None
        if more <= 0:
            known.owed = 0
            return 0, False
        # vLLM knows failures of loads only: one that is lost begins, and fails.
        return more, is_lost or not self._is_layered(known.lease)

    def _lease(self, known: _Request, chain: Chain, most: int, from_peer: int = 0) -> Lease:
        # vLLM asks again in each step in which it has no room for the request, and when it goes on after a preemption.
        again, known.is_counted = known.is_counted, True
        asked = {"request": known.number, "hints": known.hints, "again": again}
        lease = self.manager.lease(chain, most=most, from_peer=from_peer, **asked)
        if self._publisher:
            self._publisher.find(known.chain)
        return lease

    def _more(self, request: "Request", blocks: int, num_computed_tokens: int) -> int:
        """Tokens of the leading blocks that the engine lacks, if they are worth a load."""
        if request.num_tokens - num_computed_tokens <= self._config.block_tokens:
            # A load takes a step longer than the last block.
            return 0
        return blocks * self._config.block_tokens - num_computed_tokens

    def _shadow_of(self, known: _Request, num_computed_tokens: int) -> ShadowedHit | None:
        """Whether the engine computes again what there is for it, while no other request waits."""
        if self._shadow is None or len(self._requests) > 1:
            return None
        computed = num_computed_tokens // self._config.block_tokens
        return self._shadow.choose(known.lease, known.chain, known.lease.blocks, computed)

    def _has_come(self, prefilled: Prefilled, known: _Request, chain: Chain, most: int) -> bool:
        # Where nothing computes vLLM asks again at once. One of those that wait sleeps, once a step.
        is_idle = self._waited != self._step and self._computing <= self._ended
        self._waited = self._step
        seconds = _IDLE_WAIT if is_idle else 0.0
        self._prefills.names_there(prefilled, known.request, known.salt or b"")
        return self._prefills.has_ended(prefilled, chain, most, known.number, known.hints, seconds)

    def _is_layered(self, lease: Lease) -> bool:
        """Whether its blocks come while the engine computes. From below memory they would keep all requests waiting."""
        return self._config.layerwise and lease.by_tier.get("host", 0) == lease.blocks

    def load(self, request: "Request", tables: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Loads into the request's blocks, of which there is a table for each of vLLM's groups."""
        known = self._known(request)
        lease, known.lease = known.lease, None
        owed, known.owed = known.owed, 0
        prefilled, known.prefilled = known.prefilled, None
        blocks = num_external_tokens // self._config.block_tokens
        if not blocks:
            # Another connector loads, or none does.
            return
        if prefilled is not None:
            self._load_from_peer(known, prefilled, tables, blocks)
            return
        if lease is None:
            # Without a debt it is the call after the load, which has been asked for already.
            if owed:
                self._lose(request.request_id, tables, owed - blocks, owed)
            return
        end = lease.blocks
        first = end - blocks
        known.sources = self._split(lease.by_tier, first, end)
        slots = []
        for number, group in enumerate(self._config.groups):
            # What the engine has of a window itself stays as it is.
            start = self._first_kept(tables[group.index], max(first, lease.wanted(number)[0]), end)
            slots.append((number, start, tables[group.index][start:end]))
        if self._is_layered(lease):
            (given,) = slots
            kind = LayeredLoad if self._config.is_alone else SlicedLoad
            self._layered.append(kind(request.request_id, self.manager, lease, *given[1:]))
        else:
            self._start_load(request.request_id, slots, lambda: self.manager.load_into(lease, slots))

    def _load_from_peer(
        self, known: _Request, prefilled: Prefilled, tables: tuple[list[int], ...], blocks: int
    ) -> None:
        """Loads what was promised. No more than that is known of where it comes from."""
        known.sources = {}
        end = self._prefills.promised(prefilled, self._config.loadable(known.request.num_tokens))
        slots = [(0, end - blocks, tables[self._config.groups[0].index][end - blocks : end])]
        self._prefills.names_there(prefilled, known.request, known.salt or b"")
        chain = known.chain
        load = lambda: self._prefills.load(prefilled, chain, slots, known.number, known.hints)
        self._start_load(known.request.request_id, slots, load, prefilled)

    def _start_load(
        self,
        name: str,
        slots: list[tuple[int, int, list[int]]],
        load: "Callable[[], Load]",
        prefilled: Prefilled | None = None,
    ) -> None:
        # Where vLLM gives a block to no one else while a step under way may still write it (`defer_block_free`, 0.29
        # and 0.32), the load may begin at once.
        after = self._step if self._config.is_producer else 0
        loading = self._loading[name] = _Loading(slots, load, after, prefilled)
        self._begin(loading)

    def _begin(self, loading: _Loading) -> bool:
        """Begins a load, if it may begin. Whether it has begun."""
        if loading.load is None and loading.after <= self._ended:
            loading.load, loading.start = loading.start(), None
        return loading.load is not None

    def _lose(self, name: str, tables: tuple[list[int], ...], first: int, end: int) -> None:
        """Fails a load of blocks that a peer computed and that are lost."""
        slots = [(number, first, tables[group.index][first:end]) for number, group in enumerate(self._config.groups)]
        bad = [set(given) - {self._pool.null_block.block_id} for _, _, given in slots]
        self._loading[name] = _Loading(slots, start=None, after=0, bad=bad)

    def _first_kept(self, table: list[int], start: int, end: int) -> int:
        """The first position whose block no window has left: before it there is none to load into."""
        null = self._pool.null_block.block_id
        return next((at for at in range(start, end) if table[at] != null), end)

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
        self._adapters.look_again()
        for name in output.preempted_req_ids or ():
            if name in self._requests:
                self._requests[name].begin_anew()
        if output.total_num_scheduled_tokens:
            self._computing = self._step
        self._look(output)
        told = Ended(self._step, self._layered, self._save_in_layers(output))
        self._layered = []
        seconds = _IDLE_WAIT if self._computing <= self._ended else 0.0
        for name, loading in list(self._loading.items()):
            has_ended, seconds = self._has_ended(loading, seconds), 0.0
            if has_ended:
                del self._loading[name]
                told.loaded.add(name)
                if loading.prefilled is not None and name in self._requests:
                    self._has_arrived(loading, self._requests[name])
                if self._config.is_shared:
                    ((_, _, blocks),) = loading.slots
                    told.shared += blocks
                if loading.bad:
                    told.failed.add(name)
                    told.bad = [more | bad for more, bad in zip(told.bad or loading.bad, loading.bad)]
                    if name in self._requests:
                        self._requests[name].has_failed = True
        return told

    def _look(self, output: Any) -> None:
        """Notes what the step computes of requests that may fill a block in it. One that decodes fills a block in one of many
        steps, and is left alone in the others."""
        cached = output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens))
        new = {scheduled.req_id: scheduled.num_computed_tokens for scheduled in output.scheduled_new_reqs}
        before.update(new)
        is_due = (name for name in self._due.pop(self._step, ()) if self._is_due(name))
        looked = [name for name in dict.fromkeys((*new, *cached.resumed_req_ids, *is_due)) if name in self._requests]
        for name in looked:
            known = self._requests[name]
            if name in before:
                drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                self._compute(known, before[name], output.num_scheduled_tokens[name] - drafts)
                self._look_in(self._steps_to_next(known), name)
            elif known.request.status == RequestStatus.RUNNING:
                self._look_in(1, name)
        self._filling.append((self._step, looked))

    def _is_due(self, name: str) -> bool:
        return name in self._requests and self._requests[name].due == self._step

    def _compute(self, known: _Request, before: int, tokens: int) -> None:
        """The step computes `tokens` behind the first `before`."""
        if known.steps and known.steps[-1][1] > before:
            # A session goes on before what steps under way compute: that is of a token that was taken back.
            known.steps = deque((step, min(done, before)) for step, done in known.steps)
        known.steps.append((self._step, min(before + tokens, known.request.num_tokens)))

    def _steps_to_next(self, known: _Request) -> int:
        """After how many steps at least a request has filled its next block, of which this step computes the last that is known."""
        _, computed = known.steps[-1]
        if computed < known.request.num_tokens:
            # A step takes as much of a prompt as there is room for.
            return 1
        missing = self._config.block_tokens - computed % self._config.block_tokens
        return -(-missing // self._config.step_tokens)

    def _look_in(self, steps: int, name: str) -> None:
        due = self._requests[name].due = self._step + steps
        self._due.setdefault(due, []).append(name)

    def _has_ended(self, loading: _Loading, seconds: float) -> bool:
        if loading.start is None and loading.load is None:
            return True
        if loading.end is None:
            try:
                if not self._begin(loading):
                    return False
                loading.end = loading.load.wait(seconds)
            except KvbmError:
                # It was never begun: a reset, or a shutdown, came first.
                logger.exception("a load was refused")
                loading.bad = [set(slots) for _, _, slots in loading.slots]
                return True
            if loading.end is None:
                if loading.prefilled is not None and self._prefills.is_late(loading.prefilled):
                    loading.load.cancel()
                return False
            if not loading.bad and not loading.end.is_whole:
                loading.bad = self._bad(loading.slots, loading.end.usable)
        # A medium that hangs may still write there.
        return not loading.bad or loading.end.slots_are_free()

    def _has_arrived(self, loading: _Loading, known: _Request) -> None:
        """What a peer computed is here, or as much of it as comes: a hit, as that of any other look-up."""
        if not len(known.chain):
            # A reset came meanwhile: it is looked up anew.
            return
        came = loading.end.usable if loading.end is not None else 0
        self._lease(known, known.chain, self._config.loadable(known.request.num_tokens), from_peer=came)
        if loading.bad and loading.end is not None:
            came, wanted, why = loading.end.arrived, loading.end.arrived + loading.end.failed, loading.end.fault
            logger.warning("%d of %d blocks came from %s: %s", came, wanted, loading.prefilled.peer, why or "it has no more")

    def _bad(self, slots: list[tuple[int, int, list[int]]], usable: int) -> list[set[int]]:
        """Of a load that is not whole, by cache group the slots that must not be used."""
        if self._config.is_windowed:
            # vLLM computes all of it: windows are as of a position that was not reached.
            return [set(given) for _, _, given in slots]
        return [set(given[max(0, usable - first) :]) for _, first, given in slots]

    def stepped(self, stepped: Stepped | None) -> None:
        """A step has ended, with those before it: saves what it filled."""
        self._adapters.look_again()
        if stepped is not None:
            self._ended = stepped.step
            self._take_back(stepped)
            while self._filling and self._filling[0][0] <= stepped.step:
                for name in self._filling.popleft()[1]:
                    self._fill(name, stepped.step)
            self._ending = [ending for ending in self._ending if not self._end(ending, stepped.step)]
        # No request waits here for saves: the last answer goes out with this step.
        self._release()

    def _take_back(self, stepped: Stepped) -> None:
        """A load failed that the step waited for: nothing from its first bad block on may be used.

        vLLM computes these blocks again in the next step, and leaves them in its prefix cache meanwhile. It would serve
        them wrong to others if the request were taken back before that, so they leave the cache here.
        """
        for name in stepped.failed:
            if name in self._requests:
                self._requests[name].has_failed = True
        for name in self._requests if stepped.bad else ():
            request, block_tokens = self._requests[name].request, self._config.block_tokens
            (table,) = self._kv.get_block_ids(name)
            first = next((at for at, block in enumerate(table) if block in stepped.bad), None)
            if first is not None:
                self._kv.evict_blocks(set(table[first:]))
                # Of those that share a block vLLM leaves it to one of them, which may not live to do it.
                request.num_computed_tokens = min(request.num_computed_tokens, first * block_tokens)

    def _fill(self, name: str, step: int) -> None:
        """Saves what a request has filled by the end of `step`."""
        known = self._requests.get(name)
        if known is None or not self._advance(known, step):
            return
        if known.request.num_computed_tokens < known.request.num_tokens - 1:
            # What was taken back may be computed again by any step.
            self._look_in(1, name)
        self._save(known)
        self._compare(known)

    @staticmethod
    def _advance(known: _Request, step: int) -> bool:
        has_ended = False
        while known.steps and known.steps[0][0] <= step:
            # The engine takes back what it computed behind blocks that another connector could not load.
            known.computed = min(known.steps.popleft()[1], known.request.num_computed_tokens)
            has_ended = True
        return has_ended

    def _compare(self, known: _Request) -> None:
        """Has a hit compared that was computed again, once all of it is."""
        hit = known.shadowed
        if hit is None or known.computed < hit.end * self._config.block_tokens or self._kv is None:
            return
        known.shadowed = None
        table = self._kv.get_blocks(known.request.request_id).blocks[self._config.groups[0].index]
        self._shadow.hold(hit, list(table[hit.first : hit.end]), self._ended, self._pool)

    # Saves.

    def _full(self, known: _Request, computed: int) -> int:
        """Leading blocks that can be saved once `computed` tokens are there."""
        request = known.request
        tokens = computed if self._config.save_generated else min(computed, request.num_prompt_tokens)
        return min(tokens // self._config.block_tokens, len(request.block_hashes) // self._hashes_per_block)

    def _save_in_layers(self, output: Any) -> list[StepSave]:
        """What the step is to save while it computes: the blocks that it fills of prompts which other engines read meanwhile. Where it
        also loads, it may compute what is wrong, and hears of that at its end."""
        if not self._config.saves_layers or self._kv is None or loads_amid(output):
            return []
        looked = (self._requests[name] for name in self._filling[-1][1])
        saves = [self._in_layers(known) for known in looked if known.is_followed and known.steps]
        return [save for save in saves if save is not None]

    def _in_layers(self, known: _Request) -> StepSave | None:
        step, computed = known.steps[-1]
        full = self._full(known, min(computed, known.request.num_prompt_tokens))
        if step != self._step or full <= known.saved or not self._still_has_its_salt(known):
            return None
        chain, first = self._chain(known), known.saved
        table = self._kv.get_block_ids(known.request.request_id)[self._config.groups[0].index]
        known.in_layers = StepSave(self.manager, chain, first, table[first:full], known.number, known.hints)
        return known.in_layers

    @staticmethod
    def _count_layers(known: _Request) -> None:
        """What was saved layer by layer is not saved again."""
        save, known.in_layers = known.in_layers, None
        if save is not None:
            known.saved = max(known.saved, save.kept)

    def _save(self, known: _Request) -> None:
        self._count_layers(known)
        full = self._full(known, known.computed)
        if full <= known.saved or self._kv is None or self._waits_for_more(known, full):
            return
        tables = self._kv.get_blocks(known.request.request_id).blocks
        prompt = self._config.loadable(known.request.num_prompt_tokens)
        if self._config.is_hybrid and known.saved < prompt <= full:
            # Where who asks for the same prompt goes on.
            self._start(known, self._stretches(known, tables, prompt), is_end=True)
        if full > known.saved:
            self._start(known, self._stretches(known, tables, full), is_end=False)

    def _waits_for_more(self, known: _Request, full: int) -> bool:
        """Whether what it generated is saved with what follows, or at its end: a save of one block costs as much as one of many."""
        tokens = self._config.block_tokens
        is_prompt_saved = known.saved >= known.request.num_prompt_tokens // tokens
        return is_prompt_saved and (full - known.saved) * tokens < _GENERATED and not self._config.is_windowed

    def _stretches(self, known: _Request, tables: "Sequence[Sequence[KVCacheBlock]]", end: int) -> list[_Stretch]:
        """By cache group the blocks before `end` that are to be saved, of vLLM's tables."""
        full, *windows = [tables[group.index] for group in self._config.groups]
        # From the chain's root at first: what the tiers lack there is filled with the engine's own blocks. What left a window
        # before it was saved is lacking, unless the tiers have it.
        kept = _since_gone(full[known.saved : end])
        stretches = [(end - len(kept), kept)]
        since = min(known.saved, end - 1) // self._grid * self._grid
        for window in windows:
            there = _since_gone(window[since:end])
            stretches.append((end - len(there), there))
        return stretches

    def _start(self, known: _Request, stretches: list[_Stretch], is_end: bool) -> None:
        if not self._still_has_its_salt(known):
            return
        first, full = stretches[0]
        known.saved = first + len(full)
        if is_end:
            known.end = known.saved
        blocks = [block for _, held in stretches for block in held]
        if not blocks:
            return
        slots = [(number, at, [block.block_id for block in held]) for number, (at, held) in enumerate(stretches)]
        save = self.manager.save_from(
            self._chain(known), slots, is_end=is_end, request=known.number, hints=known.hints
        )
        self._pool.touch(blocks)
        self._saving.append(_Saving(known.number, save, blocks))

    def _release(self) -> None:
        """Gives back the blocks of saves and comparisons that have ended."""
        still = []
        for saving in self._saving:
            if self._has_saved(saving):
                # The last ones are wanted least, and are given back to be taken first.
                self._pool.free_blocks(reversed(saving.blocks))
            else:
                still.append(saving)
        self._saving = still
        if self._shadow:
            self._shadow.go_on(self._ended, self._pool)
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
        while (self._saving or self._shadow) and time.monotonic() < until:
            time.sleep(0.0005)
            self._release()

    def is_saving(self) -> bool:
        return bool(self._saving or self._ending or self._shadow)

    def frees_blocks_soon(self) -> bool:
        """Whether blocks become free in a moment that only a save holds: vLLM then waits for them, and preempts no request."""
        since = time.monotonic() - _MAX_SAVE
        return any(
            block.ref_cnt == 1 for saving in self._saving if saving.since > since for block in saving.blocks
        )

    def events(self) -> "Iterable[KVCacheEvent]":
        """What came to the tiers and left them since the last call."""
        return self._publisher.take() if self._publisher else ()

    def stats(self) -> Stats | None:
        """What was counted since the last call, or `None` if it is not yet time."""
        found = self._reader.read(is_at_rest=not self._requests and not self.is_saving())
        return None if found is None else Stats(found)

    # The end.

    def finish(self, request: "Request", tables: tuple[list[int], ...]) -> dict[str, Any] | None:
        """A request has ended; the step that computed its last blocks may not be known to have. Returns what it is
        answered."""
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return None
        self._numbers.discard(known.number)
        known.lease = None
        self._give_up(request.request_id, known)
        self._count_layers(known)
        computed = known.steps[-1][1] if known.steps else known.computed
        table = tables[self._config.groups[0].index]
        full = min(self._full(known, computed), len(table))
        if known.shadowed is not None and known.shadowed.end <= full and request.status != RequestStatus.FINISHED_ERROR:
            again = [self._pool.blocks[block] for block in table[known.shadowed.first : known.shadowed.end]]
            self._shadow.hold(known.shadowed, again, known.steps[-1][0] if known.steps else self._ended, self._pool)
        # Of a hybrid model a turn leaves a checkpoint.
        is_new = full > known.saved or self._config.is_hybrid and full == known.saved != known.end
        # An error may be one of its blocks.
        if is_new and request.status != RequestStatus.FINISHED_ERROR:
            held = self._stretches(known, [[self._pool.blocks[block] for block in table] for table in tables], full)
            if known.steps:
                self._pool.touch([block for _, blocks in held for block in blocks])
                self._ending.append(_Ending(known, held))
            else:
                self._start(known, held, is_end=True)
        self.manager.finished(known.number, request.num_output_tokens, for_good=known.asked.will_not_return)
        if known.asked.pin_seconds:
            self._ask_pin(known, full)
        answers = (known.asked.answers(), self._prefills.answer(request))
        return {name: answer for said in answers if said for name, answer in said.items()} or None

    def _give_up(self, name: str, known: _Request) -> None:
        """Has nothing more brought for it of what a peer computed, and what has come counts for nothing."""
        if known.prefilled is not None and known.prefilled.pull is not None:
            known.prefilled.pull.cancel()
        loading = self._loading.get(name)
        if loading is None or loading.prefilled is None:
            return
        loading.start, loading.bad = None, [set(slots) for _, _, slots in loading.slots]
        if loading.load is not None:
            loading.load.cancel()

    def _ask_pin(self, known: _Request, blocks: int) -> None:
        if known.salt is None:
            known.asked.clip_pin(f"none of its {blocks} blocks: {_NOT_KEPT}")
            return
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
            if known.salt is None:
                continue
            if known.number in busy:
                still.append(pinning)
                continue
            chain = Chain(self._hashes(known.request)[: pinning.blocks], salt=known.salt)
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
        self._start(known, ending.held, is_end=True)
        # The save holds them itself.
        self._let_go(ending)
        return True

    def _let_go(self, ending: _Ending) -> None:
        blocks = [block for _, held in ending.held for block in held]
        self._pool.free_blocks(reversed(blocks))

    def reset(self) -> bool:
        """Forgets all, since the weights may be others; unless they never are."""
        if self._config.weights_never_change:
            return True
        # After a restart the engine has the weights of its files again, and a bucket's other engines have weights of their own.
        self._weights = os.urandom(16)
        # What was computed with the old weights must not come into the new epoch, whatever becomes of the reset.
        for name, known in self._requests.items():
            known.lease = None
            # Peers give nothing of these weights.
            self._give_up(name, known)
            known.prefilled, known.owed, known.in_layers = None, 0, None
            # One whose load has ended, or a session, waits too.
            waits = known.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            begins_anew = waits and not known.request.num_computed_tokens
            if begins_anew:
                known.begin_anew()
            known.shadowed = None
            known.salt = self._salt(known.request) if known.salt is not None else None
            known.saved = 0 if begins_anew and known.salt is not None else _ALL
            known.forget_chain()
        if self._shadow is not None:
            self._shadow.forget()
        ended, self._ending = self._ending, []
        for ending in ended:
            self._let_go(ending)
        self._pinning, self._pinned = [], []
        try:
            self.manager.reset()
        except UnavailableError as error:
            # What was kept before the first reset is of the files' weights, and all since has names that end with this process.
            logger.warning("the new epoch is not noted everywhere yet: %s", error)
        except KvbmError:
            # Nothing older is found all the same: all since has other names.
            logger.exception("the tiers have begun no new epoch")
            return False
        return True

    def shutdown(self) -> None:
        self._wait(_CLOSE_WAIT)
        if not self.manager.close(_CLOSE_WAIT):
            logger.warning("copies are still under way that no medium ends")

    def _chain(self, known: _Request) -> Chain:
        """Its chain, with the blocks that have become full."""
        hashes, first = self._hashes(known.request), len(known.chain)
        if first and (first > len(hashes) or hashes[first - 1] != known.last):
            # A session goes on without the last token that was said: no block that was computed has it.
            known.forget_chain()
            first = 0
            if known.saved != _ALL:
                known.saved = min(known.saved, known.computed // self._config.block_tokens)
        known.chain.extend(hashes[first:])
        known.last = hashes[-1] if hashes else None
        if self._publisher and len(known.chain) > first:
            self._publisher.note(known.request, hashes, known.chain, first)
        return known.chain

    def _hashes(self, request: "Request") -> "list[BlockHash]":
        """vLLM's names of its full blocks. Each commits to all that comes before it, however often vLLM hashes."""
        hashes, every = request.block_hashes, self._hashes_per_block
        return hashes if every == 1 else hashes[every - 1 :: every]

    def _known(self, request: "Request") -> _Request:
        known = self._requests.get(request.request_id)
        if known is None:
            number, salt = self._number(request.request_id), self._salt(request) if self._is_hashed(request) else None
            limits = self._limits if salt is not None else replace(self._limits, why_not_held=_NOT_KEPT)
            asked = asked_by(request, limits)
            known = _Request(number, request, asked, asked.for_manager(), salt)
            known.prefilled = self._prefills.of(request) if salt is not None else None
            known.is_followed = self._prefills.is_followed(request)
            self._requests[request.request_id] = known
            self._numbers.add(number)
        return known

    def _is_hashed(self, request: "Request") -> bool:
        """Whether its hashes are of as many tokens as the engine said: blocks are told by their number."""
        tokens, hashes = self._config.hash_tokens, len(request.block_hashes)
        if hashes == request.num_tokens // tokens:
            return True
        logger.error(
            "request %s: %d tokens have %d hashes, wanted is one for each %d: none of its blocks is kept or served",
            request.request_id,
            request.num_tokens,
            hashes,
            tokens,
        )
        return False

    def _salt(self, request: "Request") -> bytes | None:
        if request.mm_features and not self._config.names_media:
            return None
        adapter = self._adapters.salt(request.lora_request)
        return None if adapter is None else self._weights + adapter

    def _still_has_its_salt(self, known: _Request) -> bool:
        """Whether its blocks still have the names that they had when it came. If not, it keeps nothing from here on."""
        if known.salt is not None and self._salt(known.request) != known.salt:
            known.keep_nothing()
        return known.salt is not None

    def _number(self, request_id: str) -> int:
        """That of the id which the client has, unless another request that lives has the same one."""
        of_client, own = vllm_request_numbers(request_id)
        return own if of_client in self._numbers else of_client


def _since_gone(blocks: "Sequence[KVCacheBlock]") -> list["KVCacheBlock"]:
    """Those behind the last one that left a sliding window."""
    return list(itertools.takewhile(lambda block: not block.is_null, reversed(blocks)))[::-1]


def _in_ranks(config: Config) -> list[EngineMemory]:
    """The memory that workers in other processes adopt, by cache group."""
    full, *others = config.groups
    memories = [EngineMemory.in_ranks(config.slots, full.shares)]
    for group in others:
        memories.append(EngineMemory.group_in_ranks(config.slots, group.shares, group.block_bytes))
    return memories
