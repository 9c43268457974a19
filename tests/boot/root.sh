#!/usr/bin/env bash
# Makes the disk of a virtual machine that boots Debian with systemd, once, and prints the folder that has it: root.ext4,
# vmlinuz, initrd.img.
#
# The root has what a node has before Keelson: systemd, containerd, the programs that service proxies call. The QEMU guest
# agent runs in it, by which the tests run commands. Nothing of Keelson is in it. Needs root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
packages=(systemd-sysv dbus udev kmod qemu-guest-agent linux-image-cloud-amd64 initramfs-tools
    containerd runc iproute2 nftables iptables ipset conntrack procps python3-minimal libpython3-stdlib curl ca-certificates jq sysstat)

hash=$(sha256sum "${BASH_SOURCE[0]}" | cut -c1-12)
cache=${KEELSON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/keelson}/boot
made=$cache/root-$hash
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ ! -d "$made" ]; then
    "$here/../../scripts/install-packages.sh" boot >&2
    # apt inside of mmdebstrap drops its rights, and must be able to reach the folder.
    work=$(mktemp -d -p "$cache")
    chmod 755 "$work"
    trap 'rm -rf "$work"' EXIT
    (
        IFS=,
        mmdebstrap --quiet --variant=minbase --include="${packages[*]}" \
            --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
            bookworm "$work/root"
    ) >&2
    install -d "$work/root/etc/systemd/network" "$work/root/etc/systemd/system"
    printf 'node\n' >"$work/root/etc/hostname"
    printf '127.0.0.1 localhost node\n' >"$work/root/etc/hosts"
    printf 'LABEL=root / ext4 defaults 0 1\n' >"$work/root/etc/fstab"
    # Not every Ethernet device: networkd would take the addresses of pods' devices.
    printf '[Match]\nName=en*\n[Network]\nDHCP=yes\n' >"$work/root/etc/systemd/network/10-ether.network"
    # What crashed services and power cuts leave is looked at after the next boot.
    install -d "$work/root/var/log/journal"
    chroot "$work/root" systemctl enable --quiet systemd-networkd
    chroot "$work/root" systemctl mask --quiet apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer
    cp -L "$work"/root/vmlinuz "$work/vmlinuz"
    cp -L "$work"/root/initrd.img "$work/initrd.img"
    mke2fs -q -t ext4 -L root -d "$work/root" "$work/root.ext4" 3G >&2
    rm -rf "$work/root"
    mv "$work" "$made"
    trap - EXIT
fi
printf '%s\n' "$made"
