#!/usr/bin/env bash
# What must hold before a change is sent: formatting, lints, tests, documentation, dependencies, and a replay of a trace. What
# this machine cannot do is skipped aloud; KVBM_REQUIRE (a list such as uring,cuda, or of the tools deny,mdbook) turns such
# skips into failures.
#
#   tests/run.sh [--all]
#
# --all is what CI runs before a merge: also interleavings, builds with other features, a minute of chaos, and the engines that
# use kvbm. It begins by saying how long each part takes, and ends by saying how long each took.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# In the order in which they run: the function; seconds where crates of others are built and ours are not (their first build
# adds some four minutes to lints and tests, and is in the figure of features), and where everything is; whether it runs
# always or with --all; what it is. Taken on two cores with nothing else at work, but for these, which are estimates: both
# figures of peers, the first of tests and replay, and the second of interleavings, dependencies, features, embedding,
# operators, vLLM and SGLang.
readonly PARTS='
formatting    |   1 |   1 | always | formatting
lints         |  13 |   2 | always | lints
tests         | 393 | 150 | always | tests
interleavings | 128 |   5 | --all  | interleavings
documentation |  20 |  20 | always | documentation
dependencies  |  10 |  10 | always | dependencies
features      | 309 |  20 | --all  | each feature alone
replay        |  20 |  20 | always | a replay, end to end
chaos         |  75 |  75 | --all  | a minute of chaos
durability    |  40 |  40 | --all  | what outlives a process
peers         |  60 |  60 | --all  | workers that read each other
embedding     | 333 | 172 | --all  | engines that embed kvbm
backends      |  52 |  52 | --all  | transfer backends
operators     |  27 |  23 | --all  | what operators look at
vllm          | 522 | 420 | --all  | vLLM, the real engine
sglang        |  98 |  60 | --all  | SGLang, and TensorRT-LLM by a stand-in
'

all=false
while (($#)); do
    case $1 in
        --all) all=true ;;
        *) echo "run.sh: unknown argument $1; valid: --all" >&2 && exit 2 ;;
    esac
    shift
done

# What would make the next build faster costs the first, and CI has no next.
if $all; then export CARGO_INCREMENTAL=0; fi

source tests/build.sh
target=${CARGO_TARGET_DIR:-target}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
log=$scratch/tests.log
passed=0

skip() { printf 'SKIPPED: %s\n' "$1" | tee -a "$scratch/skipped"; }
has() { cargo "$1" --version >/dev/null 2>&1; }
# A tool that is not here, and what is not checked for want of it.
lacks() {
    skip "$1 is not installed: $2"
    [[ ,${KVBM_REQUIRE:-}, != *,$1,* ]] || { echo "$1 is required (KVBM_REQUIRE)" >&2 && exit 1; }
}
clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

mapfile -t rows < <(sed -E '/^$/d; s/ *\| */|/g' <<<"$PARTS")
# Calls $1 with the fields of each part.
each_part() {
    local row fields
    for row in "${rows[@]}"; do
        IFS='|' read -ra fields <<<"$row"
        "$1" "${fields[@]}"
    done
}

# Runs tests, and adds up how many passed and what they skipped. Both runners report `N passed`.
run_tests() {
    CARGO_TERM_COLOR=never "$@" 2>&1 | tee "$log"
    # With nextest each test prints a result of its own as well: only its summary counts then.
    local closing='test result:'
    grep -q 'Summary \[' "$log" && closing='Summary \['
    passed=$((passed + $(sed -nE "/$closing/ s/.* ([0-9]+) passed.*/\1/p" "$log" | awk '{ n += $1 } END { print n + 0 }')))
    { grep -oE 'SKIPPED: .*' "$log" || true; } | sort -u >>"$scratch/skipped"
}

# Runs a script beside this one, which exits 3 where only figures fall short, those of $1, and 77 where what it takes cannot
# be installed.
run_script() {
    local whose=$1 status=0
    shift
    "$@" 2>&1 | tee "$log" || status=${PIPESTATUS[0]}
    { grep -oE '^SKIPPED: .*' "$log" || true; } >>"$scratch/skipped"
    case $status in
        0) ;;
        3) skip "the figures of $whose, which fall short on this machine now (above)" ;;
        77) skip "what $whose takes cannot be installed here" ;;
        *) exit "$status" ;;
    esac
}

# Runs what asks others over the network, and skips it with the words of $1 where they cannot be reached.
unless_offline() {
    local otherwise=$1
    shift
    "$@" 2>"$log" && return
    cat "$log" >&2
    grep -Eiq 'Could not resolve host|Failed to connect|timeout|timed out' "$log" || exit 1
    skip "$otherwise"
}

formatting() {
    cargo fmt --all --check
    local own
    for own in benches/peers examples/llama fuzz; do cargo fmt --check --manifest-path "$own/Cargo.toml"; done
}

lints() {
    local oldest used
    oldest=$(sed -nE 's/^rust-version = "(.*)"/\1/p' Cargo.toml)
    used=$(rustc --version)
    [[ $used == "rustc $oldest."* ]] || skip "this is $used, not the oldest Rust that is promised, $oldest"
    # The profile names our crates: one that it lacks would be tested without its assertions.
    local crate
    for crate in $(cargo tree --workspace --depth 0 --prefix none | awk 'NF { print $1 }'); do
        grep -q "^$crate = .*debug-assertions = true, overflow-checks = true" Cargo.toml ||
            { echo "profile.checked.package in Cargo.toml lacks $crate" >&2 && exit 1; }
    done
    cargo clippy --profile checked "${WHOLE[@]}" --all-targets -- -D warnings
}

tests() {
    if has nextest; then
        cargo nextest run --cargo-profile checked "${WHOLE[@]}" --no-run
        # Else what the build wrote is on its way to the disk while tests give it 300 ms.
        sync
        # Tests that pass print what they skip. Failures are printed again at the end, where one looks first.
        run_tests cargo nextest run --cargo-profile checked "${WHOLE[@]}" --no-fail-fast \
            --success-output final --failure-output immediate-final
    else
        run_tests cargo test --profile checked "${WHOLE[@]}" --no-fail-fast --all-targets -- --show-output
    fi
    run_tests cargo test --profile checked "${WHOLE[@]}" --doc --quiet
}

interleavings() {
    run_tests cargo test --profile checked "${WHOLE[@]}" --features kvbm-tests/shuttle --test interleavings
}

documentation() {
    RUSTDOCFLAGS='-D warnings' cargo doc --profile checked --workspace --no-deps --quiet
    if command -v mdbook >/dev/null; then mdbook build docs; else lacks mdbook 'the book'; fi
}

dependencies() {
    if has deny; then
        cargo deny --workspace check --hide-inclusion-graph licenses bans sources
        unless_offline 'the advisories cannot be fetched: whether a dependency has a known hole' cargo deny --workspace check advisories
    else
        lacks deny 'licences and advisories (cargo install cargo-deny)'
    fi
    tests/sbom.sh "$scratch/sbom"
    # That each crate could be published. It is built by the parts above.
    unless_offline 'the registry cannot be reached: whether the crates can be published' \
        cargo publish --workspace --dry-run --no-verify --allow-dirty --quiet
}

features() {
    if has hack; then
        cargo hack check --profile checked --workspace --exclude kvbm-tests --exclude kvbm-bench --each-feature --no-dev-deps --quiet
        return
    fi
    local manifest feature
    # Only the crates that users build. The fuzz targets are a workspace of their own, and tests and benches are built with all
    # features above.
    for manifest in {cli,config,kvbm,policies,python,tiers}/Cargo.toml; do
        for feature in '' $(awk '/^\[/ { inside = /^\[features\]/ } inside && /^[a-z]/ && !/^default/ { print $1 }' "$manifest"); do
            cargo check --profile checked --quiet --manifest-path "$manifest" --no-default-features --features "$feature"
        done
    done
}

replay() {
    source tests/trace.sh
    local trace
    trace=$(a_trace "$scratch" 2>"$log")
    tee -a "$scratch/skipped" <"$log"
    build_kvbm checked
    "$target/checked/kvbm" replay "$trace" --requests 300 --device-blocks 500 --host-blocks 1000 \
        --disk-blocks 10000 --disk-dir "$scratch/disk" --object "file://$scratch/objects" --json >"$scratch/replay.json"
    cat "$scratch/replay.json"
    grep -Eq '"mismatches": *0\b' "$scratch/replay.json"
    if grep -Eq '"lost": *[1-9]' "$scratch/replay.json"; then
        echo 'the replay lost slots' >&2
        exit 1
    fi
}

chaos() {
    tests/chaos.sh --seconds 60
}

durability() {
    run_script durability tests/durability.sh --cycles 12 --flips 120 --seconds 60
}

# The other parts are among the tests.
peers() {
    run_script 'workers that read each other' tests/peers.sh --quick transfer push network scale
}

embedding() {
    run_script embedding tests/embed.sh
}

backends() {
    run_script 'the transfer backends' tests/backends.sh
}

operators() {
    run_script 'what operators look at' tests/observe.sh --quick
}

vllm() {
    run_script vLLM tests/vllm.sh --quick
}

sglang() {
    run_script 'SGLang and TensorRT-LLM' tests/sglang.sh
}

# What a part takes, and the sum over those that run.
cold_sum=0
warm_sum=0
foretell() {
    local name=$1 cold=$2 warm=$3 runs=$4
    if ! $all && [[ $runs == --all ]]; then
        printf '%-14s %7s %7s   with --all\n' "$name" '-' '-'
        return
    fi
    cold_sum=$((cold_sum + cold))
    warm_sum=$((warm_sum + warm))
    printf '%-14s %7s %7s\n' "$name" "$(clock "$cold")" "$(clock "$warm")"
}

run_part() {
    local name=$1 runs=$4 title=$5 began=$SECONDS
    if ! $all && [[ $runs == --all ]]; then return; fi
    printf '\n== %s (after %d s)\n' "$title" "$SECONDS"
    "$name"
    printf '%-14s %7s\n' "$name" "$(clock $((SECONDS - began)))" >>"$scratch/took"
}

printf '%-14s %7s %7s   minutes on two cores: with our crates to build, with everything built\n' part first again
each_part foretell
printf '%-14s %7s %7s\n' 'all of it' "$(clock $cold_sum)" "$(clock $warm_sum)"
echo 'Where the crates of others are to be built too, as at first, it takes some four minutes more.'
each_part run_part

printf '\n== done (after %d s), which took\n' "$SECONDS"
cat "$scratch/took"
sort -u "$scratch/skipped"
echo "$passed tests passed, the replay found no wrong byte"
