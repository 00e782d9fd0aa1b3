"""A stand-in for TensorRT-LLM's executor: it calls a connector in the same order, and has a KV cache and requests.

What it computes of a token is a pattern of all tokens up to there, so that KV of another prompt, or of another place, shows.
"""

import hashlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import RequestData, SchedulerOutput

# Tokens in a block.
BLOCK = 4
# Bytes of a token's KV.
WIDTH = 1024

_numbers = itertools.count(1)


class Request:
    def __init__(self, prompt: Sequence[int], **others) -> None:
        self.request_id = next(_numbers)
        self.tokens = list(prompt)
        self.prompt = len(self.tokens)
        self.blocks: list[int] = []
        # Tokens whose KV is in the blocks.
        self.computed = 0
        # How many tokens, and blocks, the connector was told of.
        self.told = (0, 0)
        for name, value in others.items():
            setattr(self, name, value)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens


class Executor:
    """One rank, whose KV cache has `blocks` blocks and no prefix cache of its own."""

    def __init__(self, scheduler_class, worker_class, model, blocks: int = 64, chunk: int = 16) -> None:
        self.llm_args = SimpleNamespace(
            model=str(model), kv_cache_config=SimpleNamespace(tokens_per_block=BLOCK), tensor_parallel_size=1
        )
        # As TensorRT-LLM does: at the same time.
        with ThreadPoolExecutor(2) as threads:
            worker = threads.submit(worker_class, self.llm_args)
            scheduler = threads.submit(scheduler_class, self.llm_args)
            self.scheduler, self.worker = scheduler.result(), worker.result()
        self.kv = torch.zeros((blocks, 2, BLOCK, WIDTH // 2), dtype=torch.uint8)
        self.worker.register_kv_caches(self.kv)
        self.chunk = chunk
        self.free = list(range(blocks))[::-1]
        self.running: list[Request] = []
        self.starting: dict[int, Request] = {}
        self.loading: dict[int, Request] = {}
        self.saving: dict[int, Request] = {}
        self.ended: dict[int, Request] = {}
        self.loaded_tokens = 0

    def start(self, request: Request, num_computed: int = 0) -> None:
        """Allocates blocks for all of the prompt; parks it where the connector loads."""
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert matched or not is_async
        assert num_computed + matched < request.prompt
        request.blocks = [self.free.pop() for _ in range(-(-request.prompt // BLOCK))]
        # What was there before must not pass for what is loaded.
        self.kv[request.blocks] = 0xEE
        self.scheduler.update_state_after_alloc(request, list(request.blocks))
        self.loaded_tokens += matched
        request.computed = num_computed + matched
        if is_async:
            self.starting[request.request_id] = request
        else:
            self.running.append(request)

    def step(self) -> None:
        """One iteration: metadata, a forward pass over what is running, and what has ended."""
        batch = list(self.running)
        output = SchedulerOutput()
        for request in batch:
            (output.cached_requests if request.told[0] else output.new_requests).append(self._data(request))
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        for layer in range(2):
            self.worker.wait_for_layer_load(layer, None)
            self.worker.save_kv_layer(layer, None)
        for request in batch:
            self._compute(request)
        self.worker.wait_for_save(None)
        self._collect()

    def _data(self, request: Request) -> RequestData:
        tokens, blocks = request.told
        request.told = (len(request.tokens), len(request.blocks))
        count = min(self.chunk, len(request.tokens) - request.computed)
        return RequestData(request.request_id, request.tokens[tokens:], request.blocks[blocks:], request.computed, count)

    def _compute(self, request: Request) -> None:
        end = min(request.computed + self.chunk, len(request.tokens))
        for at in range(request.computed, end):
            self.kv[request.blocks[at // BLOCK], :, at % BLOCK] = expected(request, at)
        request.computed = end
        if end == len(request.tokens):
            # It says something.
            request.tokens.append(len(request.tokens) * 7 % 1000)
            if len(request.tokens) > len(request.blocks) * BLOCK:
                request.blocks.append(self.free.pop())

    def _collect(self) -> None:
        starting, self.starting = self.starting, {}
        ended, self.ended = self.ended, {}
        self.loading |= starting
        self.saving |= ended
        saved, loaded = self.worker.get_finished(list(ended), list(starting))
        for number in loaded:
            self.running.append(self.loading.pop(number))
        for number in saved:
            self._release(self.saving.pop(number))

    def end(self, request: Request) -> None:
        """It has said all, or was aborted."""
        if request in self.running:
            self.running.remove(request)
        if self.scheduler.request_finished(request, list(request.blocks)):
            self.ended[request.request_id] = request
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        # Their next owner writes them.
        self.kv[request.blocks] = 0xDD
        self.free += request.blocks

    def generate(self, request: Request, tokens: int) -> list[int]:
        """From start to end; checks all KV that it has."""
        self.start(request)
        while len(request.tokens) < request.prompt + tokens:
            self.step()
        self.check(request)
        self.end(request)
        self.settle()
        return request.tokens[request.prompt :]

    def settle(self) -> None:
        while self.saving or self.loading or self.starting or self.ended:
            self.step()

    def check(self, request: Request) -> None:
        for at in range(request.computed):
            found = self.kv[request.blocks[at // BLOCK], :, at % BLOCK]
            assert torch.equal(found, expected(request, at)), f"a wrong byte in the KV of token {at}"


def expected(request: Request, at: int) -> torch.Tensor:
    """The KV of a token."""
    depends = getattr(request, "lora_task_id", None), getattr(request, "cache_salt", None)
    seed = hashlib.sha256(repr((request.tokens[: at + 1], depends)).encode()).digest()
    return torch.frombuffer(bytearray(seed * (WIDTH // 32)), dtype=torch.uint8).view(2, WIDTH // 2)
