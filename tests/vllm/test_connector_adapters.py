"""LoRA adapters under `KvbmConnector`: what is computed with one is of its weights, whatever they are called."""

import time
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
from connectors import LENGTH, SERVED, connector, disk, is_at_rest, peerless, probe
from engine import Engine, prompt
from kvbm_rs.vllm.connector.adapters import Adapters

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def request_for(place: Path | str, number: int = 1) -> SimpleNamespace:
    place = Path(place)
    return SimpleNamespace(
        lora_name=place.name, lora_path=str(place), lora_int_id=number, is_3d_lora_weight=False
    )


@pytest.fixture
def adapters_before(tmp_path) -> tuple[Path, Path]:
    """Two that were there some time before the engine."""
    written = models.write_adapter(tmp_path / "one", 1), models.write_adapter(tmp_path / "other", 2)
    time.sleep(0.1)
    return written


@pytest.fixture
def one(adapters_before) -> Path:
    return adapters_before[0]


@pytest.fixture
def other(adapters_before) -> Path:
    return adapters_before[1]


def test_the_salt_is_that_of_the_weights(one, other):
    adapters = Adapters("options")
    salt = adapters.salt(request_for(one))
    assert adapters.salt(None) == b""
    assert adapters.salt(request_for(other, 2)) != salt
    # Another engine finds the same; one that uses adapters otherwise does not.
    assert Adapters("options").salt(request_for(one)) == salt
    assert Adapters("others").salt(request_for(one)) != salt
    # What its training leaves beside it says nothing of it.
    (one / "checkpoint-5").mkdir()
    time.sleep(0.1)
    assert Adapters("options").salt(request_for(one)) == salt


def test_an_adapter_that_changes_where_it_is_is_not_kept(one, other):
    adapters = Adapters("options")
    assert adapters.salt(request_for(one)) is not None
    models.write_adapter(one, 2)
    adapters.look_again()
    # Which of them the engine has in memory, and in its cache, is not known.
    assert adapters.salt(request_for(one)) is None
    assert adapters.salt(request_for(one)) is None, "nor later"
    assert adapters.salt(request_for(one, 2)) is None, "nor by another number"
    assert adapters.salt(request_for(other, 3)) is not None, "but from another place it is"


def test_what_cannot_be_read_is_no_error(one):
    adapters = Adapters("options")
    (one / "adapter_lost.bin").symlink_to(one / "nothing")
    assert adapters.salt(request_for(one)) is None
    (one / "adapter_lost.bin").unlink()
    adapters.look_again()
    assert adapters.salt(request_for(one)) is not None, "and then it is kept"


def test_a_number_that_stands_for_two_adapters_is_neithers(one, other):
    adapters = Adapters("options")
    assert adapters.salt(request_for(one)) is not None
    assert adapters.salt(request_for(other)) is None
    adapters.look_again()
    assert adapters.salt(request_for(one)) is None


def test_what_may_have_changed_is_found_by_this_engine_alone(one):
    engines = [Adapters("options") for _ in range(2)]
    # By the first request it may be the one that the engine loaded before, or may not.
    models.write_adapter(one, 2)
    salts = [adapters.salt(request_for(one)) for adapters in engines]
    assert None not in salts and salts[0] != salts[1]
    assert engines[0].salt(request_for(one)) == salts[0]
    # So with one that comes to its place as it is, by a name or by a link.
    for place, comes in ((one.with_name("named"), one.rename), (one.with_name("link"), lambda link: link.symlink_to("named"))):
        others = [Adapters("options") for _ in range(2)]
        comes(place)
        salts = [adapters.salt(request_for(place)) for adapters in others]
        assert None not in salts and salts[0] != salts[1]
    # And with those of the hub, of which an engine fetches the latest.
    salts = [adapters.salt(request_for("owner/name", 2)) for adapters in engines]
    assert None not in salts and salts[0] != salts[1]


def test_a_request_whose_adapter_changes_is_neither_served_nor_kept(one):
    from kvbm_rs.vllm.connector.hints import Limits
    from kvbm_rs.vllm.connector.peers import Prefills
    from kvbm_rs.vllm.connector.scheduler import _NOT_KEPT, Scheduler

    scheduler = Scheduler.__new__(Scheduler)
    scheduler._adapters, scheduler._requests, scheduler._numbers = Adapters("options"), {}, set()
    scheduler._weights, scheduler._prefills = b"", Prefills(None, peerless())
    scheduler._config = SimpleNamespace(names_media=True, hash_tokens=16)
    scheduler._limits = Limits(output_tokens=100, why_not_held="", can_prefetch=True)

    def request(name: str) -> SimpleNamespace:
        asked = {"kvbm": {"pin_seconds": 60}}
        hashed = {"block_hashes": [], "num_tokens": 9, "mm_features": []}
        return SimpleNamespace(request_id=name, lora_request=request_for(one), kv_transfer_params=asked, **hashed)

    known = scheduler._known(request("before"))
    assert known.salt is not None
    models.write_adapter(one, 2)
    scheduler._adapters.look_again()
    # There is nothing that it could be looked up in, or saved to.
    scheduler._start(known, [(0, [None] * 4)], is_end=False)
    assert known.salt is None
    assert scheduler.look_up(known.request, 0) == (0, False)
    scheduler._ask_pin(known, 4)
    assert known.asked.answers()["kvbm"]["hints"]["pin_seconds"]["why"].endswith(_NOT_KEPT)
    later = scheduler._known(request("after"))
    assert later.asked.hints["pin_seconds"] == {"status": "rejected", "why": _NOT_KEPT}


def test_each_adapter_is_served_what_was_computed_with_its_weights(model, one, other, tmp_path):
    tiers = connector(disk(tmp_path / "disk"))
    said = {}
    with Engine(model, **tiers, **LORA) as engine:
        for adapter in (None, one, other):
            cold = engine.generate(prompt(0, LENGTH), adapter=adapter)
            assert cold.scheduled == LENGTH + 7
            (said[adapter],) = cold.said
        assert len({tuple(tokens) for tokens in said.values()}) == 3
        assert probe(engine, "drain")
        assert engine.reset()
        for adapter in (other, None, one):
            warm = engine.generate(prompt(0, LENGTH), adapter=adapter)
            assert (warm.said, warm.scheduled) == ([said[adapter]], SERVED)
    # Other weights come to the same place: an adapter that went on to be trained, say.
    models.write_adapter(one, 3)
    with Engine(model, **tiers, **LORA) as engine:
        trained = engine.generate(prompt(0, LENGTH), adapter=one)
        assert trained.scheduled == LENGTH + 7
        assert trained.said != [said[one]]
        for adapter in (None, other):
            warm = engine.generate(prompt(0, LENGTH), adapter=adapter)
            assert (warm.said, warm.scheduled) == ([said[adapter]], SERVED)
        # It changes under the engine, which still has the old one in its memory.
        models.write_adapter(one, 4)
        for _ in range(2):
            assert engine.reset()
            unkept = engine.generate(prompt(0, LENGTH), adapter=one)
            assert (unkept.said, unkept.scheduled) == (trained.said, LENGTH + 7)
        assert is_at_rest(engine)
    with Engine(model, **tiers, **LORA) as engine:
        for adapter, scheduled in ((one, LENGTH + 7), (other, SERVED)):
            assert engine.generate(prompt(0, LENGTH), adapter=adapter).scheduled == scheduled
        assert engine.reset()
        assert engine.generate(prompt(0, LENGTH), adapter=one).scheduled == SERVED, "and it is kept again"
