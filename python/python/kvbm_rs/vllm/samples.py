"""What a manager counts, read now and then."""

import time
from typing import Any, Protocol

# Seconds between two readings while the engine is busy: each reads all metrics.
_INTERVAL = 1.0

# By metric: what it means, whether it counts, and values by labels. Plain, since it goes from process to process.
Metrics = dict[str, tuple[str, bool, list[tuple[dict[str, str], float]]]]


class Counting(Protocol):
    """Who has metrics: a manager or a tier."""

    def samples(self) -> list[tuple[str, str, bool, list[tuple[dict[str, str], float]]]]: ...


class Reader:
    """Reads metrics now and then: what was counted since the last time, and gauges as they are."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self._counted: dict[tuple[str, Any], float] = {}
        self._read_at = 0.0
        self._was_at_rest = True

    def read(self, is_at_rest: bool) -> Metrics | None:
        """`None` where it is too early: but what came before a rest is told before the engine pauses."""
        now = time.monotonic()
        has_come_to_rest = is_at_rest and not self._was_at_rest
        self._was_at_rest = is_at_rest
        if now - self._read_at < _INTERVAL and not has_come_to_rest:
            return None
        self._read_at = now
        found: Metrics = {}
        for name, meaning, counts, values in self._counting.samples():
            if counts:
                values = [(labels, self._since(name, labels, value)) for labels, value in values]
                values = [(labels, more) for labels, more in values if more]
            if values:
                found[name] = (meaning, counts, values)
        return found

    def _since(self, name: str, labels: dict[str, str], value: float) -> float:
        key = (name, key_of(labels))
        before, self._counted[key] = self._counted.get(key, 0.0), value
        return value - before


def key_of(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Labels that can be looked up."""
    return tuple(sorted(labels.items()))
