#!/usr/bin/env bash
# Installs from Debian's packages what a command of the Makefile needs and the machine lacks, and nothing else.
#
#   scripts/install-packages.sh run | cluster | soak | bench | vm | boot | test | packages | windows | monitoring | ci
#
# A program that is there, from wherever, is left alone. Services that come with a package are not started: Keelson's
# commands run a containerd and a registry of their own. The toolchains (Rust, Go) are not installed, only asked for.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "install-packages.sh: $*"
    exit 1
}

# Programs of the system are not in everyone's PATH.
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

# program:package[+package...], where what is no program is named by its whole path
# clang compiles the eBPF programs of the proxy; their headers come with libc6-dev.
common=(cc:gcc+libc6-dev clang:clang setpriv:util-linux)
run=("${common[@]}" containerd:containerd runc:runc docker-registry:docker-registry)
faketime=/usr/lib/$(uname -m)-linux-gnu/faketime/libfaketime.so.1
cluster=(etcd:etcd-server etcdctl:etcd-client ip:iproute2 nft:nftables "$faketime:libfaketime" perl:perl-base)
# A client of the Endpoints API of another make. The suites run Debian's own Python.
python=(/usr/bin/python3:python3 /usr/lib/python3/dist-packages/grpc/__init__.py:python3-grpcio
    protoc:protobuf-compiler grpc_python_plugin:protobuf-compiler-grpc)
# File systems on loop devices, which are filled up and frozen.
disks=(mke2fs:e2fsprogs mount:mount fsfreeze:util-linux)
# What kube-proxy runs, and what looks at its rules.
rules=(nft:nftables conntrack:conntrack iptables:iptables ipset:ipset)
# The tests that run on Windows, under Wine (tests/windows/run.sh).
windows=(x86_64-w64-mingw32-gcc:gcc-mingw-w64-x86-64 /usr/lib/wine/wine64:wine64)
# What CRI-O starts beside every container. The suites build CRI-O itself.
crio=(conmon:conmon)
# A virtual machine with another kernel, what its kernel is built with, and what programs in it use (tests/vm/run.sh).
vm=(cc:gcc+libc6-dev make:make flex:flex bison:bison bc:bc xz:xz-utils flock:util-linux slirp4netns:slirp4netns
    busybox:busybox-static ipvsadm:ipvsadm ethtool:ethtool)
# A virtual machine that boots Debian with systemd (tests/boot).
boot=(qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils mmdebstrap:mmdebstrap mke2fs:e2fsprogs flock:util-linux)
# Packages, the image and what checks them (packaging/packages.sh, tests/packages/run.sh).
packages_tools=(cc:gcc+libc6-dev clang:clang readelf:binutils jq:jq mmdebstrap:mmdebstrap umoci:umoci rpm:rpm lintian:lintian
    /usr/lib/systemd/systemd:systemd pgrep:procps)
# What the documents call besides (the suite docs runs their commands).
documents=(bpftool:bpftool git:git)
# What evaluates the rules in packaging/monitoring.
monitoring=(prometheus:prometheus promtool:prometheus)
suites=("${run[@]}" "${cluster[@]}" "${python[@]}" "${crio[@]}" chromium:chromium chromedriver:chromium-driver jq:jq
    kubectl:kubernetes-client "${rules[@]}" "${disks[@]}" "${vm[@]}" "${documents[@]}" "${monitoring[@]}")
case ${1:-} in
run) wanted=("${run[@]}") ;;
cluster) wanted=("${run[@]}" "${cluster[@]}") ;;
soak) wanted=("${run[@]}" "${cluster[@]}" "${crio[@]}" "${disks[@]}" conntrack:conntrack) ;;
bench) wanted=("${run[@]}" "${cluster[@]}" "${rules[@]}" "${vm[@]}") ;;
vm) wanted=("${vm[@]}") ;;
boot) wanted=("${boot[@]}") ;;
test) wanted=("${suites[@]}") ;;
packages) wanted=("${packages_tools[@]}") ;;
windows) wanted=("${common[@]}" "${windows[@]}") ;;
monitoring) wanted=("${monitoring[@]}") ;;
ci) wanted=("${suites[@]}" "${windows[@]}" "${packages_tools[@]}" shellcheck:shellcheck make:make) ;;
*) fail "usage: $0 run|cluster|soak|bench|vm|boot|test|packages|windows|monitoring|ci" ;;
esac

command -v cargo >/dev/null ||
    fail "Rust is missing: install it with rustup (https://rustup.rs), version 1.90 or newer"
if [ "$1" != run ] && [ "$1" != vm ] && [ "$1" != boot ] && [ "$1" != windows ] && [ "$1" != monitoring ] && ! command -v go >/dev/null; then
    fail "Go is missing: the suites build real peers with it; install 1.26 or newer from https://go.dev/dl/"
fi

# present NAME: whether the program, or the file of this path, is there.
present() {
    case $1 in
    /*) [ -e "$1" ] ;;
    *) command -v "$1" >/dev/null ;;
    esac
}

missing=()
packages=()
for entry in "${wanted[@]}"; do
    if ! present "${entry%%:*}"; then
        missing+=("${entry%%:*}")
        IFS=+ read -ra names <<<"${entry#*:}"
        packages+=("${names[@]}")
    fi
done

if [ ${#missing[@]} -gt 0 ]; then
    install="apt-get install --no-install-recommends ${packages[*]}"
    command -v apt-get >/dev/null ||
        fail "missing: ${missing[*]}; this is no Debian, so install them by your system's means (in Debian: $install)"
    [ "$(id -u)" = 0 ] || fail "missing: ${missing[*]}; only root can install them: sudo $install"

    # Debian starts what it installs unless this file says no; 101 is "forbidden by policy".
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    say "installing: ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >&2
    # --no-remove: a package of another origin that would have to go for this one is the owner's matter.
    apt-get install -q -y --no-install-recommends --no-remove "${packages[@]}" >&2
    for entry in "${wanted[@]}"; do
        present "${entry%%:*}" || fail "${entry%%:*} is still missing after installing ${entry#*:}"
    done
fi

[ "$1" = windows ] || [ "$1" = monitoring ] || [ "$(id -u)" = 0 ] || fail "containerd mounts file systems, so this needs root: sudo make $1"
