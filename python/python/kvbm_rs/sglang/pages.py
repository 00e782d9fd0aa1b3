"""The pages of one of SGLang's host pools: they go straight between its memory and our tiers."""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from kvbm_rs import Chain, EngineMemory, Manager
from kvbm_rs.errors import InvalidError, KvbmError
from kvbm_rs.sglang import logger

if TYPE_CHECKING:
    from kvbm_rs import Load, LoadEnd, Save, SaveEnd, Settings

# Seconds between two looks whether a medium that hangs has let go of SGLang's memory.
_LOOK = 0.001
# Seconds for which a thread waits at a time.
_WAIT = 60.0

# What is counted since the start, in pages.
_COUNTED = (
    "loaded",
    "failed_loads",
    "stored",
    "stored_alone",
    "duplicates",
    "declined",
    "refused",
    "failed_stores",
)


class Layout(NamedTuple):
    """How a page lies in a host pool."""

    # What its bytes are, in words.
    order: str
    dtype: str
    page_tokens: int
    # Bytes of its pieces.
    pieces: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        return sum(self.pieces)


@dataclass
class HostPool:
    """A host pool of SGLang's, whose slots are pages."""

    pool: Any

    def __post_init__(self) -> None:
        self.page_tokens: int = self.pool.page_size
        self.slots: int = self.pool.size // self.page_tokens
        order = f"{type(self.pool).__name__} {self.pool.layout}"
        try:
            self._first, pieces = self._pieces(0)
        except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
            raise InvalidError(f"SGLang does not say where the pages of {order} lie: {error}") from error
        self.layout = Layout(order, str(self.pool.dtype), self.page_tokens, pieces)

    @property
    def bytes(self) -> int:
        return self.slots * self.layout.page_bytes

    def adopt(self) -> EngineMemory:
        """Its memory, once and for all."""
        second, last = self._pieces(min(1, self.slots - 1))[0], self._pieces(self.slots - 1)[0]
        # Of a pool with one page any stride will do.
        strides = [after - before or size for before, after, size in zip(self._first, second, self.layout.pieces)]
        if last != [first + stride * (self.slots - 1) for first, stride in zip(self._first, strides)]:
            raise InvalidError(f"the pages of {self.layout.order} do not lie at equal distances: it cannot be adopted")
        parts = list(zip(self._first, strides, self.layout.pieces))
        return EngineMemory(self.slots, 1, parts, owner=_tensors(self.pool))

    def slots_of(self, indices: torch.Tensor, pages: int) -> list[int]:
        """Which pages SGLang's `indices` of tokens mean."""
        if indices.numel() != pages * self.page_tokens:
            raise InvalidError(f"{pages} pages of {self.page_tokens} tokens have {indices.numel()} indices")
        return [index // self.page_tokens for index in indices[:: self.page_tokens].tolist()]

    def _pieces(self, page: int) -> tuple[list[int], tuple[int, ...]]:
        """Where the pieces of a page begin, and their bytes."""
        begin = page * self.page_tokens
        starts, sizes = self.pool.get_page_buffer_meta(torch.arange(begin, begin + self.page_tokens))
        return starts, (sizes,) * len(starts) if isinstance(sizes, int) else tuple(sizes)


class Pages:
    """What is kept of one host pool.

    Pages of the KV cache hang on those before them: a chain. SGLang says what comes before with
    `hicache_storage_pass_prefix_keys`; where it does not, or what comes before is not here, and in other pools, which may
    keep the end of a prompt alone, each page is kept for itself, under another name.
    """

    def __init__(self, host: HostPool, settings: "Settings", fingerprint: dict[str, Any], is_chained: bool) -> None:
        self._host = host
        self._is_chained = is_chained
        self._manager = Manager(
            settings, host.adopt(), block_tokens=host.page_tokens, fingerprint=fingerprint
        )
        self.counts = dict.fromkeys(_COUNTED, 0)
        # Names the weights since they were exchanged: only this process knows which they are.
        self._weights = b""

    def leading(self, keys: Sequence[str]) -> int:
        """How many leading ones are here."""
        held = self._chained(keys)
        while held < len(keys) and self._is_alone(keys[held]):
            held += 1
        return held

    def here(self, keys: Sequence[str]) -> list[bool]:
        """Which are here, of a pool whose pages are kept each for itself."""
        return [self._is_alone(key) for key in keys]

    def load(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Which of them are in their places now."""
        slots = self._host.slots_of(indices, len(keys))
        chained = self._chained(keys)
        alone = [at for at in range(chained, len(keys)) if self._is_alone(keys[at])]
        loads = [(0, self._load(self._chain(keys[:chained]), slots[:chained]))] if chained else []
        # All are begun before any is waited for.
        loads += [(at, self._load(self._alone(keys[at]), [slots[at]])) for at in alone]
        arrived = [False] * len(keys)
        for first, load in loads:
            came = _arrived(load)
            arrived[first : first + came] = [True] * came
        self.counts["loaded"] += sum(arrived)
        self.counts["failed_loads"] += chained + len(alone) - sum(arrived)
        return arrived

    def save(self, prefix: Sequence[str] | None, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Which of them are here now. `prefix`: those before the first one; `None`: SGLang did not say."""
        slots = self._host.slots_of(indices, len(keys))
        if self._is_chained and prefix is not None:
            save = self._manager.save_from(self._chain([*prefix, *keys]), [(0, len(prefix), slots)])
            end = _ended(save)
            if not end.orphans:
                self._count(end)
                kept = max(end.blocks - len(prefix), 0)
                return [at < kept for at in range(len(keys))]
        return self._save_alone(keys, slots)

    def _save_alone(self, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        lacking = [at for at, key in enumerate(keys) if not self._chained([key])]
        saves = [(at, self._manager.save_from(self._alone(keys[at]), [(0, 0, [slots[at]])])) for at in lacking]
        kept = [True] * len(keys)
        for at, save in saves:
            end = _ended(save)
            self._count(end)
            kept[at] = end.blocks > 0
        self.counts["stored_alone"] += sum(kept[at] for at in lacking)
        return kept

    def forget(self) -> None:
        """Nothing that is here now is found again."""
        # After a restart SGLang has the weights of its files again.
        self._weights = os.urandom(16)
        self._manager.reset()

    def opened(self) -> list[str]:
        """What there is, in lines for a log."""
        return self._manager.opened()

    def occupancy(self) -> dict[str, tuple[int, int]]:
        """Pages that each tier has room for, and those in it."""
        return self._manager.occupancy()

    def metrics(self) -> str:
        return self._manager.metrics()

    def close(self, seconds: float) -> None:
        """Lets go of the host pool, once what is only in memory has gone to its medium."""
        if not self._manager.drain(seconds):
            logger.warning("not all pages got to their medium in %.0f s", seconds)
        if not self._manager.close(seconds):
            # They keep the pool's memory until they end.
            logger.error("copies of a medium that hangs still use the host pool")

    def _chain(self, keys: Sequence[str]) -> Chain:
        """SGLang's names of pages: SHA-256 over the one before and the tokens, in hexadecimal."""
        return Chain((bytes.fromhex(key) for key in keys), salt=self._weights)

    def _alone(self, key: str) -> Chain:
        """Of a page that hangs on nothing. It has another name than in a chain: a chain has no holes, and these may have."""
        return Chain([hashlib.sha256(b"alone" + bytes.fromhex(key)).digest()], salt=self._weights)

    def _chained(self, keys: Sequence[str]) -> int:
        if not self._is_chained:
            return 0
        return max(self._manager.matches(self._chain(keys)).values(), default=0)

    def _is_alone(self, key: str) -> bool:
        return bool(self._manager.matches(self._alone(key)))

    def _load(self, chain: Chain, slots: list[int]) -> "Load":
        return self._manager.load_into(self._manager.lease(chain), [(0, 0, slots)])

    def _count(self, end: "SaveEnd") -> None:
        self.counts["stored"] += end.copied
        self.counts["duplicates"] += end.duplicates
        self.counts["declined"] += end.declined
        self.counts["refused"] += end.refused
        # Blocks that are refused or declined did not fail.
        self.counts["failed_stores"] += max(end.failed - end.declined - end.refused, 0)


def _arrived(load: "Load") -> int:
    """Leading pages that came. Nothing writes the places of the others any more: SGLang reuses them."""
    try:
        end = _ended(load)
    except KvbmError as error:
        logger.warning("pages cannot be loaded: %s", error)
        return 0
    while not end.slots_are_free():
        time.sleep(_LOOK)
    return end.arrived


@overload
def _ended(transfer: "Load") -> "LoadEnd": ...
@overload
def _ended(transfer: "Save") -> "SaveEnd": ...
def _ended(transfer: "Load | Save") -> "LoadEnd | SaveEnd":
    """How it ended. It does, whatever a medium does (`transfer.timeout_ms`)."""
    while (end := transfer.wait(_WAIT)) is None:
        pass
    return end


def _tensors(pool: Any) -> list[torch.Tensor]:
    """What keeps a pool's memory, also where SGLang lets go of it sooner than a medium."""
    found = []
    for value in vars(pool).values():
        several = value if isinstance(value, (list, tuple)) else [value]
        found += [one for one in several if isinstance(one, torch.Tensor)]
    return found
