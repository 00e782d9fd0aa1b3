#!/usr/bin/env bash
# Workers that read each other, at length: tests/run.sh has quick forms of it. The last line is one JSON object; exits 0
# only if all that it says holds, 1 where something is wrong, and 3 where only figures fall short.
#
#   tests/peers.sh [--install] [--quick] [--kills N] [--schedules N] [PART...]
#
# --install has apt install etcd-server, which takes root; without it etcd is skipped aloud where it is missing, unless
# KVBM_REQUIRE names etcd. The parts:
#
#   transfer   a trace moves from two holders to two readers that find each other in etcd, while one of each is killed and
#              comes back; then the messages of a lease of 512 blocks, what NIXL takes to post them, and how fast blocks
#              come, beside memcpy
#   kill       both sides killed and frozen at random points, N times (500): a third each over TCP, by shared memory, and by
#              NIXL, which is skipped aloud where it is not installed
#   network    a link between two namespaces that is slow, loses packets and is cut; takes root
#   model      N random schedules (10,000) of leases, expiry, resets, restarts and faults of the network, in simulated time
#   discovery  files and etcd; real etcd where it is installed
#   scale      memory, threads and descriptors where 64 peers are known and 16 used
#   all        all of these, as if none were named
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

parts=() install=false quick=false kills='' schedules=''
while (($#)); do
    case $1 in
        transfer | kill | network | model | discovery | scale) parts+=("$1") ;;
        all) parts+=(transfer kill network model discovery scale) ;;
        --install) install=true ;;
        --quick) quick=true ;;
        --kills) kills=$2 && shift ;;
        --schedules) schedules=$2 && shift ;;
        *)
            echo "peers.sh: unknown argument $1; valid: transfer, kill, network, model, discovery, scale, all, --install," \
                '--quick, --kills N, --schedules N' >&2
            exit 2
            ;;
    esac
    shift
done
((${#parts[@]})) || parts=(transfer kill network model discovery scale)
if $quick; then
    : "${kills:=20}" "${schedules:=500}"
    requests=1000 cuts=5 limit=300 speed=(--working-set 64MiB --rounds 5)
else
    : "${kills:=500}" "${schedules:=10000}"
    requests=1000000 cuts=50 limit=7200 speed=()
fi

source tests/build.sh
source tests/expect.sh
source tests/trace.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
log=$scratch/log
# It would write where figures are expected.
export UCX_LOG_FILE=stderr

# Tests say what they measured. One that hangs fails.
nextest() {
    timeout --kill-after=10 "$limit" \
        cargo nextest run --cargo-profile checked "${WHOLE[@]}" --no-capture --run-ignored all -E "$1" 2>&1 | tee -a "$log" >&2
}

transfer() {
    gzip --decompress --stdout --force "$(a_trace "$scratch")" >"$scratch/trace.jsonl"
    export KVBM_PEER_TRACE=$scratch/trace.jsonl KVBM_PEER_REQUESTS=$requests
    expect 'a trace moves' nextest 'package(kvbm-tests) and test(peers::trace::)'
    expect 'messages are few' nextest 'package(kvbm-tests) and test(peers::messages::)'
    expect 'posting is cheap' nextest 'package(kvbm-tiers) and test(nixl::peer::tests::what_a_post_costs)'
    build_kvbm checked
    expect 'blocks come' "${CARGO_TARGET_DIR:-target}/checked/kvbm" bench transfer --json "${speed[@]}" >"$scratch/speed.json"
}

kill_and_freeze() {
    export KVBM_PEER_KILLS=$(((kills + 2) / 3))
    expect 'either side may be killed' nextest 'package(kvbm-tests) and test(killed_or_frozen_at_any_point)'
}

network() {
    export KVBM_PEER_CUTS=$cuts
    expect 'any link will do' nextest 'package(kvbm-tests) and test(peers::network::)'
}

model() {
    export KVBM_PEER_CASES=$schedules
    expect 'all schedules end well' nextest 'package(kvbm) and test(peers::tests::)'
}

discovery() { expect 'peers are found' nextest 'package(kvbm) and test(peers::discovery::)'; }

scale() { expect 'many peers are used' nextest 'package(kvbm-tests) and test(peers::scale::)'; }

if $install && ! command -v etcd >/dev/null; then apt-get install --quiet=2 --yes etcd-server >&2; fi
cargo nextest run --cargo-profile checked "${WHOLE[@]}" --no-run >&2
for part in "${parts[@]}"; do
    say "$part"
    if [[ $part == kill ]]; then kill_and_freeze; else "$part"; fi
done

python3 - "$log" "$scratch/speed.json" "$schedules" "${parts[*]}" "${failed[@]}" <<'PYTHON'
import json, pathlib, re, sys

log, speed, schedules, parts, *wrong = sys.argv[1:]
figures = [json.loads(found) for found in re.findall(r"figures (\{.*\})$", pathlib.Path(log).read_text(), re.MULTILINE)]
of = lambda name: [figure[name] for figure in figures if name in figure]
told = {"wrong": wrong, "short": [], "parts": parts.split()}
told |= {name: found for name in ("trace", "messages", "post", "kill", "network", "scale") if (found := of(name))}
if "model" in told["parts"]:
    told["schedules"] = int(schedules)
if "transfer" in told["parts"] and not wrong:
    rows = json.loads(pathlib.Path(speed).read_text())["rows"]
    told["transfer"] = [{"way": row["way"], "size": row["size"], **{
        name: round(row[name]["median"], 2) for name in ("gb_s", "memcpy_gb_s", "ratio")}} for row in rows]
    for found, row in zip(told["transfer"], rows):
        if row["direct"]:
            found["of_nixl_directly"] = round(row["direct"]["ratio"]["median"], 2)


def goal(name, holds):
    if not holds:
        told["short"].append(name)


for row in told.get("transfer", []):
    if row["way"] == "shared_memory":
        goal(f"{row['size']} bytes a block: 0.9 of memcpy", row["ratio"] >= 0.9)
    if "of_nixl_directly" in row:
        goal(f"{row['size']} bytes a block: 0.9 of NIXL directly", row["of_nixl_directly"] >= 0.9)
for post in of("post"):
    goal("1 µs of CPU to post a block", post["us_a_block"] <= 1)
for network in of("network"):
    # An answer to the request for a lease, and one to that for blocks; and what a busy machine takes.
    goal("the limit of a read", network["longest_read_ms"] <= 2 * network["limit_ms"] + 500)
for row in of("scale"):
    memory = row["private_kib"] + row["page_tables_kib_of_8_gib"]
    goal(f"{row['way']}: 5 MiB of memory", memory <= 5 << 10)
    goal(f"{row['way']}: a thread and 16 descriptors", row["threads"] <= 1 and row["descriptors"] <= 16)
    goal(f"{row['way']}: 64 KiB for one that is known", row["known_kib"] <= 64)
print(json.dumps(told))
sys.exit(1 if wrong else 3 if told["short"] else 0)
PYTHON
