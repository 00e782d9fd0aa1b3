"""SGLang's HiCache controller above a storage, without a server: the test is its radix tree and scheduler.

Host memory is made without a GPU's registration. What a GPU would copy there, the test writes.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel

# Tokens in a page.
PAGE = 16
LAYERS, HEADS, WIDTH = 2, 4, 32

# SGLang leaves so much to others, which test machines may not have.
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def extra(settings: dict, **others) -> dict:
    """What a user writes into the extra configuration."""
    return {
        "backend_name": "kvbm",
        "module_path": "kvbm_rs.sglang.storage",
        "class_name": "KvbmStorage",
        "interface_v1": 1,
        "weights": "made up",
        "settings": {"host.staging_blocks": 16, "host.huge_pages": False} | settings,
    } | others


def on_disk(place, **settings) -> dict:
    return {"disk.capacity": "512 blocks", "disk.dirs": str(place), "disk.keep": True} | settings


def host_pool(layout: str = "page_first", pages: int = 64, layers: int = LAYERS) -> MHATokenToKVPoolHost:
    device = MHATokenToKVPool(
        PAGE, PAGE, torch.bfloat16, HEADS, WIDTH, layers, "cpu", enable_memory_saver=False, enable_alt_stream=False
    )
    made = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=pages * PAGE,
    )
    made.device_pool = device
    return made


def tokens(number: int, pages: int) -> list[int]:
    """A prompt that is like no other."""
    return [number * 100_000 + place for place in range(pages * PAGE)]


def pattern(key: str, page: torch.Tensor) -> torch.Tensor:
    """The bytes of the page that `key` names, which tell it from others at every place."""
    seed = torch.Generator().manual_seed(int(key[:15], 16))
    return torch.randint(0, 255, (page.numel() * page.element_size(),), dtype=torch.uint8, generator=seed)


def bytes_of(page: torch.Tensor) -> torch.Tensor:
    return page.contiguous().view(torch.uint8).flatten()


class HiCache:
    """A controller with a storage. Its host pool loses all when it is closed, as a restart of the server."""

    def __init__(
        self,
        extra_config: dict,
        layout: str = "page_first",
        pages: int = 64,
        ranks: tuple[int, int] = (0, 1),
        metrics: bool = False,
        data_rank: int = 0,
    ) -> None:
        """`data_rank` is that of attention in data parallel."""
        rank, world = ranks

        class Controller(HiCacheController):
            def _generate_storage_config(self, *args, **kwargs):
                return replace(super()._generate_storage_config(*args, **kwargs), dp_rank=data_rank)

        self._parallel = get_parallel().override(
            tp_rank=rank, tp_size=world, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
        )
        self._parallel.__enter__()
        self.host = host_pool(layout, pages)
        allocator = SimpleNamespace(get_kvcache=lambda: self.host.device_pool, device="cpu")
        self._config, _, _, _, self._tells_prefixes = HybridCacheController.parse_storage_backend_extra_config(
            json.dumps(extra_config)
        )
        try:
            self.controller = Controller(
                allocator,
                self.host,
                PAGE,
                None,
                None,
                storage_backend="dynamic",
                model_name="made-up",
                prefetch_threshold=PAGE,
                storage_backend_extra_config=self._config,
                enable_storage_metrics=metrics,
            )
        except BaseException:
            self._parallel.__exit__(None, None, None)
            raise

    @property
    def storage(self):
        return self.controller.storage_backend

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.controller.detach_storage_backend()
        self._parallel.__exit__(None, None, None)

    def keys(self, prompt: Sequence[int], last: str | None = None) -> list[str]:
        return get_hash_str(list(prompt), last, page_size=PAGE)

    def backup(self, prompt: Sequence[int], first: int = 0) -> int:
        """What a GPU computed of a prompt from page `first` on goes to host memory and on to the storage. Returns how many
        pages SGLang believes are stored.
        """
        keys = self.keys(prompt)
        indices = self.host.alloc((len(keys) - first) * PAGE)
        for key, index in zip(keys[first:], indices[::PAGE].tolist()):
            page = self.host.get_data_page(index, flat=True)
            self.host.set_from_flat_data_page(index, pattern(key, page).view(page.dtype))
        prefix = keys[:first] if self._tells_prefixes else None
        self.controller.write_storage(indices, list(prompt[first * PAGE :]), keys[first:], prefix)
        operation = self.controller.ack_backup_queue.get(timeout=60)
        self.host.free(indices)
        return operation.completed_tokens // PAGE

    def serves(self, prompt: Sequence[int], first: int = 0) -> int:
        """How many pages of a prompt, from page `first` on, come from the storage to host memory. Their bytes are compared."""
        keys = self.keys(prompt)
        last = keys[first - 1] if first else None
        prefix = keys[:first] if self._tells_prefixes else None
        operation = self.controller.prefetch(f"request {next(_numbers)}", list(prompt[first * PAGE :]), last, prefix)
        self.controller.prefetch_hit_queue.get(timeout=60)
        found = len(operation.hash_value)
        if not found:
            return 0
        indices = self.host.alloc(found * PAGE)
        _fill(self.host, indices, 0xEE)
        operation.host_indices = indices
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            if ack.completed_tokens is not None:
                completed = max(completed, ack.completed_tokens // PAGE)
            if ack.completed_req:
                break
        for key, index in zip(keys[first : first + completed], indices[::PAGE].tolist()):
            page = self.host.get_data_page(index, flat=True)
            assert torch.equal(bytes_of(page), pattern(key, page)), "a wrong byte"
        self.host.free(indices)
        return completed


_numbers = itertools.count()


def _fill(host: MHATokenToKVPoolHost, indices: torch.Tensor, byte: int) -> None:
    for index in indices[::PAGE].tolist():
        page = host.get_data_page(index, flat=True)
        nothing = torch.full((page.numel() * page.element_size(),), byte, dtype=torch.uint8)
        host.set_from_flat_data_page(index, nothing.view(page.dtype))
