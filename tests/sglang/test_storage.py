"""`KvbmStorage` below SGLang's own controller and host pools: every byte is right, and a bad day costs time, not correctness."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch
from hicache import PAGE, HiCache, extra, host_pool, on_disk, pattern, tokens
from kvbm_rs.errors import InvalidError, KvbmError
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

# Says to each call what comes before.
TELLS = {"hicache_storage_pass_prefix_keys": True}


def below(place: Path, **others) -> dict:
    return extra(on_disk(place), **TELLS) | others


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first", "page_head"])
@pytest.mark.parametrize("tells", [True, False])
def test_pages_come_back_in_every_layout(tmp_path, layout, tells):
    prompt = tokens(1, 20)
    config = extra(on_disk(tmp_path), hicache_storage_pass_prefix_keys=tells)
    with HiCache(config, layout) as cache:
        assert cache.serves(prompt) == 0
        assert cache.backup(prompt) == 20
        assert cache.serves(prompt) == 20
        # A prompt that begins alike, and one whose beginning SGLang has itself.
        assert cache.serves(prompt[: 7 * PAGE] + tokens(2, 5)) == 7
        assert cache.serves(prompt, first=12) == 8
        assert cache.serves(tokens(3, 4)) == 0
    # The next process finds them.
    with HiCache(config, layout) as cache:
        assert cache.serves(prompt) == 20
