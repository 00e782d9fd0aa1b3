#!/usr/bin/env bash
# Replays of a trace while media fail, hang, lie and come back, and the clock jumps: docs/reliability.md. The last
# line is one JSON object; exits 0 only if nothing is wrong, 1 where something is.
#
#   tests/chaos.sh [--seconds N] [--first SEED] [--profile PROFILE]   seeds in turn, for N seconds (60)
#   tests/chaos.sh paced [--profile PROFILE]      eight minutes: a disk that hangs for 20 s costs no hits and no slot
#
# Every replay checks all bytes that come back. A seed that failed fails again, more or less: its faults are the same
# ones at the same times, what meets them depends on the machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=seeds
seconds=60
first=1
profile=checked
while (($#)); do
    case $1 in
        paced) mode=paced ;;
        --seconds) seconds=$2 && shift ;;
        --first) first=$2 && shift ;;
        --profile) profile=$2 && shift ;;
        *)
            echo "chaos.sh: unknown argument $1; valid: paced, --seconds N, --first SEED, --profile PROFILE" >&2
            exit 2
            ;;
    esac
    shift
done

kvbm=${CARGO_TARGET_DIR:-target}/$profile/kvbm
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
runs=$scratch/runs.jsonl
log=$scratch/log
# Every failed copy is a line: they are what is asked for here.
export RUST_LOG=${RUST_LOG:-off}

source tests/build.sh
build_kvbm "$profile"

source tests/trace.sh
trace=$(a_trace "$scratch")

# Runs a replay and notes its result: a name, the most seconds that it may take, and its arguments.
replay() {
    local name=$1 limit=$2 status=0 result
    shift 2
    result=$(timeout --kill-after=10 "$limit" "$kvbm" replay "$trace" --json --block-bytes 16KiB \
        --disk-dir "$scratch/disk" "$@" 2>"$log") || status=$?
    printf '{"name": "%s", "status": %d, "result": %s}\n' "$name" "$status" "${result:-null}" >>"$runs"
    if ((status != 0)); then
        { echo "chaos.sh: $name ended with $status: kvbm replay $*" && tail -5 "$log"; } >&2
        [[ -z $result ]] || echo "$result" >&2
    fi
}

# A short time-out, so that copies that hang become overdue; backends, tiers and concurrency vary with the seed.
replay_seed() {
    local seed=$1 tiers=()
    ((seed % 3 == 0)) || tiers=(--object "file://$scratch/objects")
    DYN_KVBM_TRANSFER_TIMEOUT_MS=${DYN_KVBM_TRANSFER_TIMEOUT_MS:-300} \
        DYN_KVBM_DISK_BACKEND=$( ((seed % 2)) && echo auto || echo threads) \
        replay "seed $seed" 300 --chaos "$seed" --requests 2500 --speed 90 --concurrency $((1 + seed % 8)) \
        --device-blocks 500 --host-blocks 600 --disk-blocks 4000 "${tiers[@]}"
}

if [[ $mode == paced ]]; then
    for fault in '' 'disk:hang@100s+20s'; do
        replay "${fault:-undisturbed}" 600 --speed 10 --requests 7000 --concurrency 8 \
            --device-blocks 1000 --host-blocks 2000 --disk-blocks 20000 ${fault:+--fault "$fault"}
    done
else
    for ((seed = first; seed == first || SECONDS < seconds; seed++)); do
        replay_seed "$seed"
    done
fi

python3 - "$mode" "$runs" <<'PYTHON'
import collections, json, sys

mode, runs = sys.argv[1], [json.loads(line) for line in open(sys.argv[2])]
results = [run["result"] for run in runs if run["result"]]
total = lambda key: sum(result.get(key, 0) for result in results)
injected = collections.Counter()
for result in results:
    injected.update(result.get("injected", {}))
recovered = [result["recovered_s"] for result in results if "recovered_s" in result]
told = {
    "mode": mode,
    "runs": len(runs),
    "seeds": [result["seed"] for result in results if "seed" in result],
    "injected": dict(sorted(injected.items())),
    "mismatches": total("mismatches") + total("served_wrong"),
    "drift": sum(len(result["drift"]) for result in results),
    "panics": total("panics"),
    # A replay that had to be ended hung as a whole.
    "hangs": total("hangs") + sum(run["status"] in (124, 137) for run in runs),
    "overdue": total("overdue"),
    "never_completing": injected["never"],
    "missing_slots": total("missing_slots"),
    "undrained": sum(not result["drained"] for result in results),
    "unrecovered": recovered.count(None),
    "longest_recovery_s": max((after for after in recovered if after is not None), default=None),
    "failed_runs": [run["name"] for run in runs if run["status"] != 0],
}
must_be_zero = ["mismatches", "drift", "panics", "hangs", "missing_slots", "undrained", "unrecovered"]
wrong = [key for key in must_be_zero if told[key]]
if told["overdue"] != told["never_completing"]:
    wrong.append("overdue")
if told["failed_runs"] or len(results) < len(runs) or not runs:
    wrong.append("failed_runs")
if mode == "paced" and len(results) == 2:
    calm, disturbed = (result["token_hit_rate"] for result in results)
    told |= {"hit_rate_undisturbed": calm, "hit_rate_disturbed": disturbed}
    told["seconds"] = [result["seconds"] for result in results]
    if not injected["hang"] or min(told["seconds"]) < 200:
        wrong.append("too little to see")
    if disturbed < 0.9 * calm:
        wrong.append("hit_rate_disturbed")
told["wrong"] = wrong
print(json.dumps(told))
sys.exit(bool(wrong))
PYTHON
