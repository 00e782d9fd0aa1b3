"""What it takes to go from an engine that prefills to one that decodes: `KvbmConnector` beside vLLM's `NixlConnector`. Prints one
JSON object; tests/disagg.sh runs it.

    python tests/vllm/handover.py [--rounds N] [--gpu]

A model of 12 layers with made-up weights in bf16, prompts of 2,048 tokens, one at a time, behind vLLM's own proxy; two engines of
one kind of connector, then two of the other, in turns, since NIXL's threads take a core also when nothing is asked; medians.
`first_token` is what a client waits for it. `hand_over` is the time from the arrival of a request at the second engine to the begin
of its first step, as vLLM counts it. `decode` is a token's time at the second engine while it reads other prompts at its peer, in
times of alone: both compute nothing else. `decode_beside_copy` is the same beside a process that copies as many bytes and does
nothing else: what the memory of this machine takes. `both_at_once` is of prompts that both engines are asked for at the same time,
without a proxy, saved by the first as whole blocks and layer by layer, in turns. There `hand_over` is the time from the first one's
answer to the begin of the second one's first step, which may come before, and `behind_answer` that to the client's first token;
`lost` is how many prompts the second one computed or gave up, since the first took longer than its limit: they are left out.

With `--gpu` both engines share a GPU, with a model of Llama 3 8B's shape; a token beside a transfer is not timed then, nor are
layers, which a GPU's engine does not save. The two engines' processes find the packages that this one finds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import models
import vllm
from connectors import probe
from engine import BLOCK, HERE, Engine, prompt
from servers import ALONE, Proxy, Server, asked, free_port
from sources import proxy_of

TOKENS = 2048
# Blocks in a host tier.
ROOM = 1024


@dataclass(frozen=True)
class Place:
    """Where the engines run, and what."""

    shape: str
    block_bytes: int
    options: dict
    environment: dict


ON_CPU = Place("bench", 2 * 12 * 12 * 64 * 2 * BLOCK, {}, ALONE)
GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
ON_GPU = Place("large", 2 * 32 * 8 * 128 * 2 * BLOCK, {"gpu_memory_utilization": 0.42}, GPU)

# tests/vllm.sh installs NIXL there.
NIXL = Path(sys.prefix, "kvcr")
WANTED, WANTED_DECODE = {"first_token": 1.05, "hand_over": 0.5}, 1.05
# How often each kind has its turn.
TURNS = 2
# Tokens that are timed at once.
TIMED = 48


def ours(role: str, port: int, peer: int | None, place: Place = ON_CPU) -> tuple[dict, dict]:
    settings = {"host.capacity": ROOM * place.block_bytes, "peers.enabled": True, "peers.port": port, "peers.lease_share": 1.0}
    if peer:
        settings["peers.addresses"] = f"127.0.0.1:{peer}"
    transfer = {"kv_connector": "KvbmConnector", "kv_connector_module_path": "kvbm_rs.vllm.connector", "kv_role": role}
    return transfer | {"kv_connector_extra_config": {"settings": settings}}, {}


def theirs(role: str, port: int, peer: int | None, place: Place = ON_CPU) -> tuple[dict, dict]:
    paths = ":".join(filter(None, [str(HERE), str(NIXL), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": paths, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    transfer = {"kv_connector": "NixlConnector", "kv_role": role}
    if place is ON_GPU:
        return transfer, environment
    return transfer | {"kv_buffer_device": "cpu"}, environment | {"UCX_TLS": "tcp,shm,cma,self"}


class Pair:
    """An engine that prefills, one that decodes, and the proxy."""

    def __init__(self, model: Path, program: Path, kind, place: Place) -> None:
        ports = free_port(), free_port()
        sides = (kind("kv_producer", ports[0], None, place), kind("kv_consumer", ports[1], ports[0], place))
        own = {"dtype": "bfloat16", "load_format": "dummy", **place.options}
        # What another prompt left in an engine's own cache is not wanted.
        self.engines = [Server(model, transfer, place.environment | environment, **own) for transfer, environment in sides]
        self.model, self.proxy = model, Proxy(program, *([engine.port] for engine in self.engines))
        # Where the first one serves its peers.
        self.served_at = ports[0]

    def __enter__(self) -> "Pair":
        for process in (*self.engines, self.proxy):
            process.__enter__()
        return self

    def __exit__(self, *_) -> None:
        for process in (self.proxy, *self.engines):
            process.__exit__()

    def waited(self) -> tuple[float, float]:
        """Seconds that requests waited for their first step at the second engine, and how many they were."""
        name = "vllm:request_queue_time_seconds"
        return self.engines[1].metric(f"{name}_sum"), self.engines[1].metric(f"{name}_count")

    def ask(self, number: int) -> dict[str, float]:
        before, began = self.waited(), time.monotonic()
        parts = self.proxy.stream(asked(self.model, prompt(number, TOKENS), 4))
        next(parts)
        first = time.monotonic() - began
        for _ in parts:
            pass
        return {"first_token": first, "hand_over": self.waited_since(before)}

    def waited_since(self, before: tuple[float, float]) -> float:
        while (after := self.waited())[1] == before[1]:
            time.sleep(0.05)
        return after[0] - before[0]

    def ask_both(self, number: int, in_layers: bool) -> dict[str, float]:
        """Asks both engines for a prompt at once."""
        tokens, computed, before, began = prompt(number, TOKENS), self.computed(), self.waited(), time.monotonic()
        follows = {"remote_prefiller": {"remote_host": "127.0.0.1", "remote_port": self.served_at}}

        def decode() -> float:
            parts = self.engines[1].stream(asked(self.model, tokens, 4, kv_transfer_params=follows))
            next(parts)
            first = time.monotonic() - began
            for _ in parts:
                pass
            return first

        with ThreadPoolExecutor(1) as client:
            first = client.submit(decode)
            is_followed = {"kv_transfer_params": {"remote_decoder": {}}} if in_layers else {}
            self.engines[0].ask(asked(self.model, tokens, 1, **is_followed))
            answered = time.monotonic() - began
            took = first.result()
            waited = self.waited_since(before)
            # A prompt that was handed over leaves fewer than two blocks to compute. One that fails before its first step waited for
            # less than nothing, as vLLM counts.
            is_lost = waited < 0.0 or self.computed() - computed >= 2 * BLOCK
            return {"first_token": took, "behind_answer": took - answered, "hand_over": waited - answered, "lost": is_lost}

    def computed(self) -> float:
        """Tokens of prompts that the second engine computed."""
        return self.engines[1].metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def at_once(model: Path, program: Path, rounds: int, place: Place) -> dict[str, dict[str, float]]:
    """Medians, in ms, of prompts that both engines are asked for at once, and how many were not handed over."""
    ways = {"blocks": False} | ({"layers": True} if place is ON_CPU else {})
    times = {way: [] for way in ways}
    with Pair(model, program, ours, place) as pair:
        for number in range(rounds + 1):
            for at, (way, in_layers) in enumerate(ways.items()):
                times[way].append(pair.ask_both(100 + len(ways) * number + at, in_layers))
    found = {}
    for way, all_of in times.items():
        handed_over = [one for one in all_of[1:] if not one.pop("lost")]
        medians = {name: statistics.median(one[name] for one in handed_over) for name in (handed_over or [{}])[0]}
        found[way] = {name: round(1e3 * took, 1) for name, took in medians.items()} | {"lost": rounds - len(handed_over)}
    return found


# Copies a number of bytes a second, whatever they are, until it is ended.
COPYING = """
import sys, time, numpy
speed, piece = float(sys.argv[1]), 4 << 20
there, here = (numpy.ones(64 * piece, numpy.uint8) for _ in range(2))
print("copying", flush=True)
due = time.monotonic()
while True:
    for at in range(0, there.size, piece):
        here[at : at + piece] = there[at : at + piece]
        due = max(due + piece / speed, time.monotonic() - 0.1)
        time.sleep(max(0.0, due - time.monotonic()))
"""


def decoding(model: Path, rounds: int) -> dict[str, float]:
    """A token's time beside a transfer, and beside a mere copy of as many bytes a second by another process, in times of alone; and
    how many GB a second that are. The medians are of a round each."""
    own = {"dtype": "bfloat16", "load_format": "dummy", "environment": {"OMP_NUM_THREADS": "1"}}
    with Engine(model, kv_transfer_config=ours("kv_producer", 0, None)[0], **own) as first:
        name, address = probe(first, "peer")
        read = [prompt(number, TOKENS) for number in range(8)]
        for asked in read:
            first.generate(asked, tokens=1)
        first.settle()
        transfer = ours("kv_consumer", 0, int(address.rpartition(":")[2]))[0]
        # Less than is read: what comes again has left.
        transfer["kv_connector_extra_config"]["settings"]["host.capacity"] = 3 * TOKENS // BLOCK * ON_CPU.block_bytes
        with Engine(model, kv_transfer_config=transfer, **own) as second:
            rows = []

            def timed(some: list) -> tuple[float, float]:
                took = probe(second, "token_times", tokens=TIMED, read=some, peer=name)
                return statistics.median(took["times"]), took["blocks"] * ON_CPU.block_bytes / sum(took["times"])

            for _ in range(rounds + 1):
                (alone, _), (beside, speed) = timed([]), timed(read)
                copying = subprocess.Popen([sys.executable, "-c", COPYING, str(speed)], stdout=subprocess.PIPE)
                try:
                    copying.stdout.readline()
                    (copied, _) = timed([])
                finally:
                    copying.kill()
                    copying.wait()
                rows.append({"decode": beside / alone, "decode_beside_copy": copied / alone, "decode_gb_s": speed / 1e9})
    return {name: round(statistics.median(row[name] for row in rows[1:]), 3) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    rounds, place = arguments.rounds, ON_GPU if arguments.gpu else ON_CPU
    program = proxy_of(vllm.__version__.split("+")[0])
    if program is None:
        print("SKIPPED: vLLM's proxy cannot be fetched", file=sys.stderr)
        sys.exit(77)
    kinds = {"kvbm": ours} | ({"nixl": theirs} if NIXL.is_dir() else {})
    with tempfile.TemporaryDirectory() as scratch:
        model = models.make(Path(scratch, place.shape), place.shape)
        times, computed = {name: [] for name in kinds}, dict.fromkeys(kinds, 0.0)
        for name in TURNS * list(kinds):
            with Pair(model, program, kinds[name], place) as pair:
                # The first prompt is the first contact.
                times[name] += [pair.ask(number) for number in range(rounds + 1)][1:]
                computed[name] += pair.computed() / (TURNS * (rounds + 1))
        beside = decoding(model, rounds) if place is ON_CPU else {}
        beside["both_at_once"] = at_once(model, program, rounds, place)
    found = {name: {what: statistics.median(one[what] for one in all_of) for what in WANTED} for name, all_of in times.items()}
    ms = {name: {what: round(1e3 * took, 1) for what, took in medians.items()} for name, medians in found.items()}
    figures = {"rounds": rounds, "ms": ms, "computed_tokens": computed} | beside
    short = ["a token beside a transfer"] if beside.get("decode", 0.0) > WANTED_DECODE else []
    hand_overs = [way.get("hand_over") for way in beside["both_at_once"].values()]
    short += ["a prefill in time, where both are asked at once"] if None in hand_overs else []
    short += ["layer by layer"] if len(hand_overs) == 2 and None not in hand_overs and hand_overs[1] > hand_overs[0] else []
    if "nixl" in found:
        ratios = {what: found["kvbm"][what] / found["nixl"][what] for what in WANTED}
        figures["over_nixl"] = {what: round(ratio, 3) for what, ratio in ratios.items()}
        short += [f"{what} over NixlConnector's" for what, ratio in ratios.items() if ratio > WANTED[what]]
    else:
        figures["left_out"] = ["NIXL is not installed"]
    print(json.dumps(figures | {"short": short}))
    sys.exit(3 if short else 0)


if __name__ == "__main__":
    main()
