"""What requests say of themselves is granted, clipped or refused, and each is answered."""

import json
from types import SimpleNamespace

import pytest
from vllm.v1.kv_hints.protocol import KvHintAction, KvHintsEnvelope

from kvbm_rs import Hints
from kvbm_rs.vllm.connector.hints import Asked, Limits, asked_by

LIMITS = Limits(output_tokens=4096, can_prefetch=True, why_not_held="")


def ask(said=None, *actions: KvHintAction, limits: Limits = LIMITS) -> Asked:
    params = None if said is None else {"kvbm": said, "do_remote_decode": True}
    hints = KvHintsEnvelope("0.1", "m1", list(actions)) if actions else None
    return asked_by(SimpleNamespace(kv_transfer_params=params, kv_hints=hints), limits)


def test_nothing_said_is_not_answered() -> None:
    assert ask().answers() is None and ask().for_manager() is None


def test_what_is_granted_reaches_the_manager() -> None:
    said = {"tenant": 7, "priority": 80, "expected_output_tokens": 100, "will_not_return": True}
    asked = ask(said | {"pin_seconds": 1.5, "prefetch": True})
    assert asked.for_manager() == Hints(tenant=7, priority=80, expected_output_tokens=100, will_not_return=True)
    assert (asked.pin_seconds, asked.prefetch) == (1.5, True)
    assert {answer["status"] for answer in asked.answers()["kvbm"]["hints"].values()} == {"accepted"}


@pytest.mark.parametrize(
    ("name", "value", "granted"),
    [
        ("priority", 1000, 100),
        ("priority", -3, 0),
        ("expected_output_tokens", 1 << 70, 4096),
        ("pin_seconds", 1e9, 3600.0),
        ("pin_seconds", float("inf"), 3600.0),
    ],
)
def test_what_is_too_much_is_clipped(name: str, value: object, granted: object) -> None:
    asked = ask({name: value})
    assert getattr(asked, name) == granted
    assert asked.answers()["kvbm"]["hints"] == {name: {"status": "clipped", "value": granted}}
    assert asked.for_manager() is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "high"),
        ("priority", True),
        ("tenant", -1),
        ("tenant", 1 << 32),
        ("will_not_return", 1),
        ("pin_seconds", float("nan")),
        ("pin_seconds", -1),
        ("pin_seconds", None),
        ("prefetch", "yes"),
        ("priorty", 5),
    ],
)
def test_what_is_wrong_is_refused_and_takes_nothing_else_along(name: str, value: object) -> None:
    asked = ask({name: value, "expected_output_tokens": 5})
    answers = asked.answers()["kvbm"]["hints"]
    assert answers[name]["status"] == "rejected" and answers[name]["why"]
    assert asked.for_manager() == Hints(expected_output_tokens=5)


def test_no_prefetch_without_tiers_for_it() -> None:
    asked = ask({"prefetch": True}, limits=Limits(output_tokens=1, can_prefetch=False, why_not_held=""))
    assert not asked.prefetch
    assert "host.capacity" in asked.answers()["kvbm"]["hints"]["prefetch"]["why"]


@pytest.mark.parametrize("said", [[], "all", 5, [{"priority": 1}]])
def test_hints_that_are_no_object_are_refused(said: object) -> None:
    assert ask(said).answers()["kvbm"]["hints"]["kvbm"]["status"] == "rejected"


def test_actions_are_answered_one_by_one() -> None:
    fetch = {"source_control_endpoint": "tcp://10.0.0.7:7001", "block_hashes": [17185806870029755380]}
    asked = ask(
        None,
        KvHintAction("a1", "kv.fetch", "1.0", fetch),
        KvHintAction("a2", "kvbm.hints", "1.3", {"priority": 90}),
        KvHintAction("a3", "kvbm.hints", "2.0", {"priority": 10}),
        KvHintAction("a4", "kvbm.hints", "1.0", {"pin_seconds": 1e9, "tenant": 3}),
    )
    answers = asked.answers()["kvbm"]["actions"]
    assert {name: answer["status"] for name, answer in answers.items()} == {
        "a1": "rejected",
        "a2": "accepted",
        "a3": "rejected",
        "a4": "clipped",
    }
    assert asked.for_manager() == Hints(priority=90, tenant=3)
    assert json.loads(json.dumps(asked.answers())) == asked.answers()


def test_a_pin_that_finds_less_room_says_so() -> None:
    asked = ask({"pin_seconds": 5})
    asked.clip_pin("2 of its 10 blocks")
    assert asked.answers()["kvbm"]["hints"]["pin_seconds"] == {"status": "clipped", "value": 5, "why": "2 of its 10 blocks"}
