#!/usr/bin/env bash
# systemd.sh DEB: installs, upgrades, removes and purges the .deb beside a running systemd. Runs below tests/systemd/run.sh only, whose root
# is an overlay: what it writes to /etc, /usr and dpkg's records is gone afterwards.
set -euo pipefail
deb=$1 work=/run/keelson-work
if [ ! -d /run/keelson-check ]; then
    echo "systemd.sh: run it by make packages-check" >&2
    exit 1
fi
fail() { echo "FAILED: $*" >&2; journalctl --no-pager -n 30 -u keelson -u keelson-proxy >&2; exit 1; }
log() { cat "$work/log"; }
until_true() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@"; do [ "$SECONDS" -lt "$end" ] || fail "timed out: $*"; sleep 0.2; done
}
main() { systemctl show "$1" --property=MainPID --value; }
runs_program() { cmp -s "/proc/$(main "$1")/exe" /usr/bin/keelson; }
no_agent() { ! pgrep -f '^/usr/bin/keelson agent' >/dev/null; }

# What run.sh has put there by hand.
rm -rf /etc/systemd/system/keelson{.service,.service.d,-proxy.service,-cri.socket,-debug.socket} /etc/keelson /usr/bin/keelson /usr/lib/sysusers.d/keelson.conf
systemctl daemon-reload
mkdir -p "$work"
# The same version again and a later one, whose program has other bytes.
cp "$deb" "$work/keelson.deb"
dpkg-deb -R "$deb" "$work/next"
sed -i 's/^\(Version: .*-\)1$/\12/' "$work/next/DEBIAN/control"
printf 'later' >>"$work/next/usr/bin/keelson"
dpkg-deb -Znone -b "$work/next" "$work/next.deb" >/dev/null

dpkg -i "$work/keelson.deb" >"$work/log" 2>&1 || fail "cannot install: $(log)"
for unit in keelson.service keelson-proxy.service keelson-cri.socket keelson-debug.socket; do
    if systemctl --quiet is-active "$unit" || systemctl --quiet is-enabled "$unit"; then fail "$unit was started or enabled"; fi
done
# An upgrade starts nothing either.
dpkg -i "$work/next.deb" >"$work/log" 2>&1 || fail "cannot upgrade: $(log)"
if systemctl --quiet is-active keelson.service; then fail "the upgrade started the agent"; fi
dpkg -i "$work/keelson.deb" >"$work/log" 2>&1 || fail "cannot go back: $(log)"

mkdir -p /etc/keelson/manifests
printf '[pulls]\nmax_parallel_image_pulls = 3\n[endpoints]\nsource = "files"\nmanifests = "/etc/keelson/manifests"\n' >/etc/keelson/keelson.toml
systemctl enable --now keelson-cri.socket keelson-debug.socket keelson.service 2>/dev/null || fail "the agent does not start"
[ "$(stat -c '%G %a' /run/keelson/cri.sock)" = "keelson-cri 660" ] || fail "cri.sock is $(stat -c '%G %a' /run/keelson/cri.sock)"

# What runs is restarted by an upgrade, and by the way back.
for package in next keelson; do
    former=$(main keelson)
    dpkg --force-confold -i "$work/$package.deb" >"$work/log" 2>&1 || fail "cannot change to $package: $(log)"
    [ "$(main keelson)" != "$former" ] || fail "the agent was not restarted"
    runs_program keelson || fail "the agent runs another program than the installed one"
    if systemctl --quiet is-active keelson-proxy.service; then fail "the upgrade started the proxy"; fi
done

systemctl start keelson-proxy.service || fail "the proxy does not start"
if dpkg -r keelson >"$work/log" 2>&1; then fail "removed below a running proxy"; fi
grep -q 'keelson-proxy.service runs' "$work/log" || fail "refused without a reason: $(log)"
systemctl --quiet is-active keelson.service || fail "the refused removal stopped the agent"
systemctl stop keelson-proxy.service
keelson proxy cleanup

dpkg -r keelson >"$work/log" 2>&1 || fail "cannot remove: $(log)"
until_true 60 no_agent
for unit in keelson.service keelson-cri.socket; do
    if systemctl --quiet is-active "$unit"; then fail "$unit is active after the removal"; fi
done
[ ! -e /run/keelson ] || fail "the removal left the sockets"
[ -d /var/lib/keelson/state ] || fail "the removal took the state"
dpkg -P keelson >"$work/log" 2>&1 || fail "cannot purge: $(log)"
left=$(find /etc /usr /var/lib /run -xdev -name '*keelson*' ! -path "$work*" ! -path '/run/keelson-check*' ! -path '/usr/src/*' ! -path '/run/systemd/*' ! -path '/etc/systemd/system/keelson-check.service')
[ -z "$left" ] || fail "left after the purge: $left"
echo "systemd: nothing started unasked, restarted by upgrades, refused, removed, purged"
