#!/usr/bin/env bash
# Checks what `make packages` has made: contents, life of the .deb and of the .rpm in roots of their own, of the .deb beside a systemd, the image
# in a containerd, lintian, and that the same commit gives the same bytes. Needs root.
#
#   tests/packages/run.sh [contents | deb | systemd | rpm | image | lint | same ...]     (default: all)
#
#   KEELSON_TEST_PACKAGES  the folder with the packages (default: <target folder>/packages)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
packages=${KEELSON_TEST_PACKAGES:-$(scripts/target-dir.sh)/packages}
cache=${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/packages

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail "this needs root"
# one PATTERN: the only file of this name.
one() {
    local files
    mapfile -t files < <(find "$packages" -maxdepth 1 -name "$1")
    [ ${#files[@]} = 1 ] || fail "$packages has ${#files[@]} files $1 and not one; run make packages"
    printf '%s\n' "${files[0]}"
}
deb=$(one '*_amd64.deb') rpm=$(one '*.x86_64.rpm') tarball=$(one '*-linux-amd64.tar.gz') image=$(one '*-linux-amd64.oci.tar')

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# make_root FOLDER: a small Debian, from the cache once it was made.
make_root() {
    local codename archive
    codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    archive=$cache/root2-$codename.tar
    if [ ! -s "$archive" ]; then
        mkdir -p "$cache"
        mmdebstrap --quiet --variant=essential --include=systemd,passwd,procps "$codename" "$cache/new.tar"
        mv "$cache/new.tar" "$archive"
    fi
    mkdir -p "$1"
    tar -x -C "$1" -f "$archive"
    mkdir -p "$1/test"
}

# isolated ROOT COMMAND...: with processes, mounts and network of its own, and /proc and /dev of ROOT.
isolated() {
    local root=$1
    shift
    # shellcheck disable=SC2016 # The inner shell's.
    unshare --mount --pid --fork --kill-child --net --ipc --uts bash -c '
        set -e
        root=$1
        shift
        mount --make-rprivate /
        mount -t proc proc "$root/proc"
        mount -t tmpfs -o mode=755 tmpfs "$root/dev"
        for device in null zero urandom; do
            : >"$root/dev/$device"
            mount --bind "/dev/$device" "$root/dev/$device"
        done
        exec "$@"' isolated "$root" "$@"
}

# check_links FOLDER: each relative link of the documents in it leads to a file, but for those to parts of the source.
check_links() {
    local document target found=0
    while IFS=: read -r document target; do
        case $target in *://*) continue ;; esac
        target=$(realpath -ms --relative-to="$1" "$(dirname "$document")/$target")
        case $target in fuzz/* | proto/* | tests/* | packaging/manifests | packaging/chart/keelson/values.yaml) continue ;; esac
        [ -e "$1/$target" ] || fail "${document#"$1"/} links to $target, which is not in the packages"
        found=$((found + 1))
    done < <(grep -roP --include='*.md' '\]\(\K[^)#\s]+' "$1")
    [ "$found" -gt 200 ] || fail "only $found links were found in the documents"
}

check_contents() {
    local kind file sbom
    dpkg-deb --fsys-tarfile "$deb" | tar -t | sed 's,^\./,/,' | grep -v '/$' | sort >"$work/deb"
    rpm -qp --queryformat '[%{FILEMODES:perms} %{FILENAMES}\n]' "$rpm" | sed -n 's/^[^d][^ ]* //p' | sort >"$work/rpm"
    tar -tf "$tarball" | sed 's,^[^/]*/,/,' | grep -v '/$' | sort >"$work/tarball"
    # Each kind has its own places for these.
    for kind in deb rpm tarball; do
        grep -Ev '/(copyright|LICENSE|changelog.*\.gz|overrides/keelson|_keelson)$' "$work/$kind" >"$work/$kind.common"
    done
    diff "$work/deb.common" "$work/rpm.common" || fail "the .rpm has other files than the .deb"
    diff "$work/deb.common" "$work/tarball.common" || fail "the tarball has other files than the .deb"
    for file in /usr/bin/keelson /etc/keelson/keelson.toml /usr/lib/sysusers.d/keelson.conf /usr/share/man/man1/keelson.1.gz \
        /usr/share/keelson/keelson-proxy-ebpf.conf \
        /usr/lib/systemd/system/keelson{.service,-proxy.service,-cri.socket,-debug.socket}; do
        grep -qxF "$file" "$work/deb" || fail "$file is missing"
    done
    mkdir "$work/documents"
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$work/documents" ./usr/share/doc/keelson
    check_links "$work/documents/usr/share/doc/keelson"
    (cd "$packages" && sha256sum --quiet -c SHA256SUMS) || fail "SHA256SUMS does not fit"
    dpkg-deb --fsys-tarfile "$deb" | tar -xO ./usr/bin/keelson >"$work/program"
    chmod 755 "$work/program"
    case $("$work/program" --version) in
    *-dev) echo "contents: not built by make packages, so it may have paths of this machine in it" ;;
    *)
        for folder in "$PWD/" "$(scripts/target-dir.sh)/" "${CARGO_HOME:-$HOME/.cargo}/"; do
            if grep -qaF "$folder" "$work/program"; then fail "the program has paths of the machine that built it: $folder"; fi
        done
        ;;
    esac
    for sbom in "$(one 'keelson-*-linux-amd64.cdx.json')" "$(one 'keelson-*-linux-amd64.oci.cdx.json')"; do
        jq -e '.bomFormat == "CycloneDX" and ([.components[].name] | index("tokio") != null) and ([.components[] | select(.name == "tokio")][0].licenses | length > 0)' \
            "$sbom" >/dev/null || fail "$sbom does not list the crates with their licences"
    done
    jq -e '[.components[].name] | index("libc6") != null' "$(one 'keelson-*-linux-amd64.oci.cdx.json')" >/dev/null ||
        fail "the SBOM of the image does not list Debian's packages"
    echo "contents: $(wc -l <"$work/deb") files in the .deb, the same ones in .rpm and tarball; SBOMs with $(jq '.components | length' "$(one 'keelson-*-linux-amd64.cdx.json')") components"
}

check_deb() {
    make_root "$work/deb-root"
    cp "$deb" "$work/deb-root/test/keelson.deb"
    cp "$here/deb.sh" "$work/deb-root/test/deb.sh"
    # A later package, whose shipped settings are other ones.
    dpkg-deb -R "$deb" "$work/next"
    sed -i 's/^\(Version: .*-\)1$/\12/' "$work/next/DEBIAN/control"
    echo '# shipped later' >>"$work/next/etc/keelson/keelson.toml"
    dpkg-deb -Znone -b "$work/next" "$work/deb-root/test/next.deb" >/dev/null
    isolated "$work/deb-root" chroot "$work/deb-root" /bin/bash /test/deb.sh
}

# The program that is named is replaced by the package's.
check_systemd() { KEELSON_PROGRAM=/bin/true tests/systemd/run.sh tests/packages/systemd.sh "$(realpath "$deb")"; }

# former_rpm FILE: a package of the same files and scripts, but of an earlier version, with other shipped settings and a file that is in
# no later one.
former_rpm() {
    local stage=$work/former glibc
    mkdir -p "$stage/root"
    tar -x -C "$stage/root" --strip-components=1 -f "$tarball"
    mv "$stage/root/usr/share/zsh/site-functions/_keelson" "$stage/_keelson"
    rm -r "$stage/root/usr/share/zsh" "$stage/root/usr/share/doc/keelson/LICENSE"
    echo '# shipped earlier' >>"$stage/root/etc/keelson/keelson.toml"
    echo 'gone in later versions' >"$stage/root/usr/share/doc/keelson/former"
    printf -- '- semver: 0.0.9\n  date: 2026-01-01T00:00:00Z\n  packager: test\n  changes: [{note: earlier}]\n' >"$stage/changelog.yaml"
    glibc=$(rpm -qp --requires "$rpm" | sed -n 's/^libc.so.6(GLIBC_\([0-9.]*\)).*/\1/p')
    sed "s|@ARCH@|amd64|; s|@VERSION@|0.0.9|; s|@STAGE@|$stage|; s|@GLIBC@|$glibc|; s|@DATE@|2026-01-01T00:00:00Z|; s|@COMPRESSION@|gzip|" \
        packaging/package/nfpm.yaml >"$stage/nfpm.yaml"
    "$(scripts/tool.sh nfpm)" package --config "$stage/nfpm.yaml" --packager rpm --target "$1" >/dev/null
}

check_rpm() {
    make_root "$work/rpm-root"
    cp "$rpm" "$work/rpm-root/test/keelson.rpm"
    former_rpm "$work/rpm-root/test/former.rpm"
    isolated "$work/rpm-root" "$here/rpm.sh" "$work/rpm-root"
}

# In a containerd of its own: imported, and run as its user.
check_image() {
    local folder=$work/containerd containerd name digest process
    local ctr=(ctr --address "$folder/containerd.sock")
    containerd=$(tests/peers/build.sh containerd | cut -d= -f2)
    mkdir -p "$folder"
    printf 'version = 3\nroot = "%s/root"\nstate = "%s/state"\n[grpc]\naddress = "%s/containerd.sock"\n' \
        "$folder" "$folder" "$folder" >"$folder/config.toml"
    # Its own shim first.
    PATH=$containerd:$PATH "$containerd/containerd" --config "$folder/config.toml" >"$folder/log" 2>&1 &
    process=$!
    # shellcheck disable=SC2064 # These values.
    trap "kill $process 2>/dev/null; wait $process; rm -rf '$work'" EXIT
    until "${ctr[@]}" version >/dev/null 2>&1; do
        kill -0 "$process" || fail "containerd ended: $(tail -n 5 "$folder/log")"
        sleep 0.2
    done
    "${ctr[@]}" images import "$image" >/dev/null
    name=$("${ctr[@]}" images ls -q)
    digest=$(tar -xOf "$image" ./index.json | jq -r '.manifests[0].digest')
    "${ctr[@]}" images ls | grep -qF "$digest" || fail "containerd has another digest than the archive"
    "${ctr[@]}" run --rm "$name" version /usr/bin/keelson version || fail "the program does not run in the image"
    # What the backends call, with the libraries that it needs.
    for program in iptables-nft-restore ip6tables-nft-save iptables-legacy-restore ip6tables-legacy-save ipset; do
        # ipset also asks the kernel, which refuses it.
        "${ctr[@]}" run --rm "$name" "run-$program" "/usr/sbin/$program" --version >"$work/version" 2>&1 || true
        grep -q ' v[0-9]' "$work/version" ||
            fail "$program does not run in the image: $(cat "$work/version")"
    done
    user=$(tar -xOf "$image" "./blobs/sha256/$(tar -xOf "$image" "./blobs/${digest/://}" | jq -r '.config.digest[7:]')" | jq -r .config.User)
    [ "$user" = 65532:65532 ] || fail "the image runs as $user"
    kill "$process"
    wait "$process" || true
    trap 'rm -rf "$work"' EXIT
    echo "image: $name $digest imported and run as $user"
}

check_lint() {
    lintian --allow-root --fail-on error,warning "$deb"
    echo "lint: lintian has no errors and no warnings"
}

# Made again from the packaged program: every file has the same bytes.
check_same() {
    dpkg-deb --fsys-tarfile "$deb" | tar -xO ./usr/bin/keelson >"$work/keelson"
    chmod 755 "$work/keelson"
    # Of the same time, though there may be a later commit by now.
    SOURCE_DATE_EPOCH=$(date -d "$(jq -r .metadata.timestamp "$(one 'keelson-*-linux-amd64.cdx.json')")" +%s) \
        PROGRAM=$work/keelson OUT=$work/again packaging/packages.sh >/dev/null
    diff "$packages/SHA256SUMS" "$work/again/SHA256SUMS" || fail "made again, packages have other bytes"
    echo "same: every file has the same bytes when it is made again"
}

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(contents deb systemd rpm image lint same)
for part in "${parts[@]}"; do
    case $part in
    contents | deb | systemd | rpm | image | lint | same) "check_$part" ;;
    *) fail "unknown part $part" ;;
    esac
done
