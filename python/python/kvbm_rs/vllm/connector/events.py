"""What comes to the tiers and leaves them, as vLLM's KV events: routers send requests where their blocks are."""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain as chained
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

    from kvbm_rs import Chain, Manager

# By tier. vLLM has no word for what several workers share: this is Dynamo's.
_MEDIA = {"host": MEDIUM_CPU, "disk": MEDIUM_STORAGE, "object": "EXTERNAL"}

# How many blocks that are in no tier yet are remembered, the latest: those of saves under way, with room to spare.
_MAX_EXPECTED = 65_536

# Events are taken in pieces of this size.
_BATCH = 4096


@dataclass(slots=True)
class _Block:
    """What an event says of a block; its bytes do not say it, so it is noted while a request has its tokens."""

    hash: "BlockHash"
    parent: "BlockHash | None"
    tokens: array
    lora: tuple[int, str] | None
    # In which an event said it was stored.
    tiers: set[str] = field(default_factory=set)


class _Prompt:
    """Blocks of a request that follow each other: what an event says of one is put together when it comes to a tier."""

    def __init__(self, request: "Request", hashes: "list[BlockHash]", chain: "Chain", first: int, block_tokens: int) -> None:
        self._chain, self._first, self._block_tokens = chain, first, block_tokens
        # A session takes back what it said last.
        self._parent = hashes[first - 1] if first else None
        self._hashes = hashes[first:]
        self._tokens = request.all_token_ids[first * block_tokens : len(hashes) * block_tokens]
        self._lora = request.lora_request and (request.lora_request.adapter_id, request.lora_request.name)

    @cached_property
    def places(self) -> dict[int, int]:
        """By name the place of a block among these."""
        names = self._chain.names(self._first)[: len(self._hashes)]
        return {name: at for at, name in enumerate(names)}

    @cached_property
    def _packed(self) -> array:
        return array("I", self._tokens)

    def block(self, name: int) -> _Block:
        at = self.places[name]
        parent = self._hashes[at - 1] if at else self._parent
        tokens = self._packed[at * self._block_tokens : (at + 1) * self._block_tokens]
        return _Block(self._hashes[at], parent, tokens, self._lora)


class Publisher:
    """Turns a manager's events into vLLM's.

    What an earlier process left in a tier has no tokens until a request comes with them: it is told then.
    """

    def __init__(self, manager: "Manager", block_tokens: int, group: int) -> None:
        self._manager = manager
        self._events = manager.events()
        self._block_tokens = block_tokens
        # Whose blocks are told, by vLLM's number.
        self._group = group
        self._blocks: dict[int, _Block] = {}
        # Those of no tier, and what has come since the last look at events.
        self._expected: OrderedDict[int, _Block | _Prompt] = OrderedDict()
        self._noted: list[_Prompt] = []
        # Found by look-ups, and to be told with the next events.
        self._found: list[KVCacheEvent] = []

    def note(self, request: "Request", hashes: "list[BlockHash]", chain: "Chain", first: int) -> None:
        """The blocks of `request` from position `first` on may come to a tier, or are there. `hashes` has one for each block."""
        self._noted.append(_Prompt(request, hashes, chain, first, self._block_tokens))

    def _expect_noted(self) -> None:
        """Takes up what was noted: not when it arrives, since vLLM does not ask before the next events."""
        noted, self._noted = self._noted, []
        for prompt in noted:
            new = [name for name in prompt.places if name not in self._blocks and name not in self._expected]
            self._expected.update(dict.fromkeys(new, prompt))
        while len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def find(self, chain: "Chain") -> None:
        """Tells what the tiers have of `chain`, whose blocks are noted, and not told yet."""
        for tier, blocks in self._manager.matches(chain).items():
            # Whatever is there, what comes before it is: so only the end can be new.
            last = self._blocks.get(chain.names(blocks - 1)[0])
            if last is None or tier not in last.tiers:
                self._expect_noted()
                self._found += self._merged([("stored", tier, name) for name in chain.names(0)[:blocks]])

    def take(self) -> list[KVCacheEvent]:
        """What happened since the last call."""
        told, self._found = self._found, []
        self._expect_noted()
        while events := self._events.take(_BATCH):
            told += self._merged([event[:3] for event in events])
        return told

    def _merged(self, events: list[tuple[str, str | None, int | None]]) -> "Iterator[KVCacheEvent]":
        """As few events as there can be: blocks of one chain that came one after the other are one."""
        run: list[_Block] = []
        medium = ""
        for what, tier, name in events:
            if what in ("cleared", "lost"):
                yield from self._stored(run, medium)
                run = []
                # Where events are lost it is unknown what is there: it is told again when it is looked up.
                yield from self._forget()
                continue
            changed = self._change(what, tier, name)
            if changed is None:
                continue
            follows = what == "stored" and run and _MEDIA[tier] == medium and _follows(changed, run[-1])
            if not follows:
                yield from self._stored(run, medium)
                run = []
            if what == "stored":
                run.append(changed)
                medium = _MEDIA[tier]
            else:
                yield BlockRemoved(block_hashes=[maybe_convert_block_hash(changed.hash)], medium=_MEDIA[tier], group_idx=self._group)
        yield from self._stored(run, medium)

    def _change(self, what: str, tier: str | None, name: int | None) -> _Block | None:
        """The block that came or left, if routers are to learn of it."""
        if tier not in _MEDIA:
            return None
        if what == "stored":
            block = self._blocks.get(name) or self._expected.pop(name, None)
            if isinstance(block, _Prompt):
                block = block.block(name)
            if block is None or tier in block.tiers:
                return None
            self._blocks[name] = block
            block.tiers.add(tier)
            return block
        block = self._blocks.get(name)
        if block is None or tier not in block.tiers:
            return None
        block.tiers.remove(tier)
        if not block.tiers:
            self._expected[name] = self._blocks.pop(name)
        return block

    def _forget(self) -> "Iterator[KVCacheEvent]":
        blocks, self._blocks = self._blocks, {}
        for tier, medium in _MEDIA.items():
            hashes = [maybe_convert_block_hash(block.hash) for block in blocks.values() if tier in block.tiers]
            if hashes:
                yield BlockRemoved(block_hashes=hashes, medium=medium, group_idx=self._group)
        for name, block in blocks.items():
            block.tiers.clear()
            self._expected[name] = block

    def _stored(self, run: list[_Block], medium: str) -> "Iterator[KVCacheEvent]":
        if not run:
            return
        parent, lora = run[0].parent, run[0].lora
        yield BlockStored(
            block_hashes=[maybe_convert_block_hash(block.hash) for block in run],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(chained.from_iterable(block.tokens for block in run)),
            block_size=self._block_tokens,
            lora_id=lora and lora[0],
            medium=medium,
            lora_name=lora and lora[1],
            group_idx=self._group,
        )


def _follows(block: _Block, last: _Block) -> bool:
    return block.parent == last.hash and block.lora == last.lora
