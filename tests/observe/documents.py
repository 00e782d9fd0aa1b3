"""What dashboards, rules and documentation say, read for tests."""

import json
import os
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "docs/dashboards"
RULES = ROOT / "docs/alerts/rules.yml"
PAGE = ROOT / "kvbm/src/serve/page"
# Built by tests/observe.sh.
KVBM = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / os.environ.get("KVBM_PROFILE", "checked") / "kvbm"
# Names that a query has of its own: our metrics, and those that a rule records.
METRIC = re.compile(r"\b(kvbm[_:][\w:]+)(\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
SUFFIXES = ("_bucket", "_sum", "_count")


def metrics() -> dict[str, tuple[str, set[str]]]:
    """Type and labels by name, as docs/metrics.md has them. NVIDIA's names are left out."""
    text = (ROOT / "docs/metrics.md").read_text().split("## Names of NVIDIA's KVBM")[0]
    rows = re.findall(r"^\| `(kvbm_\w+)` \| (\w+) \|([^|]*)\|", text, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def settings() -> set[str]:
    """Names of environment variables, as docs/configuration.md has them."""
    return set(re.findall(r"`(DYN_KVBM_\w+)`", (ROOT / "docs/configuration.md").read_text()))


def dashboards() -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def queries() -> list[tuple[str, str]]:
    """Where a query is, as `dashboard: panel`, and its expression."""
    return [
        (f"{name}: {panel['title']}", target["expr"])
        for name, board in dashboards().items()
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def questions() -> list[tuple[str, str]]:
    """The queries that docs/metrics.md has, one a line."""
    blocks = re.findall(r"```promql[^\n]*\n(.*?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
    return [("docs/metrics.md", line) for block in blocks for line in block.splitlines()]


def rules(text: str | None = None) -> list[dict]:
    return [rule for group in yaml.safe_load(text or RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict]:
    return [rule for rule in rules() if "alert" in rule]


def without_suffix(metric: str, known: dict) -> str:
    for suffix in SUFFIXES:
        if metric not in known and known.get(metric.removesuffix(suffix), [""])[0] == "histogram":
            return metric.removesuffix(suffix)
    return metric
