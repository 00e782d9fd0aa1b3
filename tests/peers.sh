#!/usr/bin/env bash
# Workers that read each other, at length: tests/run.sh has the quick forms among its tests.
#
#   tests/peers.sh [kill|model|discovery|all] [--kills N] [--schedules N]
#
#   kill       both sides killed and frozen at random points, N times (500), half of them over TCP, half by shared memory
#   model      N random schedules (10,000) of leases, expiry, resets, restarts and faults of the network, in simulated time
#   discovery  files and etcd; real etcd where it is installed
#
# The last line is one JSON object. Fails if anything does not hold.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=all kills=500 schedules=10000
while (($#)); do
    case $1 in
        kill | model | discovery | all) what=$1 ;;
        --kills) kills=$2 && shift ;;
        --schedules) schedules=$2 && shift ;;
        *) echo "peers.sh: unknown argument $1; valid: kill, model, discovery, all, --kills N, --schedules N" >&2 && exit 2 ;;
    esac
    shift
done

source tests/build.sh
wants() { [[ $what == all || $what == "$1" ]]; }
# The test itself says how often it came in between.
nextest() { cargo nextest run --cargo-profile checked "${WHOLE[@]}" --no-capture -E "$1"; }

done=()
if wants kill; then
    KVBM_PEER_KILLS=$((kills / 2)) nextest 'package(kvbm-tests) and test(killed_or_frozen_at_any_point)'
    done+=("\"kills\": $kills")
fi
if wants model; then
    KVBM_PEER_CASES=$schedules nextest 'package(kvbm) and test(peers::tests::)'
    done+=("\"schedules\": $schedules")
fi
if wants discovery; then
    nextest 'package(kvbm) and test(peers::discovery::)'
    done+=('"discovery": true')
fi
printf '{%s}\n' "$(IFS=,; echo "${done[*]}")"
