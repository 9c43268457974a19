#!/usr/bin/env bash
# Runs a command in a small virtual machine whose kernel has what the machine's own may lack: IPVS, IP sets, dummy devices.
#
#   tests/vm/run.sh COMMAND [ARGUMENT...]
#
# The kernel is Debian's cloud kernel of this release, under qemu without KVM. The VM sees the root file system of the
# machine read-only below a tmpfs, so every program of it runs there, in the current folder; what it writes is gone. The
# machine's loopback has the address 10.0.2.2 there. The exit code is the command's; 125: the VM ended without one. Needs root.
#   KEELSON_VM_MEMORY   MiB (1024)
#   KEELSON_VM_TIMEOUT  seconds (900)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/vm
memory=${KEELSON_VM_MEMORY:-1024}
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

# Loaded at the start, with what they need.
modules=(virtio_pci virtio_net virtiofs overlay crc32c_generic bridge veth dummy sctp
    ip_vs ip_vs_rr ip_vs_wrr ip_vs_lc ip_vs_wlc ip_vs_lblc ip_vs_lblcr ip_vs_sh ip_vs_dh ip_vs_sed ip_vs_nq ip_vs_mh
    nf_conntrack_netlink nf_tables nft_compat nft_chain_nat nft_objref nft_ct nft_fib_ipv4 nft_fib_ipv6 nft_hash nft_masq nft_nat
    nft_numgen nft_reject_ipv4 nft_reject_ipv6
    ip_set ip_set_bitmap_port ip_set_hash_ip ip_set_hash_ipport ip_set_hash_ipportip ip_set_hash_ipportnet ip_set_hash_netport
    xt_set xt_addrtype xt_comment xt_conntrack xt_mark xt_nat xt_MASQUERADE xt_statistic xt_tcpudp ipt_REJECT ip6t_REJECT
    iptable_nat iptable_filter iptable_mangle ip6table_nat ip6table_filter ip6table_mangle)

fail() {
    printf 'tests/vm/run.sh: %s\n' "$*" >&2
    exit 125
}
[ $# -gt 0 ] || fail "usage: $0 COMMAND [ARGUMENT...]"
[ "$(id -u)" = 0 ] || fail "virtiofsd and the packages need root"

# One run after the other builds the initrd, and all others use it.
build() {
    "$here/../../scripts/install-packages.sh" vm
    local package version root module file
    work=$(mktemp -d)
    root=$work/root
    apt-get update -qq
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ {print $2; exit}')
    [ -n "$package" ] || fail "apt knows no package linux-image-cloud-amd64"
    # apt drops its rights, and must be able to write here.
    chmod 755 "$work"
    (cd "$work" && apt-get download -qq "$package" && dpkg-deb -x ./*.deb kernel)
    version=$(basename "$work"/kernel/lib/modules/*)
    depmod -b "$work/kernel" "$version"
    mkdir -p "$root"/{bin,sbin,proc,sys,dev,lib/modules}
    chmod 755 "$root"
    cp "$(command -v busybox)" "$root/bin/busybox"
    ln -s busybox "$root/bin/sh"
    for module in "${modules[@]}"; do
        # The line of modules.dep: the file, and the files of what it needs.
        for file in $(grep -E "(^|/)$module\.ko[^:]*:" "$work/kernel/lib/modules/$version/modules.dep" | tr -d :); do
            install -D "$work/kernel/lib/modules/$version/$file" "$root/lib/modules/$version/$file"
        done
    done
    find "$root" -name '*.ko.xz' -exec xz -d {} +
    cp "$work/kernel/lib/modules/$version"/modules.{builtin,order} "$root/lib/modules/$version/"
    depmod -b "$root" "$version"
    printf '%s\n' "${modules[@]}" >"$root/modules"
    install -m 755 "$here/init.sh" "$root/init"
    (cd "$root" && find . | cpio -o -H newc --quiet) | gzip -1 >"$cache/initrd.new"
    cp "$work"/kernel/boot/vmlinuz-* "$cache/vmlinuz"
    mv "$cache/initrd.new" "$cache/initrd"
}

work='' run=$(mktemp -d)
processes=()
# shellcheck disable=SC2317 # Called by the trap.
clean_up() {
    for process in "${processes[@]}"; do kill "$process" 2>/dev/null || true; done
    rm -rf "$run" ${work:+"$work"}
}
trap clean_up EXIT

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ ! -s "$cache/vmlinuz" ] || [ "$here/run.sh" -nt "$cache/initrd" ] || [ "$here/init.sh" -nt "$cache/initrd" ]; then
    build >&2
fi
exec 9>&-

mkdir "$run/share"
{
    printf 'cd %q\nexport HOME=%q PATH=%q\n' "$PWD" "$HOME" "$PATH"
    printf '%q ' "$@"
    printf '\n'
} >"$run/share/command"
for folder in root:/:always share:"$run/share":none; do
    IFS=: read -r tag path caching <<<"$folder"
    /usr/lib/qemu/virtiofsd --socket-path="$run/$tag.sock" -o source="$path" -o sandbox=chroot -o cache="$caching" \
        >"$run/$tag.log" 2>&1 &
    processes+=($!)
done
for _ in $(seq 100); do
    if [ -S "$run/root.sock" ] && [ -S "$run/share.sock" ]; then break; fi
    sleep 0.1
done
# Instructions of newer processors cost more to emulate than they save. On a busy machine the VM may stand still for a
# while: its kernel must not take that for a fault.
timeout "${KEELSON_VM_TIMEOUT:-900}" qemu-system-x86_64 -accel tcg,thread=multi -cpu qemu64 -smp 2 -m "$memory" -machine pc \
    -nodefaults -no-user-config -display none -no-reboot -serial stdio \
    -object memory-backend-memfd,id=memory,size="${memory}M",share=on -numa node,memdev=memory \
    -nic user,model=virtio-net-pci \
    -chardev socket,id=root,path="$run/root.sock" -device vhost-user-fs-pci,chardev=root,tag=root \
    -chardev socket,id=share,path="$run/share.sock" -device vhost-user-fs-pci,chardev=share,tag=share \
    -kernel "$cache/vmlinuz" -initrd "$cache/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable no_timer_check rcupdate.rcu_cpu_stall_suppress=1" </dev/null ||
    fail "the VM did not end in time, or qemu failed ($?)"
[ -s "$run/share/code" ] || fail "the VM ended without a result"
exit "$(cat "$run/share/code")"
