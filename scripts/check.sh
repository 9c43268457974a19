#!/usr/bin/env bash
# Runs the tests that need no peers: unit tests, tables of cases, random histories. Without root, those that program a kernel in
# a network namespace are left to `make test`; what is left out is printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo=${CARGO:-cargo}

tests=(--lib --bins)
for file in {config,services/client}/tests/*.rs; do
    tests+=(--test "$(basename "$file" .rs)")
done

# Modules of keelson-proxy and its backends.
namespaces=(addresses::tests conntrack::kernel::tests conntrack::tests health::checks::tests leftovers::tests
    backend::tests kernel::netlink::affinity::tests routes::netlink::tests)
skip=()
if [ "$(id -u)" != 0 ]; then
    printf 'left out, because they need root: %s\n' "${namespaces[*]}"
    for module in "${namespaces[@]}"; do
        skip+=(--skip "$module")
    done
fi
"$cargo" test --workspace --no-fail-fast --quiet "${tests[@]}" -- "${skip[@]}"
