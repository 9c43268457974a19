#!/usr/bin/env bash
# node.sh WORK TOOLS: a stand-in of a node, on which the blocks WORK/blocks/NNN.sh run in order, until one fails.
#
# Runs in mount, PID and host name namespaces of its own. /etc, /usr and /var are overlays that keep what is written in memory, and
# /run is empty, so nothing is written to the machine. WORK/root has the node's files. TOOLS has kubeadm and kubectl, WORK/bin the kubelet. A
# stand-in for systemctl starts and ends the agent and the proxy, with the command of the proxy's unit; the proxy has a network
# namespace of its own. A process kube-proxy runs, in the network namespace of `keelson doctor`, while the Node does not have the
# label that keeps kube-proxy off. A proxy that a block starts without a unit ends with the block. Each block writes NNN.out and
# NNN.code beside it.
set -euo pipefail
work=$1
tools=$2

mount --make-rprivate /
mkdir -p "$work/upper"
mount -t tmpfs -o mode=755 tmpfs "$work/upper"
for folder in etc usr var; do
    mkdir "$work/upper/$folder" "$work/upper/$folder.work"
    mount -t overlay -o "lowerdir=/$folder,upperdir=$work/upper/$folder,workdir=$work/upper/$folder.work" overlay "/$folder"
done
mount -t tmpfs -o mode=755 tmpfs /run
hostname n1
for folder in /etc/kubernetes /etc/keelson /var/lib/kubelet /var/lib/keelson /var/lib/keelson-proxy /etc/systemd/system; do
    rm -rf "$folder"
    mkdir -p "$folder"
done
rm -rf /etc/keelson /var/lib/keelson /etc/default/kubelet /etc/sysconfig/kubelet /usr/lib/systemd/system/kubelet*
cp -r "$work"/root/etc/. /etc/
mkdir -p /run/containerd
ln -s "$work/runtime.sock" /run/containerd/containerd.sock
ln -sf "$tools"/kubeadm "$tools"/kubectl "$work"/bin/kubelet /usr/local/bin/
export PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
export KUBECONFIG=/etc/kubernetes/administrator.conf
# Other tests of the machine may have the port.
export KEELSON_DEBUG__HTTP="" KEELSON_PROXY__HTTP="" KEELSON_AGENT__HANDOVER_TIMEOUT=0s
: > /run/proxy.net
unshare --net=/run/proxy.net ip link set lo up

cat > /usr/local/bin/systemctl <<'EOF'
#!/usr/bin/env bash
# Knows what the documents say, and nothing else.
set -euo pipefail
printf '%s\n' "$*" >> /run/systemctl.log
stop() {
    [ -f "/run/$1.pid" ] || return 0
    local pid
    pid=$(cat "/run/$1.pid")
    kill -TERM "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
    rm -f "/run/$1.pid"
}
# start NAME QUESTION COMMAND...: until the question is answered.
start() {
    local name=$1 question=$2
    shift 2
    setsid "$@" >> "/run/$name.log" 2>&1 < /dev/null &
    echo $! > "/run/$name.pid"
    for _ in $(seq 1200); do
        if $question > /dev/null 2>&1; then return 0; fi
        kill -0 "$(cat "/run/$name.pid")" || break
        sleep 0.1
    done
    cat "/run/$name.log" >&2
    return 1
}
agent() {
    mkdir -p /run/keelson /run/keelson-endpoints
    start agent "/usr/bin/keelson limit" /usr/bin/keelson agent
}
# Until the agent says what changed.
reload() {
    kill -HUP "$(cat /run/agent.pid)"
    for _ in $(seq 600); do
        if grep -q 'setting changed' /run/agent.log; then return 0; fi
        sleep 0.1
    done
    return 1
}
proxy() {
    local unit=keelson-proxy.service command
    # The last one counts: that of a drop-in, if one has any.
    command=$(sed -sn 's/^ExecStart=\(..*\)/\1/p' {/usr/lib,/etc}/systemd/system/$unit /etc/systemd/system/$unit.d/*.conf \
        2>/dev/null | tail -n 1 || true)
    [ -n "$command" ] || { echo "Unit $unit not found." >&2; return 5; }
    mkdir -p /run/keelson-proxy
    # shellcheck disable=SC2086 # words of a command
    start proxy "/usr/bin/keelson proxy state" nsenter --net=/run/proxy.net $command
}
case "$*" in
daemon-reload) ;;
"enable --now keelson-cri.socket keelson-debug.socket keelson.service") agent ;;
"restart keelson") stop agent && agent ;;
"disable --now keelson.service keelson-cri.socket keelson-debug.socket")
    stop agent
    rm -f /run/keelson/*.sock
    ;;
"reload keelson") reload ;;
"status keelson") kill -0 "$(cat /run/agent.pid)" ;;
"enable --now keelson-proxy") proxy ;;
"restart keelson-proxy") stop proxy && proxy ;;
"disable --now keelson-proxy" | "disable --now keelson-proxy.service") stop proxy ;;
"restart kubelet") ;;
# What kubeadm asks.
"status kubelet" | "is-active kubelet" | "stop kubelet" | "start kubelet" | "is-enabled kubelet") ;;
*)
    echo "systemctl: not known here: $*" >&2
    exit 5
    ;;
esac
EOF
cat > /usr/local/bin/journalctl <<'EOF'
#!/usr/bin/env bash
set -euo pipefail
[ "$*" = "-u keelson" ] || { echo "journalctl: not known here: $*" >&2; exit 5; }
cat /run/agent.log
EOF
chmod 755 /usr/local/bin/systemctl /usr/local/bin/journalctl

# The name of a process is that of its file.
ln -sf "$(command -v sleep)" /usr/local/bin/kube-proxy

cat > /run/prelude.sh <<'EOF'
keelson() {
    case "$*" in
    "proxy --"*" --dry-run" | "proxy --"*" --print") nsenter --net=/run/proxy.net /usr/bin/keelson "$@" ;;
    "proxy --"*) run_proxy "$@" ;;
    # A user ends it before.
    "proxy cleanup"*) end_proxies && nsenter --net=/run/proxy.net /usr/bin/keelson "$@" ;;
    proxy*) nsenter --net=/run/proxy.net /usr/bin/keelson "$@" ;;
    watch) some_of /usr/bin/keelson "$@" ;;
    *) /usr/bin/keelson "$@" ;;
    esac
}
# What a program without end prints at first, and that it prints something and goes on.
some_of() {
    local code=0
    timeout 2 "$@" > /run/some || code=$?
    cat /run/some
    [ "$code" -eq 124 ] && [ -s /run/some ]
}
# run_proxy ARGUMENT...: in a terminal of its own, as it were, until it is in sync.
run_proxy() {
    local config=() words=("$@") word
    for word in "${!words[@]}"; do
        [ "${words[word]}" != --config ] || config=(--config "${words[word + 1]}")
    done
    mkdir -p /run/keelson-proxy
    setsid nsenter --net=/run/proxy.net /usr/bin/keelson "$@" >> /run/proxies.log 2>&1 < /dev/null &
    echo $! >> /run/proxies.pids
    for _ in $(seq 600); do
        if /usr/bin/keelson proxy state "${config[@]}" > /run/proxies.state 2>&1; then return 0; fi
        kill -0 $! || break
        sleep 0.1
    done
    cat /run/proxies.log /run/proxies.state >&2
    return 1
}
end_proxies() {
    local pid
    [ -f /run/proxies.pids ] || return 0
    while read -r pid; do
        kill -TERM "$pid" 2>/dev/null || true
        while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
    done < /run/proxies.pids
    rm /run/proxies.pids
}
# What the controller of the DaemonSet and the kubelet would do.
kube_proxy() {
    local pid
    if [ "$1" = start ]; then
        setsid /usr/local/bin/kube-proxy infinity > /run/kube-proxy.log 2>&1 < /dev/null &
        echo $! > /run/kube-proxy.pid
    elif [ -f /run/kube-proxy.pid ]; then
        pid=$(cat /run/kube-proxy.pid)
        kill "$pid"
        while kill -0 "$pid" 2> /dev/null; do sleep 0.05; done
        rm /run/kube-proxy.pid
    fi
}
# Maps and programs of other tests come and go while it lists them.
bpftool() {
    command bpftool "$@" || command bpftool "$@" || command bpftool "$@"
}
kubectl() {
    command kubectl "$@"
    case "$*" in
    "label node "*" keelson.dev/proxy=host") kube_proxy stop ;;
    "label node "*" keelson.dev/proxy-") kube_proxy start ;;
    esac
}
EOF

# What kubeadm has made of this node and the cluster, if there is one.
phases=(kubelet-start)
[ ! -f "$KUBECONFIG" ] || phases=("upload-config all" "addon kube-proxy" kubelet-start)
for phase in "${phases[@]}"; do
    # By another file than admin.conf, with which kubeadm would first set up its administrator at advertiseAddress.
    options=(--config "$work/root/kubeadm.yaml")
    [ "$phase" = kubelet-start ] || options+=(--kubeconfig "$KUBECONFIG")
    # shellcheck disable=SC2086 # words of a command
    if ! kubeadm init phase $phase "${options[@]}" >> /run/kubeadm.log 2>&1; then
        cat /run/kubeadm.log >&2
        exit 1
    fi
done

bash -c '. /run/prelude.sh; kube_proxy start'

cd "$work/checkout"
for block in "$work"/blocks/*.sh; do
    code=0
    # shellcheck disable=SC2016 # The inner shell's.
    timeout -k 5 300 bash -c 'set -euo pipefail; . /run/prelude.sh; . "$1"' bash "$block" > "${block%.sh}.out" 2>&1 < /dev/null || code=$?
    bash -c '. /run/prelude.sh; end_proxies'
    echo "$code" > "${block%.sh}.code"
    if [ "$code" -ne 0 ]; then
        cat /run/agent.log /run/proxy.log /run/proxies.log /run/kubeadm.log >> "${block%.sh}.out" 2>/dev/null || true
        break
    fi
done
