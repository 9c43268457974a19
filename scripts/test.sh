#!/usr/bin/env bash
# Runs every test of the workspace; all of it is built already. Suites that live at real intervals (a Lease is renewed
# every ten seconds), or look on for minutes (a proxy under changes), mostly wait: they run beside the others, and their
# output comes when they end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo=${CARGO:-cargo}

waiting=(heartbeats lifecycle proxy_life)
working=()
for suite in tests/tests/*; do
    name=$(basename "$suite" .rs)
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
    "$cargo" test -p keelson-tests --test "$suite" -- --test-threads 4 >"$logs/$suite" 2>&1 &
    pids+=($!)
done

failed=()
"$cargo" test --workspace --exclude keelson-tests --no-fail-fast || failed+=(crates)
"$cargo" test -p keelson-tests --no-fail-fast --lib --bins "${working[@]}" || failed+=(suites)
for index in "${!waiting[@]}"; do
    wait "${pids[index]}" || failed+=("${waiting[index]}")
    cat "$logs/${waiting[index]}"
done
pids=()
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
