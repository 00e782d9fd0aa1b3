"""vLLM's offloading with tiers, on a CPU: its own managers and region, and a worker that copies with torch where its own wants a GPU.

Named by `spec_name` and `spec_module_path` in `kv_connector_extra_config`.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Place(NamedTuple):
    """Where a block of the engine lies, there and in the primary tier."""

    group: int
    block: int
    chunk: int
    # Which of the chunk's blocks.
    part: int


class HostWorker(OffloadingWorker):
    """Copies at once: a job has ended when its submission returns."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int):
        self.caches, self.region, self.blocks_per_chunk = caches, region, blocks_per_chunk
        pages = [tensor.page_size_bytes * blocks_per_chunk for tensor in caches.tensors]
        self.rows = [region.create_next_worker_view(page) for page in pages]
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, lambda block, row: row.copy_(block))

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, lambda block, row: block.copy_(row))

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        # The region cannot be unmapped while somebody has a view of it.
        self.rows.clear()
        self.region.cleanup()

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, host: CPULoadStoreSpec, copy) -> bool:
        began, copied = time.perf_counter(), 0
        for place in self._places(engine, host):
            for layer in self.caches.group_data_refs[place.group]:
                page = self.caches.tensors[layer.tensor_idx].page_size_bytes
                block = self.caches.tensors[layer.tensor_idx].tensor[place.block]
                row = self.rows[layer.tensor_idx][place.chunk, place.part * page : (place.part + 1) * page]
                copy(block, row)
                copied += page
        self.finished.append(TransferResult(job_id, True, copied, time.perf_counter() - began))
        return True

    def _places(self, engine: GPULoadStoreSpec, host: CPULoadStoreSpec) -> Iterator[Place]:
        """Blocks come group by group, each from some position on; a chunk may have its first blocks elsewhere."""
        chunks = iter(host.chunk_ids.tolist())
        blocks = iter(engine.block_ids.tolist())
        for group, (count, first) in enumerate(zip(engine.group_sizes, engine.block_indices)):
            chunk = -1
            for index in range(first, first + count):
                part = index % self.blocks_per_chunk
                if part == 0 or index == first:
                    chunk = next(chunks)
                yield Place(group, next(blocks), chunk, part)


class HostTieringSpec(TieringOffloadingSpec):
    """All of vLLM's, but for the worker: the base class refuses to make one on a CPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
