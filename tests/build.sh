# Sourced by scripts that build what tests/run.sh tests.

# Whatever is built for a test, or to be run, is built as part of the whole: so that each crate has the features that any other
# wants of it, and is built once.
readonly WHOLE=(--workspace --features kvbm-tests/otel,kvbm-cli/nvtx,kvbm-bench/cuda)

# Builds the command and its tests with a profile. After a run of all tests nothing is left to build.
build_kvbm() { cargo test --quiet --profile "$1" "${WHOLE[@]}" --test cli --no-run; }

# Builds a wheel with the maturin of an environment, into a directory. It is built for the base interpreter, not the
# environment's. The wheel works with any Python from 3.11 on, so one build serves all environments.
build_wheel() {
    local python=$1 profile=$2 place=$3 interpreter
    interpreter=$("$python" -c 'import sys; print(sys._base_executable)')
    "$python" -m maturin build --quiet --profile "$profile" --manifest-path python/Cargo.toml --interpreter "$interpreter" --out "$place"
}
