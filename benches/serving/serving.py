"""One engine at a time through turns of conversations, with each cache in turn. A table goes to standard error.

    python benches/serving/serving.py [TRACE] [--json] [--page FILE] [--only NAME …] [--gpu] [--model DIRECTORY]

TRACE is in the Mooncake format, compressed or not; without one, conversations are made up. Some sessions are taken,
each name of a block standing for one block of the engine's (32 tokens), and their time is pressed into `--seconds`. The
engine's own cache has a sixth of the blocks that are unlike each other (or the longest prompt's), and what serves from
below it has DRAM for half of them: less would hold little that the engine's cache does not. `--json` prints one object.
`--gpu` (which has not been tried) leaves the choice of a device to vLLM; `--model` takes a real model in place of one
of 12 layers with made-up weights. Needs the environment of tests/vllm.sh.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests" / "vllm"
sys.path.append(str(TESTS))
# The engine's process finds the driver by it.
os.environ["PYTHONPATH"] = ":".join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))

import models  # noqa: E402
from connector_figures import MODEL  # noqa: E402
from contenders import CONTENDERS, Absent, Room  # noqa: E402
from engine import BLOCK, Engine, EngineError  # noqa: E402
from page import markdown, page  # noqa: E402
from conversations import Part, conversation, made_up, read, working_set  # noqa: E402

# An engine's own cache and DRAM below it, as shares of the working set.
OWN, DRAM = 1 / 6, 1 / 2
# Where hits come from that no connector tells of.
OWN_CACHE = "engine"


def block_bytes(model: Path) -> int:
    """Keys and values of a block's tokens, of a model of 2-byte numbers."""
    told = json.loads((model / "config.json").read_text())
    heads = told.get("num_key_value_heads", told["num_attention_heads"])
    width = told.get("head_dim") or told["hidden_size"] // told["num_attention_heads"]
    return 2 * told["num_hidden_layers"] * heads * width * 2 * BLOCK


def measure(model: Path, turns: list[dict], arguments: argparse.Namespace) -> dict:
    blocks, longest = working_set(turns, BLOCK), max(len(turn["prompt"]) for turn in turns)
    # One prompt has room at least: the longest, its answer, and a block that is being written.
    own = max(round(blocks * OWN), longest // BLOCK + 4)
    dram, each = round(blocks * DRAM), block_bytes(model)
    served_by = {}
    for name in arguments.only or CONTENDERS:
        with tempfile.TemporaryDirectory(dir=arguments.place) as place:
            room = Room(dram * each, 2 * blocks * each, Path(place), arguments.gpu)
            print(f"\n{name} …", file=sys.stderr)
            served_by[name] = serve(name, room, model, turns, own)
            print(json.dumps(served_by[name]), file=sys.stderr)
    tokens = sum(len(turn["prompt"]) for turn in turns)
    run = {"turns": len(turns), "prompt_tokens": tokens, "distinct_blocks": blocks}
    run |= {"engine_blocks": own, "dram_blocks": dram, "block_bytes": each}
    return {"run": run, "served_by": served_by}


def serve(name: str, room: Room, model: Path, turns: list[dict], own: int) -> dict:
    """Figures of one cache, or why there are none."""
    longest = max(len(turn["prompt"]) + turn["answer"] for turn in turns)
    # The null block is one. Without statistics vLLM does not ask where hits come from.
    arguments = {"num_gpu_blocks_override": own + 1, "max_model_len": longest + 1, "disable_log_stats": False}
    arguments |= {"dtype": "bfloat16"}
    if not any(model.glob("*.safetensors")):
        arguments |= MODEL
    # The tests' engines see no GPU.
    environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")} if room.is_gpu else {}
    try:
        below = CONTENDERS[name](room)
        with Engine(model, environment=environment, **arguments | below) as engine:
            return told(engine.call("driver:run", limit=1800.0, turns=turns))
    except Absent as absent:
        return {"absent": str(absent)}
    except EngineError as error:
        print(error, file=sys.stderr)
        return {"absent": f"it did not start or ended: {str(error).splitlines()[0]}"}


def told(ran: dict) -> dict:
    answers = ran["answers"]
    firsts = [1e3 * answer["first_s"] for answer in answers]
    below = ran["hits"]
    cached = sum(answer["cached"] for answer in answers)
    own = {OWN_CACHE: cached - sum(below.values())} if cached else {}
    return {
        "first_p50_ms": round(statistics.median(firsts)),
        "first_p95_ms": round(statistics.quantiles(firsts, n=20, method="inclusive")[-1]),
        "total_p50_ms": round(statistics.median(1e3 * answer["total_s"] for answer in answers)),
        "computed": sum(answer["prompt"] for answer in answers) - cached,
        "hits": own | below,
        "scheduler_cpu_ms": round(1e3 * ran["scheduler_cpu_s"]),
        "process_cpu_s": round(ran["process_cpu_s"], 1),
        "seconds": round(ran["seconds"], 1),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, help="an HTML file to be written")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--model", type=Path, help="a directory with config.json")
    parser.add_argument("--place", type=Path, help="a directory of the file system to be measured")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4, help="a session has at least")
    parser.add_argument("--blocks", type=int, default=32, help="a prompt has at most")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer at most")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parsed()
    part = Part(
        arguments.sessions, arguments.turns, arguments.blocks, BLOCK, arguments.seconds, arguments.answer
    )
    rows = read(arguments.trace) if arguments.trace else made_up(part)
    turns = conversation(rows, part)
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or models.make(Path(directory), "bench")
        figures = measure(model, turns, arguments)
    print(markdown(figures), file=sys.stderr)
    if arguments.page:
        arguments.page.write_text(page(figures))
    if arguments.json:
        print(json.dumps(figures))
