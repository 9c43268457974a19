#!/usr/bin/env bash
# Prints the path of a development tool, which is built from crates.io, or from its Go module, when it is not in the cache yet.
#
#   scripts/tool.sh cargo-cyclonedx | cargo-deny | cargo-fuzz | cargo-machete | cargo-nextest | nfpm | typos
#
# The cache is ${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/tools; versions are fixed here.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

package=${1:-}
case $package in
cargo-cyclonedx)
    version=0.5.9
    features=()
    ;;
cargo-deny)
    version=0.20.2
    # Advisories are not checked, so nothing of it needs a network stack with certificates.
    features=(--no-default-features)
    ;;
cargo-fuzz)
    version=0.13.2
    features=()
    ;;
cargo-machete)
    version=0.9.2
    features=()
    ;;
cargo-nextest)
    version=0.9.114
    # Without what updates itself.
    features=(--no-default-features --features default-no-update)
    ;;
nfpm)
    version=2.43.0
    module=github.com/goreleaser/nfpm/v2/cmd/nfpm
    ;;
typos)
    package=typos-cli
    version=1.42.3
    features=()
    ;;
*)
    say "usage: $0 cargo-cyclonedx|cargo-deny|cargo-fuzz|cargo-machete|cargo-nextest|nfpm|typos"
    exit 2
    ;;
esac
tool=$1

tools=${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/tools
target=$tools/$tool-$version
program=$target/bin/$tool
if [ ! -x "$program" ]; then
    mkdir -p "$tools"
    exec 9>"$tools/.$tool.lock"
    flock 9
    if [ ! -x "$program" ]; then
        say "building $tool $version (minutes)"
        # What a run that was killed has left: no other run builds while the lock is held.
        rm -rf "$tools/.$tool".??????
        work=$(mktemp -d "$tools/.$tool.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        if [ -n "${module:-}" ]; then
            GOBIN=$work/root/bin go install "$module@v$version" >&2
        else
            # Unoptimized and without debug information: it runs for a second, but would take much longer to build.
            CARGO_TARGET_DIR=$work/target CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --locked --debug "${features[@]}" \
                --root "$work/root" --version "$version" "$package" >&2
        fi
        rm -rf "$target"
        mv -T "$work/root" "$target"
    fi
fi
printf '%s\n' "$program"
