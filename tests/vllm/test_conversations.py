"""`benches/serving`: what it takes of a trace, and what it tells of an engine's answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SERVING = Path(__file__).parents[2] / "benches" / "serving"
sys.path.append(str(SERVING))

from conversations import Part, conversation, made_up, working_set  # noqa: E402
from page import markdown, page  # noqa: E402

BLOCK = 32
PART = Part(sessions=2, turns=2, blocks=8, block=BLOCK, seconds=10.0, answer=4)


def row(at: int, chain: list[int], length: int | None = None) -> dict:
    tokens = 512 * len(chain) if length is None else length
    return {"timestamp": at, "input_length": tokens, "output_length": 500, "hash_ids": chain}


def test_a_session_is_what_goes_on_from_a_whole_prompt():
    rows = [
        # One block that all have says nothing.
        row(0, [0, 10], 600),
        row(0, [0, 1, 2], 1100),
        row(1000, [0, 3, 4]),
        # Goes on behind the first one's full blocks; the other shares a beginning alone.
        row(5000, [0, 1, 5, 6]),
        row(6000, [0, 7, 8]),
        row(9000, [0, 1, 5, 6, 9], 2300),
    ]
    turns = conversation(rows, PART)
    assert [turn["at"] for turn in turns] == [0.0, 5 / 9 * 10, 10.0]
    assert [len(turn["prompt"]) for turn in turns] == [69, 4 * BLOCK, 144]
    assert {turn["session"] for turn in turns} == {0}
    assert {turn["answer"] for turn in turns} == {4}
    assert turns[1]["prompt"][: 2 * BLOCK] == turns[0]["prompt"][: 2 * BLOCK]
    assert turns[1]["prompt"][2 * BLOCK : 69] != turns[0]["prompt"][2 * BLOCK :]
    # 0, 1, 5, 6: neither the half of 2 nor of 9.
    assert working_set(turns, BLOCK) == 4


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="--blocks"):
        conversation([row(0, [*range(9)]), row(1, [*range(10)])], PART)


def test_conversations_are_made_up_alike():
    turns = conversation(made_up(PART), PART)
    assert turns == conversation(made_up(PART), PART)
    assert {turn["session"] for turn in turns} == {0, 1}
    assert max(len(turn["prompt"]) for turn in turns) <= 8 * BLOCK


def test_a_table_and_a_page_say_who_was_absent():
    served = {
        "first_p50_ms": 10,
        "first_p95_ms": 20,
        "total_p50_ms": 1234,
        "computed": 5,
        "hits": {"engine": 3, "host": 4096},
        "scheduler_cpu_ms": 500,
        "process_cpu_s": 1.0,
    }
    figures = {"run": {"turns": 3}, "served_by": {"ours": served, "theirs": {"absent": "<not here>"}}}
    assert "| ours | 10 | 20 | 1,234 | 5 | engine 3, host 4,096 | 500 | 1.0 |" in markdown(figures)
    assert "| theirs | <not here> |" in markdown(figures)
    assert "&lt;not here&gt;" in page(figures) and "<not here>" not in page(figures)


@pytest.mark.slow
def test_turns_are_served_from_below_the_engine(model):
    """The rest of it is as slow as the models that it is for."""
    command = [sys.executable, str(SERVING / "serving.py"), "--json", "--model", str(model)]
    command += ["--seconds", "1", "--sessions", "6"]
    ran = subprocess.run([*command, "--only", "KvbmConnector, memory"], capture_output=True, text=True, check=True)
    (row,) = json.loads(ran.stdout)["served_by"].values()
    assert row["hits"]["host"] > 0, row
    assert 0 < row["scheduler_cpu_ms"] < 1e3 * row["process_cpu_s"]
