"""What a request says of itself beside its tokens, and what it is answered.

In `kv_transfer_params`, under `kvbm`, or in `kv_hints` as the payload of an action of type `kvbm.hints`:

| hint | is | means |
|---|---|---|
| `tenant` | a number | whose it is |
| `priority` | 0 to 100 | how much its blocks matter beside others of the same tenant; 50 is usual |
| `expected_output_tokens` | a number | how long its answer will be |
| `will_not_return` | a boolean | no request will continue it |
| `pin_seconds` | seconds | its blocks stay where they are for so long after its end |
| `prefetch` | a boolean | its blocks come up to memory while it waits for its turn |

Each is answered in the `kv_transfer_params` of the output. Nothing that a request says is an error of the engine.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbm_rs import Hints

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

_NAME = "kvbm"
_ACTION, _ACTION_VERSION = "kvbm.hints", "1.0"

_MAX_PIN_SECONDS = 3600.0

Answer = dict[str, Any]


class _Refused(Exception):
    """Why a hint is not taken."""


@dataclass(frozen=True)
class Limits:
    """What the engine and its tiers have room for."""

    output_tokens: int
    # Why nothing is pinned or brought up; empty: it is.
    why_not_held: str
    # Whether there are a host tier, and a tier below it.
    can_prefetch: bool


@dataclass
class Asked:
    """What a request asked for, as far as it is granted, and the answers."""

    tenant: int | None = None
    priority: int | None = None
    expected_output_tokens: int | None = None
    will_not_return: bool = False
    pin_seconds: float = 0.0
    prefetch: bool = False
    # By hint, and by action.
    hints: dict[str, Answer] = field(default_factory=dict)
    actions: dict[str, Answer] = field(default_factory=dict)

    def for_manager(self) -> Hints | None:
        """`None` where nothing was said."""
        if not self.hints and not self.actions:
            return None
        return Hints(
            tenant=self.tenant,
            priority=self.priority,
            expected_output_tokens=self.expected_output_tokens,
            will_not_return=self.will_not_return,
        )

    def answers(self) -> dict[str, Any] | None:
        """`kv_transfer_params` of the output."""
        said = {name: answers for name, answers in (("hints", self.hints), ("actions", self.actions)) if answers}
        return {_NAME: said} if said else None

    def clip_pin(self, why: str) -> None:
        """Its pin holds less than it asked for."""
        for answers in (self.hints, *(action.get("hints", {}) for action in self.actions.values())):
            if answers.get("pin_seconds", {}).get("status") in ("accepted", "clipped"):
                answers["pin_seconds"] = {"status": "clipped", "value": self.pin_seconds, "why": why}


def asked_by(request: "Request", limits: Limits) -> Asked:
    asked = Asked()
    # Others' parameters are none of our business.
    said = (request.kv_transfer_params or {}).get(_NAME)
    if said is not None:
        asked.hints = _take(asked, said, limits)
    # vLLM 0.29 has none.
    hints = getattr(request, "kv_hints", None)
    for action in hints.actions if hints else ():
        asked.actions[action.action_id] = _act(asked, action, limits)
    return asked


def _act(asked: Asked, action: Any, limits: Limits) -> Answer:
    if action.action_type != _ACTION:
        return _rejected(f"no action of type {action.action_type!r} is known; valid: {_ACTION}")
    if action.action_version.partition(".")[0] != _ACTION_VERSION.partition(".")[0]:
        return _rejected(f"version {action.action_version!r} is not known; valid: {_ACTION_VERSION}")
    answers = _take(asked, action.payload, limits)
    found = {answer["status"] for answer in answers.values()}
    # The worst that happened to any of them.
    status = next((status for status in ("rejected", "clipped") if status in found), "accepted")
    return {"status": status, "hints": answers}


def _take(asked: Asked, said: Any, limits: Limits) -> dict[str, Answer]:
    """Takes over what is granted of `said`. Returns the answer to each hint."""
    if not isinstance(said, dict):
        return {_NAME: _rejected(f"hints are an object, not {said!r:.80}")}
    answers = {}
    for name, value in said.items():
        read = _READERS.get(name)
        if read is None:
            answers[str(name)] = _rejected(f"no such hint; valid: {', '.join(_READERS)}")
            continue
        try:
            granted = read(value, limits)
        except _Refused as why:
            answers[name] = _rejected(str(why))
            continue
        setattr(asked, name, granted)
        status = "accepted" if granted == value else "clipped"
        answers[name] = {"status": status, "value": granted}
    return answers


def _rejected(why: str) -> Answer:
    return {"status": "rejected", "why": why}


def _number(low: int, high: "Callable[[Limits], int]") -> "Callable[[Any, Limits], int]":
    """A reader of numbers that are clipped to these bounds."""

    def read(value: Any, limits: Limits) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Refused(f"it is a number, not {value!r:.80}")
        return min(max(value, low), high(limits))

    return read


def _tenant(value: Any, limits: Limits) -> int:
    # Another number would be another tenant.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise _Refused(f"it is a number of 32 bits, not {value!r:.80}")
    return value


def _truth(value: Any, limits: Limits) -> bool:
    if not isinstance(value, bool):
        raise _Refused(f"it is a boolean, not {value!r:.80}")
    return value


def _prefetch(value: Any, limits: Limits) -> bool:
    if _truth(value, limits) and not limits.can_prefetch:
        raise _Refused("it takes memory (host.capacity) and a tier below it")
    if limits.why_not_held:
        raise _Refused(limits.why_not_held)
    return value


def _seconds(value: Any, limits: Limits) -> float:
    if limits.why_not_held:
        raise _Refused(limits.why_not_held)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise _Refused(f"it is a time in seconds, not {value!r:.80}")
    return min(value, _MAX_PIN_SECONDS)


_READERS: "dict[str, Callable[[Any, Limits], Any]]" = {
    "tenant": _tenant,
    "priority": _number(0, lambda _: 100),
    "expected_output_tokens": _number(0, lambda limits: limits.output_tokens),
    "will_not_return": _truth,
    "pin_seconds": _seconds,
    "prefetch": _prefetch,
}
