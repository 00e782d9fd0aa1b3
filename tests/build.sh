# Sourced by scripts that build what tests/run.sh tests.

# What has tests. The benches have none (they are linted), and what they need turns on features of crates that others stand on:
# with them these would be built once more. What is built for a test, or to be run, is built as part of the whole, so that each
# crate has the features that any other wants of it, and is built once.
readonly WHOLE=(--workspace --exclude kvbm-bench)

# Builds the command with a profile. By way of its tests: behind all tests nothing is left to build.
build_kvbm() { cargo test --quiet --profile "$1" "${WHOLE[@]}" --test cli --no-run; }
