#!/bin/bash
# rpm.sh ROOT: installs and erases the .rpm in a root that is not RPM's, with its scripts and without its dependencies. Runs below
# run.sh only. ROOT/test has keelson.rpm.
set -euo pipefail
root=$1
[ -e "$root/test/keelson.rpm" ] || { echo "rpm.sh: run it by make packages-check" >&2; exit 1; }
fail() { echo "FAILED: $*" >&2; exit 1; }
in_root() { rpm --root "$root" --define '_dbpath /var/lib/rpm' --nodeps "$@" >"$root/test/log" 2>&1; }
log() { cat "$root/test/log"; }

package=$root/test/keelson.rpm
[ "$(rpm -qp --configfiles "$package")" = /etc/keelson/keelson.toml ] || fail "the settings are no configuration file"
rpm -qp --requires "$package" | grep -qxF 'systemd' || fail "systemd is not required"
rpm -qp --requires "$package" | grep -q '^libc.so.6(GLIBC_2' || fail "no C library is required"

in_root -i "$package" || fail "cannot install: $(log)"
log | grep -q 'installed and not enabled' || fail "the install says nothing: $(log)"
chroot "$root" getent group keelson-cri >/dev/null || fail "no group keelson-cri"
chroot "$root" keelson config check || fail "keelson config check fails with the installed settings"

# As in deb.sh: a kubelet that depends on it.
printf '#!/bin/bash\nexec 3<>/test/rpm-fifo\nread -r -u 3\n' >"$root/test/kubelet"
chmod 755 "$root/test/kubelet"
mkfifo "$root/test/rpm-fifo"
chroot "$root" /test/kubelet --image-service-endpoint=unix:///run/keelson/cri.sock &
kubelet=$!
for _ in $(seq 600); do
    # This process has the former /proc.
    [ "$(cat "$root/proc/$kubelet/comm")" != kubelet ] || break
    sleep 0.1
done
if in_root -e keelson; then fail "erased below a kubelet that uses the agent"; fi
log | grep -q 'keelson is not removed' || fail "not erased, and without a reason: $(log)"
[ -x "$root/usr/bin/keelson" ] || fail "the program is gone after a refused erasure"
kill "$kubelet"
wait "$kubelet" || true

echo '# changed here' >>"$root/etc/keelson/keelson.toml"
mkdir -p "$root/var/lib/keelson/state"
in_root -e keelson || fail "cannot erase: $(log)"
[ ! -e "$root/usr/bin/keelson" ] || fail "the program is left"
[ -d "$root/var/lib/keelson/state" ] || fail "the state is gone"
grep -q 'changed here' "$root/etc/keelson/keelson.toml.rpmsave" || fail "the changed settings are gone"
echo "rpm: installed, refused, erased"
