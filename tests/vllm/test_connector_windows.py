"""`KvbmConnector` with a model all of whose layers look back over a window: one cache group, which lets blocks go."""

import models
import pytest
from connectors import LENGTH, ONE_LEFT, SERVED, WHOLE, connector, host, is_at_rest, probe, spoiled_disk
from engine import BLOCK, Engine, prompt

BLOCKS = LENGTH // BLOCK


@pytest.fixture(scope="module")
def windowed(model):
    return models.make(model.parent / "windowed", "windowed")


@pytest.fixture(scope="module")
def said(windowed) -> list[list[int]]:
    with Engine(windowed, dtype="float32") as engine:
        return [engine.generate(prompt(number, LENGTH), tokens=3 * BLOCK).said[0] for number in range(4)]


def test_blocks_that_a_window_left_are_not_loaded(windowed, said):
    with Engine(windowed, **connector(host(256))) as engine:
        for number in range(4):
            assert engine.generate(prompt(number, LENGTH), tokens=3 * BLOCK).said == [said[number]]
        assert engine.reset()
        probe(engine, "watch")
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said[0], warm.scheduled) == (said[0][:8], SERVED)
        assert probe(engine, "watched")["sources"] == {"host": BLOCKS * BLOCK}
        # Of one that is all full blocks a token is left.
        whole = engine.generate(WHOLE)
        assert engine.reset()
        warm = engine.generate(WHOLE)
        assert (warm.said, warm.scheduled) == (whole.said, ONE_LEFT)
        # Beside others that compute and have blocks behind their windows, too.
        assert engine.reset()
        mixed = engine.generate(*(prompt(number, LENGTH) for number in range(4)), tokens=3 * BLOCK)
        assert mixed.said == said
        # What follows on a prompt that was loaded is kept, though its beginning is not there any more.
        turn = prompt(0, LENGTH) + said[0] + prompt(9, 9)
        assert engine.reset()
        cold = engine.generate(turn)
        assert engine.reset()
        warm = engine.generate(turn)
        assert (warm.said, warm.scheduled) == (cold.said, len(turn) % BLOCK + 7)
        assert is_at_rest(engine)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails_is_that_of_one_request(windowed, said, tmp_path, policy):
    tiers = spoiled_disk(windowed, tmp_path)
    with Engine(windowed, **connector(tiers, failure_policy=policy)) as engine:
        # The others have blocks behind their windows when it fails.
        answer = engine.generate(*(prompt(number, LENGTH) for number in (1, 2, 0)), tokens=3 * BLOCK)
        assert answer.said[:2] == said[1:3]
        assert answer.ended == ["length", "length", "error" if policy == "fail" else "length"]
        if policy == "recompute":
            assert answer.said[2] == said[0]
        # And then it heals. A load brings the end of what is there, so each finds what is bad there, and the next asks for less.
        for _ in range(4):
            assert is_at_rest(engine)
            assert engine.reset()
            answer = engine.generate(prompt(0, LENGTH), tokens=3 * BLOCK)
            if answer.ended == ["length"]:
                break
        assert answer.said == [said[0]]
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said[0], warm.scheduled) == (said[0][:8], SERVED)
        assert is_at_rest(engine)
