#!/usr/bin/env bash
# sbom.sh TRIPLE FILE [PACKAGES]: writes the SBOM (CycloneDX) of the program for one target: its crates with version, licence, source
# and checksum, and with PACKAGES (lines "name version architecture") the Debian packages of the image as well. packages.sh calls it
# and sets SOURCE_DATE_EPOCH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
triple=$1 file=$2 packages=${3:-/dev/null}
tool=$(scripts/tool.sh cargo-cyclonedx)

# The tool writes beside each Cargo.toml, so it gets a copy of what cargo reads.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
find . -path ./target -prune -o -path ./fuzz -prune -o -path ./.git -prune -o \
    \( -name '*.rs' -o -name Cargo.toml -o -name Cargo.lock \) -print0 | tar --null -T - -c | tar -x -C "$work"
(cd "$work" && env -u CARGO "$tool" cyclonedx --quiet --format json --spec-version 1.5 --target "$triple" --no-build-deps \
    --manifest-path services/keelson/Cargo.toml --override-filename sbom.cdx)
release=$(sed -n 's/^VERSION_ID="\(.*\)"/debian-\1/p' /etc/os-release)
# Without the folder of the copy, and with the version of the build.
jq --arg work "$work" --arg version "${KEELSON_BUILD_VERSION:?}" --arg release "$release" --rawfile packages "$packages" '
    ($packages | split("\n") | map(select(. != "") | split(" ")) | map({
        type: "library", "bom-ref": "pkg:deb/debian/\(.[0])@\(.[1])", name: .[0], version: .[1],
        purl: "pkg:deb/debian/\(.[0])@\(.[1] | @uri)?arch=\(.[2])&distro=\($release)"})) as $debian
    | del(.serialNumber)
    | walk(if type == "string" then split($work) | join("/keelson") else . end)
    | .metadata.component.version = $version
    | .components += $debian' "$work/services/keelson/sbom.cdx.json" >"$file"
