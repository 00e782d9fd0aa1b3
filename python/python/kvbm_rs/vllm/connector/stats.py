"""The manager's counters and gauges among vLLM's own metrics."""

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbm_rs.vllm.samples import Metrics, key_of

# What vLLM takes for its own, and unregisters with the engine.
_PREFIX = "vllm:"

# What the engine's log shows of an interval: bytes are those that were copied.
_LOGGED = ("kvbm_hit_tokens_total", "kvbm_transfer_bytes_total", "kvbm_transfer_failures_total")


class Stats(KVConnectorStats):
    """What was counted since the last reading, and gauges as they are. `data` has the metrics."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, (meaning, counts, values) in other.data.items():
            mine = _by_labels(self.data[name][2]) if name in self.data else {}
            for labels, value in values:
                key = key_of(labels)
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


def _by_labels(values: list[tuple[dict[str, str], float]]) -> dict[tuple[tuple[str, str], ...], float]:
    return {key_of(labels): value for labels, value in values}
