#!/usr/bin/env bash
# Runs a command in a small virtual machine whose kernel has what the machine's own may lack: IPVS, IP sets, dummy devices.
#
#   tests/vm/run.sh COMMAND [ARGUMENT...]
#
# The kernel is a program (kernel.sh): it needs no virtualization, and programs run in it at full speed on one processor;
# a system call takes some microseconds. The VM sees the root file system of the machine read-only below a tmpfs, so every
# program of it runs there, in the current folder; what it writes is gone. The machine's loopback has the address 10.0.2.2
# there. The exit code is the command's; 125: the VM ended without one. Needs root.
#   KEELSON_VM_MEMORY   MiB (1024)
#   KEELSON_VM_TIMEOUT  seconds (900)
#   KEELSON_VM_LINUX    version of the kernel (kernel.sh)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    printf 'tests/vm/run.sh: %s\n' "$*" >&2
    exit 125
}
[ $# -gt 0 ] || fail "usage: $0 COMMAND [ARGUMENT...]"
[ "$(id -u)" = 0 ] || fail "the programs in the VM have the rights of this user, and need root"
kernel=$("$here/kernel.sh")

run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
cp "$here/init.sh" "$run/init"
{
    printf 'cd %q\nexport HOME=%q PATH=%q\n' "$PWD" "$HOME" "$PATH"
    printf '%q ' "$@"
    printf '\n'
} >"$run/command"

# The network card of the VM is a socket, behind which this program stands for the machine.
setpriv --pdeathsig KILL slirp4netns --target-type=bess "$run/network" >"$run/network.log" 2>&1 &
network=$!
# It may have ended with the VM.
trap 'kill "$network" 2>/dev/null || true; rm -rf "$run"' EXIT
for _ in {1..200}; do
    [ ! -S "$run/network" ] || break
    sleep 0.05
done
[ -S "$run/network" ] || fail "slirp4netns did not start: $(cat "$run/network.log")"

# Each process in the VM is one outside, and ends with the first one of this PID namespace. The kernel and these processes
# take turns: with two processors each turn waits for one to wake up, ten times as long as the turn itself. So they have one
# processor, and no other VM's while there is a free one.
processors=$(taskset -pc $$ | sed 's/.*: //' | tr , '\n' | awk -F- '{ for (i = $1; i <= $NF; i++) print i }' | shuf)
for processor in $processors; do
    exec 9>"$(dirname "$kernel")/processor-$processor"
    ! flock --nonblock 9 || break
done
# Its memory is a file. In a crowd it goes first: what waits in it for a second takes minutes behind others.
mkdir "$run/memory"
# shellcheck disable=SC2016 # Expanded by the other shell.
timeout "${KEELSON_VM_TIMEOUT:-900}" nice -n -10 taskset -c "$processor" unshare --pid --fork --kill-child --mount-proc \
    sh -c 'mount -t tmpfs memory "$0" && TMPDIR=$0 exec "$@"' "$run/memory" "$kernel" "mem=${KEELSON_VM_MEMORY:-1024}M" \
    root=/dev/root rootfstype=hostfs rootflags=/ ro init="$run/init" "share=$run" uml_dir="$run/" \
    con0=null,fd:1 con=null ssl=null dummy.numdummies=0 "vec0:transport=bess,dst=$run/network" seccomp=auto quiet panic=-1 </dev/null ||
    fail "the VM did not end in time, or its kernel failed ($?)"
[ -s "$run/code" ] || fail "the VM ended without a result"
exit "$(cat "$run/code")"
