"""A server that has the live page and tells it made-up figures: states that a healthy process does not show.

    python tests/observe/stub.py [PORT]

The page is shown with `calm` figures until `/becomes/trouble` (faults, a breaker that is open) or `/becomes/empty` (a
process that has had no request) is fetched.
"""

import json
import math
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "kvbm/src/serve/page"
KINDS = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "tiers.css": "text/css",
}
# What a strict server would send: the page has nothing inline and asks no other server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
BLOCK_BYTES, BLOCK_TOKENS = 2 << 20, 16
# Slots of an object tier without a limit.
UNLIMITED = 1_073_741_816
SIZES = {"device": 12_000, "host": 32_000, "disk": 400_000, "object": UNLIMITED}
SHARES = {"device": 0.21, "host": 0.18, "disk": 0.12, "object": 0.05}
ROUTES = {
    ("device", "host"): ("memcpy", 220),
    ("host", "device"): ("memcpy", 150),
    ("host", "disk"): ("uring", 190),
    ("disk", "host"): ("uring", 60),
    ("host", "object"): ("objects", 120),
    ("object", "host"): ("objects", 12),
}
FAULTS = [
    ("copy_timed_out", "host>disk", 3),
    ("copy_io", "host>disk", 16),
    ("directory", "disk.dirs[1]", 1),
    ("checksum", "disk", 1),
]
SETTINGS = {
    "block_bytes": "2MiB",
    "eviction": "hazard",
    "host.capacity": "64GB",
    "host.huge_pages": "true",
    "host.staging_blocks": "64",
    "disk.capacity": "800GB",
    "disk.dirs": "/nvme0/kvbm, /nvme1/kvbm",
    "disk.backend": "auto",
    "object.url": "s3://cache/llama",
    "object.access_key": "(set)",
    "object.secret_key": "(set)",
    "object.put_budget": "10000",
    "transfer.timeout_ms": "5000",
    "transfer.max_concurrent": "4",
}


class Made:
    """Figures that grow as those of a busy process would, from a seed."""

    def __init__(self, kind: str = "calm") -> None:
        self.kind = kind
        self.random = random.Random(13)
        self.at = 0.0 if kind == "empty" else 5400.0
        self.asked = 0
        self.hits = dict.fromkeys(SHARES, 0.0)
        self.copied = dict.fromkeys(ROUTES, 0.0)
        if kind != "empty":
            self.asked = 4_000_000
            self.hits = {tier: share * self.asked * 0.9 for tier, share in SHARES.items()}
            self.copied = {route: rate * 5000 for route, (_, rate) in ROUTES.items()}

    def step(self, seconds: float) -> None:
        self.at += seconds
        if self.kind == "empty":
            return
        swing = 1 + 0.4 * math.sin(self.at / 37)
        asked = 900 * swing * seconds * self.random.uniform(0.7, 1.3)
        self.asked += asked
        for tier, share in SHARES.items():
            lost = 0.15 if self.kind == "trouble" and tier == "disk" else 1
            self.hits[tier] += (
                asked * share * lost * (1 + 0.25 * math.sin(self.at / 23)) * self.random.uniform(0.8, 1.2)
            )
        for route, (_, rate) in ROUTES.items():
            if not (self.kind == "trouble" and "disk" in route):
                self.copied[route] += rate * swing * seconds * self.random.uniform(0.2, 1.8)

    def state(self) -> dict:
        empty, trouble = self.kind == "empty", self.kind == "trouble"
        held = {"device": 12_000, "host": 32_000, "disk": 271_300, "object": 1_204_114}
        tiers = [
            {
                "tier": tier,
                "capacity_blocks": size,
                "resident_blocks": 0 if empty else held[tier],
                "dirty_blocks": {"host": 8200 if trouble else 2400, "disk": 5200}.get(tier, 0) if not empty else 0,
                "lost_blocks": 900 if trouble and tier == "disk" else 0,
                "evictions_total": int(self.copied["device", "host"] * {"device": 1, "host": 0.9}.get(tier, 0)),
                "hit_blocks_total": int(self.hits[tier]),
            }
            for tier, size in SIZES.items()
        ]
        routes = [
            {
                "from": a,
                "to": b,
                "backend": backend,
                "queued_blocks": 640 if trouble and "disk" in (a, b) else 0 if empty else self.random.randrange(12),
                "in_flight_blocks": 0 if empty else 16,
                "bytes_total": int(self.copied[a, b]) * BLOCK_BYTES,
                "copied_blocks_total": int(self.copied[a, b]),
                "failed_total": 16 if trouble and b == "disk" else 0,
                "overdue_now": 3 if trouble and b == "disk" else 0,
                "breaker": "open" if trouble and b == "disk" else "closed",
            }
            for (a, b), (backend, _) in ROUTES.items()
        ]
        faults = [
            {"at_s": self.at - 12 * number - 3, "what": what, "where": where, "count": count}
            for number, (what, where, count) in enumerate(FAULTS)
        ]
        return {
            "version": "0.1.0",
            "uptime_s": self.at,
            "block_bytes": BLOCK_BYTES,
            "block_tokens": BLOCK_TOKENS,
            "device": "cuda",
            "namespace": {"epoch": 0},
            "tiers": tiers,
            "groups": [],
            "routes": routes,
            "lookups": {
                "blocks_total": int(self.asked),
                "hit_blocks_total": sum(tier["hit_blocks_total"] for tier in tiers),
            },
            "peers": self.peers(),
            "faults": faults if trouble else [],
            "settings": SETTINGS,
        }

    def peers(self) -> dict | None:
        if self.kind == "empty":
            return None
        lost = {"at_s": self.at - 4.0, "why": "it did not answer in time"}
        idle = {"links": {}, "readers": 0, "leased_in_blocks": 0, "leased_out_blocks": 0, "fault": None}
        busy = {"links": {"shared_memory": 2, "tcp": 1}, "leased_in_blocks": 384}
        peers = [
            {"name": "prefill-1", "address": "10.0.0.1:6890"} | idle | busy,
            {"name": "prefill-2", "address": "10.0.0.2:6890"} | idle,
            {"name": "decode-2", "address": None} | idle | {"readers": 1, "leased_out_blocks": 96},
        ]
        if self.kind == "trouble":
            peers[0]["fault"] = lost
        return {"name": "decode-1", "address": "10.0.0.9:6890", "known": 12, "peers": peers}

    def metrics(self) -> str:
        if self.kind == "empty":
            return ""
        scales = (0.25, 0.5, 1, 2, 4)
        tops = {"device": 0.5, "host": 0.62, "disk": 0.66}
        missed = {"never_seen": 0.38, "evicted": 0.05, "capacity": 0.004, "io_error": 0.002}
        told = [
            f'kvbm_estimated_hit_rate{{scale="{scale}",tier="{tier}"}} {top * (1 - 0.75 ** (3 * scale + 1))}'
            for tier, top in tops.items()
            for scale in scales
        ]
        told += [
            f'kvbm_missed_tokens_total{{reason="{reason}"}} {int(share * self.asked * BLOCK_TOKENS)}'
            for reason, share in missed.items()
        ]
        return "\n".join([*told, ""])

    def ready(self) -> dict:
        disk = {"what": "disk", "why": "writes rest after a time-out, tried again in 4 s"}
        return {"ready": True, "degraded": [disk] if self.kind == "trouble" else []}


class Stub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.made, self.last, self.lock = Made(), time.monotonic(), threading.Lock()
        self.token: str | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"

    def now(self) -> Made:
        with self.lock:
            now = time.monotonic()
            self.made.step(now - self.last)
            self.last = now
            return self.made

    def __enter__(self) -> "Stub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        path = self.path.lstrip("/").partition("?")[0]
        name = path or "index.html"
        if name in KINDS:
            return self.tell(KINDS[name], (PAGE / name).read_bytes())
        if path.startswith("becomes/"):
            self.server.made = Made(path.removeprefix("becomes/"))
        if self.server.token and path in ("v1/state", "v1/why", "metrics"):
            if self.headers["Authorization"] != f"Bearer {self.server.token}":
                return self.send_error(401)
        if path == "metrics":
            return self.tell("text/plain", self.server.made.metrics().encode())
        answers = {
            "v1/state": lambda: self.server.now().state(),
            "readyz": lambda: self.server.made.ready(),
            "v1/why": self.why,
        }
        if path not in answers and not path.startswith("becomes/"):
            return self.send_error(404)
        self.tell("application/json", json.dumps(answers.get(path, dict)()).encode())

    def why(self) -> dict:
        found = [{"tier": "device", "blocks": 12}, {"tier": "disk", "blocks": 40}]
        missing = {"block": "9c1f77a0b2", "position": 40, "reason": "evicted", "tier": "host", "age_s": 42}
        taken = {"peer": "prefill-1", "way": "tcp", "leased_blocks": 8, "copied_blocks": 5, "why": "it was cancelled"}
        missing["policy"] = "eviction = hazard"
        return {"blocks": 60, "found": found, "next": missing, "from_peer": taken}

    def tell(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": len(body),
            "Content-Security-Policy": POLICY,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


if __name__ == "__main__":
    with Stub(int(sys.argv[1]) if sys.argv[1:] else 6880) as stub:
        print(stub.url)
        threading.Event().wait()
