"""Conversations from a trace in the Mooncake format, small enough for an engine on a CPU; or made up."""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine import prompt

# Tokens that one of the trace's names of blocks stands for.
TRACE_TOKENS = 512
# Sessions that are taken are some apart, so that they begin over minutes, as a server sees them.
TAKE_EVERY = 3
# Turns that are taken of one, so that no session is most of the run.
MOST_TURNS = 5


@dataclass(frozen=True)
class Part:
    """What is taken of a trace."""

    sessions: int
    # Of a session at least.
    turns: int
    # Blocks of a prompt at most.
    blocks: int
    # Tokens of a block, each of which stands for one of the trace.
    block: int
    # How long it is to take, and what an answer may have of tokens.
    seconds: float
    answer: int


def read(path: Path) -> list[dict]:
    with (gzip.open(path, "rt") if path.suffix == ".gz" else path.open()) as lines:
        return [json.loads(line) for line in lines]


def made_up(part: Part) -> list[dict]:
    """Sessions that share a beginning, and grow by a few blocks a turn."""
    dice, names = random.Random(20), iter(range(1, 1 << 30))
    rows = []
    for session in range(TAKE_EVERY * part.sessions):
        at, chain = session * 10_000, [0, *(next(names) for _ in range(dice.randint(2, part.blocks // 3)))]
        for _ in range(part.turns + dice.randint(0, 3)):
            rows.append(_row(at, chain, dice.randint(50, 400)))
            at += dice.randint(60_000, 240_000)
            chain = [*chain, *(next(names) for _ in range(dice.randint(1, 3)))]
            if len(chain) > part.blocks:
                break
    return sorted(rows, key=lambda row: row["timestamp"])


def _row(at: int, chain: list[int], answer: int) -> dict:
    return {"timestamp": at, "input_length": TRACE_TOKENS * len(chain), "output_length": answer, "hash_ids": chain}


def conversation(rows: list[dict], part: Part) -> list[dict]:
    """The turns of `part`, by time: their session, second, prompt and number of tokens to say."""
    fitting = [
        session
        for session in _sessions(rows)
        if len(session) >= part.turns and all(len(row["hash_ids"]) <= part.blocks for row in session)
    ]
    taken = fitting[::TAKE_EVERY][: part.sessions]
    if not taken:
        raise ValueError(f"no session of {part.turns} turns fits {part.blocks} blocks: take another trace, or --blocks")
    turns = [_turn(number, row, part) for number, session in enumerate(taken) for row in session[:MOST_TURNS]]
    first, last = (end(turn["at"] for turn in turns) for end in (min, max))
    for turn in turns:
        turn["at"] = (turn["at"] - first) / (last - first or 1) * part.seconds
    return sorted(turns, key=lambda turn: turn["at"])


def _sessions(rows: list[dict]) -> list[list[dict]]:
    """Requests by conversation: one goes on where its prompt begins with all full blocks of another one's, and with two or more."""
    found, open_ends = [], {}
    for row in rows:
        chain = tuple(row["hash_ids"])
        ends = (chain[:length] for length in range(len(chain), 1, -1))
        session = next((open_ends.pop(end) for end in ends if end in open_ends), None)
        if session is None:
            session = []
            found.append(session)
        session.append(row)
        open_ends[chain[: row["input_length"] // TRACE_TOKENS]] = session
    return found


def _turn(session: int, row: dict, part: Part) -> dict:
    scale = part.block / TRACE_TOKENS
    tokens = [token for name in row["hash_ids"] for token in prompt(name + 1, part.block)]
    return {
        "session": session,
        "at": row["timestamp"] / 1000,
        "prompt": tokens[: max(2, round(row["input_length"] * scale))],
        "answer": max(1, min(part.answer, round(row["output_length"] * scale))),
    }


def working_set(turns: list[dict], block: int) -> int:
    """Full blocks that are unlike each other."""
    return len(set(_prefixes(turns, block)))


def _prefixes(turns: list[dict], block: int) -> Iterator[int]:
    for turn in turns:
        for end in range(block, len(turn["prompt"]) + 1, block):
            yield hash(tuple(turn["prompt"][:end]))
