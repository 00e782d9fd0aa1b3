#!/usr/bin/env bash
# What outlives a process: docs/reliability.md. Drives the binary from outside. The last line is one JSON object with the
# figures; exits 0 only if they hold, 1 where something is wrong, and 3 if nothing is but a figure falls short.
#
#   tests/durability.sh [kill|bitflip|share|disk-dies|all] [--cycles N] [--flips N] [--seconds N] [--profile PROFILE]
#
#   kill       N cycles (12) of a replay that is killed -9 under load and started again, every second one with a host tier
#              in /dev/shm: what was acknowledged is there, and no byte is wrong
#   bitflip    N single bits (120) flipped while nothing runs, in slot files, indices, memory and objects: none is served
#   share      one process starts warm from the bucket that another one filled, with few requests, and what is written again
#              and again takes no more space than the tier may; kvbm fsck finds the bucket sound
#   disk-dies  of two directories one cannot be used, then one is gone: the other one's blocks are served, and a new
#              directory is taken in
#
# No cycle begins N seconds (600) after the first one of its part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

parts=(kill bitflip share disk-dies)
cycles=12
flips=120
seconds=600
profile=checked
while (($#)); do
    case $1 in
        all) ;;
        kill | bitflip | share | disk-dies) parts=("$1") ;;
        --cycles) cycles=$2 && shift ;;
        --flips) flips=$2 && shift ;;
        --seconds) seconds=$2 && shift ;;
        --profile) profile=$2 && shift ;;
        *)
            echo "durability.sh: unknown argument $1; valid: kill, bitflip, share, disk-dies, all, --cycles N, --flips N," \
                "--seconds N, --profile PROFILE" >&2
            exit 2
            ;;
    esac
    shift
done

source tests/build.sh
source tests/expect.sh

kvbm=${CARGO_TARGET_DIR:-target}/$profile/kvbm
scratch=$(mktemp -d)
memory=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$scratch" "$memory"' EXIT
runs=$scratch/runs.jsonl
touch "$runs"
# What is damaged is logged: it is what is asked for here.
export RUST_LOG=${RUST_LOG:-off}

build_kvbm "$profile"

# Prints a trace: forty conversations in turn, of 30 blocks and five more each turn, fifty requests a second. Half of the
# conversations are those of the cycle before.
conversations() {
    awk -v cycle="$1" 'BEGIN {
        for (turn = 0; turn < 10; turn++) for (chat = 20 * cycle; chat < 20 * cycle + 40; chat++) {
            ids = chat % 5
            for (block = 1; block < 30 + 5 * turn; block++) ids = ids ", " 1000 * (chat + 1) + block
            printf "{\"timestamp\": %d, \"input_length\": %d, \"output_length\": 100, \"hash_ids\": [%s]}\n",
                20 * n++, (30 + 5 * turn) * 512, ids
        }
    }'
}
trace=$scratch/conversations.jsonl
conversations 0 >"$trace"
# Prompts that have nothing in common.
strangers=$scratch/strangers.jsonl
awk 'BEGIN {
    for (prompt = 0; prompt < 60; prompt++) {
        ids = 1000 * prompt
        for (block = 1; block < 40; block++) ids = ids ", " 1000 * prompt + block
        printf "{\"timestamp\": %d, \"input_length\": %d, \"output_length\": 100, \"hash_ids\": [%s]}\n",
            300 * prompt, 40 * 512, ids
    }
}' >"$strangers"

# A replay as it is kept in all parts: the arguments of its tiers.
tiers() {
    echo --keep --json --block-bytes 16KiB --device-blocks 300 --host-blocks 3000 "$@"
}

# Runs a replay to its end and notes its result: a name, the trace, and its arguments.
replay() {
    local name=$1 status=0 result
    shift
    result=$(timeout --kill-after=10 180 "$kvbm" replay "$@" 2>"$scratch/log") || status=$?
    printf '{"name": "%s", "status": %d, "result": %s}\n' "$name" "$status" "${result:-null}" >>"$runs"
    if ((status != 0)); then
        { echo "durability.sh: $name ended with $status: kvbm replay $*" && tail -5 "$scratch/log"; } >&2
    fi
    return "$status"
}

# The arguments of the place number $1: a disk and a log, and for odd ones a host tier that outlives the process.
place() {
    local dir=$scratch/place.$1 persist=()
    (($1 % 2 == 0)) || persist=(--host-persist "$memory/place.$1")
    mkdir -p "$dir" && tiers --disk-blocks 6000 --disk-dir "$dir/disk" --ack-log "$dir/acks" "${persist[@]}"
}

# Starts a replay, kills it at some moment, and waits until it is gone.
kill_one() {
    local pid
    "$kvbm" replay "$trace" --speed 1 --concurrency $((1 + RANDOM % 8)) "$@" >/dev/null 2>&1 &
    pid=$!
    sleep "$((RANDOM % 4)).$((RANDOM % 10))$((RANDOM % 10))"
    kill -9 "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
}

part_kill() {
    local cycle arguments begun=$SECONDS
    for ((cycle = 0; cycle < cycles && SECONDS - begun < seconds; cycle++)); do
        read -ra arguments <<<"$(place $((cycle % 2)))"
        conversations $((cycle / 2)) >"$trace"
        kill_one "${arguments[@]}"
        replay "kill $((cycle % 2))" "$trace" --requests 0 "${arguments[@]}" || true
    done
}

# Flips bits, each in a file of a kind chosen at random, and says how many of each kind.
flip() {
    python3 - "$@" <<'PYTHON'
import collections, json, os, pathlib, random, sys

count, places = int(sys.argv[1]), [pathlib.Path(place) for place in sys.argv[2:]]
kinds = collections.defaultdict(list)
for file in sorted(file for place in places for file in place.rglob("*") if file.is_file() and file.stat().st_size):
    memory = "memory " if str(file).startswith("/dev/shm") else ""
    kind = "index" if file.suffix == ".index" else "object" if "objects" in file.parts else "blocks"
    kinds[memory + kind].append(file)
flipped = collections.Counter()
for _ in range(count):
    kind = random.choice(sorted(kinds))
    file = random.choice(kinds[kind])
    with open(file, "r+b") as handle:
        at = random.randrange(file.stat().st_size)
        handle.seek(at)
        byte = handle.read(1)[0] ^ 1 << random.randrange(8)
        handle.seek(at)
        handle.write(bytes([byte]))
    flipped[kind] += 1
print(json.dumps({"name": "flips", "status": 0, "result": flipped}))
PYTHON
}

part_bitflip() {
    local round at_once=20 dir=$scratch/place.1 arguments begun=$SECONDS
    read -ra arguments <<<"$(place 1) --object file://$dir/objects"
    for ((round = 0; round * at_once < flips && SECONDS - begun < seconds; round++)); do
        conversations "$round" >"$trace"
        replay 'fill' "$trace" --requests $((100 + RANDOM % 300)) "${arguments[@]}" || true
        flip "$at_once" "$dir/disk" "$dir/objects" "$memory/place.1" >>"$runs"
        # What cannot be used any more says so, and what to remove.
        replay 'flipped' "$trace" --requests 0 "${arguments[@]}" || rm -rf "$dir" "$memory/place.1"
        mkdir -p "$dir"
    done
}

# Bytes of the segments below a directory.
segment_bytes() {
    find "$1" -name '*.kvseg' -printf '%s\n' 2>/dev/null | awk '{ sum += $1 } END { print sum + 0 }'
}

part_share() {
    local bucket=$scratch/bucket rewritten=$scratch/rewritten capacity=2000 arguments worst=0 now
    read -ra arguments <<<"$(tiers --disk-blocks 0 --object "file://$bucket")"
    replay 'first' "$strangers" "${arguments[@]}" || true
    replay 'second' "$strangers" "${arguments[@]}" || true
    # Both at once, with what they write anew.
    replay 'beside' "$trace" --requests 300 "${arguments[@]}" &
    replay 'beside' "$trace" --requests 300 "${arguments[@]}" || true
    wait
    # A tier that is too small for the trace is written again and again, by one process.
    read -ra arguments <<<"$(tiers --disk-blocks 0 --object "file://$rewritten")"
    DYN_KVBM_OBJECT_NUM_BLOCKS=$capacity DYN_KVBM_OBJECT_SEGMENT_BYTES=512KiB replay 'rewritten' "$trace" --requests 400 "${arguments[@]}" &
    while [[ -n $(jobs -rp) ]]; do
        now=$(segment_bytes "$rewritten") && worst=$((now > worst ? now : worst))
        sleep 0.2
    done
    wait
    printf '{"name": "space", "status": 0, "result": {"largest": %d, "left": %d, "capacity": %d}}\n' \
        "$worst" "$(segment_bytes "$rewritten")" $((capacity * 16384)) >>"$runs"
    local status=0
    "$kvbm" fsck "file://$bucket" "file://$rewritten" --json >"$scratch/fsck" 2>>"$scratch/log" || status=$?
    printf '{"name": "fsck", "status": %d, "result": %s}\n' "$status" "$(cat "$scratch/fsck")" >>"$runs"
}

part_disk_dies() {
    local dir=$scratch/disks arguments
    read -ra arguments <<<"$(tiers --disk-blocks 3000 --disk-dir "$dir/a" --disk-dir "$dir/b" --ack-log "$dir/acks")"
    mkdir -p "$dir"
    replay 'two disks' "$trace" --requests 400 "${arguments[@]}" || true
    # What is not found is taken back.
    cp "$dir/acks" "$dir/acks.all"
    mv "$dir/b" "$dir/away"
    touch "$dir/b"
    replay 'one disk' "$trace" --requests 0 "${arguments[@]}" || true
    rm "$dir/b"
    mv "$dir/away" "$dir/b"
    mv "$dir/acks.all" "$dir/acks"
    replay 'healed' "$trace" --requests 0 "${arguments[@]}" || true
    rm -rf "$dir/b"
    replay 'one gone' "$trace" --requests 0 "${arguments[@]}" || true
    replay 'a new disk' "$trace" --requests 400 "${arguments[@]}" || true
    replay 'two disks again' "$trace" --requests 0 "${arguments[@]}" || true
}

for part in "${parts[@]}"; do
    say "$part"
    "part_${part//-/_}"
done

say figures
python3 - "$runs" "${parts[@]}" <<'PYTHON'
import collections, json, sys

parts, runs = sys.argv[2:], [json.loads(line) for line in open(sys.argv[1])]
wrong, short, told = [], [], {}


def results(*names):
    return [run["result"] for run in runs if run["name"] in names and run["result"] is not None]


def total(found, *path):
    def number(record):
        for step in path:
            record = record.get(step, {}) if isinstance(record, dict) else {}
        return record if isinstance(record, (int, float)) else 0

    return sum(map(number, found))


def figure(name, part, of, wanted):
    """A share that must be reached; that there is nothing to take it of is wrong."""
    told[name] = round(part / of, 5) if of else None
    if not of:
        wrong.append(f"nothing to tell {name} by")
    elif part < wanted * of:
        short.append(name)


def at_most(name, part, of, wanted):
    told[name] = round(part / of, 5) if of else None
    if not of or not part:
        wrong.append(f"nothing to tell {name} by")
    elif part > wanted * of:
        short.append(name)


def must_be_zero(name, count):
    told[name] = count
    if count:
        wrong.append(name)


for run in runs:
    # A start may be refused where both copies of what identifies a file are damaged; nothing else may fail.
    if run["status"] not in ((0, 2) if run["name"] == "flipped" else (0,)):
        wrong.append(f"{run['name']} ended with {run['status']}")
everything = [run["result"] for run in runs if run["result"] is not None]
must_be_zero("wrong_blocks", total(everything, "mismatches") + total(everything, "acknowledged", "wrong"))
must_be_zero("drift", sum(len(result.get("drift", [])) for result in everything))

if "kill" in parts:
    private, persistent = results("kill 0"), results("kill 1")
    both = private + persistent
    told["cycles"] = len(both)
    acknowledged = total(both, "acknowledged", "disk", "acknowledged") + total(persistent, "acknowledged", "host", "acknowledged")
    served = total(both, "acknowledged", "disk", "served") + total(persistent, "acknowledged", "host", "served")
    told["acknowledged_blocks"] = acknowledged
    figure("acknowledged_and_served", served, acknowledged, 0.99)
    host = lambda key: total(persistent, "acknowledged", "host", key)
    figure("served_from_memory_without_the_disk", host("from_there"), host("acknowledged"), 0.99)

if "bitflip" in parts:
    flips = collections.Counter()
    for result in results("flips"):
        flips.update(result)
    flipped = results("flipped")
    told["flips"] = {"all": sum(flips.values()), **dict(sorted(flips.items()))}
    told["blocks_lost_to_flips"] = sum(
        total(flipped, "acknowledged", tier, "acknowledged") - total(flipped, "acknowledged", tier, "served")
        for tier in ("host", "disk")
    )
    told["starts_refused"] = sum(run["status"] == 2 for run in runs if run["name"] == "flipped")
    if not flipped:
        wrong.append("nothing was started after a flip")

if "share" in parts:
    flushed = 512 * total(results("first"), "slots", "object", "resident")
    figure("served_of_what_another_flushed", total(results("second"), "hit_tokens", "object"), flushed, 0.95)
    # One object for each block would take a request to store it, and one to read it.
    blocks = flushed // 512 + total(results("second"), "hit_tokens", "object") // 512
    requests = total(results("first", "second"), "object_requests")
    told["requests_for_blocks"] = [requests, blocks]
    at_most("requests_of_one_object_per_block", requests, blocks, 1 / 50)
    space, [checked] = results("space")[0], results("fsck")
    # Garbage is deleted a second after it has become that.
    at_most("space_left_of_capacity", space["left"], space["capacity"], 1.3)
    told["largest_space_of_capacity"] = round(space["largest"] / space["capacity"], 2)
    told["fsck_blocks"] = sum(found["blocks"] for bucket in checked["buckets"] for found in bucket["namespaces"])
    if not told["fsck_blocks"] or not checked["is_sound"]:
        wrong.append("fsck")

if "disk-dies" in parts:
    disk = lambda name, key: total(results(name), "acknowledged", "disk", key)
    # Half, less what hangs on blocks of the other one: the prompts begin in five ways.
    acknowledged = disk("one disk", "acknowledged")
    figure("served_by_one_disk_of_two", disk("one disk", "served"), acknowledged, 0.2)
    figure("served_when_it_heals", disk("healed", "served"), disk("healed", "acknowledged"), 0.99)
    figure("served_by_a_new_disk", disk("two disks again", "served"), disk("two disks again", "acknowledged"), 0.99)

print(json.dumps({"holds": not wrong and not short, "failed": wrong + short, **told}))
sys.exit(1 if wrong else 3 if short else 0)
PYTHON
