#!/usr/bin/env bash
# Builds the program of the former version, once, and prints its path: of the last tag before this commit, or, as long as there is no
# tag, of the commit in tests/former-commit.
#
#   scripts/former.sh [commit]     "commit": prints the commit and builds nothing
#
# Suites of upgrades and of agents, proxies and clients of two versions run it beside the program of the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

former=$(git describe --tags --abbrev=0 HEAD^ 2>/dev/null || cat tests/former-commit)
commit=$(git rev-parse --verify --quiet "$former^{commit}") || {
    printf 'former.sh: this clone has no commit %s; fetch the whole history (git fetch --unshallow)\n' "$former" >&2
    exit 1
}
if [ "${1:-}" = commit ]; then
    printf '%s\n' "$commit"
    exit
fi
cache=${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/former
program=$cache/$commit/keelson
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ ! -x "$program" ]; then
    work=$(mktemp -d -p "$cache")
    trap 'rm -rf "$work"' EXIT
    git archive "$commit" | tar -xm -C "$work"
    (cd "$work" && CARGO_TARGET_DIR=$cache/target cargo build --locked --bin keelson) >&2
    install -D "$cache/target/debug/keelson" "$program.new"
    strip --strip-debug "$program.new"
    mv "$program.new" "$program"
fi
printf '%s\n' "$program"
