#!/usr/bin/env bash
# Makes the packages into <target folder>/packages: keelson_VERSION-1_ARCH.deb, keelson-VERSION-1.ARCH.rpm, a tarball of the same
# files, a container image (an OCI layout in a tar archive), the SBOMs of program and image, and SHA256SUMS. The same program, commit
# and packages of Debian give the same bytes.
#
#   packaging/packages.sh
#
#   ARCH=arm64    for another architecture (default: amd64); needs `rustup target add` and a linker for it
#   PROGRAM=PATH  packages this program instead of one that is built now; the version is what it says
#   OUT=FOLDER    instead of <target folder>/packages
#   QUICK=1       compresses less, to try something out
#   KEELSON_BUILD_VERSION=VERSION  instead of the version of the git tag (scripts/version.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'packages.sh: %s\n' "$*" >&2
    exit 1
}

arch=${ARCH:-amd64}
case $arch in
amd64) triple=x86_64-unknown-linux-gnu machine=x86_64 ;;
arm64) triple=aarch64-unknown-linux-gnu machine=aarch64 ;;
*) fail "unknown architecture $arch; set ARCH to amd64 or arm64" ;;
esac
cargo=${CARGO:-cargo}
target=$(scripts/target-dir.sh)
out=${OUT:-$target/packages}
stage=$out/.stage-$arch
program=${PROGRAM:-}
if [ -n "$program" ] && answer=$("$program" version -o json 2>/dev/null); then
    KEELSON_BUILD_VERSION=$(jq -r .version <<<"$answer")
fi
KEELSON_BUILD_VERSION=${KEELSON_BUILD_VERSION:-$(scripts/version.sh)}
export KEELSON_BUILD_VERSION
# The commit's, so that no time of a build is in any file.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
export SOURCE_DATE_EPOCH
date=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
compression=xz gzip=-9n
[ -z "${QUICK:-}" ] || compression=gzip gzip=-1n
# Debian's and RPM's mark of what comes before a version.
version=${KEELSON_BUILD_VERSION/-/\~}

# build_program: the program, without paths of this machine in it.
build_program() {
    local flags folder
    flags="--remap-path-prefix=$PWD=/keelson --remap-path-prefix=$target=/target"
    flags+=" --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
    # In a folder of the triple: what `make bench` builds has other flags.
    folder=CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<<"$triple")
    if [ "$arch" = arm64 ]; then
        command -v aarch64-linux-gnu-gcc >/dev/null || fail "aarch64-linux-gnu-gcc is missing; install gcc-aarch64-linux-gnu and libc6-dev-arm64-cross"
        export "${folder}_LINKER=aarch64-linux-gnu-gcc" CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
    fi
    env "${folder}_RUSTFLAGS=$flags" "$cargo" build --profile dist --target "$triple" -p keelson --bin keelson
    program=$target/$triple/dist/keelson
}

# stage_documents: completions and man pages, by the build of every day, which can also write man pages.
stage_documents() {
    # Without version and date, so that the build of every day is not made again for them: build scripts that compile C look at the date.
    env -u KEELSON_BUILD_VERSION -u SOURCE_DATE_EPOCH "$cargo" build --workspace --bin keelson
    local writer=$target/debug/keelson share=$1
    mkdir -p "$share"/{bash-completion/completions,fish/vendor_completions.d}
    "$writer" completions bash >"$share/bash-completion/completions/keelson"
    # Debian's folder is another one.
    "$writer" completions zsh >"$stage/_keelson"
    "$writer" completions fish >"$share/fish/vendor_completions.d/keelson.fish"
    "$writer" manual "$share/man/man1"
    # They name the writer's version.
    sed -i "s/^\(\.TH keelson 1  \"keelson \).*\"/\1$KEELSON_BUILD_VERSION\"/; s/^v[0-9].*\\\\-dev$/v${KEELSON_BUILD_VERSION//-/\\\\-}/" "$share"/man/man1/*.1
    gzip -9n "$share"/man/man1/*.1
    ln -s keelson.1.gz "$share/man/man1/kubectl-keelson.1.gz"
}

# stage_files: everything that is in every package, as it lies on a node.
stage_files() {
    local root=$1
    local units=$root/usr/lib/systemd/system doc=$root/usr/share/doc/keelson
    install -D -m 0755 "$program" "$root/usr/bin/keelson"
    # kubectl finds its plugins by their names.
    ln -s keelson "$root/usr/bin/kubectl-keelson"
    install -D -m 0644 -t "$units" packaging/keelson.service packaging/keelson-proxy.service packaging/keelson-*.socket
    install -D -m 0644 packaging/keelson-endpoints-group.conf "$units/keelson.service.d/10-endpoints-group.conf"
    # Without effect until the operator copies it.
    install -D -m 0644 -t "$root/usr/share/keelson" packaging/keelson-proxy-ebpf.conf
    install -D -m 0644 packaging/keelson.sysusers.conf "$root/usr/lib/sysusers.d/keelson.conf"
    install -D -m 0644 packaging/keelson.toml "$root/etc/keelson/keelson.toml"
    stage_documents "$root/usr/share"
    install -D -m 0644 -t "$doc" README.md SECURITY.md CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md
    for file in docs/*.md docs/{decisions,images,performance}/* packaging/README.md packaging/kustomize/*/*.yaml \
        packaging/chart/keelson/rules.yaml packaging/monitoring/* config/keelson.toml; do
        install -D -m 0644 "$file" "$doc/$file"
    done
    find "$root" -type d -exec chmod 0755 {} +
}

# write_packages: .deb and .rpm.
write_packages() {
    local kind=$1 glibc
    # The newest symbol of the C library that the program needs.
    glibc=$(readelf -W --version-info "$program" | sed -n 's/.*Name: GLIBC_\([0-9.]*\) .*/\1/p' | sort -Vu | tail -n 1)
    [ -n "$glibc" ] || fail "cannot tell which C library $program needs"
    sed "s|@ARCH@|$arch|; s|@VERSION@|$version|; s|@STAGE@|$stage|; s|@GLIBC@|$glibc|; s|@DATE@|$date|; s|@COMPRESSION@|$compression|" \
        packaging/package/nfpm.yaml >"$stage/nfpm.yaml"
    # Debian's control file has no field for it: it is in copyright.
    [ "$kind" != deb ] || sed -i '/^license:/d' "$stage/nfpm.yaml"
    "$nfpm" package --config "$stage/nfpm.yaml" --packager "$kind" --target "$2"
}

nfpm=$(scripts/tool.sh nfpm)
[ -n "$program" ] || build_program
[ -x "$program" ] || fail "$program is not a program"

# Of an earlier build.
rm -rf "$stage" "$out"/keelson[-_]*{"_$arch","$machine","linux-$arch"}.*
mkdir -p "$stage/root"
umask 022
stage_files "$stage/root"
cp packaging/package/copyright "$stage/copyright"
cat >"$stage/changelog.yaml" <<YAML
- semver: $version
  date: $date
  packager: The Keelson authors <keelson@users.noreply.github.com>
  deb: {urgency: low, distributions: [stable]}
  changes:
    - note: What people who run Keelson notice is in CHANGELOG.md
YAML

base=$out/keelson-$KEELSON_BUILD_VERSION-linux-$arch
packaging/sbom.sh "$triple" "$base.cdx.json"
install -m 0644 "$base.cdx.json" "$stage/root/usr/share/doc/keelson/sbom.cdx.json"
find "$stage" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
write_packages deb "$out/keelson_${version}-1_$arch.deb"
write_packages rpm "$out/keelson-$version-1.$machine.rpm"
install -m 0644 -t "$stage/root/usr/share/doc/keelson" LICENSE
install -D -m 0644 -t "$stage/root/usr/share/zsh/site-functions" "$stage/_keelson"
tar -C "$stage/root" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --format=gnu \
    --transform "s,^\.,keelson-$KEELSON_BUILD_VERSION," -c . | gzip $gzip >"$base.tar.gz"
packaging/image.sh "$program" "$arch" "$base.oci.tar"
packaging/sbom.sh "$triple" "$base.oci.cdx.json" "$base.oci.tar.packages"
rm -rf "$stage" "$base.oci.tar.packages"
(
    cd "$out"
    files=(*.deb *.rpm *.tar.gz *.oci.tar *.cdx.json)
    sha256sum -- "${files[@]}" >SHA256SUMS
    ls -l -- "${files[@]}" SHA256SUMS
)
