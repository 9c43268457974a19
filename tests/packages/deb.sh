#!/bin/bash
# deb.sh: installs, upgrades, refuses to remove, removes and purges the .deb. Runs below run.sh only, in a root of its own that has
# neither systemd running nor any process but these. /test has keelson.deb and next.deb (a later version with other shipped settings).
set -euo pipefail
[ -e /test/keelson.deb ] || { echo "deb.sh: run it by make packages-check" >&2; exit 1; }
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive

fail() { echo "FAILED: $*" >&2; exit 1; }
has() { grep -qF -- "$2" <<<"$1" || fail "\"$2\" is missing in: $1"; }
status() { dpkg-query -W -f '${db:Status-Abbrev}' keelson; }
# Every file but the package manager's own records.
files() {
    find / -xdev \( -path /proc -o -path /dev -o -path /sys -o -path /test -o -path /tmp -o -path /var/lib/dpkg -o -path /var/log \
        -o -path /var/cache -o -path /run/systemd -o -path '/etc/*-' \) -prune -o -printf '%p %y %m %U:%G %l\n' | sort
    sort /etc/group /etc/gshadow
}

# systemctl enable makes these folders, which are systemd's.
mkdir -p /etc/systemd/system/{sockets,multi-user}.target.wants
files >/test/before
dpkg -i /test/keelson.deb >/test/log 2>&1 || fail "cannot install: $(cat /test/log)"
has "$(cat /test/log)" "installed and not enabled"
for group in keelson keelson-cri keelson-inspect; do getent group "$group" >/dev/null || fail "no group $group"; done
for unit in keelson.service keelson-proxy.service keelson-cri.socket keelson-debug.socket; do
    [ "$(systemctl is-enabled "$unit")" = disabled ] || fail "$unit is $(systemctl is-enabled "$unit")"
done
systemd-analyze verify --man=no /usr/lib/systemd/system/keelson{.service,-proxy.service,-cri.socket,-debug.socket} ||
    fail "systemd does not accept the units"

# The settings that are installed set a limit (the kubelet's own is turned off in front of the agent), and nothing is wrong with them.
keelson config check || fail "keelson config check fails with the installed settings"
keelson config show | grep -Eq '^pulls.max_parallel_image_pulls +3 ' || fail "the installed settings set no limit"
keelson version
version=$(keelson --version)
version=${version#keelson }
[ "$(dpkg-query -W -f '${Version}' keelson)" = "${version/-/\~}-1" ] || fail "the package is not of $version"
# A page for each command that help lists, and completions that the shell accepts.
commands=$(keelson --help | sed -n '/^Commands:/,/^$/s/^  \([a-z-]*\) .*/\1/p' | grep -v '^help$')
[ -n "$commands" ] || fail "keelson --help lists no command"
for command in $commands; do
    gzip -t "/usr/share/man/man1/keelson-$command.1.gz" || fail "no man page of keelson $command"
done
zcat /usr/share/man/man1/keelson.1.gz | grep -q '^.SH OPTIONS' || fail "keelson(1) has no options"
bash -n /usr/share/bash-completion/completions/keelson

# An upgrade and the way back keep settings that were changed, and ask nothing about shipped ones that changed as well.
echo '# changed here' >>/etc/keelson/keelson.toml
dpkg --force-confold -i /test/next.deb >/test/log 2>&1 || fail "cannot upgrade: $(cat /test/log)"
dpkg --force-confold -i /test/keelson.deb >/test/log 2>&1 || fail "cannot go back: $(cat /test/log)"
tail -n 1 /etc/keelson/keelson.toml | grep -q 'changed here' || fail "the changed settings are gone"

# What a node has after a while.
mkdir -p /var/lib/keelson/state /var/lib/private/keelson-proxy /run/keelson /run/keelson-endpoints /var/lib/kubelet
ln -s private/keelson-proxy /var/lib/keelson-proxy
touch /var/lib/keelson/state/manifest /etc/keelson/token /run/keelson/cri.sock /var/lib/private/keelson-proxy/affinity
systemctl enable keelson.service keelson-proxy.service 2>/dev/null

# A kubelet that pulls images through the agent. It must not lose its image service.
printf '#!/bin/bash\nexec 3<>/test/fifo\nread -r -u 3\n' >/test/kubelet
chmod 755 /test/kubelet
mkfifo /test/fifo
start_kubelet() { # ARGUMENT...
    /test/kubelet "$@" &
    kubelet=$!
    for _ in $(seq 600); do
        [ "$(cat "/proc/$kubelet/comm")" != kubelet ] || return 0
        sleep 0.1
    done
    fail "no process kubelet"
}
stop_kubelet() {
    kill "$kubelet"
    wait "$kubelet" || true
}
remove_is_refused() { # TEXT: in the message
    if dpkg -r keelson >/test/log 2>&1; then fail "removed below a kubelet that uses the agent"; fi
    has "$(cat /test/log)" "keelson is not removed"
    has "$(cat /test/log)" "$1"
    # The wish to remove it is noted.
    [ "$(status)" = "ri " ] || fail "the package is $(status) after a refused removal"
    [ -x /usr/bin/keelson ] || fail "the program is gone after a refused removal"
}
echo 'imageServiceEndpoint: unix:///run/keelson/cri.sock' >/test/config.yaml
start_kubelet --config=/test/config.yaml
remove_is_refused /test/config.yaml
stop_kubelet
start_kubelet --config /test/config.yaml
remove_is_refused /test/config.yaml
stop_kubelet
start_kubelet --image-service-endpoint=unix:///run/keelson/cri.sock
remove_is_refused "/proc/$kubelet/cmdline"
stop_kubelet
# The proxy of a pod: the host sees its process.
(exec -a '/usr/bin/keelson proxy --backend nft' sleep 300) &
proxy=$!
for _ in $(seq 600); do
    if grep -q '^/usr/bin/keelson proxy' "/proc/$proxy/cmdline"; then break; fi
    sleep 0.1
done
remove_is_refused "a proxy (process $proxy)"
kill "$proxy"
wait "$proxy" || true
# One that runs and does not use it, and a file for the next start that does.
echo '# imageServiceEndpoint: unix:///run/keelson/cri.sock' >/test/config.yaml
start_kubelet --config=/test/config.yaml
dpkg -r keelson >/test/log 2>&1 || fail "not removed beside a kubelet that does not use it: $(cat /test/log)"
if grep -q WARNING /test/log; then fail "warned of a commented line: $(cat /test/log)"; fi
stop_kubelet

# Removed: settings and state are there, the program and its sockets are not.
for path in /usr/bin/keelson /usr/lib/systemd/system/keelson.service /run/keelson; do
    [ ! -e "$path" ] || fail "$path is left after the removal"
done
for path in /etc/keelson/keelson.toml /etc/keelson/token /var/lib/keelson/state/manifest; do
    [ -e "$path" ] || fail "the removal took $path with it"
done
# Again, with a configuration of a kubelet that does not run: removed with a warning.
dpkg -i /test/keelson.deb >/test/log 2>&1 || fail "cannot install again: $(cat /test/log)"
tail -n 1 /etc/keelson/keelson.toml | grep -q 'changed here' || fail "the changed settings are gone"
echo 'imageServiceEndpoint: unix:///run/keelson/cri.sock' >/var/lib/kubelet/config.yaml
dpkg -P keelson >/test/log 2>&1 || fail "cannot purge: $(cat /test/log)"
has "$(cat /test/log)" "WARNING: /var/lib/kubelet/config.yaml points the kubelet at /run/keelson/cri.sock"
rm -r /var/lib/kubelet
files >/test/after
diff /test/before /test/after || fail "the purge left or took the above"
echo "deb: installed, upgraded, refused, removed, purged; nothing is left"
