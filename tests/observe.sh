#!/usr/bin/env bash
# What operators look at: dashboards, rules and the runbook agree with the metrics; the live page holds in a real browser; and a
# real Prometheus and Alertmanager watch the demo, in which each query returns data and no alert fires, and a replay whose disk hangs
# for a minute: alerts fire and end.
# The last line is one JSON object; exits 0 only if all that it says holds, 1 where something is wrong, and 3 if nothing is but a
# figure falls short.
#
#   tests/observe.sh [--install] [--quick] [--profile PROFILE]
#
# --install has apt install what is missing of prometheus, prometheus-alertmanager, chromium and chromium-driver, which takes root;
# without it they are skipped aloud, unless KVBM_REQUIRE names prometheus or chromium. --quick leaves out the replay and the
# bench of metrics (seven minutes); Prometheus watches the demo, for less than a minute.
# KVBM_OBSERVE_VENV says where the environment of the tests is or is to be made (target/observe), KVBM_SHOTS where pictures of the page go.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install=false
quick=false
profile=checked
while (($#)); do
    case $1 in
        --install) install=true ;;
        --quick) quick=true ;;
        --profile) profile=$2 && shift ;;
        *) echo "observe.sh: unknown argument $1; valid: --install, --quick, --profile PROFILE" >&2 && exit 2 ;;
    esac
    shift
done

venv=$(realpath -m "${KVBM_OBSERVE_VENV:-target/observe}")
python=$venv/bin/python
kvbm=$(realpath -m "${CARGO_TARGET_DIR:-target}")/$profile/kvbm
export KVBM_PROFILE=$profile
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

source tests/build.sh
source tests/expect.sh
source tests/trace.sh

skipped=()
skip() {
    echo "SKIPPED: $1" >&2
    skipped+=("$1")
}
has() {
    local program
    for program; do command -v "$program" >/dev/null || return 1; done
}
# Whether a package's programs are here. Where they are required and are not, that is a failure.
need() {
    local name=$1
    shift
    has "$@" && return
    skip "$name is not installed (tests/observe.sh --install)"
    [[ ,${KVBM_REQUIRE:-}, != *,$name,* ]] || failed+=("$name is required")
    return 1
}

if $install; then
    say 'packages'
    packages=()
    has prometheus promtool || packages+=(prometheus)
    has prometheus-alertmanager || packages+=(prometheus-alertmanager)
    has chromium chromedriver || packages+=(chromium chromium-driver)
    ((${#packages[@]} == 0)) || {
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
    } >&2
fi

say 'an environment for the tests'
[[ -x $python ]] || python3 -m venv "$venv"
"$python" -c 'import pytest, yaml' 2>/dev/null || "$python" -m pip install --quiet pytest pyyaml >&2
# Schemas of Grafana, Kubernetes and CycloneDX, which come with them.
"$python" -c 'import kubernetes_validate, grafana_foundation_sdk, cyclonedx, jsonschema' 2>/dev/null ||
    "$python" -m pip install --quiet kubernetes-validate grafana-foundation-sdk 'cyclonedx-python-lib[json-validation]' >&2 ||
    skip 'the schemas of Grafana, Kubernetes and CycloneDX cannot be installed here'

say 'the command'
build_kvbm "$profile"

chromium=true
need chromium chromium chromedriver || chromium=false
prometheus=true
need prometheus prometheus promtool prometheus-alertmanager || prometheus=false

say 'documents and the page'
expect 'the tests pass' "$python" -m pytest tests/observe -q -p no:cacheprovider --junit-xml "$scratch/tests.xml" >&2

if $quick; then
    skip 'the replay that Prometheus watches, and what metrics take (--quick)'
else
    say 'what metrics take from saves and loads'
    expect 'it is timed' "$kvbm" bench observe --json >"$scratch/bench.json"
fi

# Watches what $1 names: arguments of live.py follow.
watch() {
    local what=$1 status=0
    shift
    mkdir "$scratch/$what"
    timeout 400 "$python" tests/observe/live.py "$what" "$kvbm" "$@" "$scratch/$what" >"$scratch/$what.json" || status=$?
    ((status == 0 || status == 1 || status == 3)) || failed+=("the $what is watched to its end")
}

if $prometheus; then
    say 'the demo that Prometheus watches'
    watch demo
fi
if $prometheus && ! $quick; then
    say 'a replay that Prometheus watches'
    trace=$(a_trace "$scratch")
    watch replay "$(realpath "$trace")"
    if [[ -n ${KVBM_SHOTS:-} && -e $scratch/replay/page.png ]]; then cp "$scratch/replay/page.png" "$KVBM_SHOTS/replay.png"; fi
fi

"$python" - "$scratch" "$(printf '%s\n' "${skipped[@]}")" "${failed[@]}" <<'PYTHON'
import json, pathlib, sys
from xml.etree import ElementTree

place, skipped, wrong = pathlib.Path(sys.argv[1]), sys.argv[2].split("\n"), sys.argv[3:]
counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
try:
    for suite in ElementTree.parse(place / "tests.xml").iter("testsuite"):
        counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
except (OSError, ElementTree.ParseError):
    wrong.append("no report of the tests")
live, short = {}, []
for what in ("demo", "replay"):
    if not (place / f"{what}.json").exists():
        continue
    try:
        seen = json.loads((place / f"{what}.json").read_text())
    except ValueError:
        wrong.append(f"no result of the {what}")
        continue
    wrong += seen.pop("wrong", [])
    short += seen.pop("short", [])
    live |= seen
if (place / "bench.json").exists() and not wrong:
    rows = {row["watch"]: row for row in json.loads((place / "bench.json").read_text())["rows"]}
    ratio = rows["metrics"]["throughput_ratio"]
    live["metrics_throughput"] = round(ratio["median"], 3)
    # Where rounds differ by more than that, for other reasons, the median may be anything.
    short += ["metrics_throughput"] if ratio["p75"] < 0.99 else []
left_out = [line for line in skipped if line]
print(json.dumps({"holds": not wrong and not short, "failed": [*wrong, *short], "left_out": left_out, **counts, **live}))
sys.exit(1 if wrong else 3 if short else 0)
PYTHON
