"""Replays traces through vLLM's own CPU offloading manager, and prints what its eviction policies come to.

    python tests/vllm/policy_replay.py [--traces DIR] [--chunks 1000,5000] [--policies hazard,lru,arc] [--requests N]

prints one JSON object: for each trace, number of chunks and policy the token hit rate in per cent and the CPU time of a
request in microseconds, of everything that the manager does for it.

As in docs/policies.md, chunks have 512 tokens, requests come in the order of the trace, a hit is the longest prefix that
is there, all full chunks of a prompt are stored, and a request ends 500 ms and 20 ms a generated token after it came. As
in the engine, a prompt is stored in pieces, as it is computed: of 8,192 tokens.
"""

import argparse
import gzip
import hashlib
import heapq
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvbm_rs._native import ChunkPolicy
from kvbm_rs.vllm.policy import HazardPolicy

CHUNK_TOKENS = 512
PIECE_CHUNKS = 16
FIRST_TOKEN_MS = 500
TOKEN_MS = 20

TRACES = Path(os.environ.get("KVBM_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


class ReplayedHazardPolicy(HazardPolicy):
    """HazardPolicy by the clock of a trace. It learns in the thread that calls it, so its time counts too."""

    def _make_policy(self, capacity: int) -> ChunkPolicy:
        return ChunkPolicy(capacity, learn_here=True, manual_clock=True)

    def advance_to(self, now_ms: int) -> None:
        self._policy.advance_to(now_ms)


@dataclass(frozen=True)
class Request:
    at_ms: int
    prompt_tokens: int
    output_tokens: int
    keys: list[bytes]


@dataclass(frozen=True)
class Outcome:
    """Of a replay: the token hit rate in per cent, and the CPU time of a request in microseconds."""

    hit_rate: float
    microseconds: float


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The requests of a trace in the Mooncake format."""
    return list(_requests(path, limit))


def _requests(path: Path, limit: int | None) -> Iterator[Request]:
    keys: dict[int, bytes] = {}
    with gzip.open(path) as lines:
        for number, line in enumerate(lines):
            if number == limit:
                return
            row = json.loads(line)
            full = row["hash_ids"][: row["input_length"] // CHUNK_TOKENS]
            for name in full:
                if name not in keys:
                    keys[name] = make_offload_key(hashlib.sha256(str(name).encode()).digest(), 0)
            yield Request(row["timestamp"], row["input_length"], row["output_length"], [keys[name] for name in full])


def make_manager(policy: str, chunks: int) -> CPUOffloadingManager:
    """vLLM's manager, with a policy of its own or with ours."""
    if policy == "hazard":
        return CPUOffloadingManager(chunks, ReplayedHazardPolicy.__name__, __name__)
    return CPUOffloadingManager(chunks, policy)


def replay(requests: list[Request], policy: str, chunks: int) -> Outcome:
    """Plays the requests to a manager that is empty."""
    manager = make_manager(policy, chunks)
    advance = getattr(manager._policy, "advance_to", lambda now_ms: None)
    running: list[tuple[int, int, ReqContext]] = []
    prompt_tokens = hit_tokens = nanoseconds = 0
    for number, request in enumerate(requests):
        context = ReqContext(req_id=str(number))
        for end, key in enumerate(request.keys, 1):
            context.set_offload_key_position(key, end * CHUNK_TOKENS)
        began = time.process_time_ns()
        while running and running[0][0] <= request.at_ms:
            ended_ms, _, ended = heapq.heappop(running)
            advance(ended_ms)
            manager.on_request_finished(ended)
        advance(request.at_ms)
        hit_tokens += CHUNK_TOKENS * serve(manager, request.keys, context)
        nanoseconds += time.process_time_ns() - began
        prompt_tokens += request.prompt_tokens
        add_generated(context, request, number)
        ends_ms = request.at_ms + FIRST_TOKEN_MS + TOKEN_MS * request.output_tokens
        heapq.heappush(running, (ends_ms, number, context))
    return Outcome(100 * hit_tokens / max(1, prompt_tokens), nanoseconds / 1000 / max(1, len(requests)))


def serve(manager: CPUOffloadingManager, keys: list[bytes], context: ReqContext) -> int:
    """What the engine asks of the manager until the prompt is computed. Returns how many chunks it found."""
    manager.on_new_request(context)
    hits = 0
    while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
        hits += 1
    if hits:
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
    stored = hits
    for computed in range(hits, len(keys), PIECE_CHUNKS):
        # What found no room is offered again with what comes next.
        offered = keys[stored : computed + PIECE_CHUNKS]
        output = manager.prepare_store(offered, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
            stored += len(offered)
    return hits


def add_generated(context: ReqContext, request: Request, number: int) -> None:
    """Chunks that end in what was generated: vLLM names them, although nothing of them is stored here."""
    tokens = request.prompt_tokens + request.output_tokens
    for index in range(len(request.keys), tokens // CHUNK_TOKENS):
        key = make_offload_key(hashlib.sha256(f"{number} {index}".encode()).digest(), 0)
        context.set_offload_key_position(key, (index + 1) * CHUNK_TOKENS)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--traces", type=Path, default=TRACES)
    arguments.add_argument("--names", default="conversation,agentic")
    arguments.add_argument("--chunks", default="1000,3000,5000,10000")
    arguments.add_argument("--policies", default="hazard,lru,arc")
    arguments.add_argument("--requests", type=int)
    options = arguments.parse_args()
    figures: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name in options.names.split(","):
        requests = read_trace(options.traces / f"{name}.jsonl.gz", options.requests)
        for chunks in map(int, options.chunks.split(",")):
            of_chunks = figures.setdefault(name, {}).setdefault(str(chunks), {})
            for policy in options.policies.split(","):
                outcome = replay(requests, policy, chunks)
                of_chunks[policy] = {
                    "hit_rate": round(outcome.hit_rate, 2),
                    "microseconds": round(outcome.microseconds, 1),
                }
    print(json.dumps(figures))


if __name__ == "__main__":
    # So that vLLM's factory finds the class by the name of this module.
    import policy_replay

    policy_replay.main()
