"""Names of blocks, from a request's tokens.

TensorRT-LLM has hashes of its own, of 64 bits, and tells them after it has asked what is here.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from kvbm_rs import Chain


class Names:
    """A request's chain, which grows with its tokens: SHA-256 over the name before and the tokens."""

    def __init__(self, request: Any, block_tokens: int, engine: bytes) -> None:
        """`engine` tells this one from all others."""
        self.chain = Chain()
        self._block_tokens = block_tokens
        # What its KV depends on besides tokens: no other prompt is served with it.
        depends = [getattr(request, name, None) for name in ("lora_task_id", "cache_salt_id", "cache_salt")]
        if depends[0] is not None:
            # Programs number adapters, the next one otherwise: what is computed with one is found by this engine alone.
            depends.append(engine)
        self._last = hashlib.sha256(repr(depends).encode()).digest()

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens`: all of the request's, from the first on."""
        size = self._block_tokens
        fresh = []
        for end in range((len(self.chain) + 1) * size, len(tokens) + 1, size):
            block = array("I", tokens[end - size : end]).tobytes()
            self._last = hashlib.sha256(self._last + block).digest()
            fresh.append(self._last)
        self.chain.extend(fresh)


def is_known_by_tokens(request: Any) -> bool:
    """Whether tokens say what its KV is: those of images, sounds and prompt tuning stand for something else."""
    others = ("multimodal_hashes", "multimodal_embedding", "prompt_embedding_table", "mrope_rotary_cos_sin")
    return all(getattr(request, name, None) is None for name in others)
