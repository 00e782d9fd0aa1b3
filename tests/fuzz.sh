#!/usr/bin/env bash
# Has libFuzzer look for bytes that make a reader of ours panic, or read something else than it would write:
# fuzz/src/lib.rs. By hand, since building takes minutes; cli/tests/corpus.rs replays the corpus with all other tests.
#
#   tests/fuzz.sh [--seconds N] [TARGET...]    each target for N seconds (60); without names, all of them
#
# What makes one fail lies in fuzz/artifacts/TARGET afterwards: mend the reader, and put the file into
# fuzz/corpus/TARGET. What else it found new lies in fuzz/found, and is not kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=60
targets=()
while (($#)); do
    case $1 in
        --seconds) seconds=$2 && shift ;;
        -*) echo "fuzz.sh: unknown argument $1; valid: --seconds N, TARGET..." >&2 && exit 2 ;;
        *) targets+=("$1") ;;
    esac
    shift
done
if ((${#targets[@]} == 0)); then
    for path in fuzz/corpus/*; do targets+=("${path##*/}"); done
fi

if ! cargo fuzz --version >/dev/null 2>&1 && ! cargo install --quiet cargo-fuzz --locked; then
    echo 'SKIPPED: cargo-fuzz is not installed, and cannot be'
    exit 0
fi
# Sanitizers are for nightly compilers; this has a stable one take them too.
export RUSTC_BOOTSTRAP=1
for target in "${targets[@]}"; do
    mkdir -p "fuzz/found/$target"
    # None of our formats needs more memory than this for so few bytes.
    cargo fuzz run --fuzz-dir fuzz --features libfuzzer "$target" "fuzz/found/$target" "fuzz/corpus/$target" -- \
        -max_total_time="$seconds" -max_len=65536 -malloc_limit_mb=256 -rss_limit_mb=2048 -print_final_stats=1
done
