#!/usr/bin/env bash
# restarts.sh CONTAINERD CRI-DRIVER: restarts, stops and kills the installed units under a load of CRI calls, with two image pulls
# that run and six that wait (I8). Runs below run.sh only: it writes to /etc and /run. The exit code is 0 if no caller noticed.
set -euo pipefail
containerd=$1 driver=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ ! -d /run/keelson-check ]; then
    echo "restarts.sh: run it by make systemd-check" >&2
    exit 1
fi
units=(keelson-cri.socket keelson-debug.socket keelson.service)
images=8 work=/run/keelson-work
driver=("$driver" --endpoint unix:///run/keelson/cri.sock --logtostderr=false --alsologtostderr=false)

fail() { echo "FAILED: $*" >&2; tail -n 20 "$work"/{pulls,load} >&2 || true; exit 1; }
show() { systemctl show keelson --property="$1" --value; }
# Process IDs of agents, the newest last.
agents() { pgrep -f '^/usr/bin/keelson agent' || true; }
until_true() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@"; do [ "$SECONDS" -lt "$end" ] || fail "timed out: $*"; sleep 0.2; done
}
is_replaced() { [ "$(show ActiveState)" = active ] && [ "$(show MainPID)" != "$1" ] && [ "$(show MainPID)" != 0 ]; }
agent_count() { [ "$(agents | wc -l)" = "$1" ]; }
two_run() { /usr/bin/keelson pulls -o json | grep -Eq '"running": ?2[,}]?'; }
replace() { # COMMAND...: another main process must come
    local former started
    former=$(show MainPID) started=$(date +%s%N)
    "$@"
    echo "$*: returned after $((($(date +%s%N) - started) / 1000000)) ms"
    until_true 60 is_replaced "$former"
    sleep 1
    echo "  main process $(show MainPID), agents $(agents | tr '\n' ' ')"
}

# Does what a package manager does: a new file takes the place of the program, units are read again, the service is restarted.
upgrade() { # VERSION
    cp /usr/bin/keelson /usr/bin/keelson.dpkg-new
    # Bytes behind the end of an ELF file are another program to the file system, and the same one to the kernel.
    printf 'version %s' "$1" >> /usr/bin/keelson.dpkg-new
    mv /usr/bin/keelson.dpkg-new /usr/bin/keelson
    touch /etc/systemd/system/keelson.service
    systemctl daemon-reload
    systemctl restart keelson
}
runs_installed_program() { cmp -s "/proc/$1/exe" /usr/bin/keelson; }

mkdir -p "$work/hosts/_default"
printf '[host."http://127.0.0.1:5999"]\n' > "$work/hosts/_default/hosts.toml"
cat > "$work/containerd.toml" <<TOML
version = 3
root = "$work/root"
state = "$work/state"
[grpc]
address = "$work/containerd.sock"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "$work/hosts"
TOML
"$containerd" -c "$work/containerd.toml" > "$work/containerd.log" 2>&1 &
python3 "$here/../boot/node/registry.py" 5999 "$images" "$work" &
printf '[cri]\nruntime_endpoint = "unix://%s"\n[pulls]\nmax_parallel_image_pulls = 2\n' "$work/containerd.sock" > /etc/keelson/keelson.toml
until_true 60 test -S "$work/containerd.sock"
until_true 60 curl -sfo /dev/null http://127.0.0.1:5999/v2/
systemctl start "${units[@]}"

names=()
for n in $(seq 0 $((images - 1))); do names+=("127.0.0.1:5999/image$n:latest"); done
"${driver[@]}" pulls --timeout 10m --clients "$images" "${names[@]}" > "$work/pulls" 2>&1 &
pulls=$!
until_true 15 two_run
mkfifo "$work/stop"
exec 5<> "$work/stop"
"${driver[@]}" load --rate 200 --clients 2 "${names[0]}" < "$work/stop" > "$work/load" 5>&- &
load=$!
until_true 60 grep -q started "$work/load"

for _ in 1 2 3 4 5; do replace systemctl restart keelson; done
for version in 2 3; do
    replace upgrade "$version"
    runs_installed_program "$(agents | tail -n 1)" || fail "the agent after the upgrade runs another program"
    runs_installed_program "$(show MainPID)" || fail "the main process after the upgrade runs another program"
done
replace kill -TERM "$(show MainPID)"
replace kill -KILL "$(show MainPID)"
replace kill -TERM "$(agents | tail -n 1)"
systemctl reload keelson
exec 5>&-
wait "$load" || fail "the load failed: $(cat "$work/load")"
tail -n 1 "$work/load"
grep -q '"failed":0' "$work/load" || fail "calls failed: $(head -n 20 "$work/load")"
kill -0 "$pulls" || fail "pulls ended early: $(cat "$work/pulls")"
touch "$work/open"
wait "$pulls" || fail "a pull failed: $(cat "$work/pulls")"
cat "$work/pulls"
! grep -q '"ok":false' "$work/pulls" || fail "a pull failed"
echo "layers sent: $(wc -l < "$work/sent"), different ones: $(sort -u "$work/sent" | wc -l)"
[ "$(sort "$work/sent" | uniq -d | wc -l)" = 0 ] || fail "a layer was sent twice"
until_true 60 agent_count 1

replace kill -KILL "$(agents)"
replace systemctl kill -s ABRT --kill-who=main keelson
agent_count 1 || fail "the agent outlived SIGABRT of its stand-in"
systemctl stop "${units[@]}"
until_true 60 agent_count 0
echo "no caller noticed"
