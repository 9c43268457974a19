#!/usr/bin/env bash
# Builds the kernel of the virtual machine (run.sh), and prints its path: Linux of this Debian release as a program of the user
# (user-mode Linux), configured by kernel.config. It is kept in ${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/vm;
# the name covers what it is made from. Two runs at once wait for each other. Packages that the virtual machine needs are installed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/vm
source=linux-source-6.1
kernel=$cache/linux-$(cat "$here/kernel.sh" "$here/kernel.config" | sha256sum | cut -c1-12)

build() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # apt drops its rights, and must be able to write here.
    chmod 777 "$work"
    cd "$work"
    apt-get update -qq
    apt-get download -qq "$source"
    # Without what only other kernels are made of: half of the time.
    dpkg-deb --fsys-tarfile ./*.deb | tar -xO "./usr/src/$source.tar.xz" |
        tar -xJ --exclude='drivers/gpu/*.[ch]' --exclude='drivers/net/[ew]*/*.[ch]' --exclude='Documentation/*.rst' --exclude='Documentation/*.yaml'
    cd "$source"
    # Room for the registers of processors that have AMX: ptrace sets all of them or none.
    sed -i 's/HOST_FP_SIZE, 2696/HOST_FP_SIZE, 11264/' arch/x86/um/user-offsets.c
    grep -q 'HOST_FP_SIZE, 11264' arch/x86/um/user-offsets.c
    make -s ARCH=um allnoconfig KCONFIG_ALLCONFIG="$here/kernel.config"
    while read -r setting; do
        grep -qxF "$setting" .config || {
            printf 'kernel.sh: the kernel cannot have %s\n' "$setting"
            exit 1
        }
    done < <(grep '^CONFIG' "$here/kernel.config")
    make -s ARCH=um -j"$(nproc)" linux
    strip -o "$kernel.new" linux
    mv "$kernel.new" "$kernel"
}

"$here/../../scripts/install-packages.sh" vm
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
[ -x "$kernel" ] || (build) >&2 9>&-
printf '%s\n' "$kernel"
