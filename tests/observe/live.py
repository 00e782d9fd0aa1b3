"""What a real Prometheus, Alertmanager and browser see of a process. Prints one JSON object.

    python tests/observe/live.py replay KVBM TRACE DIRECTORY
    python tests/observe/live.py demo KVBM DIRECTORY

A replay has a disk that hangs for a while: alerts have to fire while it does, and to end after it. The demo is the one that the
quick start has people watch, for less than a minute: no alert may fire. In both every query of docs/dashboards and docs/alerts
has to return data, but for those that need what neither has (`ABSENT`). Time in the rules runs twenty times as fast as in
docs/alerts.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

import browser
import documents
from browser import Browser, free_port

HASTE = 20
# Seconds of the replay: until then all is well but for bytes that change, and so long the disk hangs.
CALM, HANG = 50, 60
# Fewer than the alert of copies that fail takes.
CHANGED = "disk.read:corrupt@15s+10s x3"
BY_CHANGE = {"KvbmChecksumFailures"}
BY_HANG = {"KvbmCopiesOverdue", "KvbmSlotsLost", "KvbmTransfersFailing", "KvbmBreakerOpen"}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# What dashboards leave to Grafana.
VARIABLES = {"$__rate_interval": "15s", "$__range": "1m", "$instance": ".+", "$tier": ".+"}
# Metrics that a replay does not have, and why.
ABSENT = {
    "kvbm_rank_up": "the leader of a model that is spread over processes has it",
    "kvbm_peer_": "a worker that has peers has them",
    "kvbm_shadow_blocks_total": "an engine that computes hits again has it",
    "kvbm_shadow_wrong_rate_bound": "an engine that computes hits again has it",
}
# What is there when something is wrong, which it is not in the demo.
WITHOUT_FAULTS = ("ALERTS",)
# Requests to a store that does not fail, and what is compared with what was an hour ago.
NEVER_FAILED, HOUR_AGO = 'outcome="failed"', f"offset {3600 // HASTE}s"
# What a panel shows in place of nothing.
STAND_IN = re.compile(r" or (?:vector\(0\)|label_replace\((?:vector\(\d\)|up\{[^}]*\})(?:, \"[^\"]*\"){4}\))")
# Seconds within which the demo is to have data in every panel, and so long it is watched at least, for alerts.
DEMO, DEMO_AT_LEAST = 45, 30
LIMITS = {"first_paint_ms": 1000, "page_bytes": 200 << 10, "scrape_ms": 5.0}


class Services:
    """Processes that end with this one."""

    def __init__(self, place: Path) -> None:
        self.place, self.started = place, []

    def start(self, name: str, command: list[str], **more) -> subprocess.Popen:
        with open(self.place / f"{name}.log", "wb") as log:
            process = subprocess.Popen(command, stderr=log, stdout=more.pop("stdout", log), cwd=self.place, **more)
        self.started.append(process)
        return process

    def __enter__(self) -> "Services":
        return self

    def __exit__(self, *_) -> None:
        for process in reversed(self.started):
            process.terminate()
        for process in self.started:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


class Receiver(ThreadingHTTPServer):
    """What Alertmanager tells: each alert with `firing` or `resolved`, in turn."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Told)
        self.told: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def names(self, status: str) -> set[str]:
        return {name for name, became in self.told if became == status}


class Told(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.told += [(alert["labels"]["alertname"], alert["status"]) for alert in body["alerts"]]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def until(seconds: float, holds) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if holds():
                return True
        except OSError:
            pass
        time.sleep(0.3)
    return False


def hastened(rules: str) -> str:
    """Rules whose spans are a twentieth as long."""

    def shorter(found: re.Match) -> str:
        return f"{max(1, int(found[1]) * SECONDS[found[2]] // HASTE)}s"

    text = re.sub(r"\b(\d+)([smhd])\b", shorter, rules)
    assert "rate5m" in text, "names are left alone"
    return text


class Prometheus:
    def __init__(self, services: Services, target: str, receiver: Receiver) -> None:
        place, port, alerts = services.place, free_port(), free_port()
        (place / "rules.yml").write_text(hastened(documents.RULES.read_text()))
        scraped = [{"job_name": "kvbm", "static_configs": [{"targets": [target]}]}]
        managers = [{"static_configs": [{"targets": [f"127.0.0.1:{alerts}"]}]}]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": scraped,
            "alerting": {"alertmanagers": managers},
        }
        (place / "prometheus.yml").write_text(yaml.safe_dump(config))
        hook = {"url": f"http://127.0.0.1:{receiver.server_address[1]}/", "send_resolved": True}
        route = {
            "receiver": "test",
            "group_by": ["..."],
            "group_wait": "1s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        }
        config = {"route": route, "receivers": [{"name": "test", "webhook_configs": [hook]}]}
        (place / "alertmanager.yml").write_text(yaml.safe_dump(config))
        services.start(
            "alertmanager",
            ["prometheus-alertmanager", "--config.file=alertmanager.yml", "--storage.path=alerts"]
            + [f"--web.listen-address=127.0.0.1:{alerts}", "--cluster.listen-address="],
        )
        services.start(
            "prometheus",
            ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=series"]
            + [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
        )
        self.url = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict]:
        answer = json.loads(fetch(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        return answer["data"]["result"]

    def broken(self) -> list[str]:
        """Rules that could not be evaluated, and why."""
        groups = json.loads(fetch(f"{self.url}/api/v1/rules"))["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] == "err"]

    def has(self, expression: str) -> bool:
        """Whether a query returns a number at all."""
        return any(one["value"][1] != "NaN" for one in self.query(expression))


def filled_in(expression: str, board: dict) -> str:
    typed = {f"${one['name']}": one["query"] for one in board["templating"]["list"] if one["type"] == "textbox"}
    for name, value in sorted((VARIABLES | typed).items(), key=lambda pair: -len(pair[0])):
        expression = expression.replace(name, value)
    return STAND_IN.sub("", expression)


def loosened(expression: str) -> str:
    """An alert's expression with comparisons that keep what does not hold: it returns data where its parts fit together."""
    parts = re.split(r"(\{[^}]*\})", expression)
    parts[::2] = [re.sub(r"(==|!=|>=|<=|>|<)(?! *bool)", r"\1 bool", part) for part in parts[::2]]
    return "".join(parts)


def asked() -> dict[str, str]:
    """All queries, by where they are: those of panels and of recorded rules as they are, of alerts the whole and each metric."""
    found = {}
    for name, board in documents.dashboards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                found[f"{name}: {panel['title']} {target['refId']}"] = filled_in(target["expr"], board)
    for rule in documents.rules(hastened(documents.RULES.read_text())):
        if "record" in rule:
            found[rule["record"]] = rule["record"]
            continue
        found[rule["alert"]] = loosened(rule["expr"])
        for metric, selector in documents.METRIC.findall(rule["expr"]):
            found[f"{rule['alert']}: {metric}{selector}"] = metric + selector
    return found


def is_excused(expression: str, absent=()) -> bool:
    return any(part in expression for part in (NEVER_FAILED, HOUR_AGO, *ABSENT, *absent))


def look_at(url: str, place: Path) -> dict:
    """What the page of the process shows, and how soon."""
    with Browser() as page:
        page.resize(1280, 900)
        page.open(url)
        shown = page.wait("return /%/.test(document.querySelector('#now-rate').textContent)", 60)
        page.wait("return document.querySelectorAll('#rate path').length > 0", 30)
        time.sleep(6)
        paint = page.run("return performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        # Only what the browser got over the network.
        sizes = page.run("return performance.getEntriesByType('resource').map(r => [r.name, r.decodedBodySize])")
        assets = page.run("return performance.getEntriesByType('navigation')[0].decodedBodySize") + sum(
            size for name, size in sizes if name.endswith((".css", ".js"))
        )
        found = {
            "shown": bool(shown),
            "tiers": page.run("return document.querySelectorAll('#tiers li').length"),
            "routes": page.run("return document.querySelectorAll('#routes tbody tr th').length"),
            "curves": page.run("return document.querySelectorAll('#curves figure').length"),
            "settings": page.run("return document.querySelectorAll('#settings tbody tr').length"),
            "elsewhere": [name for name, _ in sizes if not name.startswith(url)],
            "errors": page.errors(),
            "first_paint_ms": round(paint) if paint is not None else None,
            "page_bytes": assets,
        }
        page.screenshot(place / "page.png")
        return found


def watch(kvbm: str, trace: str, place: Path) -> dict:
    port = free_port()
    arguments = ["--json", "--block-bytes=16KiB", f"--disk-dir={place}/disk", f"--object=file://{place}/objects"]
    sizes = [
        "--device-blocks=500",
        "--host-blocks=600",
        "--disk-blocks=3000",
        "--speed=10",
        # When the disk hangs, enough copies are under way for the alert of copies that fail.
        "--concurrency=32",
        "--requests=9000",
    ]
    faults = [f"--fault={CHANGED}", f"--fault=disk:hang@{CALM}s+{HANG}s"]
    # An object tier that evicts, budgets that are not spent, a tenant with a quota, and a disk that is missed soon.
    settings = {
        "DYN_KVBM_OBJECT_NUM_BLOCKS": "6000",
        "DYN_KVBM_OBJECT_PUT_BUDGET": "1000000",
        "DYN_KVBM_OBJECT_GET_BUDGET": "1000000",
        "DYN_KVBM_TRANSFER_TIMEOUT_MS": "1000",
        "DYN_KVBM_DISK_WRITE_BUDGET": "100TB",
        # Requests of a trace name no tenant: they are the others'.
        "DYN_KVBM_TENANT_QUOTAS": "7=1GiB",
    }
    wrong, seen, receiver, url = [], set(), Receiver(), f"http://127.0.0.1:{port}/"
    queries = asked()
    with Services(place) as services, open(place / "report.json", "wb") as report:
        replay = services.start(
            "replay",
            [kvbm, "replay", trace, f"--serve=127.0.0.1:{port}", *arguments, *sizes, *faults],
            stdout=report,
            env=os.environ | settings,
        )
        began = time.monotonic()
        prometheus = Prometheus(services, f"127.0.0.1:{port}", receiver)
        if not until(30, lambda: prometheus.has('up{job="kvbm"} == 1')):
            return {"wrong": ["nothing is scraped"], "log": (place / "replay.log").read_text()[-2000:]}
        ready = until(10, lambda: json.loads(fetch(f"{url}readyz"))["ready"])
        page = look_at(url, place) if browser.is_installed() else None
        time.sleep(max(0.0, CALM - 5 - (time.monotonic() - began)))
        seen |= {where for where, query in queries.items() if prometheus.has(query)}
        early = receiver.names("firing")
        fired = until(HANG + 20, lambda: receiver.names("firing") >= BY_HANG | BY_CHANGE)
        degraded = json.loads(fetch_whatever(f"{url}readyz")).get("degraded", [])
        state = json.loads(fetch(f"{url}v1/state"))
        seen |= {where for where, query in queries.items() if prometheus.has(query)}
        time.sleep(max(0.0, CALM + HANG - (time.monotonic() - began)))
        ended = until(90, lambda: receiver.names("resolved") >= BY_HANG | BY_CHANGE)
        healed = until(40, lambda: not json.loads(fetch_whatever(f"{url}readyz"))["degraded"])
        seen |= {where for where, query in queries.items() if prometheus.has(query)}
        scrape = float(
            prometheus.query(f'quantile_over_time(0.5, scrape_duration_seconds{{job="kvbm"}}[{CALM}s])')[0]["value"][1]
        )
        series = int(prometheus.query('max_over_time(scrape_samples_scraped{job="kvbm"}[10m])')[0]["value"][1])
        still = replay.poll() is None
        broken = prometheus.broken()
    without = unexcused(queries, seen)
    checks = {
        "it was ready": ready,
        "alerts fired while the disk hung": fired,
        "and ended after it": ended,
        "none fired before": not (early & BY_HANG),
        "readyz named the disk": any("disk" in one["what"] for one in degraded),
        "and then nothing": healed,
        "the state had the faults": bool(state["faults"]),
        "the replay went on": still,
        "every query returns data": not without,
        "no rule is broken": not broken,
    }
    if page:
        checks |= {
            "the page shows the state": page["shown"]
            and page["tiers"] == 4
            and page["routes"] >= 5
            and page["settings"] > 10,
            "the page asks no other server": not page["elsewhere"] and not page["errors"],
        }
    wrong += [name for name, holds in checks.items() if not holds]
    figures = {"scrape_ms": round(1000 * scrape, 2)}
    figures |= {name: page[name] for name in LIMITS if page and name in page}
    return {
        "wrong": wrong,
        "short": [name for name, value in figures.items() if value is None or value > LIMITS[name]],
        **figures,
        "series": series,
        "queries": len(queries),
        "without_data": without,
        "excused": sorted(set(queries) - seen - set(without)),
        "broken": broken,
        "fired": sorted(receiver.names("firing")),
        "resolved": sorted(receiver.names("resolved")),
        "page": page,
    }


def watch_demo(kvbm: str, place: Path) -> dict:
    port, receiver, queries, seen = free_port(), Receiver(), asked(), set()
    with Services(place) as services:
        demo, began = services.start("demo", [kvbm, "demo", f"--serve=127.0.0.1:{port}"]), time.monotonic()
        prometheus = Prometheus(services, f"127.0.0.1:{port}", receiver)
        if not until(30, lambda: prometheus.has('up{job="kvbm"} == 1')):
            return {"wrong": ["nothing is scraped"], "log": (place / "demo.log").read_text()[-2000:]}

        def is_complete() -> bool:
            seen.update(where for where, query in queries.items() if where not in seen and prometheus.has(query))
            return not unexcused(queries, seen, WITHOUT_FAULTS)

        complete = until(DEMO, is_complete)
        time.sleep(max(0.0, DEMO_AT_LEAST - (time.monotonic() - began)))
        broken, still = prometheus.broken(), demo.poll() is None
    fired = sorted(receiver.names("firing"))
    checks = {
        "every query of the demo returns data": complete,
        "no rule is broken": not broken,
        "no alert fires": not fired,
        "the demo goes on": still,
    }
    return {
        "wrong": [name for name, holds in checks.items() if not holds],
        "demo_queries": len(queries),
        "demo_without_data": unexcused(queries, seen, WITHOUT_FAULTS),
        "demo_excused": sorted(set(queries) - seen),
        "demo_fired": fired,
        "demo_broken": broken,
    }


def unexcused(queries: dict[str, str], seen: set[str], absent=()) -> list[str]:
    """Where queries have returned nothing so far that are to return something."""
    return [where for where in sorted(set(queries) - seen) if not is_excused(queries[where], absent)]


def fetch_whatever(url: str) -> str:
    """The body, whatever the status: one that is not ready says why."""
    try:
        return fetch(url)
    except urllib.error.HTTPError as error:
        return error.read().decode()


if __name__ == "__main__":
    what, kvbm, *trace, place = sys.argv[1:]
    watches = {"replay": watch, "demo": watch_demo}
    told = watches[what](kvbm, *trace, Path(place))
    print(json.dumps(told))
    sys.exit(1 if told["wrong"] else 3 if told.get("short") else 0)
