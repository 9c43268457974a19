#!/bin/bash
# rpm.sh ROOT: installs, upgrades, downgrades and erases the .rpm in a root that is not RPM's, with its scripts and without its
# dependencies. Runs below run.sh only. ROOT/test has keelson.rpm and former.rpm (an earlier version with other shipped settings and one
# file more).
set -euo pipefail
root=$1
[ -e "$root/test/keelson.rpm" ] || { echo "rpm.sh: run it by make packages-check" >&2; exit 1; }
fail() { echo "FAILED: $*" >&2; exit 1; }
in_root() { rpm --root "$root" --define '_dbpath /var/lib/rpm' --nodeps "$@" >"$root/test/log" 2>&1; }
log() { cat "$root/test/log"; }

package=$root/test/keelson.rpm former=$root/test/former.rpm
[ "$(rpm -qp --configfiles "$package")" = /etc/keelson/keelson.toml ] || fail "the settings are no configuration file"
rpm -qp --requires "$package" | grep -qxF 'systemd' || fail "systemd is not required"
rpm -qp --requires "$package" | grep -q '^libc.so.6(GLIBC_2' || fail "no C library is required"

in_root -i "$package" || fail "cannot install: $(log)"
log | grep -q 'installed and not enabled' || fail "the install says nothing: $(log)"
chroot "$root" getent group keelson-cri >/dev/null || fail "no group keelson-cri"
chroot "$root" keelson config check || fail "keelson config check fails with the installed settings"
in_root -e keelson || fail "cannot erase: $(log)"
[ ! -e "$root/etc/keelson/keelson.toml" ] || fail "unchanged settings are left"
in_root -i "$former" || fail "cannot install the former package: $(log)"

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
# The kubelet still runs: an upgrade is not an erasure. Of systemd there are only the calls.
mkdir -p "$root/run/systemd/system" "$root/var/lib/keelson/state"
mv "$root/usr/bin/systemctl" "$root/test/systemctl"
printf '#!/bin/bash\necho "$*" >>/test/calls\n' >"$root/usr/bin/systemctl"
chmod 755 "$root/usr/bin/systemctl"
settings=$root/etc/keelson/keelson.toml
# change FROM TO [FLAG]: one version for the other, which reads the units again, restarts what runs, and does nothing else to them.
change() {
    : >"$root/test/calls"
    # shellcheck disable=SC2086 # None, or one.
    in_root -U ${3:-} "$2" || fail "cannot go from $1 to $2: $(log)"
    diff "$root/test/calls" - <<<$'daemon-reload\ntry-restart keelson.service\ntry-restart keelson-proxy.service' ||
        fail "other calls of systemctl from $1 to $2"
    [ "$(rpm --root "$root" --define '_dbpath /var/lib/rpm' -q keelson)" = "$(rpm -qp "$2")" ] || fail "$2 is not the one package"
    ! log | grep -q 'installed and not enabled' || fail "an upgrade says that it is an install"
    chroot "$root" keelson config check || fail "keelson config check fails after the change from $1 to $2"
    [ -d "$root/var/lib/keelson/state" ] || fail "the state is gone"
    local path
    while read -r path; do
        [ -e "$root$path" ] || [ -L "$root$path" ] || fail "$path of $2 is missing"
    done < <(rpm -qpl "$2")
    while read -r path; do
        [ ! -e "$root$path" ] || fail "$path of $1 is left"
    done < <(comm -23 <(rpm -qpl "$1" | sort) <(rpm -qpl "$2" | sort))
}
# ships FILE: whose settings it has.
ships() { if grep -q 'shipped earlier' "$1"; then echo former; else echo new; fi; }
changed() { [ "$(tail -n 1 "$settings")" = '# changed here' ]; }

comm -23 <(rpm -qpl "$former" | sort) <(rpm -qpl "$package" | sort) | grep -q . || fail "the former package has no file of its own"
# Unchanged settings follow the package.
change "$former" "$package"
[ "$(ships "$settings")" = new ] || fail "the settings are not those of the new package"
[ ! -e "$settings.rpmnew" ] || fail "there is a keelson.toml.rpmnew beside unchanged settings"
if in_root -U "$former"; then fail "an earlier version was installed without --oldpackage"; fi
change "$package" "$former" --oldpackage
[ "$(ships "$settings")" = former ] || fail "the settings are not those of the former package"
# Changed ones stay, and the shipped ones lie beside them if they have changed as well.
echo '# changed here' >>"$settings"
change "$former" "$package"
changed || fail "the changed settings are gone"
[ -e "$settings.rpmnew" ] || fail "there is no keelson.toml.rpmnew beside changed settings"
[ "$(ships "$settings.rpmnew")" = new ] || fail "the new settings are not in keelson.toml.rpmnew"
rm "$settings.rpmnew"
change "$package" "$former" --oldpackage
changed || fail "the changed settings are gone after the downgrade"
[ "$(ships "$settings.rpmnew")" = former ] || fail "the former settings are not in keelson.toml.rpmnew"
rm "$settings.rpmnew"
change "$former" "$package"
mv "$root/test/systemctl" "$root/usr/bin/systemctl"
rmdir "$root/run/systemd/system"

kill "$kubelet"
wait "$kubelet" || true

in_root -e keelson || fail "cannot erase: $(log)"
[ ! -e "$root/usr/bin/keelson" ] || fail "the program is left"
[ -d "$root/var/lib/keelson/state" ] || fail "the state is gone"
grep -q 'changed here' "$root/etc/keelson/keelson.toml.rpmsave" || fail "the changed settings are gone"
echo "rpm: installed, refused, upgraded, downgraded, erased"
