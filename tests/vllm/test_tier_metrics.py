"""What `KvbmTier` counts stands among vLLM's own metrics."""

from pathlib import Path

import pytest
from connectors import probe
from engine import BLOCK, TINY_BLOCK_BYTES, Engine, offloading, prompt
from offloading import PAGE, TOKENS, Offloading, chain
from prometheus_client import CollectorRegistry, Counter, Gauge
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from kvbm_rs.vllm import tier_metrics

PAGE_OF_METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
# In docs/metrics.md and of no tier: histograms, ranks, and NVIDIA's names of what has one of ours.
NVIDIAS = ("kvbm_offload_", "kvbm_onboard_", "kvbm_matched_", "_cache_hit_rate", "kvbm_object_read_", "kvbm_object_write_")


def tier(place: Path) -> dict:
    return {
        "type": "KvbmTier",
        "module_path": "kvbm_rs.vllm.tier",
        "host.huge_pages": False,
        "weights": "made up",
        "disk.capacity": "256 blocks",
        "disk.dirs": str(place),
    }


def test_all_of_them_fit_into_one_registry():
    registry, kinds = CollectorRegistry(), {OffloadingCounterMetadata: Counter}
    for name, told in tier_metrics.definitions().items():
        kinds.get(type(told), Gauge)(name, told.documentation, told.labelnames, registry=registry)


def described() -> dict[str, tuple[str, tuple[str, ...]]]:
    """By name, as a tier has it: the type and the labels of docs/metrics.md."""
    rows = [line.split("|") for line in PAGE_OF_METRICS.read_text().splitlines() if line.startswith("| `kvbm_")]
    found = {}
    for _, name, kind, labels, *_ in rows:
        name, kind = name.strip(" `"), kind.strip()
        if kind != "histogram" and name != "kvbm_rank_up" and not any(part in name for part in NVIDIAS):
            names = tuple(label.strip(" `") for label in labels.split(",") if label.strip())
            found["vllm:" + name.replace("kvbm_", "kvbm_tier_", 1)] = (kind, names)
    return found


def test_vllm_is_told_of_every_metric_of_the_page() -> None:
    told = {
        name: ("counter" if isinstance(one, OffloadingCounterMetadata) else "gauge", one.labelnames)
        for name, one in tier_metrics.definitions().items()
    }
    assert told == described()


def test_a_request_counts_once_whatever_it_does(tmp_path: Path) -> None:
    """Its look-up is one; that it loads what it found and ends is none."""
    keys = chain(1, 20)
    with Offloading(tier(tmp_path), row=PAGE) as below:

        def counted(name: str, **labels: str) -> float:
            values = next((one[3] for one in below.tier._tier.samples() if one[0] == name), [])
            return sum(value for having, value in values if labels.items() <= having.items())

        below.save(keys)
        assert counted("kvbm_hit_tokens_total") == 0
        below.forget_primary()
        before = counted("kvbm_requests_total")
        assert below.serves(keys) == 20
        assert counted("kvbm_requests_total") == before + 1
        assert counted("kvbm_hit_tokens_total") == 20 * TOKENS
        # Asked again and again, it is the same request.
        below.forget_primary()
        request = below.begin(keys)
        assert below.look_up(request, keys) == 20
        below.end(request)
        assert counted("kvbm_hit_tokens_total") == 2 * 20 * TOKENS
        assert counted("kvbm_transfer_blocks_total", to="device") == 40


@pytest.mark.slow
def test_an_engine_shows_them(model: Path, tmp_path: Path) -> None:
    with Engine(model, offloading(16 * TINY_BLOCK_BYTES, tier(tmp_path)), disable_log_stats=False) as engine:

        def metric(name: str, **labels: str) -> float:
            found = probe(engine, "metrics").get(f"vllm:kvbm_tier_{name}", [])
            return next((value for having, value in found if having == labels), 0.0)

        asked = prompt(1, 10 * BLOCK + 5)
        cold = engine.generate(asked)
        for number in range(2, 5):
            engine.generate(prompt(number, 10 * BLOCK + 5))
        engine.settle()
        assert engine.reset()
        assert engine.generate(asked).said == cold.said
        engine.settle()
        assert metric("hit_tokens", tier="disk") == 10 * BLOCK
        assert metric("slots", tier="disk", state="resident") >= 40
        assert metric("transfer_failures", **{"from": "disk", "to": "device", "kind": "io"}) == 0
