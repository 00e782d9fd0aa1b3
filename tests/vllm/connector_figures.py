"""What it takes to come back by `KvbmConnector`, beside vLLM's own prefix cache and the bare copy. Prints one JSON object.

    python tests/vllm/connector_figures.py [--rounds N]

A model of 12 layers with made-up weights in bf16, a prompt of 2,050 tokens, medians. `ttft` is what the first token takes
(`layers`: from the host tier, layer by layer); ratios to a hit in the engine's own cache are of a round each. `load` is a load
of the prompt's blocks from the host tier beside `memcpy` of the same bytes by as many threads; `decode` is generated tokens a
second with saving on, beside an engine without connector, in turns.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import models
from engine import Engine, prompt

TOKENS = 2050
# Bytes of a block of 32 tokens: keys and values of 12 layers, 12 heads of 64 numbers of 2 bytes.
BLOCK_BYTES = 2 * 12 * 12 * 64 * 2 * 32
# Blocks in a tier: some prompts' worth.
ROOM = 512
# What is wanted: of the first token in times of the engine's own hit, of the load in times of memcpy, of decoding at least.
WANTED = {"host": 1.25, "layers": 1.25, "disk": 1.5, "object": 2.0}
WANTED_LOAD, WANTED_DECODE = 1.15, 0.97

MODEL = {"dtype": "bfloat16", "load_format": "dummy"}


def connector(settings: dict, **extra) -> dict:
    transfer = {
        "kv_connector": "KvbmConnector",
        "kv_connector_module_path": "kvbm_rs.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"settings": settings, **extra},
    }
    return {"kv_transfer_config": transfer}


def openings(place: Path) -> dict[str, dict]:
    """Arguments of an engine by what serves."""
    host = {"host.capacity": ROOM * BLOCK_BYTES}
    return {
        "host": connector(host),
        "layers": connector(host, layerwise=True),
        "disk": connector({"disk.capacity": ROOM * BLOCK_BYTES, "disk.dirs": str(place)}),
        "object": connector({"object.url": f"file://{place}/objects"}),
    }


def first_tokens(engine: Engine, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token: computed, from the engine's own cache, and from below."""
    found: dict[str, list[float]] = {"computed": [], "engine": [], "below": []}
    for number in range(rounds + 1):
        asked = prompt(number, TOKENS)
        computed = engine.generate(asked, tokens=1)
        own = engine.generate(asked, tokens=1)
        engine.call("connector_probe:drain")
        assert engine.reset()
        below = engine.generate(asked, tokens=1)
        assert computed.said == own.said == below.said
        assert (computed.scheduled, own.scheduled, below.scheduled) == (TOKENS, 2, 2)
        # The first round is for warming up.
        if number:
            for name, answer in (("computed", computed), ("engine", own), ("below", below)):
                found[name].append(answer.seconds)
    return found


def decoding(rounds: int, model: Path, place: Path) -> list[float]:
    """Tokens a second with saving on, in those without, of rounds in turns."""
    ratios = []
    with Engine(model, **MODEL) as plain, Engine(model, **openings(place)["host"], **MODEL) as saving:
        for number in range(rounds + 1):
            asked = [prompt(100 * number + one, 70) for one in range(4)]
            pair = [plain, saving] if number % 2 else [saving, plain]
            seconds = {engine: engine.generate(*asked, tokens=100).seconds for engine in pair}
            if number:
                ratios.append(seconds[plain] / seconds[saving])
    return ratios


def measure(model: Path, rounds: int) -> dict:
    figures: dict = {}
    for name in WANTED:
        with tempfile.TemporaryDirectory() as place:
            with Engine(model, **openings(Path(place))[name], **MODEL) as engine:
                found = first_tokens(engine, rounds)
                ratios = [below / own for below, own in zip(found["below"], found["engine"])]
                figures[f"ttft_{name}_ratio"] = round(statistics.median(ratios), 3)
                figures[f"ttft_{name}_ms"] = {
                    what: round(1e3 * statistics.median(times), 1) for what, times in found.items()
                }
                if name == "host":
                    times = engine.call(
                        "connector_probe:load_times", prompt=prompt(1, TOKENS), rounds=4 * rounds
                    )
                    figures["load_memcpy_ratio"] = round(statistics.median(times["ratios"]), 3)
                    figures["load_ms"] = round(1e3 * statistics.median(times["load"]), 2)
    with tempfile.TemporaryDirectory() as place:
        figures["decode_ratio"] = round(statistics.median(decoding(rounds, model, Path(place))), 3)
    return figures


def short_of(figures: dict) -> list[str]:
    short = [
        f"first token from {tier}: {figures[f'ttft_{tier}_ratio']}, wanted {wanted}"
        for tier, wanted in WANTED.items()
        if figures[f"ttft_{tier}_ratio"] > wanted
    ]
    if figures["load_memcpy_ratio"] > WANTED_LOAD:
        short.append(f"load: {figures['load_memcpy_ratio']} of memcpy, wanted {WANTED_LOAD}")
    if figures["decode_ratio"] < WANTED_DECODE:
        short.append(f"decoding: {figures['decode_ratio']}, wanted {WANTED_DECODE}")
    return short


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(models.make(Path(directory), "bench"), arguments.rounds)
    short = short_of(figures)
    print(json.dumps({"holds": not short, **figures, "short": short}))
    sys.exit(3 if short else 0)
