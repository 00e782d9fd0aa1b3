"""Requests of a trace through engines that prefill and engines that decode, behind vLLM's own proxy, while clients go away and
engines are killed. Prints figures as one JSON object; tests/disagg.sh runs it.

    python tests/vllm/disagg.py --model DIRECTORY --trace FILE [--requests N] [--kills N] [--each N]
"""

import argparse
import gzip
import json
import random
import statistics
import sys
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import vllm
from connectors import connector, host
from engine import BLOCK, prompt
from servers import ALONE, Proxy, Server, asked, free_port
from sources import proxy_of

# Blocks of 512 tokens of the trace are one of the engine's here, and a prompt ends where it does not fit.
MOST_BLOCKS, ANSWER = 40, 16
CLIENTS = 4
# Seconds in which an answer ends, by tokens or by an error: `peer_timeout_ms`, and what two processors take to compute a queue.
LIMIT_MS, COMPUTE = 5000, 30.0
# What may be said to a client whose engine is gone.
GONE = (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, KeyError, json.JSONDecodeError)


@dataclass
class Ended:
    """How a request ended."""

    how: str
    seconds: float
    # To the first token.
    first: float | None = None


def prompts(trace: Path, count: int) -> list[list[int]]:
    """Those of the first requests: what has an equal start there has one here."""
    opened = gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open()
    found = []
    with opened as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"][:MOST_BLOCKS]
            found.append([token for number in ids for token in prompt(number + 1, BLOCK)] + prompt(len(found) + 7, 5))
            if len(found) == count:
                break
    return found


class Engines:
    """Those that prefill, those that decode, and the proxy. Each may be killed and started again."""

    def __init__(self, model: Path, program: Path, each: int) -> None:
        self.model, self.each = model, each
        # Where those that prefill serve their peers.
        self.peers = [free_port() for _ in range(each)]
        self.ports = [free_port() for _ in range(2 * each)]
        self.all = [self.engine(number) for number in range(2 * each)]
        for engine in self.all:
            engine.__enter__()
        self.proxy = Proxy(program, self.ports[:each], self.ports[each:]).__enter__()

    def engine(self, number: int) -> Server:
        decodes = number >= self.each
        known = ",".join(f"127.0.0.1:{port}" for port in self.peers)
        tiers = host(1024, **{"peers.enabled": True, "peers.lease_share": 1.0})
        tiers |= {"peers.port": 0, "peers.addresses": known} if decodes else {"peers.port": self.peers[number]}
        role = "kv_consumer" if decodes else "kv_producer"
        transfer = connector(tiers, role=role, peer_timeout_ms=LIMIT_MS)["kv_transfer_config"]
        return Server(self.model, transfer, ALONE, port=self.ports[number])

    def kill(self, number: int) -> None:
        """kill -9, and another one in its place."""
        self.all[number].kill()
        self.all[number] = self.engine(number)
        self.all[number].__enter__()

    def stop(self) -> None:
        for process in (self.proxy, *self.all):
            process.__exit__()


def ask(engines: Engines, tokens: list[int], said: list[int], abort_at: int | None) -> Ended:
    """One client. `wrong`: what was said is not what one engine says."""
    began, first, found = time.monotonic(), None, []
    ended = lambda how: Ended(how, time.monotonic() - began, first)
    try:
        for part in engines.proxy.stream(asked(engines.model, tokens, ANSWER)):
            found += part["choices"][0]["token_ids"]
            first = first or time.monotonic() - began
            if found != said[: len(found)]:
                return ended("wrong")
            if abort_at is not None and len(found) >= abort_at:
                return ended("aborted")
    except GONE:
        return ended("error")
    return ended("right" if found == said else "error")


def at_rest(server: Server, limit: float = 60.0) -> bool:
    """Whether no request and no block of one is left."""
    until = time.monotonic() + limit
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(server.metric(name) for name in names):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--each", type=int, default=2)
    options = parser.parse_args()
    program = proxy_of(vllm.__version__.split("+")[0])
    if program is None:
        print("SKIPPED: vLLM's proxy cannot be fetched", file=sys.stderr)
        sys.exit(77)
    wanted, draw = prompts(options.trace, options.requests), random.Random(4)
    with Server(options.model, None) as alone:
        said = [alone.ask(asked(options.model, tokens, ANSWER))["choices"][0]["token_ids"] for tokens in wanted]
    engines = Engines(options.model, program, options.each)
    aborts = [draw.randrange(1, ANSWER) if draw.random() < 0.2 else None for _ in wanted]
    asking = iter(range(len(wanted)))
    lock, done, are_up = threading.Lock(), [], threading.Event()
    are_up.set()
    # Killed in turn, the last one first, each after an equal share of the requests.
    killed = [0] * len(engines.all)
    kills = [(len(wanted) * (kill + 1) // (options.kills + 1), -(kill + 1) % len(killed)) for kill in range(options.kills)]

    def client() -> None:
        while True:
            with lock:
                number = next(asking, None)
            if number is None:
                return
            are_up.wait()
            ended = ask(engines, wanted[number], said[number], aborts[number])
            with lock:
                done.append(ended)
                kill = kills.pop(0)[1] if kills and len(done) >= kills[0][0] else None
            if kill is not None:
                # What is under way meets it; what comes waits until another engine is there.
                are_up.clear()
                engines.kill(kill)
                killed[kill] += 1
                are_up.set()

    with ThreadPoolExecutor(CLIENTS) as clients:
        for running in [clients.submit(client) for _ in range(CLIENTS)]:
            running.result()
    rests = [at_rest(engine) for engine in engines.all]
    drift = sum(engine.metric("vllm:kvbm_accounting_drift") for engine in engines.all)
    decode = engines.all[options.each :]
    peer_blocks = sum(engine.metric("vllm:kvbm_peer_blocks_total", direction="received") for engine in decode)
    engines.stop()
    count = lambda how: sum(ended.how == how for ended in done)
    longest = max(ended.seconds for ended in done)
    figures = {
        "requests": len(done),
        **{how: count(how) for how in ("right", "wrong", "aborted", "error")},
        "killed": {"prefill": sum(killed[: options.each]), "decode": sum(killed[options.each :])},
        "longest_s": round(longest, 2),
        "limit_s": LIMIT_MS / 1000 + COMPUTE,
        "first_token_s": round(statistics.median(ended.first for ended in done if ended.first), 3),
        "peer_blocks_since_last_kill": int(peer_blocks),
        "drift": drift,
    }
    failed = []
    if count("wrong"):
        failed.append("an answer is not one engine's")
    if not all(rests):
        failed.append("something is left in an engine at rest")
    if drift:
        failed.append("the audit found drift")
    if not options.kills and count("error"):
        failed.append("a request failed where nothing died")
    if not count("right"):
        failed.append("nothing was answered")
    short = ["an answer took too long"] if longest > LIMIT_MS / 1000 + COMPUTE else []
    if not peer_blocks:
        failed.append("no block came from the other engine")
    print(json.dumps({"failed": failed, "short": short, **figures}))
    sys.exit(1 if failed else 3 if short else 0)


if __name__ == "__main__":
    main()
