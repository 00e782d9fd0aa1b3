#!/usr/bin/env python3
"""Writes the dashboards beside it; with --check says whether they are what it would write.

What users import is the JSON. This keeps its panels alike: each has a unit, a description, and one query or a few.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE = "$__rate_interval"
ROUTE = "{{from}} → {{to}}"
TIER_COLOURS = {"device": "#5794F2", "host": "#1FB8A6", "disk": "#E0A030", "object": "#9D6FE0"}


def target(expr: str, legend: str = "", instant: bool = False, style: str = "time_series") -> dict:
    kind = {"instant": True, "range": False} if instant else {"range": True}
    return {"datasource": SOURCE, "expr": expr, "legendFormat": legend or "__auto", "format": style, **kind}


def panel(kind: str, title: str, words: str, unit: str, *queries, width: int = 8, height: int = 8, **more) -> dict:
    """`queries` are pairs of an expression and what the legend says. `more` goes to the type's own settings."""
    instant = kind in ("stat", "gauge", "bargauge")
    targets = [target(expr, legend, instant) for expr, legend in queries]
    for letter, one in zip("ABCDEFGH", targets):
        one["refId"] = letter
    defaults = {"unit": unit, **more.pop("defaults", {})}
    options, custom = LOOKS[kind](more)
    if custom:
        defaults["custom"] = custom
    return {
        "type": kind,
        "title": title,
        "description": words,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": colours(queries)},
        "options": options,
        "gridPos": {"w": width, "h": height, "x": 0, "y": 0},
    }


def colours(queries) -> list[dict]:
    """A tier has one colour wherever a line is a tier's."""
    if not any(legend == "{{tier}}" for _, legend in queries):
        return []
    fixed = {tier: {"mode": "fixed", "fixedColor": colour} for tier, colour in TIER_COLOURS.items()}
    return [
        {"matcher": {"id": "byName", "options": tier}, "properties": [{"id": "color", "value": value}]}
        for tier, value in fixed.items()
    ]


def look_lines(more: dict) -> tuple[dict, dict]:
    stacked = more.get("stacked", False)
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    if more.get("log"):
        custom["scaleDistribution"] = {"type": "log", "log": 10}
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return options, custom


def look_one(more: dict) -> tuple[dict, dict]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    graph = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "textMode": "auto",
        "orientation": "auto",
    }
    return {"reduceOptions": reduce, **graph}, {}


def look_gauge(more: dict) -> tuple[dict, dict]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {
        "reduceOptions": reduce,
        "orientation": "auto",
        "showThresholdLabels": False,
        "showThresholdMarkers": True,
    }, {}


def look_bars(more: dict) -> tuple[dict, dict]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "gradient", "showUnfilled": True}, {}


LOOKS = {"timeseries": look_lines, "stat": look_one, "gauge": look_gauge, "bargauge": look_bars}


def steps(*bounds: tuple[float | None, str]) -> dict:
    return {
        "thresholds": {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in bounds]}
    }


ZERO_IS_GOOD = steps((None, "green"), (1e-9, "red"))
SHARE = {"min": 0, "max": 1}


def lines(*args, **more) -> dict:
    return panel("timeseries", *args, **more)


def stat(*args, **more) -> dict:
    return panel("stat", *args, width=4, height=4, **more)


def of(name: str, **labels: str) -> str:
    """A metric of the instances that are chosen. A label's value may begin with `=~` or `!=`."""
    matchers = ['instance=~"$instance"']
    for label, value in labels.items():
        operator = value[:2] if value[:2] in ("=~", "!=") else "="
        matchers.append(f'{label.rstrip("_")}{operator}"{value.removeprefix(operator)}"')
    return f"{name}{{{', '.join(matchers)}}}"


def of_tier(name: str, **labels: str) -> str:
    return of(name, tier="=~$tier", **labels)


def rate(by: str, metric: str, span: str = RATE) -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}[{span}]))"


def quantile_of_pulls(share: str) -> str:
    return f"histogram_quantile({share}, {rate('le, way', of('kvbm_peer_pull_seconds_bucket'))})"


def instead(value: str, label: str, words: str) -> str:
    """What a panel shows where there is nothing to count: that it is so, and not "No data", as of what is broken."""
    return f' or label_replace({value}, "{label}", "{words}", "", "")'


def quantile(share: float, by: str, metric: str) -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}[{RATE}])))"


def recent(metric: str, span: str = "1h") -> str:
    """What a counter grew by. One that appears with its first event has no sample before it, which increase() would need."""
    return f"sum(increase({metric}[{span}])) + (sum({metric} unless {metric} offset {span}) or vector(0))"


HIT, ASKED = of("kvbm_hit_tokens_total"), of("kvbm_requested_tokens_total")
SECONDS = of("kvbm_transfer_seconds_bucket")
BLOCK_BYTES = f"(sum({of('kvbm_transfer_bytes_total')}) / sum({of('kvbm_transfer_blocks_total')}))"
PREFILL = ("prefill", "Prefill tokens/s", "8000", "How many prompt tokens the engine computes in a second")

OVERVIEW = [
    stat(
        "Hit rate",
        "Share of requested tokens that were found in any tier, and not computed again.",
        "percentunit",
        (f"{rate('', HIT)} / {rate('', ASKED)}", ""),
    ),
    stat(
        "Tokens saved",
        "Tokens found instead of computed, in the time shown.",
        "short",
        (f"sum(increase({HIT}[$__range]))", ""),
    ),
    stat(
        "Prefill time saved",
        "What the engine would have computed for these tokens at `Prefill tokens/s` (above). The time to load them is not taken off.",
        "s",
        (f"sum(increase({HIT}[$__range])) / $prefill", ""),
    ),
    stat(
        "TTFT saved",
        "By how much the first token of a mean request comes sooner: its found tokens at `Prefill tokens/s`. The time to load them is not taken off.",
        "s",
        (f"{rate('', HIT)} / {rate('', of('kvbm_requests_total'))} / $prefill", ""),
    ),
    stat(
        "Lost slots",
        "Slots held by copies that have not ended. Alarm where it stays.",
        "short",
        (f"sum({of('kvbm_slots', state='lost')})", ""),
        defaults=ZERO_IS_GOOD,
    ),
    stat(
        "Failed copies, last hour",
        "Each is a miss, never a wrong byte.",
        "short",
        (f"{recent(of('kvbm_transfer_failures_total'))} or vector(0)", ""),
        defaults=ZERO_IS_GOOD,
    ),
    lines(
        "Hit rate by tier",
        "Share of requested tokens found, by the fastest tier that had them. Above the stack is what was computed.",
        "percentunit",
        (f"{rate('tier', HIT)} / scalar({rate('', ASKED)})", "{{tier}}"),
        stacked=True,
        width=12,
        defaults=SHARE,
    ),
    lines(
        "Hit rate by instance",
        "The same for all tiers together, of each process.",
        "percentunit",
        (f"{rate('instance', HIT)} / {rate('instance', ASKED)}", "{{instance}}"),
        width=12,
        defaults=SHARE,
    ),
    lines(
        "Tokens",
        "Prompt tokens asked for, found and not found.",
        "short",
        (rate("", ASKED), "requested / s"),
        (rate("", HIT), "found / s"),
        (rate("", of("kvbm_missed_tokens_total")), "missed / s"),
    ),
    lines(
        "Missed tokens by reason",
        "Why the first block that was missing was not there. docs/metrics.md explains the reasons.",
        "short",
        (rate("reason", of("kvbm_missed_tokens_total")), "{{reason}}"),
        stacked=True,
    ),
    lines(
        "Bytes moved", "On each route between tiers.", "Bps", (rate("from, to", of("kvbm_transfer_bytes_total")), ROUTE)
    ),
    lines(
        "Requests", "Chains leased in a second.", "reqps", (rate("instance", of("kvbm_requests_total")), "{{instance}}")
    ),
    lines(
        "Held tokens left to the engine",
        "Tokens that were held but are computed sooner than loaded, and tokens behind the last checkpoint of all cache groups.",
        "short",
        (rate("", of("kvbm_recompute_tokens_total")), "sooner computed / s"),
        (rate("", of("kvbm_out_of_reach_tokens_total")), "out of reach / s"),
    ),
    lines(
        "How full",
        "Share of slots that hold a block. Full is normal.",
        "percentunit",
        (f"sum by (tier) ({of('kvbm_slots', state='resident')}) / sum by (tier) ({of('kvbm_slots')})", "{{tier}}"),
        defaults=SHARE,
    ),
]

TIERS = [
    lines(
        "How full",
        "Share of slots that hold a block. Full is normal; an object tier without limit looks empty.",
        "percentunit",
        (
            f"sum by (tier) ({of_tier('kvbm_slots', state='resident')}) / sum by (tier) ({of_tier('kvbm_slots')})",
            "{{tier}}",
        ),
        defaults=SHARE,
    ),
    lines(
        "Slots by state",
        "Without those that are free.",
        "short",
        (f"sum by (tier, state) ({of_tier('kvbm_slots', state='!=free')})", "{{tier}} {{state}}"),
        stacked=True,
    ),
    lines(
        "Time until full",
        "Free slots over the speed at which they go, over 15 minutes; at most a year, which means that it is not filling.",
        "s",
        (
            f"clamp_max(sum by (tier) ({of_tier('kvbm_slots', state='free')}) / clamp_min(sum by (tier) (deriv({of_tier('kvbm_slots', state='resident')}[15m])), 1e-6), 31536000)",
            "{{tier}}",
        ),
        log=True,
    ),
    lines(
        "Blocks that come",
        "Blocks that became resident.",
        "short",
        (rate("tier", of_tier("kvbm_published_blocks")), "{{tier}}"),
    ),
    lines(
        "Blocks that are evicted",
        "Blocks that made room for others.",
        "short",
        (rate("tier", of_tier("kvbm_evicted_blocks")), "{{tier}}"),
    ),
    lines(
        "Blocks not taken in",
        "`declined`: not worth the room. `full`: reservations without room, since every leaf was leased, in flight or not yet flushed.",
        "short",
        (rate("tier", of_tier("kvbm_declined_blocks")), "{{tier}} declined"),
        (rate("tier", of_tier("kvbm_full_reservations")), "{{tier}} full"),
    ),
    lines(
        "Age of what is missed",
        "How long a block had been gone when it was wanted again. Short ages say that a little more of the tier would help.",
        "s",
        (quantile(0.5, "tier", of_tier("kvbm_miss_age_seconds_bucket")), "{{tier}} median"),
        (quantile(0.9, "tier", of_tier("kvbm_miss_age_seconds_bucket")), "{{tier}} p90"),
        log=True,
    ),
    lines(
        "Misses by reason",
        "Chains held in part or not at all, by why the first missing block was not there, and the tier that had it last (`none`, shown with all tiers: no tier).",
        "short",
        (rate("tier, reason", of_tier("kvbm_misses_total")), "{{tier}} {{reason}}"),
        stacked=True,
    ),
    panel(
        "bargauge",
        "Hit rate at other sizes",
        "Estimated: what share of requested blocks a tier of a multiple of this one's size would have held, of late.",
        "percentunit",
        (f"avg by (tier, scale) ({of_tier('kvbm_estimated_hit_rate')})", "{{tier}} × {{scale}}"),
        defaults=SHARE,
    ),
    lines(
        "Waiting to be flushed",
        "Blocks that the tier below does not have yet.",
        "short",
        (f"sum by (tier) ({of_tier('kvbm_dirty_blocks')})", "{{tier}}"),
    ),
    lines(
        "Share that waits to be flushed",
        "Of the blocks held. Flushing falls behind where it grows.",
        "percentunit",
        (
            f"sum by (tier) ({of_tier('kvbm_dirty_blocks')}) / (sum by (tier) ({of_tier('kvbm_slots', state='resident')}) > 0)",
            "{{tier}}",
        ),
        defaults=SHARE,
    ),
    lines(
        "Staging slots",
        "DRAM slots through which blocks bounce where nothing connects their tiers.",
        "short",
        (f"sum by (state) ({of('kvbm_staging_slots')})", "{{state}}"),
        stacked=True,
    ),
    lines(
        "Saves that changed nothing",
        "Blocks that were there already, and blocks that could not be kept since those before them are not there.",
        "short",
        (rate("", of("kvbm_duplicate_blocks_total")), "duplicate / s"),
        (rate("", of("kvbm_orphan_blocks_total")), "orphan / s"),
    ),
    lines("Epoch", "It grows with each reset.", "short", (of("kvbm_epoch"), "{{instance}}")),
]

TRANSFERS = [
    lines(
        "Bytes", "Copied on each route.", "Bps", (rate("from, to", of("kvbm_transfer_bytes_total")), ROUTE), width=12
    ),
    lines(
        "Blocks",
        "Copied on each route.",
        "short",
        (rate("from, to", of("kvbm_transfer_blocks_total")), ROUTE),
        width=12,
    ),
    lines(
        "Time of a block, p99",
        "From a batch's start to a block's arrival, without the time in the queue. The largest bucket is 2 s.",
        "s",
        (quantile(0.99, "from, to", SECONDS), ROUTE),
        log=True,
    ),
    lines(
        "Time of a block, median",
        "From a batch's start to a block's arrival, without the time in the queue.",
        "s",
        (quantile(0.5, "from, to", SECONDS), ROUTE),
        log=True,
    ),
    lines(
        "Time of a block, mean",
        "From a batch's start to a block's arrival, without the time in the queue.",
        "s",
        (
            f"{rate('from, to', of('kvbm_transfer_seconds_sum'))} / {rate('from, to', of('kvbm_transfer_seconds_count'))}",
            ROUTE,
        ),
        log=True,
    ),
    lines(
        "Waiting",
        "Blocks in the queue of each route. Beyond transfer.queue_blocks saves are refused.",
        "short",
        (f"sum by (from, to) ({of('kvbm_queue_blocks')})", ROUTE),
    ),
    lines(
        "Batches under way",
        "At most transfer.max_concurrent for each route.",
        "short",
        (f"sum by (from, to) ({of('kvbm_batches_in_flight')})", ROUTE),
    ),
    lines(
        "Failed",
        "Copies that failed, by kind.",
        "short",
        (rate("from, to, kind", of("kvbm_transfer_failures_total")), ROUTE + " {{kind}}"),
    ),
    lines(
        "Overdue",
        "Copies whose medium has completed nothing for transfer.timeout_ms. Each holds the slot that it writes.",
        "short",
        (f"sum by (from, to) ({of('kvbm_copies_overdue')})", ROUTE),
    ),
    lines(
        "Given up, and given back",
        "Copies given up as overdue, and those of them that ended after all, since the start.",
        "short",
        (f"sum by (from, to) ({of('kvbm_overdue_copies_total')})", ROUTE + " given up"),
        (f"sum by (from, to) ({of('kvbm_returned_copies_total')})", ROUTE + " given back"),
    ),
    lines(
        "Lost slots",
        "Held by overdue copies until these end.",
        "short",
        (f"sum by (tier) ({of('kvbm_slots', state='lost')})", "{{tier}}"),
    ),
    lines(
        "Backends that this machine lacks",
        "Starts at which `auto` fell back: with `gds`, blocks between disk and device pass through host memory.",
        "short",
        (f"sum by (backend) ({of('kvbm_backend_fallbacks_total')})", "{{backend}}"),
    ),
]

WRITTEN = of("kvbm_transfer_bytes_total", to="disk")
BUDGET = of("kvbm_disk_write_budget_bytes")
DISK = [
    stat("Written, last day", "Bytes written to the disk tier.", "bytes", (f"sum(increase({WRITTEN}[1d]))", "")),
    stat("At this speed in a year", "From the last hour.", "bytes", (f"{rate('', WRITTEN, '1h')} * 86400 * 365", "")),
    panel(
        "gauge",
        "Share of the endurance",
        "Bytes written, at the speed of the last hour, over what the drives endure (`Endurance, bytes a day`, above: capacity times drive writes a day, all drives together).",
        "percentunit",
        (f"{rate('', WRITTEN, '1h')} * 86400 / $endurance", ""),
        width=8,
        height=8,
        defaults={**SHARE, **steps((None, "green"), (0.7, "orange"), (1, "red"))},
    ),
    panel(
        "gauge",
        "Share of the budget, last day",
        "Bytes written in 24 hours over `disk.write_budget`, which no 24 hours exceed: what is beyond it stays in the tier above. Of processes that have a budget.",
        "percentunit",
        (f"sum(increase({WRITTEN}[1d]) and on (job, instance) {BUDGET}) / sum({BUDGET})", ""),
        width=8,
        height=8,
        defaults={**SHARE, **steps((None, "green"), (0.7, "orange"), (0.9, "red"))},
    ),
    stat(
        "Reads for each write",
        "Blocks read from the disk tier for each one written, over an hour. Far below 1: most are written for nothing, and disk.admission may be worth a look.",
        "none",
        (
            f"{rate('', of('kvbm_transfer_blocks_total', from_='disk'), '1h')} / {rate('', of('kvbm_transfer_blocks_total', to='disk'), '1h')}",
            "",
        ),
    ),
    stat("Directories in use", "Of those in disk.dirs.", "short", (f"sum({of('kvbm_disk_directory_up')})", "")),
    lines(
        "Bytes to and from disk",
        "All that the disk tier writes and reads, without the scrubber.",
        "Bps",
        (rate("", WRITTEN), "written"),
        (rate("", of("kvbm_transfer_bytes_total", from_="disk")), "read"),
        width=12,
    ),
    lines(
        "Directories",
        "1: in use; 0: left alone. Numbers are places in disk.dirs.",
        "short",
        (of("kvbm_disk_directory_up"), "{{instance}} {{dir}}"),
        width=12,
        defaults=SHARE,
    ),
    lines(
        "Failures of directories",
        "Times that a directory was left alone, since the start.",
        "short",
        (f"sum by (instance, dir) ({of('kvbm_disk_directory_failures_total')})", "{{instance}} {{dir}}"),
    ),
    lines(
        "Scrubbed",
        "Blocks verified that no request asked for.",
        "short",
        (rate("tier, outcome", of("kvbm_scrubbed_blocks_total")), "{{tier}} {{outcome}}"),
    ),
    lines(
        "Not admitted",
        "Blocks that were not thought worth a write.",
        "short",
        (rate("", of("kvbm_declined_blocks", tier="disk")), "declined / s"),
    ),
    lines(
        "Flushes that failed",
        "Since the start. They are tried again.",
        "short",
        (f"sum by (tier) ({of('kvbm_flush_failures')})", "{{tier}}"),
        width=12,
    ),
    lines(
        "Index not written",
        "Times since the start. Until it succeeds, what comes is not found after a restart.",
        "short",
        (f"sum by (tier) ({of('kvbm_index_failures_total')})", "{{tier}}"),
        width=12,
    ),
]

REQUESTS = "kvbm_object_requests_total"
PUT_COST = f"{rate('', of(REQUESTS, request='=~put|list'))} * 3600 / 1000 * $put_price"
GET_COST = f"{rate('', of(REQUESTS, request='get'))} * 3600 / 1000 * $get_price"
EGRESS_COST = f"{rate('', of('kvbm_object_bytes_total', direction='received'))} * 3600 / 1e9 * $egress_price"
OBJECT = [
    stat("Requests", "To the object store.", "reqps", (rate("", of(REQUESTS)), "")),
    stat(
        "Held",
        "Blocks in the object tier, in bytes. Workers that share a bucket count the same blocks.",
        "bytes",
        (f"sum({of('kvbm_slots', tier='object', state='resident')}) * {BLOCK_BYTES}", ""),
    ),
    stat(
        "Requests cost, a month",
        "At the speed of the last while and the prices above. Storage and traffic are not in it.",
        "currencyUSD",
        (f"({PUT_COST} + {GET_COST}) * 730", ""),
    ),
    stat(
        "Storage costs, a month",
        "What is held, at the price above.",
        "currencyUSD",
        (f"sum({of('kvbm_slots', tier='object', state='resident')}) * {BLOCK_BYTES} / 1e9 * $storage_price", ""),
    ),
    stat(
        "Cost of a million tokens found",
        "Requests and traffic, over the tokens that the object tier had.",
        "currencyUSD",
        (
            f"({PUT_COST} + {GET_COST} + {EGRESS_COST}) / ({rate('', of('kvbm_hit_tokens_total', tier='object'))} * 3600 / 1e6)",
            "",
        ),
    ),
    stat(
        "Failed requests",
        "Share of all, over five minutes.",
        "percentunit",
        (
            f"1 - ({rate('', of(REQUESTS, outcome='!=failed'), '5m')} or vector(0)) / {rate('', of(REQUESTS), '5m')}",
            "",
        ),
        defaults=ZERO_IS_GOOD,
    ),
    lines(
        "Requests by kind",
        "What the client tries again by itself counts once.",
        "reqps",
        (rate("request", of(REQUESTS)), "{{request}}"),
    ),
    lines(
        "Requests by outcome",
        "`conflict`: another worker stored the same first, which is no fault.",
        "reqps",
        (rate("outcome", of(REQUESTS)), "{{outcome}}"),
    ),
    lines(
        "Bytes",
        "Sent to the store and asked of it.",
        "Bps",
        (rate("direction", of("kvbm_object_bytes_total")), "{{direction}}"),
    ),
    lines(
        "Cost of an hour",
        "Requests and traffic at the prices above.",
        "currencyUSD",
        (PUT_COST, "put and list"),
        (GET_COST, "get"),
        (EGRESS_COST, "traffic out"),
        stacked=True,
    ),
    lines(
        "Budget left",
        "Share of each budget of the object tier in this period; at 0 it is not used in that direction. Only where a budget is set.",
        "percentunit",
        (f"min by (budget) ({of('kvbm_object_budget_left')})", "{{budget}}"),
        defaults=SHARE,
    ),
    lines(
        "Refused by a budget",
        "Segments not stored and runs of blocks not read.",
        "short",
        (rate("budget", of("kvbm_object_budget_refusals_total")), "{{budget}}"),
    ),
    lines(
        "Time of a block, p99",
        "From a batch's start to a block's arrival. The largest bucket is 2 s.",
        "s",
        (quantile(0.99, "from, to", of("kvbm_transfer_seconds_bucket", from_="object")), ROUTE),
        (quantile(0.99, "from, to", of("kvbm_transfer_seconds_bucket", to="object")), ROUTE),
        log=True,
        width=12,
    ),
    lines(
        "Blocks for each request",
        "Blocks stored with a put and read with a get: requests are paid for each, so more is cheaper.",
        "none",
        (f"{rate('', of('kvbm_transfer_blocks_total', to='object'))} / {rate('', of(REQUESTS, request='put'))}", "put"),
        (
            f"{rate('', of('kvbm_transfer_blocks_total', from_='object'))} / {rate('', of(REQUESTS, request='get'))}",
            "get",
        ),
        width=12,
    ),
]

FAULTS = [
    stat(
        "Drift",
        "Broken invariants of the block table: 0, or a defect.",
        "short",
        (f"max({of('kvbm_accounting_drift')})", ""),
        defaults=ZERO_IS_GOOD,
    ),
    stat(
        "Lost slots",
        "Held by copies that have not ended.",
        "short",
        (f"sum({of('kvbm_slots', state='lost')})", ""),
        defaults=ZERO_IS_GOOD,
    ),
    stat(
        "Overdue now",
        "Copies whose medium has completed nothing for transfer.timeout_ms.",
        "short",
        (f"sum({of('kvbm_copies_overdue')})", ""),
        defaults=ZERO_IS_GOOD,
    ),
    stat(
        "Changed blocks, last hour",
        "Blocks whose checksum did not hold. They were dropped, not served.",
        "short",
        (f"{recent(of('kvbm_checksum_failures_total'))} or vector(0)", ""),
        defaults=ZERO_IS_GOOD,
    ),
    stat(
        "Panics",
        "Of background work and of the handling of completions, since the start.",
        "short",
        (f"sum({of('kvbm_background_panics_total')}) + max({of('kvbm_completion_panics')})", ""),
        defaults=ZERO_IS_GOOD,
    ),
    stat(
        "Alerts",
        "Alerts of docs/alerts that fire.",
        "short",
        ('count(ALERTS{alertname=~"Kvbm.+", alertstate="firing"}) or vector(0)', ""),
        defaults=ZERO_IS_GOOD,
    ),
    lines(
        "Failed copies",
        "Each is a miss for the engine, with the blocks behind it.",
        "short",
        (rate("from, to, kind", of("kvbm_transfer_failures_total")), ROUTE + " {{kind}}"),
        width=12,
    ),
    lines(
        "Alerts",
        "What fires, and where.",
        "short",
        (
            'count by (alertname, instance) (ALERTS{alertname=~"Kvbm.+", alertstate="firing"})'
            + instead("vector(0)", "alertname", "none"),
            "{{alertname}} {{instance}}",
        ),
        stacked=True,
        width=12,
    ),
    lines(
        "Overdue copies",
        "Copies whose medium has completed nothing for transfer.timeout_ms, now.",
        "short",
        (f"sum by (from, to) ({of('kvbm_copies_overdue')})", ROUTE),
    ),
    lines(
        "Breakers",
        "1: nothing is copied on the route but a block that tries now and then, since its medium has failed or hung.",
        "short",
        (f"sum by (from, to) ({of('kvbm_breaker_open')})", ROUTE),
    ),
    lines(
        "Changed blocks",
        "By the tier that they were read from, since the start.",
        "short",
        (f"sum by (tier) ({of('kvbm_checksum_failures_total')})", "{{tier}}"),
    ),
    lines(
        "Dropped blocks",
        "Since the start, with their descendants: as corrupt, and because they could not be read any more.",
        "short",
        (f"sum by (tier) ({of('kvbm_quarantined_blocks')})", "{{tier}} corrupt"),
        (f"sum by (tier) ({of('kvbm_unreadable_blocks')})", "{{tier}} unreadable"),
    ),
    lines(
        "Blocks that left unflushed",
        "Since the start: the tier below could not be written when room was needed.",
        "short",
        (f"sum by (tier) ({of('kvbm_unflushed_blocks')})", "{{tier}}"),
    ),
    lines(
        "Ranks",
        "1: there; 0: away, and nothing is copied. The leader is the process that is scraped; most have no other ranks.",
        "short",
        (of("kvbm_rank_up") + instead(of("up"), "rank", "leader"), "{{instance}} {{rank}}"),
        defaults=SHARE,
    ),
    lines(
        "Compared with the engine",
        "Hits that the engine computed again. Only where transfer.shadow_share is set.",
        "short",
        (
            rate("tier, verdict", of("kvbm_shadow_blocks_total")) + instead("vector(0)", "verdict", "nothing compared"),
            "{{tier}} {{verdict}}",
        ),
    ),
    lines(
        "Wrong blocks at most",
        "The share of wrong blocks is not larger, with 95 % confidence. Only where transfer.shadow_share is set.",
        "percentunit",
        (
            f"max by (tier) ({of('kvbm_shadow_wrong_rate_bound')})" + instead("vector(1)", "tier", "nothing compared"),
            "{{tier}}",
        ),
        log=True,
    ),
]

TENANTS = [
    lines(
        "Hit rate",
        "Share of a tenant's requested tokens that were found in any tier. `other`: all that tenant_weights and tenant_quotas do not name.",
        "percentunit",
        (
            f"{rate('tenant', of('kvbm_tenant_hit_tokens_total'))} / ({rate('tenant', of('kvbm_tenant_requested_tokens_total'))} > 0)",
            "{{tenant}}",
        ),
        width=12,
        defaults=SHARE,
    ),
    lines(
        "Tokens asked for",
        "Of a tenant's leased chains.",
        "short",
        (rate("tenant", of("kvbm_tenant_requested_tokens_total")), "{{tenant}} / s"),
        stacked=True,
        width=12,
    ),
    lines(
        "Held",
        "Bytes of a tier that are charged to a tenant: what its requests brought there.",
        "bytes",
        (f"sum by (tenant, tier) ({of_tier('kvbm_tenant_blocks')}) * scalar({BLOCK_BYTES})", "{{tenant}} {{tier}}"),
        stacked=True,
        width=12,
    ),
    lines(
        "Share of the quota",
        "Blocks that a tenant holds of a tier, over its quota of them. Above 1 it uses room that no other tenant wants, and gives way first.",
        "percentunit",
        (
            f"sum by (instance, tenant, tier) ({of_tier('kvbm_tenant_blocks')}) / on (instance, tenant) group_left () sum by (instance, tenant) ({of('kvbm_tenant_quota_blocks')})",
            "{{tenant}} {{tier}}",
        ),
        width=12,
    ),
    lines(
        "Quota",
        "Of each tier, in bytes.",
        "bytes",
        (f"sum by (tenant) ({of('kvbm_tenant_quota_blocks')}) * scalar({BLOCK_BYTES})", "{{tenant}}"),
        width=12,
    ),
    lines(
        "Evicted",
        "Blocks of a tenant's that made room for others, in a second.",
        "short",
        (rate("tenant, tier", of_tier("kvbm_tenant_evicted_blocks")), "{{tenant}} {{tier}}"),
        width=12,
    ),
]

PRICES = [
    ("put_price", "1,000 puts cost", "0.005", "Price of a thousand PUT or LIST requests"),
    ("get_price", "1,000 gets cost", "0.0004", "Price of a thousand GET requests"),
    ("egress_price", "1 GB out costs", "0", "Price of a gigabyte that leaves the store"),
    ("storage_price", "1 GB-month costs", "0.023", "Price of a gigabyte stored for a month"),
]
ENDURANCE = (
    "endurance",
    "Endurance, bytes a day",
    "1920000000000",
    "What the drives endure: capacity in bytes times drive writes a day",
)

PEERS = [
    lines(
        "Bytes between workers",
        "What came from peers, and what went to them over TCP. What a reader copies by itself, from a neighbour's memory or by NIXL, is counted where it arrives.",
        "Bps",
        (rate("direction, way", of("kvbm_peer_bytes_total")), "{{direction}} by {{way}}"),
        width=12,
    ),
    lines(
        "Blocks between workers",
        "The same in blocks. Bytes over blocks is the size of a block.",
        "short",
        (rate("direction, way", of("kvbm_peer_blocks_total")), "{{direction}} by {{way}} / s"),
        width=12,
    ),
    lines(
        "Leases that ended",
        "At peers (received) and to peers (sent), by how. Others than whole and given_up are misses, or blocks that another worker needed for too long.",
        "short",
        (rate("direction, end", of("kvbm_peer_leases_total")), "{{direction}}: {{end}} / s"),
        width=12,
    ),
    lines(
        "Time of a pull",
        "From the first request for blocks to the arrival of the last, whatever their number.",
        "s",
        (quantile_of_pulls("0.5"), "{{way}} p50"),
        (quantile_of_pulls("0.99"), "{{way}} p99"),
        width=12,
    ),
    lines(
        "Bytes that NIXL reads at once",
        "The mean piece of memory: neighbouring blocks are one. Small pieces are slow.",
        "bytes",
        (
            f"{rate('instance', of('kvbm_peer_bytes_total', way='nixl'))}"
            f" / {rate('instance', of('kvbm_peer_nixl_descriptors_total'))}",
            "{{instance}}",
        ),
        width=12,
    ),
    lines(
        "Workers that were not let in",
        "They did not know the secret, had other blocks, or found all connections in use. The log says which.",
        "short",
        (rate("reason", of("kvbm_peer_refused_total")), "{{reason}} / s"),
        width=12,
    ),
    lines(
        "Numbers that were too large",
        "Of blocks that were converted (peers.convert_types): the largest number of the new type is in their place.",
        "short",
        (rate("instance", of("kvbm_peer_saturated_numbers_total")), "{{instance}} / s"),
        width=12,
    ),
    lines(
        "Blocks saved layer by layer",
        "What an engine saved while it computed, so that another engine reads each layer as soon as it is there.",
        "short",
        (rate("instance", of("kvbm_layered_blocks_total")), "{{instance}} / s"),
        width=12,
    ),
    lines(
        "Leases that there are",
        "At peers (received) and to peers (sent); and those that were cut, since peers.lease_share left no room for all blocks.",
        "short",
        (f"sum by (direction) ({of('kvbm_peer_open_leases')})", "{{direction}}"),
        (rate("instance", of("kvbm_peer_leases_cut_total")), "{{instance}} cut / s"),
        width=12,
    ),
]

BOARDS = {
    "overview": ("overview", OVERVIEW, [PREFILL]),
    "tiers": ("tiers", TIERS, []),
    "transfers": ("transfers", TRANSFERS, []),
    "disk": ("disk wear", DISK, [ENDURANCE]),
    "object": ("object store", OBJECT, PRICES),
    "tenants": ("tenants", TENANTS, []),
    "peers": ("peers", PEERS, []),
    "faults": ("faults", FAULTS, []),
}


def chosen(name: str, label: str, query: str) -> dict:
    both = {"text": "All", "value": "$__all"}
    asked = {"query": query, "refId": name}
    more = {
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "refresh": 2,
        "sort": 1,
        "current": both,
        "options": [],
    }
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": asked,
        **more,
    }


def typed(name: str, label: str, value: str, words: str) -> dict:
    now = {"text": value, "value": value}
    return {
        "type": "textbox",
        "name": name,
        "label": label,
        "description": words,
        "query": value,
        "current": now,
        "options": [{**now, "selected": True}],
    }


def variables(panels: list[dict], more) -> list[dict]:
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "refresh": 1,
        "options": [],
    }
    made = [source, chosen("instance", "Instance", "label_values(kvbm_requests_total, instance)")]
    if "$tier" in json.dumps(panels):
        made.append(chosen("tier", "Tier", 'label_values(kvbm_slots{instance=~"$instance"}, tier)'))
    return made + [typed(*one) for one in more]


def placed(panels: list[dict]) -> list[dict]:
    """From left to right, and a new row where the next does not fit."""
    x = y = height = 0
    for number, one in enumerate(panels, 1):
        at = one["gridPos"]
        if x + at["w"] > WIDTH:
            x, y, height = 0, y + height, 0
        one["id"] = number
        at |= {"x": x, "y": y}
        x, height = x + at["w"], max(height, at["h"])
    return panels


def board(name: str) -> dict:
    title, panels, more = BOARDS[name]
    return {
        "uid": f"kvbm-{name}",
        "title": f"kvbm: {title}",
        "tags": ["kvbm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "kvbm",
                "tags": ["kvbm"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {"list": variables(panels, more)},
        "annotations": {"list": []},
        "panels": placed(panels),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    other = []
    for name in BOARDS:
        path, text = HERE / f"{name}.json", json.dumps(board(name), indent=2, ensure_ascii=False) + "\n"
        if check and (not path.exists() or path.read_text() != text):
            other.append(path.name)
        elif not check:
            path.write_text(text)
    if other:
        print(f"not what docs/dashboards/generate.py writes: {', '.join(other)}", file=sys.stderr)
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
