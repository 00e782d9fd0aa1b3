"""Data parallelism in a real server: its ranks are given one configuration, and each keeps its own blocks."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from connectors import LENGTH, connector, disk, host
from engine import BLOCK, ENVIRONMENT, prompt

# Two engines start together.
START_LIMIT = 600.0


class Server:
    """`vllm serve` with two ranks. A context manager: leaving it ends the processes, by force if need be."""

    def __init__(self, model: Path, settings: dict) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model = str(model)
        arguments = {
            "model": self.model,
            "port": self.port,
            "data-parallel-size": 2,
            "block-size": BLOCK,
            "max-model-len": 4096,
            "dtype": "float32",
            "kv-transfer-config": json.dumps(connector(settings)["kv_transfer_config"]),
        }
        options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--skip-tokenizer-init", *options],
            env=os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=self.log,
            # Its engines go with it.
            start_new_session=True,
        )

    def __enter__(self) -> "Server":
        until = time.monotonic() + START_LIMIT
        while True:
            try:
                self.get("/health")
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    self.kill()
                    raise AssertionError(f"the server does not start:\n{self.logged()[-8000:]}") from None
                time.sleep(0.5)

    def __exit__(self, *_) -> None:
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

    def ask(self, rank: int, tokens: list[int]) -> list[int]:
        """What a rank says to a prompt."""
        asked = {"model": self.model, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        asked |= {"return_token_ids": True, "detokenize": False}
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(asked).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def hits(self, rank: int) -> int:
        """Tokens that came from below a rank's engine."""
        lines = (line for line in self.get("/metrics").splitlines() if line.startswith("vllm:kvbm_hit_tokens_total{"))
        return int(sum(float(line.split()[-1]) for line in lines if f'engine="{rank}"' in line))


@pytest.mark.slow
def test_ranks_of_data_parallelism_keep_their_own_beside_each_other(model, said, tmp_path, shared_memory):
    tiers = host(64, **{"host.persist": str(shared_memory)}) | disk(tmp_path)
    with Server(model, tiers) as server:
        for rank in (0, 1):
            assert server.ask(rank, prompt(rank, LENGTH)) == said[rank]
    for place in (tmp_path, shared_memory):
        assert list(place.glob("kvbm-*.*")) and list((place / "kvbm-dp1").glob("kvbm-*.*"))
    with Server(model, tiers) as server:
        for rank in (0, 1):
            assert server.ask(rank, prompt(rank, LENGTH)) == said[rank]
            until = time.monotonic() + 30
            # They are read once a second.
            while server.hits(rank) != LENGTH // BLOCK * BLOCK:
                assert time.monotonic() < until, server.logged()[-4000:]
                time.sleep(0.1)
