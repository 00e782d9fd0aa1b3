"""`KvbmConnector` with a model half of whose layers keep a state (LFM 2: short convolutions) in place of keys and values."""

from dataclasses import dataclass
from pathlib import Path

import models
import pytest
from connectors import LENGTH, SERVED, WHOLE, connector, is_at_rest, probe, spoil
from engine import BLOCK, Engine, prompt

# Of two layers: keys and values of 4 heads of 32 numbers of 4 bytes; the last 2 inputs of a convolution of 256 channels.
BLOCK_BYTES = 2 * 2 * 4 * 32 * 4 * BLOCK
STATE_BYTES = 2 * 2 * 256 * 4
BLOCKS = LENGTH // BLOCK

LONG = prompt(20, 40 * BLOCK + 5)
BEGINNING = prompt(0, 5 * BLOCK + 3)
FORK = LONG[: 35 * BLOCK] + prompt(21, 9)
# So that steps end, and leave a state, where checkpoints are.
CHUNKS = {"max_num_batched_tokens": 16 * BLOCK}


@dataclass
class Said:
    """What an engine without connector says."""

    # To the prompts 0 to 5.
    short: list[list[int]]
    long: list[int]
    fork: list[int]
    # To prompt 0 where it has the beginning of it, whose steps were shorter: of this model that matters, without us as well.
    begun: list[int]


@pytest.fixture(scope="module")
def states(model: Path) -> Path:
    return models.make(model.parent / "states", "states")


@pytest.fixture(scope="module")
def said(states) -> Said:
    with Engine(states, dtype="float32", **CHUNKS) as engine:
        short = [engine.generate(prompt(number, LENGTH)).said[0] for number in range(6)]
        long, fork = [engine.generate(asked).said[0] for asked in (LONG, FORK)]
        assert engine.reset()
        engine.generate(BEGINNING)
        return Said(short, long, fork, engine.generate(prompt(0, LENGTH)).said[0])


def host(blocks: int) -> dict:
    return {"host.capacity": blocks * (BLOCK_BYTES + STATE_BYTES)}


def disk(directory: Path) -> dict:
    """A disk tier that the next process finds, and that all goes to at once. Only a request for it finds what is bad."""
    tier = {"disk.capacity": 512 * (BLOCK_BYTES + STATE_BYTES), "disk.dirs": str(directory), "disk.keep": True}
    return tier | {"flush.interval_ms": 10, "transfer.scrub_mib_per_second": 0}


def ask_served(engine: Engine, number: int, said: Said) -> None:
    """Asks for a prompt that all tiers together have but for its end."""
    answer = engine.generate(prompt(number, LENGTH))
    assert (answer.said, answer.scheduled) == ([said.short[number]], SERVED), engine.logged()[-4000:]


def test_states_that_the_engine_forgot_come_from_below(states, said):
    with Engine(states, **connector(host(512)), **CHUNKS) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said.short[0]], LENGTH + 7)
        # From the engine's own cache.
        ask_served(engine, 0, said)

        assert engine.reset()
        probe(engine, "watch")
        ask_served(engine, 0, said)
        assert probe(engine, "watched")["sources"] == {"host": BLOCKS * BLOCK}
        assert is_at_rest(engine)
        # Of states the one at the prompt's end is kept, once.
        assert probe(engine, "saved_by_group") == {"full": BLOCKS, "state_1": 1}

        # A state has the last token in it, and does not serve to compute that again: a block is left.
        whole = engine.generate(WHOLE)
        assert engine.reset()
        warm = engine.generate(WHOLE)
        assert (warm.said, warm.scheduled) == (whole.said, BLOCK + 7)

        # Who shares a beginning goes on at the last checkpoint in it.
        assert engine.generate(LONG).said == [said.long]
        assert engine.reset()
        fork = engine.generate(FORK)
        assert (fork.said, fork.scheduled) == ([said.fork], len(FORK) - 32 * BLOCK + 7)

        # The engine has a beginning of its own, and gets the rest.
        assert engine.reset()
        engine.generate(BEGINNING)
        rest = engine.generate(prompt(0, LENGTH))
        assert (rest.said, rest.scheduled) == ([said.begun], SERVED)
        assert is_at_rest(engine)

        # The control of all this: with other bytes, tokens differ.
        for group in range(2):
            assert engine.reset()
            probe(engine, "spoil_next_load", group=group)
            spoiled = engine.generate(prompt(0, LENGTH))
            assert spoiled.scheduled == SERVED and spoiled.said != [said.short[0]], group

        # New weights: what was kept is not served any more, and what comes then is.
        assert engine.reset(connector=True)
        assert engine.generate(prompt(0, LENGTH)).scheduled == LENGTH + 7
        assert engine.reset()
        ask_served(engine, 0, said)
        assert is_at_rest(engine)


def test_a_killed_process_leaves_its_states_and_changed_ones_are_computed_again(states, said, tmp_path):
    with Engine(states, **connector(disk(tmp_path)), **CHUNKS) as engine:
        engine.generate(prompt(0, LENGTH))
        assert probe(engine, "drain")
        engine.settle()
        engine.kill()
    with Engine(states, **connector(disk(tmp_path)), **CHUNKS) as engine:
        probe(engine, "watch")
        ask_served(engine, 0, said)
        assert probe(engine, "watched")["sources"] == {"disk": BLOCKS * BLOCK}
        assert probe(engine, "drain")
    kept, _ = sorted(tmp_path.glob("*.blocks"), key=lambda file: file.stat().st_size)
    spoil(kept, block_bytes=STATE_BYTES)
    with Engine(states, **connector(disk(tmp_path)), **CHUNKS) as engine:
        answer = engine.generate(prompt(0, LENGTH))
        assert answer.said == [said.short[0]]
        assert answer.scheduled >= LENGTH + 7, "computed again, after a load that failed as a whole"
        # And then it heals.
        assert probe(engine, "drain")
        assert engine.reset()
        ask_served(engine, 0, said)
        assert is_at_rest(engine)
