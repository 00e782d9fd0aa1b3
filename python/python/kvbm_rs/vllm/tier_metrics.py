"""The tier's counters and gauges among vLLM's own metrics: docs/metrics.md has them, `kvbm_…` is `vllm:kvbm_tier_…` here."""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvbm_rs.vllm.samples import Metrics

# A name of its own, since a process may have the connector's metrics too.
_PREFIX = "vllm:kvbm_tier_"

# vLLM asks for names and labels before there is a tier. A test compares with docs/metrics.md, which has besides these only
# histograms, what a tier never has (ranks) and other names of the same (NVIDIA's).
_LABELS: dict[str, tuple[str, ...]] = {
    name: labels
    for labels, names in {
        (): """requests_total requested_tokens_total recompute_tokens_total orphan_blocks_total duplicate_blocks_total
            layered_blocks_total out_of_reach_tokens_total epoch accounting_drift background_panics_total
            completion_panics disk_write_budget_bytes peer_leases_cut_total peer_nixl_descriptors_total
            peer_saturated_numbers_total""",
        ("tier",): """hit_tokens_total checksum_failures_total shadow_wrong_rate_bound dirty_blocks published_blocks
            evicted_blocks declined_blocks quarantined_blocks unreadable_blocks flush_failures unflushed_blocks
            full_reservations index_failures_total""",
        ("from", "to"): """transfer_blocks_total transfer_bytes_total overdue_copies_total returned_copies_total
            copies_overdue queue_blocks batches_in_flight breaker_open""",
        ("from", "to", "kind"): "transfer_failures_total",
        ("reason", "tier"): "misses_total",
        ("reason",): "missed_tokens_total peer_refused_total",
        ("tier", "scale"): "estimated_hit_rate",
        ("tier", "state"): "slots",
        ("tier", "outcome"): "scrubbed_blocks_total",
        ("tier", "verdict"): "shadow_blocks_total",
        ("state",): "staging_slots",
        ("tenant",): "tenant_requested_tokens_total tenant_hit_tokens_total tenant_quota_blocks",
        ("tenant", "tier"): "tenant_blocks tenant_evicted_blocks",
        ("dir",): "disk_directory_up disk_directory_failures_total",
        ("request", "outcome"): "object_requests_total",
        ("direction",): "object_bytes_total peer_open_leases",
        ("direction", "end"): "peer_leases_total",
        ("direction", "way"): "peer_blocks_total peer_bytes_total",
        ("budget",): "object_budget_refusals_total object_budget_left",
        ("backend",): "backend_fallbacks_total",
    }.items()
    for name in names.split()
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """All metrics that a tier may have, by name."""
    return {_PREFIX + name: _definition(name, labels) for name, labels in _LABELS.items()}


def _definition(name: str, labels: tuple[str, ...]) -> OffloadingMetricMetadata:
    counts = name.endswith("_total")
    kind = OffloadingCounterMetadata if counts else OffloadingGaugeMetadata
    return kind(documentation=f"`kvbm_{name}` of the kvbm tier: its docs/metrics.md says more.", labelnames=labels)


def stats(found: Metrics) -> OffloadingConnectorStats:
    """What was read, as vLLM collects it: counts since the last time, and gauges as they are."""
    stats = OffloadingConnectorStats()
    for name, (_, counts, values) in found.items():
        name = name.removeprefix("kvbm_")
        names = _LABELS.get(name)
        # vLLM ends with what it was not told before.
        if names is None:
            continue
        tell = stats.increase_counter if counts else stats.set_gauge
        for labels, value in values:
            if labels.keys() == set(names):
                tell(_PREFIX + name, value, tuple(labels[label] for label in names))
    return stats
