#!/usr/bin/env bash
# run.sh COMMAND...: runs a command beside a systemd that is process 1 of namespaces of its own, with the shipped units installed.
#
# The root is an overlay of this machine's root with everything written kept in memory: nothing here can write to or delete from
# the machine's own folders, /tmp included. Network, processes, cgroups, mounts, IPC and host name are separate; /proc/sys and /sys
# are read-only; units that set up a machine are masked. Needs root, systemd 252 or newer, cgroup2 and overlayfs.
#   KEELSON_PROGRAM  the agent (default: target/debug/keelson)
# The exit code is 0 if the command's was 0, else 1. The unit's journal is printed after the command's output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)

# Inside of the namespaces, before systemd.
boot() {
    local root=$1/root upper=$1/root/upper out=$1/out
    mount --make-rprivate /
    mount -t tmpfs -o mode=755,size=4G keelson-systemd "$root"
    mkdir "$root"/{upper,work,root}
    mount -t overlay -o "lowerdir=/,upperdir=$upper,workdir=$root/work" keelson-systemd "$root/root"
    cd "$root/root"
    for folder in tmp run var/tmp var/log dev; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
    chmod 1777 tmp var/tmp
    for device in null zero full random urandom tty; do
        : > "dev/$device"
        mount --bind "/dev/$device" "dev/$device"
    done
    mkdir dev/{shm,pts} run/keelson-check
    : > run/keelson-check/out
    mount --bind "$out" run/keelson-check/out
    ln -s /proc/self/fd dev/fd
    ln -s pts/ptmx dev/ptmx
    mount -t tmpfs -o mode=1777 tmpfs dev/shm
    mount -t proc proc proc
    mount --bind proc/sys proc/sys
    mount -o remount,bind,ro proc/sys
    mount -t sysfs -o ro sysfs sys
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    # As systemd does outside of containers.
    mount -t bpf -o mode=700 bpf sys/fs/bpf
    mkdir old
    pivot_root . old
    umount -l /old
    rmdir /old
    # Guard: from here on nothing of the machine may be reachable for writing.
    if [ "$(findmnt -no FSTYPE /)" != overlay ] || [ "$(findmnt -no FSTYPE --target /tmp)" != tmpfs ]; then
        echo "run.sh: the root is not separate from the machine's" >&2
        exit 1
    fi
    # What the machine has of Keelson is no part of the test.
    rm -rf /etc/keelson /var/lib/keelson /var/lib/keelson-proxy /var/lib/private/keelson-proxy
    ip link set lo up
    install_units
    exec env -i container=keelson PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/lib/systemd/systemd \
        --unit=keelson-check.service --log-target=journal --show-status=no
}

install_units() {
    local units=/etc/systemd/system unit
    rm -rf "$units"
    mkdir -p "$units"
    install -m 0755 "$program" /usr/bin/keelson
    install -m 0644 "$repository"/packaging/keelson{,-proxy}.service "$repository"/packaging/keelson-*.socket "$units"
    install -D -m 0644 "$repository/packaging/keelson-endpoints-group.conf" -t "$units/keelson.service.d"
    install -D -m 0644 -t /usr/share/keelson "$repository/packaging/keelson-proxy-ebpf.conf"
    install -D -m 0644 "$repository/packaging/keelson.sysusers.conf" /usr/lib/sysusers.d/keelson.conf
    install -D -m 0644 "$repository/packaging/keelson.toml" /etc/keelson/keelson.toml
    systemd-sysusers /usr/lib/sysusers.d/keelson.conf
    for unit in systemd-tmpfiles-{setup,setup-dev,clean}.service systemd-tmpfiles-clean.timer systemd-sysctl.service \
        systemd-udevd.service systemd-udev-trigger.service systemd-random-seed.service systemd-update-utmp.service \
        systemd-remount-fs.service systemd-modules-load.service sys-kernel-{debug,tracing}.mount sys-fs-fuse-connections.mount; do
        ln -s /dev/null "$units/$unit"
    done
    mkdir -p /etc/systemd/journald.conf.d
    printf '[Journal]\nStorage=volatile\nRateLimitBurst=0\n' > /etc/systemd/journald.conf.d/check.conf
    {
        printf '#!/bin/bash\nexec > /run/keelson-check/out 2>&1\nexport HOME=%q PATH=%q\ncd %q\n' "$HOME" "$PATH" "$directory"
        printf '%q ' "${command[@]}"
        printf '\n'
    } > /run/keelson-check/command
    chmod 755 /run/keelson-check/command
    cat > "$units/keelson-check.service" <<UNIT
[Unit]
Requires=basic.target
After=basic.target
SuccessAction=exit-force
FailureAction=exit-force
FailureActionExitStatus=1
[Service]
Type=oneshot
ExecStart=/run/keelson-check/command
ExecStopPost=/bin/sh -c 'journalctl --no-pager --output=short-precise --unit=keelson.service > /run/keelson-check/out 2>&1'
UNIT
}

if [ "${1:-}" = --inside ]; then
    root=$2 program=$3 directory=$4
    shift 4
    command=("$@")
    boot "$root"
fi

[ "$(id -u)" = 0 ] || { echo "run.sh: needs root" >&2; exit 1; }
[ -x /usr/lib/systemd/systemd ] || { echo "run.sh: systemd is not installed" >&2; exit 1; }
program=$(realpath "${KEELSON_PROGRAM:-$repository/target/debug/keelson}")
work=$(mktemp -d)
mkdir "$work/root"
mkfifo "$work/out"
group=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts)/keelson-systemd-$$
mkdir "$group"
# shellcheck disable=SC2317 # Called by the trap.
end() {
    # The namespaces have ended: only empty folders and the pipe are left.
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
    rm -f "$work/out"
    rmdir "$work/root" "$work"
}
trap end EXIT
exec 7<> "$work/out"
cat "$work/out" 7>&- &
reader=$!
code=0
( echo "$BASHPID" > "$group/cgroup.procs"
  exec 7>&- unshare --pid --fork --kill-child --mount --cgroup --ipc --uts --net \
      "${BASH_SOURCE[0]}" --inside "$work" "$program" "$PWD" "$@" ) < /dev/null || code=$?
# The end of the pipe, once no process writes to it.
exec 7>&-
wait "$reader"
exit "$code"
