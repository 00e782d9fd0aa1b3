#!/usr/bin/env bash
# Engines that embed kvbm: the tests of engines with memory of their own, ranks and cache groups; the example of
# docs/embedding.md says with kvbm what it says without, and what that saves; `get` beside memcpy; an engine's own memory
# beside memcpy of the same pieces; what ranks cost. The last line is one JSON object; exits 0 only if all that it says holds,
# 1 where something is wrong, and 3 if nothing is but a figure falls short in the median of three runs.
#
#   tests/embed.sh [--long] [--profile PROFILE]
#
# --long measures five times, whatever comes out. The example builds an engine of some hundred crates: where cargo cannot
# fetch them it is skipped aloud and named in `left_out`, unless KVBM_REQUIRE names llama: then that is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

long=false
profile=checked
while (($#)); do
    case $1 in
        --long) long=true ;;
        --profile) profile=$2 && shift ;;
        *) echo "embed.sh: unknown argument $1; valid: --long, --profile PROFILE" >&2 && exit 2 ;;
    esac
    shift
done

example=examples/llama/Cargo.toml
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

source tests/build.sh
source tests/expect.sh

# Sums up what lies in a directory: 0 if all holds, 1 if anything is wrong or missing, 3 if only figures fall short. Writes the
# kinds to measure again to the file `again` in it.
judge() {
    python3 - "$@" <<'PYTHON'
import json, pathlib, statistics, sys

place, wrong = pathlib.Path(sys.argv[1]), sys.argv[2:]
BLOCKS = {65536: "64KiB", 262144: "256KiB"}


def read(path):
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        wrong.append(f"no {path.name}")
        return {}
    return found


def number(record, name, *path):
    """A number, whose absence is a failure that is named."""
    for step in path:
        record = record.get(step) if isinstance(record, dict) else None
    if isinstance(record, (int, float)) and not isinstance(record, bool):
        return record
    wrong.append(f"no {name}")
    return None


def rows(record, key):
    found = record.get(key)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


runs = [read(path) for path in sorted(place.glob("get.*.json"))]
if not runs:
    wrong.append("no get.*.json")
ratios = {name: [] for name in BLOCKS.values()}
for run in runs:
    of_size = {row.get("block_bytes"): row for row in rows(run, "get")}
    for size, name in BLOCKS.items():
        ratios[name].append(number(of_size.get(size), f"ratio of {name}", "ratio", "median"))
# Medians over the runs: a machine with others on it is noisy.
median = lambda values: statistics.median(present) if (present := [value for value in values if value is not None]) else None
ratios = {name: median(values) for name, values in ratios.items()}
# Figures that fall short, by what measures them.
short = [("get", f"get_over_memcpy {name}") for name, ratio in ratios.items() if ratio is not None and ratio < 0.9]

# Medians over the runs of what else was timed: a figure, whether more of it is better, and what is wanted.
def timed(kind, path):
    found = [read(file) for file in sorted(place.glob(f"{kind}.*.json"))]
    if not found:
        wrong.append(f"no {kind}.*.json")
    return median([number(run, f"{kind} {'/'.join(path)}", *path) for run in found])


WANTED = {
    "save_of_pieces_over_memcpy": ("memory", ["pieces", "save_ratio", "median"], True, 0.8),
    "load_of_pieces_over_memcpy": ("memory", ["pieces", "load_ratio", "median"], True, 0.8),
    "save_of_whole_blocks_over_memcpy": ("memory", ["contiguous", "save_ratio", "median"], True, 0.95),
    "load_of_whole_blocks_over_memcpy": ("memory", ["contiguous", "load_ratio", "median"], True, 0.95),
    "first_layer_of_load": ("memory", ["pieces", "first_layer_share", "median"], False, 1.5 / 32),
    "leader_us_per_batch_of_64": ("ranks", ["leader_cpu_us_per_batch"], False, 20),
}
figures = {name: timed(kind, path) for name, (kind, path, _, _) in WANTED.items()}
for name, (kind, _, more_is_better, wanted) in WANTED.items():
    figure = figures[name]
    if figure is not None and (figure < wanted if more_is_better else figure > wanted):
        short.append((kind, name))
by_size = {}
for file in sorted(place.glob("ranks.*.json")):
    for row in rows(read(file), "throughput"):
        ratio = number(row, "ratio of ranks", "ratio")
        by_size.setdefault(f"{row.get('block_bytes', 0) >> 10}KiB", []).append(ratio)
by_size = {name: median(values) for name, values in by_size.items()}
if not by_size:
    wrong.append("no throughput of ranks")
short += [("ranks", f"ranks_over_one_process {name}") for name, ratio in by_size.items() if ratio is not None and ratio < 0.9]

llama = None
if not (place / "llama.skipped").exists():
    llama = rows(read(place / "llama.json"), "shared")
    if not llama:
        wrong.append("the example measured nothing")
    for row in llama:
        shared = number(row, "shared tokens", "shared_tokens")
        saved = number(row, f"ms saved of {shared} tokens", "saved_ms")
        if saved is not None and saved <= 0:
            short.append(("llama", f"ms saved of {shared} tokens"))
    llama = [{key: round(value, 1) for key, value in row.items()} for row in llama]

print(json.dumps({
    "holds": not wrong and not short,
    "failed": wrong + [name for _, name in short],
    "left_out": ["examples/llama"] if llama is None else [],
    "get_over_memcpy": {name: None if ratio is None else round(ratio, 3) for name, ratio in ratios.items()},
    **{name: None if figure is None else round(figure, 3) for name, figure in figures.items()},
    "ranks_over_one_process": by_size,
    "llama_of_1024_tokens": llama,
}))
(place / "again").write_text("".join(f"{kind}\n" for kind in sorted({kind for kind, _ in short})))
sys.exit(1 if wrong else 3 if short else 0)
PYTHON
}

say 'engines with memory of their own, ranks and cache groups'
# With the packages of the other tests, whose builds it finds.
expect 'engines are driven through good times and bad' cargo test --quiet --profile "$profile" \
    "${WHOLE[@]}" --test all -- embedded:: engine_memory:: hybrid:: ranks:: >&2

say 'a Llama that gets the KV cache of prompts from kvbm'
fetch() { cargo fetch --quiet --manifest-path "$example" || cargo fetch --quiet --offline --manifest-path "$example"; }
has_llama=true
if fetch 2>"$scratch/message"; then
    expect 'the example is formatted' cargo fmt --check --manifest-path "$example"
    expect 'the example answers as without kvbm' cargo test --quiet --manifest-path "$example" >&2
elif [[ ,${KVBM_REQUIRE:-}, == *,llama,* ]]; then
    cat "$scratch/message" >&2
    failed+=('cargo cannot fetch what the example is built of')
    has_llama=false
else
    echo 'SKIPPED: cargo cannot fetch what examples/llama is built of' >&2
    has_llama=false
fi
$has_llama || touch "$scratch/llama.skipped"

say 'figures'
bench() { cargo bench --quiet --profile "$profile" "${WHOLE[@]}" --bench "$1"; }
measure() {
    case $1 in
        get) expect 'get is timed' bench blocking >"$scratch/get.$2.json" ;;
        memory) expect "an engine's own memory is timed" bench engine_memory >"$scratch/memory.$2.json" ;;
        ranks) expect 'ranks are timed' bench ranks >"$scratch/ranks.$2.json" ;;
        llama) expect 'the example is timed' cargo run --quiet --manifest-path "$example" >"$scratch/llama.json" ;;
    esac
}
measured=(get memory ranks)
if $has_llama; then measured+=(llama); fi
# What falls short is measured again.
if $long; then attempts=5; else attempts=3; fi
for ((attempt = 1; attempt <= attempts; attempt++)); do
    for kind in "${measured[@]}"; do measure "$kind" "$attempt"; done
    status=0
    verdict=$(judge "$scratch" "${failed[@]}") || status=$?
    $long && continue
    ((status == 3)) || break
    mapfile -t measured <"$scratch/again"
done
echo "$verdict"
exit "$status"
