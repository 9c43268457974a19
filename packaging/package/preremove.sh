#!/bin/sh
# Before the files are removed: refuses while the node depends on them, then stops the units.
# Debian calls it with "remove" or "upgrade", RPM with the number of versions that stay.
set -e

case "${1:-}" in
remove | 0) ;;
*) exit 0 ;;
esac

socket=/run/keelson/cri.sock
has_systemd=''
[ ! -d /run/systemd/system ] || has_systemd=1
if [ -n "$has_systemd" ]; then
    # cri.listen may be elsewhere: "/run/keelson/cri.sock (Stream)".
    listen=$(systemctl show keelson-cri.socket --property=Listen --value 2>/dev/null | head -n 1) || true
    case "${listen%% *}" in /*) socket=${listen%% *} ;; esac
fi

# kubelets: process IDs.
kubelets() {
    for folder in /proc/[0-9]*; do
        if [ "$(cat "$folder/comm" 2>/dev/null)" = kubelet ]; then echo "${folder#/proc/}"; fi
    done
}

# files_of_kubelet [PROCESS]: where a kubelet may have read its image endpoint from.
files_of_kubelet() {
    if [ -n "${1:-}" ]; then
        echo "/proc/$1/cmdline"
        tr '\0' '\n' <"/proc/$1/cmdline" | {
            flag=''
            while read -r argument; do
                case "$argument" in
                --config=* | --config-dir=*) flag=${argument%%=*} argument=${argument#*=} ;;
                --config | --config-dir)
                    flag=$argument
                    continue
                    ;;
                esac
                case "$flag" in
                --config) if [ -f "/proc/$1/root$argument" ]; then echo "/proc/$1/root$argument"; fi ;;
                # The kubelet reads no other names; copies of earlier settings have some.
                --config-dir) find "/proc/$1/root$argument" -type f -name '*.conf' 2>/dev/null || true ;;
                esac
                flag=''
            done
        }
    fi
    for file in /var/lib/kubelet/config.yaml /var/lib/kubelet/kubeadm-flags.env /etc/default/kubelet /etc/sysconfig/kubelet \
        /etc/systemd/system/kubelet.service.d/*.conf /etc/kubernetes/kubelet.conf.d/*.conf; do
        if [ -f "$file" ]; then echo "$file"; fi
    done
}

# names_socket FILE: outside of comments.
names_socket() { tr '\0' '\n' <"$1" 2>/dev/null | grep -v '^[[:space:]]*[#;]' | grep -qF "$socket"; }

# first_with_socket [PROCESS]: the first of these files that names the agent's socket.
first_with_socket() {
    files_of_kubelet "${1:-}" | while read -r file; do
        if names_socket "$file"; then
            echo "$file"
            break
        fi
    done
}

how_to_go_back="Run 'keelson bypass --restart-kubelet', which gives the kubelet its former settings back; by hand:
  /usr/share/doc/keelson/docs/pulls.md, \"Taking the agent out\"."

for kubelet in $(kubelets); do
    file=$(first_with_socket "$kubelet")
    if [ -n "$file" ]; then
        echo "keelson is not removed: the kubelet (process $kubelet) pulls its images through $socket, says $file." >&2
        echo "Without the agent this node would pull no image. $how_to_go_back" >&2
        echo "Then remove the package again. On a node that is given up, stop the kubelet first." >&2
        exit 1
    fi
done
if [ -n "$has_systemd" ] && systemctl --quiet is-active keelson-proxy.service; then
    echo "keelson is not removed: keelson-proxy.service runs, and the Services of this node depend on it." >&2
    echo "Start kube-proxy again, then run: systemctl disable --now keelson-proxy && keelson proxy cleanup" >&2
    exit 1
fi
for folder in /proc/[0-9]*; do
    if tr '\0' ' ' <"$folder/cmdline" 2>/dev/null | grep -Eq '^/usr/bin/keelson proxy (-|$)'; then
        echo "keelson is not removed: a proxy (process ${folder#/proc/}) follows the agent of this node, and its Services depend on it." >&2
        echo "Take the node out first: kubectl label node NODE keelson.dev/proxy-" >&2
        exit 1
    fi
done

file=$(first_with_socket)
if [ -n "$file" ]; then
    echo "WARNING: $file points the kubelet at $socket." >&2
    echo "A kubelet that is started without the agent exits at once. $how_to_go_back" >&2
fi
if [ -d /var/lib/keelson/state ]; then
    echo "keelson: leases in the container runtime end within 2 hours. Conditions and a Lease at the API server stay;" >&2
    echo "  'keelson cleanup' removes them, as long as the program is installed." >&2
fi

# The agent ends its calls after systemctl stop has returned: up to agent.handover_timeout and agent.drain_timeout.
agent_runs() {
    for folder in /proc/[0-9]*; do
        case "$(readlink "$folder/exe" 2>/dev/null)" in
        /usr/bin/keelson | '/usr/bin/keelson (deleted)')
            if tr '\0' ' ' <"$folder/cmdline" 2>/dev/null | grep -q '^[^ ]* agent '; then return 0; fi
            ;;
        esac
    done
    return 1
}

if [ -n "$has_systemd" ]; then
    units="keelson.service keelson-cri.socket keelson-debug.socket keelson-proxy.service"
    # shellcheck disable=SC2086 # Names of units.
    systemctl stop $units || true
    # shellcheck disable=SC2086
    [ "$1" != 0 ] || systemctl --no-reload disable $units >/dev/null 2>&1 || true
    seconds=0
    while agent_runs && [ "$seconds" -lt 60 ]; do
        sleep 1
        seconds=$((seconds + 1))
    done
fi
