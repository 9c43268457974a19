#!/usr/bin/env bash
# Runs every test of the workspace; all of it is built already. Each command selects the whole workspace, because Cargo
# chooses other features of dependencies, and builds them again, for fewer crates. Suites that live at real intervals (a
# Lease is renewed every ten seconds), or look on for minutes (a proxy under changes), mostly wait: they run beside the
# others, and their output comes when they end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo=${CARGO:-cargo}

waiting=(heartbeats lifecycle proxy_life)
working=()
for file in {.,services}/*/tests/{*.rs,*/main.rs}; do
    name=${file##*/tests/}
    name=${name%/main.rs}
    name=${name%.rs}
    case " ${waiting[*]} " in
    *" $name "*) ;;
    *) working+=(--test "$name") ;;
    esac
done

logs=$(mktemp -d)
pids=()
end() {
    for pid in "${pids[@]}"; do
        # One that has ended already is fine.
        kill "$pid" 2>/dev/null || true
    done
    rm -rf "$logs"
}
trap end EXIT

for suite in "${waiting[@]}"; do
    "$cargo" test --workspace --test "$suite" -- --test-threads 4 >"$logs/$suite" 2>&1 &
    pids+=($!)
done

failed=()
"$cargo" test --workspace --no-fail-fast --lib --bins --examples "${working[@]}" || failed+=(others)
"$cargo" test --workspace --doc || failed+=(docs)
# Again before the oldest control plane that is supported. Left out: a kubelet that would be newer than its API server, and
# histories that depend on no version.
export KEELSON_TEST_KUBERNETES=1.31
"$cargo" test --workspace --test heartbeats -- --test-threads 4 --skip contest:: || failed+=(heartbeats-1.31)
"$cargo" test --workspace --test endpoints -- --skip large:: --skip kills:: --skip consistency:: || failed+=(endpoints-1.31)
unset KEELSON_TEST_KUBERNETES
for index in "${!waiting[@]}"; do
    wait "${pids[index]}" || failed+=("${waiting[index]}")
    cat "$logs/${waiting[index]}"
done
pids=()
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
