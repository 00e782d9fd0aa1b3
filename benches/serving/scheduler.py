"""What connectors cost vLLM's scheduler: CPU time of its thread in all calls of one, without a model. Prints one JSON object.

    python benches/serving/scheduler.py [--rounds N] [--running N …]

vLLM's own scheduler runs with `KvbmConnector` and with its `OffloadingConnector` in turns, over a host tier that has room for all.
A block has 16 tokens; requests have come one after the other, so that of 1,000 that decode some 62 fill one in each step. Times are
in µs, medians over the rounds: `step` and `mean` of all calls in a step (the mean has what is done now and then, such as metrics),
`by_method` of the mean by method, `arrival` and `finish` of one more request of 3 blocks, and `prompt` of one of 512 blocks with
KV events on: when it arrives and is looked up (`arrival`), and what events of it cost until they are told (`events`). Needs the
environment of tests/vllm.sh.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests" / "vllm"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from connector_figures import connector  # noqa: E402
from engine import prompt  # noqa: E402
from modelless import BLOCK, BLOCK_BYTES, Modelless  # noqa: E402
from vllm.config import KVEventsConfig  # noqa: E402
from vllm.envs import enable_envs_cache  # noqa: E402

# In the engine's cache, and in the tier below it.
BLOCKS, BELOW = 40_000, 80_000
OWN = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": BELOW * BLOCK_BYTES},
}
OURS = connector({"host.capacity": BELOW * BLOCK_BYTES}, weights="made up")["kv_transfer_config"]
CONTENDERS = {"KvbmConnector": OURS, "OffloadingConnector": OWN}

# Steps in which requests come, and as many that are measured. Meanwhile a request fills eight blocks, which are saved together.
STEPS = 8 * BLOCK
# Requests that come to those that run, one by one, and prompts of 512 blocks.
MORE, PROMPTS, PROMPT_BLOCKS = 20, 3, 512

ARRIVAL = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc")
FINISH = ("request_finished", "request_finished_all_groups")
EVENTS = ("take_events",)
STEP = (
    *("build_connector_meta", "update_connector_output", "get_kv_connector_stats", "has_pending_push_work"),
    *("has_pending_block_frees", "get_external_cache_hit_sources"),
)


class Meter:
    """µs of CPU in each method of a connector since the last reading. What one calls of its own is its."""

    def __init__(self, connector: Any) -> None:
        self._spent: Counter[str] = Counter()
        self._is_inside = False
        for name in (*ARRIVAL, *FINISH, *EVENTS, *STEP):
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return method(*arguments, **named)
            self._is_inside, began = True, time.thread_time_ns()
            found = method(*arguments, **named)
            # Some give a generator.
            found = list(found) if name in EVENTS else found
            self._spent[name] += (time.thread_time_ns() - began) / 1000
            self._is_inside = False
            return found

        return timed

    def read(self, *names: str) -> Counter[str]:
        spent, self._spent = self._spent, Counter()
        return Counter({name: spent[name] for name in names or spent})


def at(engine: Modelless, meter: Meter, running: int, seed: int) -> dict[str, Any]:
    """With this number of requests that decode."""
    names = [f"{seed}-{running}-{number}" for number in range(running)]
    for first in range(STEPS):
        for number in range(first, running, STEPS):
            engine.add(names[number], prompt(seed + number, 2 * BLOCK + 1), tokens=2 * STEPS + 10 * BLOCK)
        engine.step()
    gc.collect()
    gc.freeze()
    meter.read()
    steps = []
    for _ in range(STEPS):
        engine.step()
        steps.append(meter.read())
    arrivals, finishes = [], []
    for number in range(MORE):
        engine.add("more", prompt(seed - 1 - number, 3 * BLOCK + 1))
        engine.step()
        arrivals.append(meter.read(*ARRIVAL).total())
        engine.step()
        meter.read()
        engine.finish("more")
        finishes.append(meter.read(*FINISH).total())
        engine.step()
    for name in names:
        engine.finish(name)
    while engine.step().total_num_scheduled_tokens or engine.scheduler.connector.has_pending_push_work():
        pass
    return {
        "step": statistics.median(step.total() for step in steps),
        "mean": statistics.fmean(step.total() for step in steps),
        "by_method": {name: spent / STEPS for name, spent in sum(steps, Counter()).items()},
        "arrival": statistics.median(arrivals),
        "finish": statistics.median(finishes),
    }


def long_prompts(engine: Modelless, meter: Meter, seed: int) -> dict[str, Any]:
    """Prompts that come alone, with events on."""
    arrivals, events = [], []
    for number in range(PROMPTS):
        asked = prompt(seed + number, PROMPT_BLOCKS * BLOCK + 1)
        meter.read()
        engine.add("long", asked, tokens=BLOCK)
        engine.step()
        spent = meter.read()
        arrivals.append(sum(spent[name] for name in ARRIVAL))
        told = sum(spent[name] for name in EVENTS)
        while engine.step().total_num_scheduled_tokens or engine.scheduler.connector.has_pending_push_work():
            pass
        events.append(told + meter.read(*EVENTS).total())
    return {"arrival": statistics.median(arrivals), "events": statistics.median(events)}


def measured(transfer: dict[str, Any], running: list[int], seed: int) -> dict[str, Any]:
    engine = Modelless(transfer, BLOCKS, max(running) + 1)
    meter = Meter(engine.scheduler.connector)
    found: dict[str, Any] = {str(number): at(engine, meter, number, seed) for number in running}
    engine.close()
    told = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = Modelless(transfer, BLOCKS, 4, kv_events_config=told)
    meter = Meter(engine.scheduler.connector)
    found["prompt"] = long_prompts(engine, meter, seed)
    engine.close()
    return found


def medians(rounds: list[Any]) -> Any:
    if isinstance(rounds[0], dict):
        names = {name: None for one in rounds for name in one}
        return {name: medians([one.get(name, 0.0) for one in rounds]) for name in names}
    return round(statistics.median(rounds), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--only", choices=CONTENDERS, nargs="+", default=list(CONTENDERS))
    arguments = parser.parse_args()
    # As an engine does.
    enable_envs_cache()
    found: dict[str, list[Any]] = {name: [] for name in arguments.only}
    # The first round is for warming up.
    for number in range(arguments.rounds + 1):
        for name in arguments.only:
            one = measured(CONTENDERS[name], arguments.running, 1_000_000 * number)
            print(name, json.dumps(medians([one])), file=sys.stderr)
            if number:
                found[name].append(one)
    print(json.dumps({name: medians(rounds) for name, rounds in found.items()}))


if __name__ == "__main__":
    main()
