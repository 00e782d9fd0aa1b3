"""Dashboards, rules and the runbook agree with each other and with docs/metrics.md."""

import json
import re
import shutil
import subprocess
import sys
import typing

import pytest
import yaml

import documents
from documents import METRIC, MATCHER, ROOT

BOARDS = documents.dashboards()
KNOWN = documents.metrics()
RECORDED = {rule["record"] for rule in documents.rules() if "record" in rule}
EXPRESSIONS = documents.queries() + [(rule.get("alert") or rule["record"], rule["expr"]) for rule in documents.rules()]
QUESTIONS = documents.questions()
# On every metric of a hybrid model, and what Prometheus adds.
ALWAYS = {"group", "instance", "job", "le"}
# Metrics that are on no dashboard and in no rule, and why.
NOT_SHOWN: dict[str, str] = {}


def test_dashboards_are_what_the_generator_writes():
    done = subprocess.run(
        [sys.executable, documents.DASHBOARDS / "generate.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {"overview", "tiers", "transfers", "disk", "object", "tenants", "peers", "faults"} <= set(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_dashboards_fit_the_schema_of_grafana(name):
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    read = models.Dashboard.from_json(BOARDS[name])
    # A key that the schema does not have is dropped on the way.
    written = json.loads(JSONEncoder(sort_keys=True).encode(read))
    assert lost(BOARDS[name], written) == []
    assert wrong_types(read) == []


def lost(given, kept, where: str = "") -> list[str]:
    if isinstance(given, dict):
        missing = [f"{where}.{key}" for key in given if key not in (kept or {})]
        return missing + [
            line for key in given if key in (kept or {}) for line in lost(given[key], kept[key], f"{where}.{key}")
        ]
    if isinstance(given, list):
        if len(given) != len(kept):
            return [f"{where}: {len(given)} became {len(kept)}"]
        return [line for number, pair in enumerate(zip(given, kept)) for line in lost(*pair, f"{where}[{number}]")]
    return [] if given == kept else [f"{where}: {given!r} became {kept!r}"]


PLAIN = {str: str, bool: bool, int: int, float: (int, float)}


def wrong_types(model, where: str = "") -> list[str]:
    """Fields whose value is not of the type that the schema gives them, as far as that type is a plain one."""
    if isinstance(model, list):
        return [line for number, one in enumerate(model) for line in wrong_types(one, f"{where}[{number}]")]
    if not hasattr(model, "from_json"):
        return []
    hints = typing.get_type_hints(type(model))
    found = []
    for field, hint in hints.items():
        value = getattr(model, field, None)
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else [hint]
        only_plain = all(one in PLAIN or one is type(None) for one in choices)
        wanted = [PLAIN[one] for one in choices if one in PLAIN]
        if value is not None and only_plain and not any(isinstance(value, one) for one in wanted):
            found.append(f"{where}.{field}: {value!r} is no {hint}")
        found += wrong_types(value, f"{where}.{field}")
    return found


def test_the_check_of_the_schema_sees_what_is_wrong():
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    good = {"title": "a", "panels": [{"type": "stat", "title": "b"}]}
    assert wrong_types(models.Dashboard.from_json(good)) == []
    assert wrong_types(models.Dashboard.from_json({"title": 3})) != []
    assert lost({"panels": [{"titel": 1}]}, {"panels": [{}]}) == [".panels[0].titel"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_templated_and_say_what_they_show(name):
    board = BOARDS[name]
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert {"datasource", "instance"} <= set(variables)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"] and len(panel["description"]) > 15, panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert all(variable in variables for variable in re.findall(r"\$(?!__)(\w+)", target["expr"])), target[
                "expr"
            ]
            ours = [found for found in METRIC.finditer(target["expr"])]
            assert all('instance=~"$instance"' in (found[2] or "") for found in ours), target["expr"]
    taken = [
        (x, y)
        for at in (panel["gridPos"] for panel in board["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < 24, "panels lie on each other"


@pytest.mark.parametrize("panel", BOARDS["tiers"]["panels"], ids=lambda panel: panel["title"])
def test_panels_of_tiers_show_those_that_are_chosen(panel):
    for target in panel["targets"]:
        for name, selector in METRIC.findall(target["expr"]):
            if "tier" in KNOWN[documents.without_suffix(name, KNOWN)][1]:
                assert 'tier=~"$tier"' in selector, target["expr"]


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS + QUESTIONS)
def test_queries_ask_for_what_there_is(where, expression):
    for metric, selector in METRIC.findall(expression):
        if metric in RECORDED:
            continue
        name = documents.without_suffix(metric, KNOWN)
        assert name in KNOWN, f"{where}: {metric} is not in docs/metrics.md"
        unknown = set(MATCHER.findall(selector)) - KNOWN[name][1] - ALWAYS
        assert not unknown, f"{where}: {metric} has no label {unknown}"


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS + QUESTIONS)
def test_counters_are_asked_for_their_speed(where, expression):
    """But for those whose panel says that it shows them since the start, ratios of two, and alerts on any at all."""
    panel = next((one for board in BOARDS.values() for one in board["panels"] if f": {one['title']}" in where), {})
    if "since the start" in panel.get("description", "").lower():
        return
    for found in METRIC.finditer(expression):
        kind, _ = KNOWN.get(documents.without_suffix(found[1], KNOWN), ("recorded", ()))
        if kind not in ("counter", "histogram"):
            continue
        before, after = expression[: found.start()].rstrip(), expression[found.end() :].lstrip()
        speed = re.search(r"(rate|increase)\($", before) and after.startswith("[")
        first = "unless" in before[-10:] or after.startswith("unless") or after.startswith("offset")
        bytes_of_a_block = found[1] in ("kvbm_transfer_bytes_total", "kvbm_transfer_blocks_total") and before.endswith(
            "sum("
        )
        ever = 'verdict="wrong"' in (found[2] or "") or "fell back" in panel.get("description", "")
        assert speed or first or bytes_of_a_block or ever, f"{where}: {found[0]} is a counter"


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_reads_the_queries_of_the_page(tmp_path):
    assert len(QUESTIONS) > 5
    rules = [{"record": f"question:{number}", "expr": expression} for number, (_, expression) in enumerate(QUESTIONS)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "questions", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_is_shown():
    shown = {
        documents.without_suffix(name, KNOWN) for _, expression in EXPRESSIONS for name, _ in METRIC.findall(expression)
    }
    assert set(KNOWN) - shown == set(NOT_SHOWN)


def test_the_runbook_has_what_there_are_alerts_for():
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    names = [alert["alert"] for alert in documents.alerts()]
    assert sorted(headings) == sorted(names)
    for alert in documents.alerts():
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["annotations"]["summary"] and alert["labels"]["severity"] in ("critical", "warning", "info")


def test_runbook_entries_say_where_to_look_and_what_to_do():
    text = (ROOT / "docs/runbook.md").read_text()
    for entry in text.split("\n### ")[1:]:
        name = entry.split("\n")[0]
        assert "- **Look:**" in entry and "- **Do:**" in entry, name


def test_each_alert_has_a_unit_test():
    tests = yaml.safe_load((documents.RULES.parent / "rules_test.yml").read_text())["tests"]
    tested = {name for test in tests for name in re.findall(r'alertname="(\w+)"', str(test))}
    assert tested == {alert["alert"] for alert in documents.alerts()}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize(
    "command", [["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]], ids=["check", "test"]
)
def test_rules_hold_under_promtool(command):
    done = subprocess.run(["promtool", *command], cwd=documents.RULES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_is_small_and_asks_nobody_else():
    files = {path.name: path.read_text() for path in documents.PAGE.iterdir()}
    assert set(files) == {"index.html", "page.css", "page.js", "tiers.css"}
    assert sum(len(text.encode()) for text in files.values()) <= 200 << 10
    for name, text in files.items():
        elsewhere = {url for url in re.findall(r"https?:[^\s'\")]+|@import|url\([^)]*", text) if "w3.org" not in url}
        assert not elsewhere, name
    # A strict Content-Security-Policy forbids what is inline.
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", files["index.html"])
    assert "innerHTML" not in files["page.js"], "what the server tells is text"
