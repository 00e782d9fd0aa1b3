#!/usr/bin/env bash
# SGLang's own HiCache classes on a CPU above our storage, and the connector for TensorRT-LLM under a stand-in for it. The last line
# is one JSON object; exits 0 only if all holds, 1 where something is wrong, and 77 where the environment cannot be installed.
#
#   tests/sglang.sh
#
# KVBM_SGLANG_VENV says where the environment is or is to be made (target/sglang), KVBM_PROFILE by which profile the wheel is built
# (checked), KVBM_TENSORRT_LLM where a checkout of TensorRT-LLM is, with whose source the stand-in is compared then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

(($# == 0)) || { echo "sglang.sh: unknown argument $1; there are none" >&2 && exit 2; }

venv=$(realpath -m "${KVBM_SGLANG_VENV:-target/sglang}")
profile=${KVBM_PROFILE:-checked}
python=$venv/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

source tests/build.sh
source tests/expect.sh

install() {
    [[ -x $python ]] || python3 -m venv "$venv"
    "$python" -c 'import sglang, pytest' 2>/dev/null && "$python" -m maturin --version >/dev/null 2>&1 && return
    "$python" -m pip install --quiet uv &&
        "$python" -m uv pip install --quiet --compile-bytecode --python "$python" -r tests/sglang/requirements.txt pytest 'maturin>=1.9.4,<2' &&
        "$python" -m uv pip install --quiet --compile-bytecode --python "$python" --no-deps sglang==0.5.23
}

say 'an environment with SGLang 0.5.23'
if ! install >&2; then
    echo 'SKIPPED: SGLang 0.5.23 cannot be installed here' >&2
    exit 77
fi

say 'the wheel'
build_wheel "$python" "$profile" "$scratch/wheel" >&2
"$python" -m pip install --quiet --no-deps --no-index --force-reinstall "$scratch"/wheel/*.whl >&2

for engine in sglang trtllm; do
    say "tests of kvbm_rs.$engine"
    expect "the tests of kvbm_rs.$engine pass" \
        "$python" -m pytest "tests/$engine" -q --junit-xml "$scratch/$engine.xml" >&2
done

"$python" - "$scratch" "${failed[@]}" <<'PYTHON'
import json, pathlib, sys
from xml.etree import ElementTree

place, wrong = pathlib.Path(sys.argv[1]), sys.argv[2:]
counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
for engine in ("sglang", "trtllm"):
    try:
        for suite in ElementTree.parse(place / f"{engine}.xml").iter("testsuite"):
            counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
    except (OSError, ElementTree.ParseError):
        wrong.append(f"no report of the tests of kvbm_rs.{engine}")
print(json.dumps({"holds": not wrong, "failed": wrong, **counts}))
sys.exit(1 if wrong else 0)
PYTHON
