#!/usr/bin/env bash
# image.sh PROGRAM ARCHITECTURE ARCHIVE: makes a container image, as an OCI layout in a tar archive, without a daemon and without root.
#
# The image has the program and, as Debian packages of this machine's release, what it calls: the C library, and iptables and ipset
# for the backends iptables and ipvs. No shell, no package manager. Beside the archive, ARCHIVE.packages lists the packages.
# packages.sh calls it and sets KEELSON_BUILD_VERSION and SOURCE_DATE_EPOCH. The same program and the same versions of Debian's
# packages give the same bytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
program=$1 arch=$2 archive=$3
created=$(date -u -d "@${SOURCE_DATE_EPOCH:?}" +%Y-%m-%dT%H:%M:%SZ)
# The program's own, where it runs here.
revision=$("$program" version -o json 2>/dev/null | jq -r '.commit // "unknown"') ||
    revision=$(git rev-parse HEAD 2>/dev/null) || revision=unknown
# Tags of images have no "+".
tag=${KEELSON_BUILD_VERSION:?}
tag=${tag//+/_}
name=ghcr.io/keelson/keelson

umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{debs,base,program}

# apt COMMAND...: of the wanted architecture. Another one than the machine's gets lists of its own.
apt=(-o "APT::Architecture=$arch" -o "APT::Architectures::=$arch" -o APT::Sandbox::User=root)
if [ "$arch" != "$(dpkg --print-architecture)" ]; then
    mkdir -p "$work"/apt/{lists,cache}
    : >"$work/apt/status"
    apt+=(-o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o "Dir::State::status=$work/apt/status"
        -o "APT::Architectures=$arch")
fi
apt-get "${apt[@]}" update -qq
mapfile -t names < <(apt-cache "${apt[@]}" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances libc6 libgcc-s1 iptables ipset | grep '^[a-z]' | sort -u)
(cd "$work/debs" && apt-get "${apt[@]}" download -qq "${names[@]}")

# The first layer: Debian's files, /usr merged, without what only people read.
root=$work/base
mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{etc,run,tmp,var/lib,proc,sys,dev}
ln -s usr/bin usr/sbin usr/lib usr/lib64 "$root"
# shellcheck disable=SC2016 # dpkg's fields.
for deb in "$work"/debs/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$root" --keep-directory-symlink --no-same-owner
    dpkg-deb -W --showformat='${Package} ${Version} ${Architecture}\n' "$deb"
done | sort >"$archive.packages"
find "$root/usr/share" -mindepth 1 -maxdepth 1 ! -name doc ! -name iptables -exec rm -rf {} +
find "$root/usr/share/doc" -type f ! -name copyright -delete
find "$root/usr/share/doc" -mindepth 1 -type l -delete
rm -rf "$root"/usr/lib/*/gconv "$root"/etc/{ld.so.conf.d/fakeroot*,init.d,default}
printf 'root:x:0:0:root:/:/usr/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/usr/sbin/nologin\n' >"$root/etc/passwd"
printf 'root:x:0:\nnonroot:x:65532:\n' >"$root/etc/group"
chmod 1777 "$root/tmp"

# The second layer: what is Keelson's.
install -D -m 0755 "$program" "$work/program/usr/bin/keelson"
install -D -m 0644 LICENSE "$work/program/usr/share/doc/keelson/LICENSE"
find "$work/program" -type d -exec chmod 0755 {} +

layout=$work/layout image=$work/layout:$tag
history=(--history.created "$created" --history.author Keelson)
umoci init --layout "$layout"
umoci new --image "$image"
umoci config --image "$image" --no-history --created "$created" --architecture "$arch" --os linux
for layer in base program; do
    tar -C "$work/$layer" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --format=gnu \
        -cf "$work/$layer.tar" .
    umoci raw add-layer --image "$image" "${history[@]}" --history.created_by "keelson: $layer" "$work/$layer.tar"
done
# A number, so that Kubernetes can tell that it is not root. packaging/kustomize sets another user where one is needed, and says why.
umoci config --image "$image" --no-history --created "$created" \
    --config.user 65532:65532 --config.entrypoint /usr/bin/keelson --config.env PATH=/usr/sbin:/usr/bin \
    --config.label org.opencontainers.image.title=keelson \
    --config.label "org.opencontainers.image.description=Kubernetes node agent and service proxy" \
    --config.label org.opencontainers.image.source=https://github.com/keelson/keelson \
    --config.label org.opencontainers.image.licenses=Apache-2.0 \
    --config.label "org.opencontainers.image.version=$KEELSON_BUILD_VERSION" \
    --config.label "org.opencontainers.image.revision=$revision" \
    --config.label "org.opencontainers.image.created=$created"
umoci gc --layout "$layout"
# containerd takes the whole name from here: `ctr images import` needs no option.
jq -c --arg name "$name:$tag" '.manifests[0].annotations["io.containerd.image.name"] = $name' "$layout/index.json" >"$work/index.json"
mv "$work/index.json" "$layout/index.json"
tar -C "$layout" --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" --format=gnu \
    -cf "$archive" .
printf '%s\n' "$name:$tag $(jq -r '.manifests[0].digest' "$layout/index.json")"
