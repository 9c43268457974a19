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

# The drop-in of the backend ebpf. In a container auto finds a cgroup that is not the root, and says so.
install -D -m 0644 /usr/share/keelson/keelson-proxy-ebpf.conf /etc/systemd/system/keelson-proxy.service.d/ebpf.conf
systemctl daemon-reload
ip address add 10.244.7.7/32 dev lo
python3 -m http.server --bind 10.244.7.7 8080 --directory /etc/keelson/manifests > /run/keelson-work-server 2>&1 &
server=$!
cat > /etc/keelson/manifests/web.yaml <<'YAML'
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.78, clusterIPs: [10.96.0.78], ipFamilies: [IPv4], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.244.7.7], conditions: {ready: true}}]
YAML
systemctl start keelson-proxy.service || fail "keelson-proxy.service does not start with the drop-in"
until_true 30 says 'backend: auto \(nft\)'
says 'not chosen: ebpf: /sys/fs/cgroup is not the root of cgroup v2' || fail "the reason is not in the state"
systemctl stop keelson-proxy.service

printf '[proxy]\nebpf_cgroup = "/sys/fs/cgroup"\n' >> /etc/keelson/keelson.toml
systemctl start keelson-proxy.service || fail "keelson-proxy.service does not start with ebpf"
until_true 30 says 'backend: auto \(ebpf\)'
until_true 30 says 'socket level: attached'
pid=$(systemctl show keelson-proxy --property=MainPID --value)
[ "$(grep CapEff "/proc/$pid/status" | tr -d ' \t' | cut -d: -f2)" = "0000008000201000" ] || fail "other capabilities than the drop-in's: $(grep Cap "/proc/$pid/status")"
/usr/bin/keelson proxy explain 10.96.0.78:80 | grep -q 'socket level: program keelson_connect4' || fail "packets decide: $(/usr/bin/keelson proxy explain 10.96.0.78:80)"
# No route leads to the cluster IP: only a socket that is translated reaches the server.
answers() { timeout 5 python3 -c 'import urllib.request as r; r.urlopen("http://10.96.0.78/", timeout=3).read()' 2> /run/keelson-work-error; }
until_true 30 answers
! says 'cannot enter' || fail "the namespaces of pods cannot be entered: $(state)"
systemctl restart keelson-proxy.service
answers || fail "no answer while the proxy restarts: $(cat /run/keelson-work-error)"
until_true 30 says 'socket level: attached'
systemctl stop keelson-proxy.service
answers || fail "the programs went with the proxy"
[ "$(find /sys/fs/bpf/keelson -type f | wc -l)" -gt 10 ] || fail "nothing is pinned"
/usr/bin/keelson proxy cleanup
[ ! -e /sys/fs/bpf/keelson ] || fail "the clean-up left pins"
# A BPF file system that is read-only for the service: nft serves.
printf '[Service]\nProtectKernelTunables=yes\n' > /etc/systemd/system/keelson-proxy.service.d/less.conf
systemctl daemon-reload
systemctl start keelson-proxy.service || fail "keelson-proxy.service does not start without the BPF file system"
until_true 30 says 'backend: auto \(nft\)'
says 'not chosen: ebpf: cannot make /sys/fs/bpf/keelson' || fail "the reason is not in the state"
systemctl stop keelson-proxy.service
kill "$server"
rm -r /etc/systemd/system/keelson-proxy.service.d
systemctl daemon-reload
/usr/bin/keelson proxy cleanup
systemctl stop keelson.service keelson-cri.socket keelson-debug.socket
echo "the proxy's sandbox lets it do what it must"
