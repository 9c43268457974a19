#!/usr/bin/env bash
# Makes the packages of this version and of the former one (scripts/former.sh), and does to a node that boots what happens to
# nodes: make boot-check. Further arguments go to keelson-boot.
#   PROGRAM=PATH  packages this program of this version instead of one that is built now
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=$(scripts/target-dir.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

former=$(scripts/former.sh)
PROGRAM=$former KEELSON_BUILD_VERSION=0.0.9 packaging/packages.sh >&2
mv "$target"/packages/keelson_*_amd64.deb "$work/former.deb"
packaging/packages.sh >&2
cp "$target"/packages/keelson_*_amd64.deb "$work/keelson.deb"
driver=$(tests/peers/build.sh cri-driver | cut -d= -f2)/cri-driver
export KEELSON_PEERS
KEELSON_PEERS=$(tests/peers/build.sh etcd kubernetes)
kubernetes=$(tests/peers/build.sh kubernetes | cut -d= -f2)
tools=$(tests/peers/build.sh node-tools | cut -d= -f2)
"${CARGO:-cargo}" build --workspace --bin keelson-boot >&2
"$target/debug/keelson-boot" --package "$work/keelson.deb" --former "$work/former.deb" --cri-driver "$driver" --kubernetes "$kubernetes" --node-tools "$tools" --out "$target/boot" "$@"
