#!/usr/bin/env bash
# Builds the peers that the suites run against, each from its own Go module
# beside this script, and prints one line "NAME=FOLDER" for each.
#
#   build.sh [NAME...]        no names: all that `make test` uses
#
# The result is kept in ${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/peers/NAME-VERSION-HASH, where HASH
# covers everything that goes into the build, so that a later run reuses it and a changed input builds anew. Two runs
# at once wait for each other; an interrupted one leaves nothing that looks finished.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/peers
peers=(chart-tools cni containerd coredns crio cri-driver etcd kubeadm kubernetes reflectors)

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "build.sh: $*"
    exit 1
}

# module_version MODULE FOLDER: the version that the folder's go.mod asks for.
module_version() {
    local version
    version=$(cd "$2" && go list -m -f '{{.Version}}' "$1")
    [ -n "$version" ] || fail "no version of $1 in $2/go.mod"
    printf '%s' "${version#v}"
}

# Each build_NAME FOLDER puts its programs into FOLDER. The functions are part of what the hash covers.
# helm, and what checks objects of prometheus-operator.
build_chart-tools() {
    (
        cd "$here/chart-tools"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" \
            -o "$1/" helm.sh/helm/v3/cmd/helm
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" -o "$1/strict" .
    )
}

# Pods that have addresses: each with a route of its own on the node, so that no bridge has to call netfilter.
build_cni() {
    local module=github.com/containernetworking/plugins/plugins
    (
        cd "$here/cni"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" -o "$1/" \
            "$module"/{ipam/host-local,main/loopback,main/ptp}
    )
}

build_coredns() {
    (cd "$here/coredns" && CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" -o "$1/" .)
}

build_containerd() {
    local module=github.com/containerd/containerd/v2 version
    version=$(module_version "$module" "$here/containerd")
    (
        cd "$here/containerd"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false \
            -tags "urfave_cli_no_docs static_build osusergo netgo" \
            -ldflags "-s -w -X $module/version.Version=v$version -X $module/version.Package=$module" \
            -o "$1/" "$module/cmd/containerd" "$module/cmd/containerd-shim-runc-v2"
    )
}

# The version between Debian's and the newest one.
build_containerd-1.7() {
    local module=github.com/containerd/containerd version
    version=$(module_version "$module" "$here/containerd-1.7")
    (
        cd "$here/containerd-1.7"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -tags "urfave_cli_no_docs static_build osusergo netgo" \
            -ldflags "-s -w -X $module/version.Version=v$version -X $module/version.Package=$module" \
            -o "$1/" "$module/cmd/containerd" "$module/cmd/containerd-shim-runc-v2"
    )
}

# Without cgo, so that no headers have to be installed. What that leaves out (signatures by gpgme, seccomp, btrfs, the
# cache of blob locations on disk) the suites do not use. pinns is CRI-O's own C program, which pins namespaces.
build_crio() {
    local module=github.com/cri-o/cri-o
    (
        cd "$here/crio"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" \
            -tags "containers_image_openpgp containers_image_ostree_stub exclude_graphdriver_btrfs osusergo netgo" \
            -o "$1/" "$module/cmd/crio"
        cc -std=c99 -Os -static -o "$1/pinns" "$(go list -m -f '{{.Dir}}' "$module")"/pinns/src/*.c
    )
}

build_cri-driver() {
    (cd "$here/cri-driver" && CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" -o "$1/" .)
}

# The store of the newest control plane. The oldest one has Debian's, which is older than streaming lists.
build_etcd() {
    local module=go.etcd.io/etcd
    (
        cd "$here/etcd"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" -o "$1/etcd" "$module/server/v3"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" -o "$1/etcdutl" "$module/etcdutl/v3"
    )
}

# What people call on a node, and Debian has no package of (tests/boot).
build_node-tools() {
    local module=sigs.k8s.io/cri-tools version
    version=$(module_version "$module" "$here/node-tools")
    (
        cd "$here/node-tools"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w -X $module/pkg/version.Version=v$version" \
            -o "$1/" "$module/cmd/crictl" github.com/fullstorydev/grpcurl/cmd/grpcurl
    )
}

build_reflectors() {
    (cd "$here/reflectors" && CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" -o "$1/" .)
}

# The programs say no version of their own, and clients refuse an API server without one.
# kubernetes_programs FOLDER MODULE-FOLDER PROGRAM...
kubernetes_programs() {
    local version package flags="-s -w" target=$1 module=$2
    shift 2
    version=$(module_version k8s.io/kubernetes "$module")
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        flags+=" -X $package.gitVersion=v$version -X $package.gitTreeState=clean"
        flags+=" -X $package.gitMajor=$(cut -d. -f1 <<<"$version") -X $package.gitMinor=$(cut -d. -f2 <<<"$version")"
    done
    (
        cd "$module"
        CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "$flags" -o "$target/" \
            "${@/#/k8s.io/kubernetes/cmd/}"
    )
}

build_kubernetes() {
    kubernetes_programs "$1" "$here/kubernetes" kube-{apiserver,controller-manager,proxy,scheduler} kubectl kubelet
}

# The oldest control plane that is supported.
build_kubernetes-1.31() {
    kubernetes_programs "$1" "$here/kubernetes-1.31" kube-{apiserver,controller-manager}
}

# A control plane of this version, from the requirements that its own module has: they and the version name every module.
# control_plane_between FOLDER VERSION
control_plane_between() {
    local module work=$1/module
    mkdir "$work"
    module=$(cd "$here/kubernetes" && go mod download -json "k8s.io/kubernetes@v$2" | sed -n 's/.*"GoMod": "\(.*\)",*/\1/p')
    {
        printf 'module keelson.dev/tests/peers/kubernetes-between\n\n'
        grep -E '^(go|godebug) ' "$module"
        printf 'require k8s.io/kubernetes v%s\n\nreplace (\n' "$2"
        sed -n "s/^\s*\(k8s\.io\/[^ ]*\) v0\.0\.0$/\t\1 => \1 v0.${2#1.}/p" "$module"
        printf ')\n'
    } >"$work/go.mod"
    # Adds what these requirements require, and their checksums.
    (cd "$work" && go list -mod=mod -deps k8s.io/kubernetes/cmd/kube-{apiserver,controller-manager} >/dev/null)
    kubernetes_programs "$1" "$work" kube-{apiserver,controller-manager}
    rm -r "$work"
}

build_kubernetes-1.32() { control_plane_between "$1" "$(peer_version kubernetes-1.32)"; }
build_kubernetes-1.33() { control_plane_between "$1" "$(peer_version kubernetes-1.33)"; }
build_kubernetes-1.34() { control_plane_between "$1" "$(peer_version kubernetes-1.34)"; }
build_kubernetes-1.35() { control_plane_between "$1" "$(peer_version kubernetes-1.35)"; }

# What administrators run: the commands of the documentation.
build_kubeadm() {
    kubernetes_programs "$1" "$here/kubeadm" kubeadm kubectl
}

peer_version() {
    case $1 in
    chart-tools) module_version helm.sh/helm/v3 "$here/chart-tools" ;;
    cni) module_version github.com/containernetworking/plugins "$here/cni" ;;
    containerd) module_version github.com/containerd/containerd/v2 "$here/containerd" ;;
    containerd-1.7) module_version github.com/containerd/containerd "$here/containerd-1.7" ;;
    coredns) module_version github.com/coredns/coredns "$here/coredns" ;;
    crio) module_version github.com/cri-o/cri-o "$here/crio" ;;
    etcd) module_version go.etcd.io/etcd/server/v3 "$here/etcd" ;;
    cri-driver) module_version k8s.io/cri-client "$here/cri-driver" ;;
    node-tools) module_version sigs.k8s.io/cri-tools "$here/node-tools" ;;
    kubeadm | kubernetes | kubernetes-1.31) module_version k8s.io/kubernetes "$here/$1" ;;
    kubernetes-1.32) printf 1.32.5 ;;
    kubernetes-1.33) printf 1.33.13 ;;
    kubernetes-1.34) printf 1.34.4 ;;
    kubernetes-1.35) printf 1.35.4 ;;
    reflectors) module_version k8s.io/client-go "$here/reflectors" ;;
    *) fail "no peer is called '$1'; there are: ${peers[*]}" ;;
    esac
}

# inputs_hash NAME VERSION: of a control plane in between, which has no folder, the version names every input.
inputs_hash() {
    (
        declare -f "build_$1" kubernetes_programs
        go version
        if [ -d "$here/$1" ]; then
            cd "$here/$1"
            find . -type f | LC_ALL=C sort | xargs sha256sum
        else
            declare -f control_plane_between
            printf '%s\n' "$2"
        fi
    ) | sha256sum | cut -c1-12
}

build() {
    local name=$1 version hash target work started
    version=$(peer_version "$name")
    hash=$(inputs_hash "$name" "$version")
    target=$cache/$name-$version-$hash
    if [ ! -d "$target" ]; then
        exec 9>"$cache/.$name.lock"
        flock 9
        if [ ! -d "$target" ]; then
            # What a run that was killed has left: no other run builds while the lock is held.
            rm -rf "$cache/.$name".??????
            work=$(mktemp -d "$cache/.$name.XXXXXX")
            # shellcheck disable=SC2064 # the folder of this build, not of a later one
            trap "rm -rf '$work'" EXIT
            say "building $name $version (minutes when the Go build cache is cold)"
            started=$SECONDS
            "build_$name" "$work"
            chmod 755 "$work"
            mv -T "$work" "$target"
            trap - EXIT
            say "built $name $version in $((SECONDS - started)) s"
        fi
        exec 9>&-
    fi
    printf '%s=%s\n' "$name" "$target"
}

command -v go >/dev/null || fail "Go is missing: the peers are Go programs; see scripts/install-packages.sh"
mkdir -p "$cache"
[ $# -gt 0 ] || set -- "${peers[@]}"
for name in "$@"; do
    build "$name"
done
