#!/usr/bin/env bash
# The transfer backends as users choose them: toggles, a replay with disk and objects on NIXL against an
# S3-protocol server, and how close the manager comes to NIXL called directly. Installs NIXL and the server into a
# virtual environment of its own. The last line is one JSON object; exits 0 only if all that it says holds, 3 if
# nothing is wrong but a figure falls short in the median of three runs, and 77 where nothing can be installed.
#
#   tests/backends.sh [--long] [--profile PROFILE]
#   tests/backends.sh --self-test
#
# --long replays the whole trace, takes larger working sets for the figures, and tries other versions of NIXL.
# --self-test tries only whether results that lack something are noticed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

long=false
self_test=false
profile=checked
while (($#)); do
    case $1 in
        --long) long=true ;;
        --self-test) self_test=true ;;
        --profile) profile=$2 && shift ;;
        *) echo "backends.sh: unknown argument $1; valid: --long, --profile PROFILE, --self-test" >&2 && exit 2 ;;
    esac
    shift
done

target=${CARGO_TARGET_DIR:-target}
kvbm=$target/$profile/kvbm
environment=${KVBM_BACKENDS_VENV:-$target/backends-venv}
scratch=$(mktemp -d)
server=
stop() {
    [[ -z $server ]] || kill "$server" 2>/dev/null || true
    rm -rf "$scratch"
}
trap stop EXIT

source tests/build.sh
source tests/expect.sh

# Sums up what lies in a directory: 0 if all holds, 1 if anything is wrong or missing, 3 if only figures fall short.
judge() {
    "$python" - "$@" <<'PYTHON'
import collections, json, pathlib, statistics, sys

place, wrong = pathlib.Path(sys.argv[1]), sys.argv[2:]
TIERS = {"device", "host", "disk", "object"}
POSIX = {f"posix_{op}_{size}MiB" for op in ("write", "read") for size in (1, 4)}
UCX = {f"ucx_{op}" for op in ("write", "read")}


def field(record, name, *path):
    """A number, whose absence is a failure that is named."""
    for step in path:
        record = record.get(step) if isinstance(record, dict) else None
    if isinstance(record, (int, float)) and not isinstance(record, bool):
        return record
    wrong.append(f"no {name}")
    return None


def read(path):
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        wrong.append(f"no {path.name}")
        return {}
    return found


def runs(kind):
    paths = sorted(place.glob(f"{kind}.*.json"))
    if not paths:
        wrong.append(f"no {kind}.*.json")
    return [read(path) for path in paths]


def rows(run):
    found = run.get("rows")
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


replay = read(place / "replay.json")
if field(replay, "mismatches", "mismatches"):
    wrong.append("mismatches")
if field(replay, "blocks_verified", "blocks_verified") == 0:
    wrong.append("nothing was verified")
for tier in sorted(TIERS):
    if field(replay, f"lost slots of {tier}", "slots", tier, "lost"):
        wrong.append(f"lost slots of {tier}")

ratios, layer = collections.defaultdict(list), []
for run in runs("posix"):
    found = {f"posix_{row.get('op')}_{(field(row, 'size of a row', 'size') or 0) // (1 << 20)}MiB": row for row in rows(run)}
    for name in sorted(POSIX):
        ratios[name].append(field(found.get(name, {}), f"ratio of {name}", "ratio"))
for run in runs("ucx"):
    found = {f"ucx_{row.get('op')}": row for row in rows(run)}
    for name in sorted(UCX):
        ratios[name].append(field(found.get(name, {}), f"ratio of {name}", "ratio", "median"))
    layer.append(field(run, "layer_us", "layer_us", "median"))

# Medians over the runs: a machine with others on it is noisy.
median = lambda values: statistics.median(present) if (present := [value for value in values if value is not None]) else None
ratios = {name: median(values) for name, values in ratios.items()}
layer = median(layer)
short = [name for name, ratio in ratios.items() if ratio is not None and ratio < 0.9]
short += ["layer_us"] if layer is not None and layer > 2 else []
print(json.dumps({
    "holds": not wrong and not short,
    "failed": wrong + short,
    "ratios": {name: None if ratio is None else round(ratio, 3) for name, ratio in ratios.items()},
    "layer_us_per_16_blocks": None if layer is None else round(layer, 3),
    "replay": {name: replay.get(name) for name in ("requests", "blocks_verified", "mismatches")},
}))
sys.exit(1 if wrong else 3 if short else 0)
PYTHON
}

# A judge that passes what is not there passes everything: it is fed results that lack something, or are bad.
test_the_judge() {
    local python=python3 wanted number case status cases=0 failures=0
    while IFS='|' read -r number wanted case; do
        status=0 cases=$((cases + 1))
        judge "$scratch/judge/$number" >"$scratch/verdict" 2>&1 || status=$?
        if [[ $status != "$wanted" ]] || ! grep -q '^{"holds": ' "$scratch/verdict"; then
            echo "the judge says $status, not $wanted, of: $case" >&2
            cat "$scratch/verdict" >&2
            failures=$((failures + 1))
        fi
    done < <(results_to_judge)
    ((cases > 20 && failures == 0))
}

# Writes results into directories of their own, and lists them: number, verdict, what is wrong with them.
results_to_judge() {
    python3 - "$scratch/judge" <<'PYTHON'
import json, pathlib, sys

# The verdict, and what makes of good results (r: the replay, p: POSIX, u: UCX) those that deserve it.
CASES = """
0|pass
3|p["rows"][0]["ratio"] = 0.5
3|u["layer_us"]["median"] = 2.5
1|r = None
1|r = ""
1|r = "[]"
1|r["mismatches"] = 1
1|r["blocks_verified"] = 0
1|r["slots"]["disk"]["lost"] = 1
1|del r["mismatches"]
1|del r["blocks_verified"]
1|del r["slots"]
1|r["slots"] = {}
1|del r["slots"]["object"]
1|del r["slots"]["disk"]["lost"]
1|p = None
1|p = "{}"
1|del p["rows"]
1|p["rows"] = []
1|p["rows"].pop()
1|del p["rows"][0]["ratio"]
1|p["rows"][0]["ratio"] = None
1|del p["rows"][0]["size"]
1|del p["rows"][0]["op"]
1|u = None
1|u = "not JSON"
1|del u["rows"]
1|u["rows"].pop()
1|u["rows"][0]["ratio"] = {}
1|del u["layer_us"]
1|u["layer_us"] = {}
"""

for number, case in enumerate(CASES.strip().splitlines()):
    r = {"requests": 9, "blocks_verified": 5, "mismatches": 0,
         "slots": {tier: {"lost": 0} for tier in ("device", "host", "disk", "object")}}
    p = {"rows": [{"op": op, "size": size << 20, "ratio": 1.0} for op in ("write", "read") for size in (1, 4)]}
    u = {"rows": [{"op": op, "ratio": {"median": 1.0}} for op in ("write", "read")], "layer_us": {"median": 1.0}}
    exec(case.split("|")[1])
    place = pathlib.Path(sys.argv[1]) / str(number)
    place.mkdir(parents=True)
    for name, result in {"replay": r, "posix.1": p, "ucx.1": u}.items():
        if result is not None:
            text = result if isinstance(result, str) else json.dumps(result)
            (place / f"{name}.json").write_text(text)
    print(f"{number}|{case}")
PYTHON
}

say 'the judge of the results'
expect 'the judge misses nothing' test_the_judge
if $self_test; then exit $((${#failed[@]} > 0)); fi

say 'NIXL, a server, the binary'
install() {
    python3 -m venv "$environment" &&
        "$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps nixl-cu12==1.5.1 &&
        "$environment/bin/pip" install --quiet --disable-pip-version-check 'moto[server]' &&
        touch "$environment/ready"
}
if [[ ! -e $environment/ready ]] && ! install; then
    echo 'backends.sh: pip cannot install nixl-cu12 and moto here' >&2
    exit 77
fi
build_kvbm "$profile"
environment=$(cd "$environment" && pwd)
python=$environment/bin/python

# `kvbm` with NIXL, and without the settings that this script was started with.
clean() {
    local name unset=()
    for name in $(compgen -e | grep '^DYN_KVBM_' || true); do unset+=(-u "$name"); done
    env "${unset[@]}" -u NIXL_PLUGIN_DIR "$@"
}
with_nixl() { clean RUST_LOG=error VIRTUAL_ENV="$environment" "$@"; }
without_nixl() { clean -u VIRTUAL_ENV PATH=/usr/bin:/bin RUST_LOG=warn,kvbm::assemble::nixl=info "$@"; }

say 'toggles'
with_nixl DYN_KVBM_NIXL_BACKEND_UCX=true DYN_KVBM_NIXL_BACKEND_POSIX=on "$kvbm" doctor --json >"$scratch/doctor.json"
state() { "$python" -c 'import json, sys
checks = json.load(open(sys.argv[1]))["nixl"]
sys.exit([check["state"] for check in checks if check["name"] == sys.argv[2]] != [sys.argv[3]])' "$@"; }
expect 'UCX is ready' state "$scratch/doctor.json" UCX ready
expect 'POSIX is ready' state "$scratch/doctor.json" POSIX ready
expect 'OBJ is off unless named' state "$scratch/doctor.json" OBJ disabled
expect 'what nothing uses is told' grep -q 'UCX is on and nothing uses it' "$scratch/doctor.json"
expect 'spans say what NIXL measured' with_nixl KVBM_REQUIRE=nixl \
    cargo test --quiet --profile "$profile" "${WHOLE[@]}" --test spans nixl >&2

# Exits with 2 and says so: variable, value, what the message holds.
refused() {
    local status=0
    with_nixl "$1=$2" "$kvbm" config >/dev/null 2>"$scratch/message" || status=$?
    [[ $status == 2 ]] && grep -q -- "$3" "$scratch/message"
}
expect 'maybe is no toggle' refused DYN_KVBM_NIXL_BACKEND_POSIX maybe 'true, 1, on, yes'
expect 'NOSUCH is no plugin' refused DYN_KVBM_NIXL_BACKEND_NOSUCH 1 'UCX, '
expect 'nixl needs its plugin' refused DYN_KVBM_DISK_BACKEND nixl DYN_KVBM_NIXL_BACKEND_POSIX

trace=${KVBM_TRACES:-../shared/traces}/conversation.jsonl.gz
if [[ ! -e $trace ]]; then
    echo "SKIPPED: $trace is not here (KVBM_TRACES says where traces are): the replay is of a made-up trace" >&2
    trace=$scratch/made-up.jsonl
    awk 'BEGIN { for (turn = 1; turn <= 10; turn++) for (chat = 0; chat < 30; chat++) {
        ids = chat % 5
        for (block = 1; block < 4 * turn; block++) ids = ids ", " 1000 + 100 * chat + block
        printf "{\"timestamp\": %d, \"input_length\": %d, \"output_length\": 100, \"hash_ids\": [%s]}\n",
            1000 * turn + chat, 4 * turn * 512, ids
    } }' >"$trace"
fi

say 'without NIXL'
replay() { "$@" "$kvbm" replay "$trace" --requests 5 --host-blocks 50 --json >/dev/null 2>"$scratch/message"; }
if without_nixl "$kvbm" doctor | grep -q 'library *┆ ready'; then
    echo 'SKIPPED: the system has a NIXL of its own: what happens without one' >&2
else
    expect 'the default runs natively' replay without_nixl
    expect 'and says so once' test "$(grep -c 'Blocks move natively' "$scratch/message")" = 1
fi
# Exits with 2 and names the remedy.
stopped() {
    local status=0
    replay with_nixl DYN_KVBM_NIXL_LIBRARY="$scratch/nowhere.so" "$@" || status=$?
    [[ $status == 2 ]] && grep -q 'pip install nixl-cu12' "$scratch/message"
}
expect 'a plugin that was asked for is needed' stopped DYN_KVBM_NIXL_BACKEND_UCX=true
expect 'a library that was named is needed' stopped
doctor_reports() {
    with_nixl DYN_KVBM_NIXL_LIBRARY="$scratch/nowhere.so" DYN_KVBM_NIXL_BACKEND_POSIX=1 \
        "$kvbm" doctor --json >"$scratch/doctor.json" 2>/dev/null && state "$scratch/doctor.json" POSIX unavailable
}
expect 'doctor reports it and goes on' doctor_reports

say 'a directory of plugins that are none'
mkdir "$scratch/plugins"
echo 'no plugin' >"$scratch/plugins/libplugin_POSIX.so"
foreign() { with_nixl NIXL_PLUGIN_DIR="$1" DYN_KVBM_NIXL_BACKEND_POSIX=1 "$kvbm" doctor --json >"$scratch/doctor.json" 2>/dev/null; }
expect 'doctor survives it' foreign "$scratch/plugins"
if $long; then
    say 'plugins of another version'
    old=$scratch/old
    python3 -m venv "$old"
    "$old/bin/pip" install --quiet --disable-pip-version-check --no-deps nixl-cu12==1.3.2
    too_old() {
        with_nixl DYN_KVBM_NIXL_LIBRARY="$(echo "$old"/lib/python3*/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so)" \
            "$kvbm" doctor --json >"$scratch/doctor.json" 2>/dev/null && state "$scratch/doctor.json" library unavailable
    }
    expect 'doctor reports that 1.3.2 is too old' too_old
    expect 'doctor survives plugins of 1.3.2' foreign "$(echo "$old"/lib/python3*/site-packages/.nixl_cu12.mesonpy.libs/plugins)"
fi

say 'an S3-protocol server'
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$environment/bin/moto_server" -H 127.0.0.1 -p "$port" >"$scratch/server.log" 2>&1 &
server=$!
bucket() { "$python" -c 'import sys, urllib.request as u
u.urlopen(u.Request(sys.argv[1], method="PUT"), timeout=5)' "http://127.0.0.1:$port/kvbm" 2>/dev/null; }
for _ in $(seq 100); do bucket && break || sleep 0.2; done

say 'a replay with disk on POSIX and objects on OBJ'
if $long; then tiers=(--device-blocks 1000 --host-blocks 5000 --disk-blocks 50000)
else tiers=(--requests 120 --device-blocks 300 --host-blocks 600 --disk-blocks 1500); fi
expect 'the replay ends well' with_nixl DYN_KVBM_NIXL_BACKEND_POSIX=on DYN_KVBM_NIXL_BACKEND_OBJ=on \
    DYN_KVBM_DISK_BACKEND=nixl DYN_KVBM_OBJECT_BACKEND=nixl DYN_KVBM_OBJECT_ENDPOINT="http://127.0.0.1:$port" \
    DYN_KVBM_OBJECT_ACCESS_KEY=test DYN_KVBM_OBJECT_SECRET_KEY=test \
    "$kvbm" replay "$trace" "${tiers[@]}" --disk-dir "$scratch/disk" --object s3://kvbm/replay --json >"$scratch/replay.json"

say 'figures'
if $long; then set=512MiB rounds=15; else set=128MiB rounds=7; fi
measure() {
    expect 'POSIX is timed' with_nixl "$kvbm" bench tiers --tier nixl --size 1MiB,4MiB --working-set "$set" \
        --rounds "$rounds" --dir "$scratch/bench" --json >"$scratch/posix.$1.json"
    expect 'UCX is timed' with_nixl "$kvbm" bench nixl --working-set "$set" --rounds "$rounds" --json >"$scratch/ucx.$1.json"
}
# What falls short is measured again.
for attempt in 1 2 3; do
    measure "$attempt"
    status=0
    verdict=$(judge "$scratch" "${failed[@]}") || status=$?
    ((status == 3)) || break
done
echo "$verdict"
exit "$status"
