"""`KvbmConnector` with a model of several cache groups (Gemma 3: full attention, and layers that look back over a window)."""

from dataclasses import dataclass
from pathlib import Path

import models
import pytest
from connectors import LENGTH, ONE_LEFT, SERVED, WHOLE, connector, is_at_rest, probe, spoil
from engine import BLOCK, Engine, prompt

# Of the model `hybrid`, of each of its three cache groups: two layers, keys and values of 4 heads of 32 numbers of 4 bytes.
BLOCK_BYTES = 2 * 2 * 4 * 32 * 4 * BLOCK
WINDOW = 128 // BLOCK
BLOCKS = LENGTH // BLOCK
# Room for a prompt's blocks in all groups.
PROMPT_BYTES = 3 * BLOCKS * BLOCK_BYTES

# Longer than the way from one checkpoint to the next, which is 16 blocks.
LONG = prompt(20, 40 * BLOCK + 5)
FORK = LONG[: 35 * BLOCK] + prompt(21, 9)


@dataclass
class Said:
    """What an engine without connector says."""

    # To the prompts 0 to 5.
    short: list[list[int]]
    long: list[int]
    fork: list[int]
    # To prompt 5, and to what follows on that.
    begun: list[int]
    turn: list[int]


@pytest.fixture(scope="module")
def hybrid(model: Path) -> Path:
    return models.make(model.parent / "hybrid", "hybrid")


@pytest.fixture(scope="module")
def said(hybrid) -> Said:
    with Engine(hybrid, dtype="float32") as engine:
        short = [engine.generate(prompt(number, LENGTH)).said[0] for number in range(6)]
        long, fork = [engine.generate(asked).said[0] for asked in (LONG, FORK)]
        begun = engine.generate(prompt(5, LENGTH), tokens=3 * BLOCK).said[0]
        return Said(short, long, fork, begun, engine.generate(turn(begun)).said[0])


def turn(begun: list[int]) -> list[int]:
    return prompt(5, LENGTH) + begun + prompt(22, 9)


def host(prompts: int, **more) -> dict:
    return {"host.capacity": prompts * PROMPT_BYTES, **more}


def disk(directory: Path) -> dict:
    """A disk tier that the next process finds, and that all goes to at once. Only a request for it finds what is bad."""
    tier = {"disk.capacity": 32 * PROMPT_BYTES, "disk.dirs": str(directory), "disk.keep": True}
    return tier | {"flush.interval_ms": 10, "transfer.scrub_mib_per_second": 0}


def ask_served(engine: Engine, number: int, said: Said) -> None:
    """Asks for a prompt that all tiers together have but for its end."""
    answer = engine.generate(prompt(number, LENGTH))
    assert (answer.said, answer.scheduled) == ([said.short[number]], SERVED), engine.logged()[-4000:]


def test_what_the_engine_forgot_comes_from_below(hybrid, said):
    with Engine(hybrid, **connector(host(32))) as engine:
        # vLLM's own hybrid manager is on, and its groups are ours.
        assert [group["window"] for group in probe(engine, "groups")] == [0, WINDOW, WINDOW]
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said.short[0]], LENGTH + 7)
        # From the engine's own cache.
        ask_served(engine, 0, said)

        assert engine.reset()
        probe(engine, "watch")
        ask_served(engine, 0, said)
        assert probe(engine, "watched")["sources"] == {"host": BLOCKS * BLOCK}
        assert is_at_rest(engine)
        # Of windows the last blocks of the prompt are kept, once.
        assert probe(engine, "saved_by_group") == {"full": BLOCKS, "window_1": WINDOW, "window_2": WINDOW}

        # Of one that is all full blocks a token is left.
        whole = engine.generate(WHOLE)
        assert engine.reset()
        warm = engine.generate(WHOLE)
        assert (warm.said, warm.scheduled) == (whole.said, ONE_LEFT)
        assert is_at_rest(engine)

        # Who shares a beginning goes on at the last checkpoint in it.
        assert engine.generate(LONG).said == [said.long]
        assert engine.reset()
        fork = engine.generate(FORK)
        assert (fork.said, fork.scheduled) == ([said.fork], len(FORK) - 32 * BLOCK + 7)

        # A turn ends with a checkpoint as well.
        assert engine.generate(prompt(5, LENGTH), tokens=3 * BLOCK).said == [said.begun]
        assert engine.reset()
        follows = engine.generate(turn(said.begun))
        full = (LENGTH + 3 * BLOCK - 1) // BLOCK
        assert (follows.said, follows.scheduled) == ([said.turn], len(turn(said.begun)) - full * BLOCK + 7)

        # The engine has a beginning of its own, and gets the rest.
        assert engine.reset()
        engine.generate(prompt(0, 5 * BLOCK + 3))
        ask_served(engine, 0, said)
        assert is_at_rest(engine)

        hints = probe(engine, "ask", prompt=prompt(0, LENGTH), params={"kvbm": {"pin_seconds": 60, "prefetch": True}})
        answers = hints["params"]["kvbm"]["hints"]
        assert {answer["status"] for answer in answers.values()} == {"rejected"}

        # The control of all this: with other bytes, tokens differ.
        assert engine.reset()
        probe(engine, "spoil_next_load")
        spoiled = engine.generate(prompt(0, LENGTH))
        assert spoiled.scheduled == SERVED and spoiled.said != [said.short[0]]

        # New weights: what was kept is not served any more, and what comes then is.
        assert engine.reset(connector=True)
        assert engine.generate(prompt(0, LENGTH)).scheduled == LENGTH + 7
        assert engine.reset()
        ask_served(engine, 0, said)
        assert is_at_rest(engine)


def test_blocks_keep_their_names_where_vllm_hashes_more_often(hybrid):
    """With `--prefix-match-unit` below the block size a request has several hashes for each block."""
    forked = LONG[: 20 * BLOCK] + prompt(23, 20 * BLOCK + 5)
    finer = {"prefix_match_unit": BLOCK // 2}
    with Engine(hybrid, dtype="float32", **finer) as engine:
        said = [engine.generate(asked).said[0] for asked in (LONG, forked)]
    with Engine(hybrid, **connector(host(16)), **finer) as engine:
        assert engine.generate(LONG).said == said[:1]
        assert engine.reset()
        # It goes on at the last checkpoint in what they share.
        fork = engine.generate(forked)
        assert (fork.said, fork.scheduled) == (said[1:], len(forked) - 16 * BLOCK + 7)
        for asked, expected in zip((LONG, forked), said):
            assert engine.reset()
            warm = engine.generate(asked)
            assert (warm.said, warm.scheduled) == ([expected], SERVED)
        assert is_at_rest(engine)


@pytest.mark.slow
def test_a_killed_process_leaves_its_blocks_to_the_next(hybrid, said, tmp_path, shared_memory):
    for tiers in (disk(tmp_path), host(8, **{"host.persist": str(shared_memory)})):
        with Engine(hybrid, **connector(tiers)) as engine:
            engine.generate(prompt(0, LENGTH))
            assert probe(engine, "drain")
            engine.settle()
            engine.kill()
        with Engine(hybrid, **connector(tiers)) as engine:
            probe(engine, "watch")
            ask_served(engine, 0, said)
            tier = "disk" if "disk.dirs" in tiers else "host"
            assert probe(engine, "watched")["sources"] == {tier: BLOCKS * BLOCK}
            assert is_at_rest(engine)


def test_bytes_that_changed_are_computed_again(hybrid, said, tmp_path):
    with Engine(hybrid, **connector(disk(tmp_path))) as engine:
        engine.generate(prompt(0, LENGTH))
        assert probe(engine, "drain")
    window, _, full = sorted(tmp_path.glob("*.blocks"))
    for slots in (full, window):
        spoil(slots, block_bytes=BLOCK_BYTES)
        with Engine(hybrid, **connector(disk(tmp_path))) as engine:
            probe(engine, "watch")
            answer = engine.generate(prompt(0, LENGTH))
            assert answer.said == [said.short[0]]
            assert answer.scheduled >= LENGTH + 7, "computed again, after a load that failed as a whole"
            assert probe(engine, "watched")["sources"] == {"disk": BLOCKS * BLOCK}
            # And then it heals.
            assert probe(engine, "drain")
            assert engine.reset()
            ask_served(engine, 0, said)
            assert is_at_rest(engine)
            assert probe(engine, "drain")


@pytest.mark.slow
def test_preempted_and_aborted_requests_leave_nothing_wrong(hybrid, said):
    # Chunks of a prompt, and too few blocks for all requests.
    few = {"num_gpu_blocks_override": 92, "max_num_seqs": 6, "max_model_len": 44 * BLOCK, "max_num_batched_tokens": 512}
    with Engine(hybrid, **connector(host(64)), **few) as engine:
        probe(engine, "watch")
        for _ in range(2):
            answer = engine.generate(*(prompt(number, LENGTH) for number in range(6)))
            assert answer.said == said.short
        long = engine.generate(*(prompt(number, 4 * BLOCK) for number in range(6)), tokens=3 * BLOCK)
        assert probe(engine, "watched")["preempted"] > 0
        again = engine.generate(*(prompt(number, 4 * BLOCK) for number in range(6)), tokens=3 * BLOCK)
        assert again.said == long.said
        assert is_at_rest(engine)

        assert engine.generate(LONG).said == [said.long]
        assert engine.reset()
        fork = engine.generate(FORK)
        assert (fork.said, fork.scheduled) == ([said.fork], len(FORK) - 32 * BLOCK + 7)

        # While it waits, while it loads, while it computes, while it generates.
        for steps in range(6):
            assert engine.reset()
            probe(engine, "abort_after", prompt=prompt(0, LENGTH), steps=steps)
            assert is_at_rest(engine)
        assert engine.reset()
        ask_served(engine, 0, said)


@pytest.mark.slow
def test_two_ranks_serve_together(hybrid, said):
    two = {"tensor_parallel_size": 2}
    with Engine(hybrid, environment={"OMP_NUM_THREADS": "1"}, **connector(host(16)), **two) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == (cold.said, SERVED)
        assert is_at_rest(engine)
