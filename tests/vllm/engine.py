"""Engines for tests: vLLM in processes of their own (`serve.py`), which can be killed and started again."""

import json
import os
import tempfile
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from template import template_of

HERE = Path(__file__).parent
# Tokens in a block. A CPU's kernels want a multiple of 32.
BLOCK = 32
# Bytes of a block of the model `tiny`: keys and values of 4 layers, 4 heads of 32 numbers of 4 bytes each.
TINY_BLOCK_BYTES = 2 * 4 * 4 * 32 * 4 * BLOCK
# From its start to the first answer; and for any answer.
START_LIMIT, ANSWER_LIMIT = 300.0, 240.0

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    # The scheduler in the process of the engine, where tests can look at it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class EngineError(Exception):
    """What the engine's process said of itself, or that it ended."""


@dataclass(frozen=True)
class Answer:
    """What a batch of prompts came to."""

    # Tokens of each.
    said: list[list[int]]
    # Tokens of each prompt that the engine says it had.
    cached: list[int]
    # Tokens that were computed for all of them: what `cached` cannot say after a failed load.
    scheduled: int
    seconds: float
    ended: list[str]


class Engine:
    """A running engine. A context manager: leaving it ends the process, by force if need be."""

    def __init__(self, model: Path, extra: dict | None = None, environment: dict | None = None, **arguments):
        """`extra` is `kv_connector_extra_config` of vLLM's own `OffloadingConnector`; without it there is no connector."""
        self.name = uuid.uuid4().hex
        self.log = tempfile.TemporaryFile("w+")
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        template = template_of(os.environ | ENVIRONMENT | {"PYTHONPATH": ":".join(paths)} | (environment or {}))
        (reads, asks), (answers, writes) = os.pipe(), os.pipe()
        self.asks, self.answers = open(asks, "w"), open(answers)
        try:
            self.process = template.fork("serve", [], reads, writes, self.log.fileno())
        finally:
            os.close(reads)
            os.close(writes)
        try:
            self._ask(opening(model, extra, self.name) | arguments, START_LIMIT)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None and error is None:
            self.stop()
        self.kill()

    def generate(
        self, *prompts: list[int], tokens: int = 8, salt: str | None = None, adapter: Path | None = None
    ) -> Answer:
        """`adapter` is a directory of a LoRA adapter, which has its name."""
        lora = None if adapter is None else str(adapter)
        return Answer(**self._ask({"generate": list(prompts), "tokens": tokens, "salt": salt, "adapter": lora}))

    def reset(self, connector: bool = False) -> bool:
        """Makes the engine forget its own prefix cache, and with `connector` vLLM's primary tier too."""
        # Stores take turns of the engine to end, and a block that is being stored cannot be forgotten.
        self.settle()
        return self._ask({"reset": {"reset_connector": connector}})["done"]

    def settle(self) -> float:
        """Waits until nothing is under way, below the engine neither. Returns the seconds that it took."""
        return self._ask({"settle": {}})["seconds"]

    def call(self, function: str, limit: float = ANSWER_LIMIT, **arguments):
        """Calls `module:function` of a test in the engine's process, with the engine and `arguments`."""
        return self._ask({"call": function, "with": arguments}, limit)

    def stop(self, whole: bool = False) -> int:
        """Shuts it down, as vLLM does at its end, and returns its exit status. A `whole` end is Python's own too, which is slow."""
        self._ask({"stop": {"whole": whole}})
        return self.process.wait(60)

    def kill(self) -> None:
        """kill -9, and wait until it is gone. What it left in /dev/shm goes too, as vLLM leaves its primary tier there."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.asks, self.answers):
            pipe.close()
        Path(f"/dev/shm/vllm_offload_{self.name}.mmap").unlink(missing_ok=True)

    def logged(self) -> str:
        """All that it printed so far."""
        self.log.seek(0)
        return self.log.read()

    def _ask(self, request: dict, limit: float = ANSWER_LIMIT) -> dict:
        # A process that hangs is killed, and reading from it ends.
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        try:
            print(json.dumps(request), file=self.asks, flush=True)
            line = self.answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise EngineError(f"the engine ended (or hung for {limit} s):\n{self.logged()[-8000:]}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise EngineError(f"{answer['error']}\n{self.logged()[-8000:]}")
        return answer


def opening(model: Path, extra: dict | None, name: str) -> dict:
    """The arguments of `vllm.LLM` that all tests share."""
    arguments = {
        "model": str(model),
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": BLOCK,
        "max_model_len": 4096,
        "seed": 0,
        "disable_log_stats": True,
        # Equal chunks: floating-point sums depend on them.
        "max_num_batched_tokens": 4096,
    }
    if extra is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": name,
            "kv_connector_extra_config": extra,
        }
    return arguments


def offloading(primary_bytes: int, *tiers: dict, **more) -> dict:
    """vLLM's own offloading with these tiers below its primary one, on a CPU."""
    return {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "host_spec",
        "cpu_bytes_to_use": primary_bytes,
        "secondary_tiers": list(tiers),
        **more,
    }


def prompt(number: int, tokens: int) -> list[int]:
    """Tokens of a prompt that is like no other. 0 to 2 mean something to the model."""
    state, said = number * 2654435761 % 2**32 or 1, []
    for _ in range(tokens):
        state = (state * 1664525 + 1013904223) % 2**32
        said.append(3 + (state >> 16) % 256)
    return said
