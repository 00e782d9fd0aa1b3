"""What the tier costs beside vLLM's own: both below the same manager, in turns, medians. Prints one JSON object.

    python tests/vllm/figures.py [--rounds N] [--place DIRECTORY]

`put` and `get` are bytes a second of 8 requests at once, from the primary tier to files and back, until vLLM hears of the last job.
`look_up_us` is what a request of 512 keys, which are all there, takes of the scheduler's thread until all answers are final;
`look_up_cpu_us` is the time of all threads.
"""

import argparse
import contextlib
import importlib.util
import json
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

from offloading import PAGE, Offloading, chain

REQUESTS = 8
# Bytes of a chunk, and chunks of a request.
ROWS = {64 << 10: 64, 1 << 20: 32, 4 << 20: 8}
LOOKED_UP = 512
# What is wanted of ours over vLLM's `fs`: (put, get) by bytes of a chunk, and of look-ups.
WANTED = {64 << 10: (1.3, 1.3), 1 << 20: (1.3, 1.0), 4 << 20: (1.3, 1.0)}
WANTED_LOOK_UP = 20.0
# Of puts and gets over NVIDIA's `kvcr`.
WANTED_OVER_KVCR = 3.0
OURS = {"type": "KvbmTier", "module_path": "kvbm_rs.vllm.tier", "weights": "made up"}


def kvbm(place: Path, chunks: int) -> dict:
    return {**OURS, "disk.capacity": f"{chunks} blocks", "disk.dirs": str(place)}


def kvbm_dram(place: Path, chunks: int) -> dict:
    """As `kvcr` keeps blocks: in DRAM alone."""
    return {**OURS, "host.capacity": f"{2 * chunks} blocks"}


def fs(place: Path, chunks: int) -> dict:
    return {"type": "fs", "root_dir": str(place)}


def kvcr(place: Path, chunks: int) -> dict:
    """In DRAM alone: to files it takes blocks one by one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    control = {"control_host": "127.0.0.1", "control_advertise_host": "127.0.0.1", "control_ports": [port]}
    # Its own limits are a second and five: on a busy machine it gives up blocks then.
    patience = {"operation_timeout_ms": 30_000, "abandon_timeout_ms": 60_000}
    room = {"secondary_g2_slots": 2 * chunks, "policy": "lru"}
    return {"type": "kvcr", "router_capabilities": ["router_hint"], **control, **patience, **room}


def contenders() -> dict:
    """`kvcr` where it is installed, as tests/vllm.sh does."""
    found = {"kvbm": kvbm, "fs": fs}
    return found | {"kvcr": kvcr, "kvbm_dram": kvbm_dram} if importlib.util.find_spec("kvcr") else found


def put_and_get(below: Offloading, number: int, chunks: int) -> tuple[float, float]:
    """Bytes a second each way, of prompts that were never seen."""
    chains = [chain(number * REQUESTS + request, chunks) for request in range(REQUESTS)]
    size = REQUESTS * chunks * below.row
    requests = [below.begin(keys) for keys in chains]
    stored = [below.manager.prepare_store(keys, request) for keys, request in zip(chains, requests)]
    began = time.perf_counter()
    for keys, request in zip(chains, requests):
        below.manager.complete_store(set(keys), request)
    wait(below)
    put = size / (time.perf_counter() - began)
    assert all(len(one.keys_to_store) == chunks for one in stored)
    for request in requests:
        below.end(request)
    below.forget_primary()
    requests = [below.begin(keys) for keys in chains]
    # Where they are is asked before: that is the other figure.
    asked, pending = list(zip(requests, chains)), below.manager._pending_load_submissions
    # All ask in one step: then all are answered in one, and loaded together.
    while [below.look_up_once(*one)[0] for one in asked] != [chunks] * REQUESTS:
        assert not any(one.keys for tier in pending.values() for one in tier.values()), "only a part is there"
        below.step()
        time.sleep(0.002)
    assert sum(len(one.keys) for one in pending[0].values()) == REQUESTS * chunks
    began = time.perf_counter()
    wait(below)
    get = size / (time.perf_counter() - began)
    hits = [below.look_up_once(request, keys)[0] for request, keys in zip(requests, chains)]
    assert hits == [chunks] * REQUESTS
    for request in requests:
        below.step(request)
        below.end(request)
    below.forget_primary()
    return put, get


def wait(below: Offloading) -> None:
    below.step()
    while below.manager.has_pending_work():
        time.sleep(0.0002)
        below.step()


def look_up(below: Offloading, keys: list[bytes]) -> tuple[float, float]:
    """Microseconds of the scheduler's thread for a request, and of all threads."""
    tier, request = below.tier, below.begin(keys)
    nothing = ScheduleEndContext([], [])
    spent, cpu = 0.0, time.process_time()
    while True:
        began = time.perf_counter()
        answers = [tier.lookup(key, request) for key in keys]
        tier.on_schedule_end(nothing)
        spent += time.perf_counter() - began
        if LookupResult.RETRY not in answers:
            break
        time.sleep(0.02)
    assert answers == [LookupResult.HIT] * len(keys)
    began = time.perf_counter()
    tier.on_request_finished(request)
    spent += time.perf_counter() - began
    time.sleep(0.002)
    cpu = time.process_time() - cpu
    return spent * 1e6, cpu * 1e6


def measure(place: Path, rounds: int) -> dict:
    speeds, found = defaultdict(list), contenders()
    for row, chunks in ROWS.items():
        for number in range(rounds + 1):
            # In turns, each time the other first.
            for name in sorted(found, reverse=number % 2 == 1):
                directory = place / f"{name}-{row}"
                directory.mkdir(exist_ok=True)
                tier = found[name](directory, REQUESTS * chunks)
                with Offloading(tier, row=row, chunks=2 * REQUESTS * chunks) as below:
                    if name == "kvcr":
                        # It always says that it has something to do.
                        below.tier.has_pending_work = lambda manager=below.manager: bool(manager._jobs)
                    below.view()[:] = np.random.default_rng(number).integers(-128, 128, row, np.int8)
                    speed = put_and_get(below, number, chunks)
                shutil.rmtree(directory)
                # The first round is for warming up.
                if number > 0:
                    speeds[name, row].append(speed)
    lookups = {"kvbm": [], "fs": []}
    keys = chain(1 << 20, LOOKED_UP)
    opened = {}
    for name in lookups:
        (place / f"{name}-look-up").mkdir()
        opened[name] = Offloading(found[name](place / f"{name}-look-up", LOOKED_UP), row=PAGE, chunks=600)
        opened[name].save(keys)
    for _ in range(4 * rounds):
        for name, below in opened.items():
            lookups[name].append(look_up(below, keys))
    for below in opened.values():
        below.manager.shutdown()
    return told(speeds, lookups)


def told(speeds: dict, lookups: dict) -> dict:
    median = statistics.median
    figures, short = {}, []
    for row in ROWS:
        mib = {
            name: [round(median(one[way] for one in taken) / 2**20) for way in (0, 1)]
            for (name, of), taken in speeds.items()
            if of == row
        }

        def over(ours: str, other: str) -> list[float]:
            pairs = list(zip(speeds[ours, row], speeds[other, row]))
            return [median(a[way] / b[way] for a, b in pairs) for way in (0, 1)]

        ratios = over("kvbm", "fs")
        over_kvcr = over("kvbm_dram", "kvcr") if "kvcr" in mib else []
        for way, ratio, wanted in zip(("put", "get"), ratios, WANTED[row]):
            if ratio < wanted:
                short.append(f"{way} of {row >> 10} KiB")
        for way, ratio in zip(("put", "get"), over_kvcr):
            if ratio < WANTED_OVER_KVCR:
                short.append(f"{way} of {row >> 10} KiB over kvcr")
        figures[f"{row >> 10}KiB"] = {
            "put_over_fs": round(ratios[0], 2),
            "get_over_fs": round(ratios[1], 2),
            "over_kvcr": [round(ratio, 2) for ratio in over_kvcr],
            "put_mib_s": {name: speed[0] for name, speed in mib.items()},
            "get_mib_s": {name: speed[1] for name, speed in mib.items()},
        }
    spent = {name: median(one[0] for one in found) for name, found in lookups.items()}
    cpu = {name: median(one[1] for one in found) for name, found in lookups.items()}
    ratio = spent["fs"] / spent["kvbm"]
    if ratio < WANTED_LOOK_UP:
        short.append("look_up")
    figures["look_up_512"] = {
        "over_fs": round(ratio, 1),
        "us": {name: round(value) for name, value in spent.items()},
        "cpu_us": {name: round(value) for name, value in cpu.items()},
    }
    left_out = [] if importlib.util.find_spec("kvcr") else ["kvcr is not installed"]
    return {"holds": not short, "short": short, "tier": figures, "left_out": left_out}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", type=Path, help="a directory of the file system to be measured")
    arguments = parser.parse_args()
    # NIXL's log goes to standard output.
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(dir=arguments.place) as scratch:
        figures = measure(Path(scratch), arguments.rounds)
    print(json.dumps(figures))
    sys.exit(0 if figures["holds"] else 3)
