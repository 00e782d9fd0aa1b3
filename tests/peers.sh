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
#   push       what is left of a prompt's transfer when the last of 32 steps in which it is computed has ended, or, of one
#              that is computed in one step, the last of 32 layers
#   kill       both sides killed and frozen at random points, N times (500): a third each over TCP, by shared memory, and by
#              NIXL, which is skipped aloud where it is not installed
#   network    a link between two namespaces that is slow, loses packets and is cut; takes root
#   model      N random schedules (10,000) of leases, expiry, resets, restarts and faults of the network, in simulated time
#   layouts    blocks of other numbers of tokens, orders of axes and numbers of ranks: N random chains (2,000) between all forms,
#              processes of some, and how fast all of that goes beside blocks that are alike
#   types      numbers as those of another type: each of them, chains, and how fast
#   discovery  files and etcd; real etcd where it is installed
#   scale      memory, threads and descriptors where 64 peers are known and 16 used
#   all        all of these, as if none were named
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(transfer push kill network model layouts types discovery scale)
parts=() install=false quick=false kills='' schedules=''
while (($#)); do
    case $1 in
        transfer | push | kill | network | model | layouts | types | discovery | scale) parts+=("$1") ;;
        all) parts+=("${all[@]}") ;;
        --install) install=true ;;
        --quick) quick=true ;;
        --kills) kills=$2 && shift ;;
        --schedules) schedules=$2 && shift ;;
        *)
            echo "peers.sh: unknown argument $1; valid: transfer, push, kill, network, model, layouts, types, discovery, scale, all," \
                '--install, --quick, --kills N, --schedules N' >&2
            exit 2
            ;;
    esac
    shift
done
((${#parts[@]})) || parts=("${all[@]}")
if $quick; then
    : "${kills:=20}" "${schedules:=500}"
    requests=1000 cuts=5 chains=300 limit=300 speed=(--working-set 64MiB --rounds 5)
else
    : "${kills:=500}" "${schedules:=10000}"
    requests=1000000 cuts=50 chains=2000 limit=7200 speed=()
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

push() {
    expect 'steps travel while others are computed' nextest 'package(kvbm-tests) and test(peers::overlap::)'
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

layouts() {
    export KVBM_PEER_CASES=$chains
    expect 'blocks become others' nextest 'package(kvbm) and test(peers::conversion::)'
    expect 'blocks come in any form' nextest 'package(kvbm-tests) and test(peer_layouts::) - test(numbers_of_the_other_type)'
    expect 'heads come from any ranks' nextest 'package(kvbm-tests) and test(peer_ranks::)'
}

types() {
    expect 'numbers become others' nextest 'package(kvbm) and test(/peers::(numbers|fp8)::/)'
    expect 'numbers come in either type' nextest 'package(kvbm-tests) and test(numbers_of_the_other_type)'
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
told |= {name: found for name in ("trace", "messages", "post", "steps", "layers", "kill", "network", "conversion", "heads", "scale") if (found := of(name))}
if "model" in told["parts"]:
    told["schedules"] = int(schedules)
if "transfer" in told["parts"] and not wrong:
    rows = json.loads(pathlib.Path(speed).read_text())["rows"]
    told["transfer"] = [{"way": row["way"], "size": row["size"], **{
        name: round(row[name]["median"], 2) for name in ("gb_s", "memcpy_gb_s", "ratio")}} for row in rows]
    for found, row in zip(told["transfer"], rows):
        if row["direct"]:
            found["of_nixl_directly"] = round(row["direct"]["ratio"]["median"], 2)
            found["of_nixl_and_checksum"] = round(row["direct"]["summed_ratio"]["median"], 2)


def goal(name, holds):
    if not holds:
        told["short"].append(name)


for row in told.get("transfer", []):
    if row["way"] == "shared_memory":
        goal(f"{row['size']} bytes a block: 0.9 of memcpy", row["ratio"] >= 0.9)
    if "of_nixl_and_checksum" in row:
        # A pull is verified.
        goal(f"{row['size']} bytes a block: 0.9 of NIXL directly and a checksum", row["of_nixl_and_checksum"] >= 0.9)
for post in of("post"):
    goal("1 µs of CPU to post a block", post["us_a_block"] <= 1)
for row in of("steps"):
    goal(f"{row['way']}: 2/32 of a transfer are left behind its last step", row["left_of_whole"] <= 2 / 32)
for row in of("layers"):
    goal(f"{row['way']}: 2/32 of a transfer are left behind its last layer", row["left_of_whole"] <= 2 / 32)
for network in of("network"):
    # An answer to the request for a lease, and one to that for blocks; and what a busy machine takes.
    goal("the limit of a read", network["longest_read_ms"] <= 2 * network["limit_ms"] + 500)
for row in of("conversion"):
    # Numbers one by one are slower: docs/peers.md says by how much.
    if "columns" not in row["what"]:
        goal(f"{row['what']}: 0.5 of memcpy", row["of_memcpy"] >= 0.5)
for row in of("heads"):
    for name, ratio in row.items():
        if name.endswith("of equal"):
            goal(f"ranks, {row['way']}, {row['blocks']} blocks, {name}: 0.7", ratio >= 0.7)
for row in of("scale"):
    memory = row["private_kib"] + row["page_tables_kib_of_8_gib"]
    goal(f"{row['way']}: 5 MiB of memory", memory <= 5 << 10)
    goal(f"{row['way']}: a thread and 16 descriptors", row["threads"] <= 1 and row["descriptors"] <= 16)
    goal(f"{row['way']}: 64 KiB for one that is known", row["known_kib"] <= 64)
print(json.dumps(told))
sys.exit(1 if wrong else 3 if told["short"] else 0)
PYTHON
