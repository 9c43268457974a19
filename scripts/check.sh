#!/usr/bin/env bash
# Runs the tests that need no peers: unit tests, tables of cases, random histories. Without root, those that make namespaces are
# left to `make test`; what is left out is printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo=${CARGO:-cargo}

tests=(--lib --bins)
for file in {config,services/client}/tests/*.rs; do
    tests+=(--test "$(basename "$file" .rs)")
done

# Modules of keelson-proxy and its backends, whose tests make network namespaces, cgroups or mounts.
namespaces=(addresses::tests backend::tests conntrack::kernel::tests conntrack::tests direct::tests driver::tests entries::tests
    health::checks::tests instance::tests kernel::filters::tests kernel::netlink::affinity::tests kernel::tests leftovers::tests pods::tests
    programs::tests::entries_need_no_program routes::netlink::tests stale::diag::tests)
# Builds a kernel, which is one of the peers.
peers=(kernel::tests::in_the_vm)
printf 'left out, because they need peers: %s\n' "${peers[*]}"
skip=()
for test in "${peers[@]}"; do
    skip+=(--skip "$test")
done
if [ "$(id -u)" != 0 ]; then
    printf 'left out, because they need root: %s\n' "${namespaces[*]}"
    for module in "${namespaces[@]}"; do
        skip+=(--skip "$module")
    done
fi
"$cargo" test --workspace --no-fail-fast --quiet "${tests[@]}" -- "${skip[@]}"
