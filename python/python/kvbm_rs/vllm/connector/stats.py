"""The manager's counters and gauges among vLLM's own metrics."""

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from kvbm_rs import Manager

# Seconds between two readings while the engine is busy: each reads all metrics.
_INTERVAL = 1.0

# What vLLM takes for its own, and unregisters with the engine.
_PREFIX = "vllm:"

# What the engine's log shows of an interval: bytes are those that were copied.
_LOGGED = ("kvbm_hit_tokens_total", "kvbm_transfer_bytes_total", "kvbm_transfer_failures_total")

# By metric: what it means, whether it counts, and values by labels. Plain, since it goes from process to process.
Metrics = dict[str, tuple[str, bool, list[tuple[dict[str, str], float]]]]


class Stats(KVConnectorStats):
    """What was counted since the last reading, and gauges as they are. `data` has the metrics."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, (meaning, counts, values) in other.data.items():
            mine = _by_labels(self.data[name][2]) if name in self.data else {}
            for labels, value in values:
                key = _key(labels)
                mine[key] = mine.get(key, 0.0) + value if counts else value
            self.data[name] = (meaning, counts, [(dict(key), value) for key, value in mine.items()])
        return self

    def reduce(self) -> dict[str, int | float]:
        shown = {}
        for name in _LOGGED:
            for labels, value in self.data.get(name, ("", True, []))[2]:
                shown["_".join([name.removesuffix("_total"), *labels.values()])] = value
        return shown

    def is_empty(self) -> bool:
        return not self.data


class Reader:
    """Reads a manager's metrics now and then: what was counted since the last time."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager
        self._counted: dict[tuple[str, Any], float] = {}
        self._read_at = 0.0
        self._was_at_rest = True

    def read(self, is_at_rest: bool) -> Stats | None:
        """`None` where it is too early: but what came before a rest is told before the engine pauses."""
        now = time.monotonic()
        has_come_to_rest = is_at_rest and not self._was_at_rest
        self._was_at_rest = is_at_rest
        if now - self._read_at < _INTERVAL and not has_come_to_rest:
            return None
        self._read_at = now
        found: Metrics = {}
        for name, meaning, counts, values in self._manager.samples():
            if counts:
                values = [(labels, self._since(name, labels, value)) for labels, value in values]
                values = [(labels, more) for labels, more in values if more]
            if values:
                found[name] = (meaning, counts, values)
        return Stats(found)

    def _since(self, name: str, labels: dict[str, str], value: float) -> float:
        key = (name, _key(labels))
        before, self._counted[key] = self._counted.get(key, 0.0), value
        return value - before


class PromMetrics(KVConnectorPromMetrics):
    """The metrics of docs/metrics.md, with vLLM's labels and under `vllm:kvbm_…`, as they appear."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._metrics: dict[str, Counter | Gauge] = {}

    def observe(self, transfer_stats_data: Metrics, engine_idx: int = 0) -> None:
        engine = dict(zip(self._labelnames, self.per_engine_labelvalues[engine_idx]))
        for name, (meaning, counts, values) in transfer_stats_data.items():
            for labels, value in values:
                metric = self._metric(name, meaning, counts, list(labels)).labels(**engine, **labels)
                if counts:
                    metric.inc(value)
                else:
                    metric.set(value)

    def _metric(self, name: str, meaning: str, counts: bool, labels: list[str]) -> Any:
        if name not in self._metrics:
            names = [*self._labelnames, *labels]
            if counts:
                made = self._counter_cls(name=_PREFIX + name, documentation=meaning, labelnames=names)
            else:
                made = self._gauge_cls(
                    name=_PREFIX + name, documentation=meaning, labelnames=names, multiprocess_mode="mostrecent"
                )
            self._metrics[name] = made
        return self._metrics[name]


def _key(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _by_labels(values: list[tuple[dict[str, str], float]]) -> dict[tuple[tuple[str, str], ...], float]:
    return {_key(labels): value for labels, value in values}
