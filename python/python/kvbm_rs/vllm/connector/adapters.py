"""Which weights a LoRA adapter has: vLLM's names of blocks have its name and its path, behind which there may be others tomorrow."""

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm_rs.vllm import logger
from kvbm_rs.weights import digest_of_files

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

# Beside them there may be what the training left, and goes on to change.
_FILES = "adapter_*"

# Seconds: times of files come from a clock that goes by ticks, and is behind by up to one.
_TICK = 0.02


class Adapters:
    """The adapters that requests come with.

    vLLM does not tell when it loads one, and it does so again where it ran out of room for them. So weights are known for certain
    only of files that have not changed since the engine started. What is computed with others is found by this engine alone, and
    of an adapter whose files change nothing is kept any more: the engine may have loaded either, and have blocks of either.
    """

    def __init__(self, options: str | None) -> None:
        """`options` is how vLLM uses adapters."""
        self._options = options
        self._started = time.time()
        self._engine = os.urandom(16).hex()
        # What the weights were when a request first came with them, by what the engine tells adapters apart by, its number, and
        # by what its prefix cache does, name and path. `None` once they were others.
        self._first: dict[int | tuple[str, str], tuple[str, str, str] | None] = {}
        # What was found since `look_again`.
        self._found: dict[tuple[int, str, str], bytes | None] = {}

    def look_again(self) -> None:
        """The engine may have loaded others."""
        self._found.clear()

    def salt(self, adapter: "LoRARequest | None") -> bytes | None:
        """What sets apart the blocks that are computed with an adapter. `None`: it is not known with which weights they are."""
        if adapter is None:
            return b""
        key = adapter.lora_int_id, adapter.lora_name, adapter.lora_path
        if key not in self._found:
            self._found[key] = self._look(adapter)
        return self._found[key]

    def _look(self, adapter: "LoRARequest") -> bytes | None:
        try:
            weights, changed = _weights(Path(os.path.expanduser(adapter.lora_path)))
        except (OSError, ValueError):
            # They are being exchanged, or cannot be read.
            return None
        if not self._is_first(adapter, weights):
            return None
        is_certain = weights and changed < self._started - _TICK
        # Not every version of vLLM has it.
        is_3d = getattr(adapter, "is_3d_lora_weight", False)
        parts = (self._options, is_3d, weights, "" if is_certain else self._engine)
        return hashlib.sha256(repr(parts).encode()).digest()

    def _is_first(self, adapter: "LoRARequest", weights: str) -> bool:
        """Whether the engine has had no other weights that it could take for these."""
        name = adapter.lora_name, adapter.lora_path
        keys, now = (adapter.lora_int_id, name), (*name, weights)
        known = [self._first.setdefault(key, now) for key in keys]
        if known == [now, now]:
            return True
        if any(known):
            logger.warning("the adapter %s changed: its blocks are not kept any more; load it from another path", name[0])
        self._first.update(dict.fromkeys(keys))
        return False


def _weights(place: Path) -> tuple[str, float]:
    """A digest of an adapter's files, and when they changed last. Empty of what is no directory, such as the hub's."""
    files = list(place.glob(_FILES)) if place.is_dir() else []
    if not files:
        return "", 0.0
    # Others may come to the place by a link or a name that changes, and not they.
    links = [path for path in (*files, place, *place.parents) if path.is_symlink()]
    changed = [path.stat() for path in (place, *files)] + [link.lstat() for link in links]
    return digest_of_files(place, _FILES), max(found.st_ctime for found in changed)
