"""Servers for tests: `vllm serve` in a process group of its own, and vLLM's proxy before two of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from engine import BLOCK, ENVIRONMENT
from template import template_of

# Two engines start together, on two processors.
START_LIMIT = 600.0

# One process has all of an engine. On a CPU vLLM gives its worker one of its own otherwise.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


# Sockets that stay bound, so that the kernel offers their ports to no other. A server that sets SO_REUSEADDR, as ours
# and vLLM's do, can still listen there.
HELD: list[socket.socket] = []


def free_port() -> int:
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", 0))
    HELD.append(free)
    return free.getsockname()[1]


class Process:
    """A process that serves HTTP. A context manager: leaving it ends the group, by force if need be."""

    def __init__(
        self, arguments: list[str], health: str, environment: dict | None = None, port: int | None = None
    ) -> None:
        self.port = port or free_port()
        self.health = health
        self.log = tempfile.TemporaryFile("w+")
        # In a process group of its own: what it starts goes with it.
        self.process = self.start([*arguments, "--port", str(self.port)], os.environ | (environment or {}))

    def start(self, arguments: list[str], environment: dict):
        streams = {"stdout": self.log, "stderr": self.log}
        return subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True, **streams)

    def __enter__(self):
        until = time.monotonic() + START_LIMIT
        while True:
            try:
                self.get(self.health)
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    self.kill()
                    raise AssertionError(f"it does not start:\n{self.logged()[-8000:]}") from None
                time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def post(self, asked: dict, headers: dict | None = None, timeout: float = 240.0):
        """An answer of `/v1/completions`, to be read."""
        url, headers = f"http://127.0.0.1:{self.port}/v1/completions", {"Content-Type": "application/json"} | (headers or {})
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), headers), timeout=timeout)

    def ask(self, asked: dict, headers: dict | None = None, timeout: float = 240.0) -> dict:
        with self.post(asked, headers, timeout) as answer:
            return json.load(answer)

    def stream(self, asked: dict, timeout: float = 240.0) -> Iterator[dict]:
        """The parts of a streamed answer, as they come."""
        with self.post(asked | {"stream": True}, timeout=timeout) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))


class Server(Process):
    """`vllm serve`."""

    def __init__(
        self,
        model: Path,
        transfer: dict | None,
        environment: dict | None = None,
        port: int | None = None,
        **options,
    ) -> None:
        arguments = {
            "model": str(model),
            "block-size": BLOCK,
            "max-model-len": 4096,
            "dtype": "float32",
            **({"kv-transfer-config": json.dumps(transfer)} if transfer else {}),
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        texts = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        super().__init__(
            ["--enforce-eager", "--skip-tokenizer-init", *texts],
            "/health",
            ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"} | (environment or {}),
            port,
        )

    def start(self, arguments: list[str], environment: dict):
        stdin = 0
        streams = stdin, self.log.fileno(), self.log.fileno()
        return template_of(environment).fork("vllm.entrypoints.openai.api_server", arguments, *streams)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of a metric that have these labels."""
        lines = (line for line in self.get("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.split()[-1]) for line in lines if all(text in line for text in wanted))


class Proxy(Process):
    """vLLM's own, unchanged, before engines that prefill and engines that decode, by their ports."""

    def __init__(self, program: Path, prefills: list[int], decodes: list[int]) -> None:
        ends = []
        for kind, ports in (("prefiller", prefills), ("decoder", decodes)):
            ends += [f"--{kind}-hosts", *["127.0.0.1"] * len(ports), f"--{kind}-ports", *map(str, ports)]
        super().__init__([str(program), *ends], "/healthcheck")


def asked(model: Path, tokens: list[int], length: int = 8, **more) -> dict:
    """A prompt of tokens, answered by tokens."""
    greedy = {"max_tokens": length, "temperature": 0, "ignore_eos": True}
    return {"model": str(model), "prompt": tokens, "return_token_ids": True, "detokenize": False} | greedy | more
