"""`KvbmConnector` tells what its tiers hold by vLLM's KV events: as a router hears them from the engine's publisher."""

import tempfile
from collections import defaultdict

import msgspec
import pytest
import zmq
from connectors import LENGTH, connector, disk, host, is_at_rest, probe
from engine import BLOCK, Engine, prompt

BLOCKS = LENGTH // BLOCK


class Router:
    """What a router knows of an engine that it listens to from the start."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        # The engine binds it when it is there.
        self.socket.connect(endpoint)
        self.held: dict[str, dict[int, list[int]]] = defaultdict(dict)
        self.events: list[dict] = []

    def arguments(self) -> dict:
        return {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}}

    def listen(self) -> dict[str, dict[int, list[int]]]:
        """Tokens of each prompt's beginning up to a block, by medium and hash, after all that was said."""
        while self.socket.poll(1000):
            _, _, payload = self.socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                self.events.append(event)
                self.hear(event)
        return self.held

    def hear(self, event: dict) -> None:
        if event["type"] == "AllBlocksCleared":
            # It has no medium: an engine says it of its own blocks.
            self.held["GPU"].clear()
            return
        held = self.held[event["medium"]]
        if event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                del held[name]
            return
        assert event["type"] == "BlockStored" and event["block_size"] == BLOCK
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        before = [] if parent is None else held[parent]
        assert len(tokens) == BLOCK * len(event["block_hashes"])
        for at, name in enumerate(event["block_hashes"], 1):
            held[name] = before + tokens[: at * BLOCK]

    def longest(self, medium: str, tokens: list[int]) -> int:
        """Leading blocks of a prompt that the medium has."""
        return sum(tokens[: at * BLOCK] in self.held[medium].values() for at in range(1, len(tokens) // BLOCK + 1))


@pytest.fixture
def router():
    # The name of a socket is short: not below pytest's own directory.
    with tempfile.TemporaryDirectory() as place:
        listening = Router(f"ipc://{place}/events")
        yield listening
        listening.socket.close(0)


@pytest.mark.slow
def test_a_router_learns_what_the_tiers_hold(model, tmp_path, router):
    tiers = host(16) | disk(tmp_path)
    with Engine(model, **connector(tiers), **router.arguments()) as engine:
        engine.generate(prompt(0, LENGTH))
        assert is_at_rest(engine) and probe(engine, "drain")
        # Told by the engine's next step.
        engine.generate(prompt(9, 3), tokens=1)
        router.listen()
        assert [router.longest(medium, prompt(0, LENGTH)) for medium in ("GPU", "CPU", "STORAGE")] == [BLOCKS] * 3
        # The engine's names are the same in each medium.
        assert set(router.held["CPU"]) == set(router.held["STORAGE"]) <= set(router.held["GPU"])

        # Others take the room in memory; disk keeps all.
        for number in range(1, 4):
            engine.generate(prompt(number, LENGTH))
        assert is_at_rest(engine) and probe(engine, "drain")
        engine.generate(prompt(9, 3), tokens=1)
        router.listen()
        assert len(router.held["STORAGE"]) == 4 * BLOCKS
        assert len(router.held["CPU"]) == probe(engine, "occupancy")["host"][1] <= 16
        assert all(router.longest("STORAGE", prompt(number, LENGTH)) == BLOCKS for number in range(4))

        # What the engine forgets is below still; a new epoch forgets all.
        assert engine.reset()
        router.listen()
        assert router.longest("STORAGE", prompt(0, LENGTH)) == BLOCKS
        assert engine.reset(connector=True)
        engine.generate(prompt(9, 3), tokens=1)
        router.listen()
        assert not router.held["CPU"] and not router.held["STORAGE"]

        # And then it is told anew.
        engine.generate(prompt(0, LENGTH))
        assert is_at_rest(engine) and probe(engine, "drain")
        engine.generate(prompt(9, 3), tokens=1)
        router.listen()
        assert router.longest("STORAGE", prompt(0, LENGTH)) == BLOCKS


@pytest.mark.slow
def test_what_an_earlier_process_left_is_told_when_asked(model, tmp_path, router):
    with Engine(model, **connector(disk(tmp_path))) as engine:
        engine.generate(prompt(0, LENGTH))
        assert is_at_rest(engine) and probe(engine, "drain")
    with Engine(model, **connector(disk(tmp_path)), **router.arguments()) as engine:
        router.listen()
        assert not router.held["STORAGE"]
        # A beginning of it is enough.
        engine.generate(prompt(0, 4 * BLOCK + 1))
        router.listen()
        assert router.longest("STORAGE", prompt(0, LENGTH)) == 4
        engine.generate(prompt(0, LENGTH))
        router.listen()
        assert router.longest("STORAGE", prompt(0, LENGTH)) == BLOCKS
