#!/usr/bin/env bash
# Engines that prefill and engines that decode, at length: tests/vllm.sh has a quick form of it. The last line is one JSON
# object; exits 0 only if all that it says holds, 1 where something is wrong, 3 if nothing is but a figure falls short, and 77
# where the environment, or vLLM's proxy, cannot be had.
#
#   tests/disagg.sh [--requests N] [--kills N] [--late N]
#
# N requests of a trace (200) go through vLLM's own proxy before two engines of each kind, one in five of which its client leaves,
# while engines are killed N times (10) in turn; then N reads (100) come when the lease is over and the blocks are others'. handover.py
# measures, beside vLLM's NixlConnector where the whole of tests/vllm.sh has installed NIXL. It takes the environment that
# tests/vllm.sh has made, with the wheel in it: KVBM_VENV says where that is (target/vllm).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requests=200 kills=10 late=100
while (($#)); do
    case $1 in
        --requests) requests=$2 && shift ;;
        --kills) kills=$2 && shift ;;
        --late) late=$2 && shift ;;
        *) echo "disagg.sh: unknown argument $1; valid: --requests N, --kills N, --late N" >&2 && exit 2 ;;
    esac
    shift
done

python=$(realpath -m "${KVBM_VENV:-target/vllm}")/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
source tests/expect.sh
source tests/trace.sh
if ! "$python" -c 'import vllm, pytest, kvbm_rs' 2>/dev/null; then
    echo 'SKIPPED: no environment with vLLM and the wheel: tests/vllm.sh makes it' >&2
    exit 77
fi
export PYTHONPATH=tests/vllm PYTHONHASHSEED=0 CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
models=${KVBM_MODELS:-$scratch/models}
"$python" tests/vllm/models.py "$models/tiny" >&2

say "$requests requests of a trace, $kills kills"
status=0
"$python" tests/vllm/disagg.py --model "$models/tiny" --trace "$(a_trace "$scratch")" --requests "$requests" --kills "$kills" \
    >"$scratch/figures.json" || status=$?
((status != 77)) || exit 77
expect 'all requests end well' test "$status" -eq 0 -o "$status" -eq 3

say "$late reads that come too late"
late_reads() {
    KVBM_MODELS=$models KVBM_LATE_READS=$late "$python" -m pytest -q -k 'lost_before_it_is_read' \
        tests/vllm/test_connector_peers.py >&2
}
expect 'no late read is wrong' late_reads

say 'figures'
"$python" tests/vllm/handover.py >"$scratch/handover.json" || (($? == 3)) || failed+=('the figures are taken')

"$python" - "$scratch" "$late" "${failed[@]}" <<'PYTHON'
import json, pathlib, sys

place, late, *failed = sys.argv[1:]
figures, short = {}, []
for file in ("figures.json", "handover.json"):
    try:
        found = json.loads(pathlib.Path(place, file).read_text())
    except (OSError, ValueError):
        found = {"failed": [f"no {file}"]}
    failed += found.pop("failed", [])
    short += found.pop("short", [])
    figures |= found
print(json.dumps({"holds": not failed and not short, "failed": [*failed, *short], "late_reads": int(late), **figures}))
sys.exit(1 if failed else 3 if short else 0)
PYTHON
