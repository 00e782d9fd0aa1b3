"""Shadow verification: some hits are computed again, and what was kept is compared with that (docs/reliability.md)."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvbm_rs.errors import KvbmError
from kvbm_rs.vllm import logger
from kvbm_rs.vllm.connector.tensors import block_dimension

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvbm_rs import Chain, Lease, Load, LoadEnd, Manager

# Blocks of a hit that are compared at most: what was kept of them goes to as many of the engine's blocks.
_MAX_BLOCKS = 16


@dataclass
class ShadowedHit:
    """A hit that the engine computes in place of loading it."""

    chain: "Chain"
    # Keeps what was kept, so that it is not compared with itself.
    lease: "Lease | None"
    # Position and tier of blocks that follow each other.
    samples: list[tuple[int, str]]

    @property
    def first(self) -> int:
        return self.samples[0][0]

    @property
    def end(self) -> int:
        return self.samples[-1][0] + 1


@dataclass
class _Comparison:
    hit: ShadowedHit
    # The step that computes the last of them.
    after: int
    # What was computed, and what is loaded.
    computed: list["KVCacheBlock"]
    kept: list["KVCacheBlock"] = field(default_factory=list)
    load: "Load | None" = None
    end: "LoadEnd | None" = None
    # A reset came: they are of other weights.
    is_void: bool = False


class Shadow:
    def __init__(self, manager: "Manager", elements: str, tensors: list["torch.Tensor"], slots: int) -> None:
        """`elements` is what the numbers of `tensors` are, of which there is one for each layer."""
        self._manager, self._elements, self._tensors, self._slots = manager, elements, tensors, slots
        self._comparisons: list[_Comparison] = []

    def __bool__(self) -> bool:
        return bool(self._comparisons)

    def choose(self, lease: "Lease", chain: "Chain", most: int, computed: int) -> ShadowedHit | None:
        """Whether the engine, which has `computed` leading blocks itself, computes the first `most` of what `lease` has again."""
        below = [sample for sample in self._manager.shadow_sample(lease) if computed <= sample[0] < most]
        return ShadowedHit(chain, lease, below[-_MAX_BLOCKS:]) if below else None

    def hold(self, hit: ShadowedHit, computed: list["KVCacheBlock"], after: int, pool: "BlockPool") -> None:
        """The engine has computed a hit in these blocks, once step `after` has ended."""
        pool.touch(computed)
        self._comparisons.append(_Comparison(hit, after, computed))

    def go_on(self, ended: int, pool: "BlockPool") -> None:
        """Goes on with what can be compared once step `ended` has ended."""
        self._comparisons = [one for one in self._comparisons if one.after > ended or not self._has_ended(one, pool)]

    def forget(self) -> None:
        for comparison in self._comparisons:
            comparison.is_void = True

    def _has_ended(self, comparison: _Comparison, pool: "BlockPool") -> bool:
        try:
            if comparison.load is None and not self._begin(comparison, pool):
                pool.free_blocks(comparison.computed)
                return True
            comparison.end = comparison.end or comparison.load.poll()
            if comparison.end is None or not comparison.end.slots_are_free():
                return False
            if not comparison.is_void:
                self._compare(comparison)
        except KvbmError:
            logger.exception("a hit that was computed again is not compared")
        pool.free_blocks(comparison.computed)
        pool.free_blocks(comparison.kept)
        return True

    def _begin(self, comparison: _Comparison, pool: "BlockPool") -> bool:
        """Begins to load what was kept. Whether there is room for it."""
        hit = comparison.hit
        if comparison.is_void or pool.get_num_free_blocks() < len(hit.samples):
            return False
        comparison.kept = pool.get_new_blocks(len(hit.samples))
        slots = [block.block_id for block in comparison.kept]
        lease, hit.lease = hit.lease, None
        comparison.load = self._manager.load_into(lease, [(0, hit.first, slots)])
        return True

    def _compare(self, comparison: _Comparison) -> None:
        hit = comparison.hit
        pairs = zip(hit.samples[: comparison.end.arrived], comparison.kept, comparison.computed)
        for sample, kept, computed in pairs:
            served, again = self._bytes(kept.block_id), self._bytes(computed.block_id)
            if self._manager.shadow_compare(hit.chain, sample, self._elements, served, again) is not None:
                # Those behind it were computed from it, and have left with it.
                return

    def _bytes(self, block: int) -> bytes:
        of_layers = (tensor.select(block_dimension(tensor, self._slots), block) for tensor in self._tensors)
        return b"".join(layer.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes() for layer in of_layers)
