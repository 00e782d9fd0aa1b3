"""What a request says of itself reaches the manager of a real engine, acts there, and is answered in the output."""

import pytest
from connectors import LENGTH, connector, disk, host, is_at_rest, probe
from engine import BLOCK, Engine, prompt

BLOCKS = LENGTH // BLOCK


def ask(engine: Engine, number: int, **said) -> dict:
    """Asks with these hints. Returns the answer to each."""
    output = probe(engine, "ask", prompt=prompt(number, LENGTH), params={"kvbm": said})
    return output["params"]["kvbm"]["hints"]


@pytest.mark.slow
def test_hints_reach_the_manager_and_are_answered(model, said, tmp_path):
    with Engine(model, **connector(host(64) | disk(tmp_path))) as engine:
        probe(engine, "record_hints")
        output = probe(
            engine,
            "ask",
            prompt=prompt(0, LENGTH),
            params={"kvbm": {"priority": 300, "tenant": 4, "colour": "red"}},
            actions=[
                ["a1", "kv.fetch", "1.0", {"source_control_endpoint": "tcp://10.0.0.7:7001", "block_hashes": [1]}],
                ["a2", "kvbm.hints", "1.0", {"expected_output_tokens": 8, "will_not_return": True}],
            ],
        )
        assert output["said"] == said[0]
        answers = output["params"]["kvbm"]
        assert {name: answer["status"] for name, answer in answers["hints"].items()} == {
            "priority": "clipped",
            "tenant": "accepted",
            "colour": "rejected",
        }
        assert {name: answer["status"] for name, answer in answers["actions"].items()} == {
            "a1": "rejected",
            "a2": "accepted",
        }
        everything = {"tenant": 4, "priority": 100, "expected_output_tokens": 8, "will_not_return": True}
        recorded = probe(engine, "recorded_hints", expected=everything)
        assert recorded == {"lease": [True], "save_from": [True], "finished": [True]}
        # Who says nothing is answered nothing.
        assert probe(engine, "ask", prompt=prompt(1, LENGTH))["params"] is None
        assert is_at_rest(engine)


@pytest.mark.slow
def test_pinned_blocks_stay_and_those_asked_for_come_up(model, said, tmp_path):
    with Engine(model, **connector(host(44) | disk(tmp_path))) as engine:
        assert ask(engine, 0, pin_seconds=600)["pin_seconds"]["status"] == "accepted"
        # A quarter may be pinned: one block more.
        answer = ask(engine, 1, pin_seconds=600)["pin_seconds"]
        assert answer["status"] == "clipped" and answer["why"].startswith("1 of its 10 blocks")
        for number in range(2, 10):
            engine.generate(prompt(number, LENGTH))
        assert is_at_rest(engine) and probe(engine, "drain") and engine.reset()
        held = [probe(engine, "matches", prompt=prompt(number, LENGTH)) for number in range(10)]
        assert held[0] == {"host": BLOCKS, "disk": BLOCKS}
        assert held[1]["host"] >= 1
        assert all(tiers["disk"] == BLOCKS for tiers in held)

        # What is only on disk comes up while it waits.
        below = min(range(2, 10), key=lambda number: held[number].get("host", 0))
        assert held[below].get("host", 0) < BLOCKS
        brought = probe(engine, "ask", prompt=prompt(below, LENGTH), params={"kvbm": {"prefetch": True}}, wait=0.5)
        assert brought["said"] == said[below]
        assert brought["waited"]["host"] == BLOCKS, "before it had its turn"
        # A reset ends pins too.
        assert engine.reset(connector=True)
        assert ask(engine, 1, pin_seconds=600)["pin_seconds"]["status"] == "accepted"
