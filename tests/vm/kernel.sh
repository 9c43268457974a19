#!/usr/bin/env bash
# Builds the kernel of the virtual machine (run.sh), and prints its path: Linux as a program of the user (user-mode Linux), configured
# by kernel.config and kernel-VERSION.config. It is kept in ${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/vm;
# the name covers what it is made from. Two runs at once wait for each other. Packages that the virtual machine needs are installed.
#   KEELSON_VM_LINUX   6.1 (this Debian release's, the default), or 7.3 of the next release's backports: a system call there takes a
#                      third of the time, and the kernel three times as long to build
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/vm
version=${KEELSON_VM_LINUX:-6.1}
source=linux-source-$version
config=("$here/kernel.config" "$here/kernel-$version.config")
[ -f "${config[1]}" ] || {
    printf 'kernel.sh: there is no kernel-%s.config: KEELSON_VM_LINUX is 6.1 or 7.3\n' "$version" >&2
    exit 1
}
kernel=$cache/linux-$(cat "$here/kernel.sh" "${config[@]}" | sha256sum | cut -c1-12)

# Into the current folder.
download() {
    local apt=()
    if [ "$version" != 6.1 ]; then
        mkdir -p lists/partial
        printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie-backports main\n' >backports.list
        apt=(-o "Dir::Etc::SourceList=$PWD/backports.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$PWD/lists")
    fi
    apt-get "${apt[@]}" update -qq
    apt-get "${apt[@]}" download -qq "$source"
}

build() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # apt drops its rights, and must be able to write here.
    chmod 777 "$work"
    cd "$work"
    download
    # Without what only other kernels are made of: half of the time.
    dpkg-deb --fsys-tarfile ./*.deb | tar -xO "./usr/src/$source.tar.xz" |
        tar -xJ --exclude='drivers/gpu/*.[ch]' --exclude='drivers/net/[ew]*/*.[ch]' --exclude='Documentation/*.rst' --exclude='Documentation/*.yaml'
    cd "$source"
    if [ "$version" = 6.1 ]; then
        # Room for the registers of processors that have AMX: ptrace sets all of them or none.
        sed -i 's/HOST_FP_SIZE, 2696/HOST_FP_SIZE, 11264/' arch/x86/um/user-offsets.c
        grep -q 'HOST_FP_SIZE, 11264' arch/x86/um/user-offsets.c
    fi
    cat "${config[@]}" >wanted
    make -s ARCH=um allnoconfig KCONFIG_ALLCONFIG=wanted
    while read -r setting; do
        grep -qxF "$setting" .config || {
            printf 'kernel.sh: the kernel cannot have %s\n' "$setting"
            exit 1
        }
    done < <(grep '^CONFIG' wanted)
    make -s ARCH=um -j"$(nproc)" linux
    strip -o "$kernel.new" linux
    mv "$kernel.new" "$kernel"
}

"$here/../../scripts/install-packages.sh" vm
mkdir -p "$cache"
if [ ! -x "$kernel" ]; then
    exec 9>"$cache/lock"
    flock 9
    [ -x "$kernel" ] || (build) >&2 9>&-
fi
printf '%s\n' "$kernel"
