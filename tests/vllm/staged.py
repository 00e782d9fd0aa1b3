"""An engine without a model, in stages: vLLM's own scheduler, and for keys and values numbers that say of which tokens they are.

All workers are in this process. The first stage computes a step when it is scheduled. The later ones compute it when as many steps
are under way as there are stages, and with `is_async` one more.
"""

import pickle
from collections import deque
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from modelless import BLOCK, LAYERS, SAID, Modelless, _cache, _config, transfers_of
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

# Numbers that keys and values are made of. Prime, and within 16 bits.
_NAMES = 32_749


@dataclass(frozen=True)
class Computed:
    """What a step computes of a request: its tokens from `begin` on."""

    begin: int
    # Of each token up to the step's last one: what its keys and values are, by which all tokens up to it are told.
    names: torch.Tensor
    blocks: torch.Tensor


@dataclass
class _Step:
    output: SchedulerOutput
    requests: list[Computed]
    # By worker.
    ended: list[ModelRunnerOutput]


class Worker:
    """One that has some heads of the layers of a stage."""

    def __init__(self, config: Any, blocks: int, stage: int, number: int):
        self.stage, self._number = stage, number
        cache = _cache(blocks, stage)
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        self._tensors = torch.zeros(LAYERS, blocks, 2, BLOCK, 1, 32, dtype=torch.int16)
        self._layers = cache.kv_cache_groups[0].layer_names
        self.join()

    def join(self) -> None:
        module = "kvbm_rs.vllm.connector.worker"
        with patch(f"{module}._stage", lambda: self.stage), patch(f"{module}._number", lambda: self._number):
            self.connector.register_kv_caches(dict(zip(self._layers, self._tensors)))

    def compute(self, requests: list[Computed]) -> list[str]:
        """Looks at what comes before it, as attention does, and writes the rest. Returns what is wrong."""
        found_wrong = []
        for layer, (name, tensor) in enumerate(zip(self._layers, self._tensors)):
            self.connector.wait_for_layer_load(name)
            for computed in requests:
                at = torch.arange(len(computed.names))
                blocks, inside = computed.blocks[at // BLOCK], at % BLOCK
                # No two layers or workers have the same.
                names = computed.names + layer + LAYERS * (self._number + 2 * self.stage)
                found = tensor[blocks, :, inside]
                wrong = (found != names[:, None, None, None]).flatten(1).any(1)[: computed.begin].nonzero().flatten()
                if len(wrong):
                    found_wrong.append(f"stage {self.stage} has others than of tokens {wrong.tolist()[:8]}")
                new = slice(computed.begin, None)
                tensor[blocks[new], :, inside[new]] = names[new, None, None, None].to(torch.int16)
        return found_wrong


class Staged(Modelless):
    """`stages` times `workers`, and vLLM's `kv_transfer_config`."""

    def __init__(
        self,
        transfer: dict[str, Any],
        blocks: int,
        requests: int,
        stages: int,
        workers: int,
        is_async: bool = False,
        **arguments: Any,
    ) -> None:
        parallel = {"pipeline_parallel_size": stages, "tensor_parallel_size": workers}
        config = _config(transfer, blocks, requests, **parallel, **arguments)
        config.cache_config.num_gpu_blocks = blocks
        # Threads of torch's wait for each other longer than any of this takes.
        torch.set_num_threads(1)
        config.scheduler_config.async_scheduling = is_async
        self._stages, self._most, self._steps = stages, stages + is_async, deque[_Step]()
        # Of the tokens of each request.
        self._names: dict[str, list[int]] = {}
        with set_current_vllm_config(config):
            self.workers = [
                Worker(config, blocks, stage, number) for stage in range(stages) for number in range(workers)
            ]
            self._schedule(config, _cache(blocks))
        self._aggregator = KVOutputAggregator(len(self.workers))

    def add(self, name: str, *arguments: Any, **named: Any) -> Request:
        self._names[name] = [1]
        return super().add(name, *arguments, **named)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        # A load may end before later stages have computed the steps under way: each that has begun does.
        ours = self.scheduler.connector._scheduler
        for loading in ours._loading.values():
            ours._has_ended(loading, 10.0)
        self._steps.append(_Step(output, [self._computed(output, name) for name in output.num_scheduled_tokens], []))
        self._compute(self._steps[-1], 0)
        if len(self._steps) == self._most:
            self._end(self._steps.popleft())
        return output

    def _computed(self, output: SchedulerOutput, name: str) -> Computed:
        request = self.scheduler.requests[name]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        names = self._names[name]
        known = request.all_token_ids
        for at in range(len(names) - 1, request.num_computed_tokens):
            # What is not said yet will be that.
            names.append((names[-1] * 263 + (known[at] if at < len(known) else SAID)) % _NAMES)
        begin = request.num_computed_tokens - output.num_scheduled_tokens[name]
        return Computed(begin, torch.tensor(names[1 : request.num_computed_tokens + 1]), torch.tensor(blocks))

    def _compute(self, step: _Step, stage: int) -> None:
        # As it comes to workers in processes of their own.
        told = pickle.dumps(step.output.kv_connector_metadata)
        for worker in self.workers:
            if worker.stage == stage:
                wrong: list[str] = []
                forward = lambda worker=worker, wrong=wrong: wrong.extend(worker.compute(step.requests))
                output = replace(step.output, kv_connector_metadata=pickle.loads(told))
                came = transfers_of(worker.connector, output, forward)
                # vLLM drops what was computed from a load that failed.
                assert not wrong or came.invalid_block_ids, wrong
                step.ended.append(self._said(step, came))

    def _said(self, step: _Step, came: Any) -> ModelRunnerOutput:
        names = list(step.output.num_scheduled_tokens)
        requests = [self.scheduler.requests.get(name) for name in names]
        said = [
            [SAID] if request is not None and len(computed.names) >= request.num_tokens else []
            for request, computed in zip(requests, step.requests)
        ]
        at = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, at, sampled_token_ids=said, kv_connector_output=came)

    def _end(self, step: _Step) -> None:
        for stage in range(1, self._stages):
            self._compute(step, stage)
        self.scheduler.update_from_output(step.output, self._aggregator.aggregate(step.ended, len(self.workers) - 1))

    def close(self) -> None:
        while self._steps:
            self._end(self._steps.popleft())
        for worker in self.workers:
            worker.connector.shutdown()
        self.scheduler.shutdown()
