#!/usr/bin/env bash
# Runs the tests that need no peer and no root: unit tests, tables of cases, random histories. What programs the kernel's rules
# does so in a network namespace; who is not root gets one in a user namespace.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo=${CARGO:-cargo}

tests=(--lib --bins)
for file in {config,services/client}/tests/*.rs; do
    tests+=(--test "$(basename "$file" .rs)")
done

in_namespace=()
if [ "$(id -u)" != 0 ]; then
    "$cargo" test --workspace --no-run --quiet "${tests[@]}"
    # shellcheck disable=SC2016 # The inner shell expands it.
    in_namespace=(unshare --user --map-root-user --net sh -c 'ip link set lo up && exec "$@"' sh)
fi
"${in_namespace[@]}" "$cargo" test --workspace --no-fail-fast --quiet "${tests[@]}"
