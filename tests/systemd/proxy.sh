#!/usr/bin/env bash
# proxy.sh: starts the installed keelson-proxy.service beside an agent and checks what its sandbox lets it do (P1, P11). Runs below
# run.sh only. The network namespace is not the machine's first one, so the kernel keeps conntrack's limit and hash table to itself.
set -euo pipefail
if [ ! -d /run/keelson-check ]; then
    echo "proxy.sh: run it by make systemd-check" >&2
    exit 1
fi
fail() { echo "FAILED: $*" >&2; state >&2; journalctl --no-pager -u keelson-proxy -u keelson >&2; exit 1; }
until_true() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@"; do [ "$SECONDS" -lt "$end" ] || fail "timed out: $*"; sleep 0.2; done
}
state() { /usr/bin/keelson proxy state 2>&1 || true; }
says() { state | grep -Eq "$1"; }

cat > /etc/keelson/keelson.toml <<'TOML'
[endpoints]
source = "files"
manifests = "/etc/keelson/manifests"
TOML
mkdir -p /etc/keelson/manifests
sysctl_dir=/proc/sys/net/netfilter
established=$(cat "$sysctl_dir/nf_conntrack_tcp_timeout_established")
[ "$established" != 86400 ] || fail "the kernel's default is the wanted value: nothing would be seen"

# The agent first, then the proxy: the socket is in a folder of its own that the proxy's group may use.
systemctl start keelson.service
systemctl start keelson-proxy.service || fail "keelson-proxy.service does not start"
until_true 30 says '^Agent: +connected'
[ "$(stat -c %a /run/keelson-endpoints)" = 755 ] || fail "/run/keelson-endpoints has another mode"
pid=$(systemctl show keelson-proxy --property=MainPID --value)
[ "$(stat -c %u "/proc/$pid")" != 0 ] || fail "the proxy is root"

until_true 30 says 'nf_conntrack_tcp_timeout_established: 86400'
[ "$(cat "$sysctl_dir/nf_conntrack_tcp_timeout_established")" = 86400 ] || fail "the kernel has another timeout"
[ "$(cat "$sysctl_dir/nf_conntrack_tcp_timeout_close_wait")" = 3600 ] || fail "the kernel has another timeout of CLOSE_WAIT"
says 'nf_conntrack_max: [0-9]+ instead of [0-9]+ \(' || fail "a refused write is not in the state: $(state)"
# No other setting of the kernel may be written from inside of the sandbox.
if nsenter --target "$pid" --mount sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward' 2> /run/keelson-work-error; then
    fail "the sandbox lets ip_forward be written"
fi

# The old connection may still be shown as one that follows: a revision made after the restart has to arrive.
systemctl restart keelson.service
revision() { state | sed -n 's/^Revision: *\([0-9]*\).*/\1/p'; }
before=$(revision)
cat > /etc/keelson/manifests/service.yaml <<'YAML'
apiVersion: v1
kind: Service
metadata: {name: late, namespace: default}
spec: {clusterIP: 10.96.0.77, clusterIPs: [10.96.0.77], ipFamilies: [IPv4], ports: [{port: 80}]}
YAML
arrived() { [ "$(revision)" -gt "${before:-0}" ] 2>/dev/null && says '^Agent: +connected'; }
until_true 60 arrived
nft list map ip keelson refused | grep -q 10.96.0.77 || fail "the Service made after the restart is not in the kernel"
systemctl stop keelson-proxy.service
nft list table ip keelson > /run/keelson-table || fail "the rules went with the proxy"
/usr/bin/keelson proxy cleanup
systemctl stop keelson.service keelson-cri.socket keelson-debug.socket
echo "the proxy's sandbox lets it do what it must"
