#!/usr/bin/env bash
# Builds the peers, and runs the tests of the workspace. Each command selects the whole workspace, because Cargo chooses other
# features of dependencies, and builds them again, for fewer crates. Which tests, and how, is in .config/nextest.toml.
#
#   scripts/test.sh [ARGUMENT...]     for cargo nextest run, such as -E 'binary(pulls)' or a part of a name
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo=${CARGO:-cargo}

# What takes minutes the first time, side by side: each waits for downloads at times, and for its last unit.
printf '%s\n' tests/peers/build.sh 'scripts/tool.sh cargo-nextest' \
    "$cargo build --workspace --bins --tests --examples" | xargs -P 3 -I COMMAND bash -c COMMAND >/dev/null
# Asked for once, and not by each test.
KEELSON_PEERS=$(tests/peers/build.sh)
export KEELSON_PEERS
# Peers written in Go collect garbage less often: a tenth less of their processor time.
export GOGC=400
# Each test is a program that nextest starts, and not one more in between, which is for a terminal that stops the run.
export NEXTEST_DOUBLE_SPAWN=0
nextest=$(scripts/tool.sh cargo-nextest)
failed=()
# nextest runs no examples in documentation.
[ $# -gt 0 ] || "$cargo" test --workspace --doc --quiet || failed+=(documentation)
CARGO=$cargo "$nextest" nextest run --workspace --no-tests fail "$@" || failed+=(tests)
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
