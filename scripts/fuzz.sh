#!/usr/bin/env bash
# Runs every fuzz target for a short while: KEELSON_FUZZ_SECONDS each, 60 if unset. Finds go to fuzz/artifacts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${KEELSON_FUZZ_SECONDS:-60}
tool=$(scripts/tool.sh cargo-fuzz)
# Coverage needs flags that only a nightly compiler takes, or a stable one with RUSTC_BOOTSTRAP.
export RUSTC_BOOTSTRAP=1
targets=$("$tool" list)
[ -n "$targets" ] || {
    printf 'fuzz.sh: cargo fuzz lists no target\n' >&2
    exit 1
}
for target in $targets; do
    printf 'fuzzing %s for %s s\n' "$target" "$seconds" >&2
    mkdir -p "fuzz/corpus/$target"
    "$tool" run --sanitizer none "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$seconds" -timeout=10
done
