#!/usr/bin/env bash
# Tests and benches on a GPU, of a machine that may have a driver and nothing else.
#
#   tests/gpu.sh build [DIR]   here: makes stripped binaries, and packs them with what they need into DIR (target/gpu)
#   tests/gpu.sh run           there, unpacked: runs them and writes docs/results/gpu-<date>.md
#
# `run` fails where there is no GPU. KVBM_REQUIRE=cuda,gds turns what is skipped besides into a failure. What has
# been run this way, and what has not, is in docs/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

limit=$((60 << 20))

say() { printf '%s\n' "$*" >&2; }

# The executable that cargo makes of the given target.
executable() {
    cargo "$1" --profile checked --message-format json "${@:2}" |
        sed -nE 's/.*"executable":"([^"]+)".*/\1/p' | tail -1
}

build() {
    local out=${1:-${CARGO_TARGET_DIR:-target}/gpu}
    local bundle=$out/kvbm-gpu
    rm -rf "$out"
    mkdir -p "$bundle/bin" "$bundle/lib" "$bundle/tests"
    strip -o "$bundle/bin/gpu-tests" "$(executable build -p kvbm-tiers --features baselines,cuda,testing --test gpu)"
    strip -o "$bundle/bin/unit-tests" "$(executable test --no-run -p kvbm-tiers --features cuda,testing --lib)"
    strip -o "$bundle/bin/gpu-bench" "$(executable build -p kvbm-bench --features cuda --bench gpu)"
    strip -o "$bundle/bin/kvbm" "$(executable build -p kvbm-cli --features cuda --bin kvbm)"
    cp tests/gpu.sh "$bundle/tests/"
    git describe --always --dirty >"$bundle/version" 2>/dev/null || echo unknown >"$bundle/version"
    fetch_cufile "$bundle/lib"
    tar -C "$out" -czf "$out/kvbm-gpu.tar.gz" kvbm-gpu
    local bytes
    bytes=$(stat -c %s "$out/kvbm-gpu.tar.gz")
    say "$out/kvbm-gpu.tar.gz: $((bytes >> 20)) MiB"
    ((bytes <= limit)) || { say 'the bundle is larger than 60 MiB'; exit 1; }
}

# cuFile is no part of the driver. The kernels are built in, so no other library is needed.
fetch_cufile() {
    local scratch
    scratch=$(mktemp -d)
    if python3 -m venv "$scratch/v" && "$scratch/v/bin/pip" install -q nvidia-cufile-cu12; then
        find "$scratch/v" -name 'libcufile.so*' -exec cp {} "$1/" \;
    else
        say 'SKIPPED: no libcufile from the package registry: the bundle tests GDS only if the machine has it'
    fi
    rm -rf "$scratch"
}

run() {
    [[ -x bin/gpu-tests ]] || { say 'run this in an unpacked bundle: tests/gpu.sh build makes one'; exit 1; }
    export LD_LIBRARY_PATH=$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    local doctor
    doctor=$(bin/kvbm doctor)
    if ! grep -qE 'CUDA +.*ready:' <<<"$doctor"; then
        say "no GPU: $(grep -E 'CUDA ' <<<"$doctor" || echo 'kvbm doctor does not say why')"
        exit 1
    fi
    export KVBM_REQUIRE=cuda${KVBM_REQUIRE:+,$KVBM_REQUIRE}
    mkdir -p docs/results
    local report status=0
    report=docs/results/gpu-$(date +%F).md
    {
        echo "# On a GPU, $(date +%F)"
        printf '\nVersion %s.\n\n```\n%s\n```\n' "$(cat version)" "$doctor"
        section 'Conformance, kernels and faults' bin/gpu-tests
        section 'Unit tests' bin/unit-tests cuda::
        sanitised
        printf '\n## Figures\nMedians of rounds in turns, built with assertions.\n\n'
        bin/gpu-bench || echo "FAILED: the bench, with status $? (2: a goal is missed)"
    } 2>&1 | tee "$report"
    ! grep -qE '^FAILED|test result: FAILED' "$report" || status=1
    say "written: $report"
    return $status
}

# Runs tests, and keeps what they say in the report.
section() {
    local log status=0
    log=$(mktemp)
    "${@:2}" --nocapture --test-threads 1 >"$log" 2>&1 || status=$?
    printf '\n## %s\n```\n' "$1"
    grep -E '^test |SKIPPED|panicked|ERROR SUMMARY' "$log" || true
    printf '```\n'
    ((status == 0)) || printf 'FAILED: %s, with status %d\n' "$1" "$status"
    rm -f "$log"
}

# Small cases under NVIDIA's memory checker, where it is installed.
sanitised() {
    if command -v compute-sanitizer >/dev/null; then
        section 'Sanitised' compute-sanitizer --error-exitcode 1 bin/gpu-tests kernels_ what_ tensors_
    else
        printf '\n## Sanitised\nSKIPPED: compute-sanitizer is not on this machine.\n'
    fi
}

case ${1:-} in
    build) build "${2:-}" ;;
    run) run ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
