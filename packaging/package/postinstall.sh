#!/bin/sh
# After the files are unpacked: makes the groups and restarts what runs. Enables and starts nothing.
# Debian calls it with "configure [former version]" and "abort-...", RPM with the number of installed versions.
set -e

case "${1:-}" in
configure) former=${2:-} ;;
1) former='' ;;
2) former=earlier ;;
*) exit 0 ;;
esac

# keelson-cri, keelson-inspect and keelson: who may open which socket.
systemd-sysusers /usr/lib/sysusers.d/keelson.conf

if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
    if [ -n "$former" ]; then
        # What does not run stays so. Calls and pulls that run end in the old process, queued ones are handed over. Sockets are
        # left as they are, so that no caller is refused.
        for unit in keelson.service keelson-proxy.service; do
            systemctl try-restart "$unit" ||
                echo "keelson: $unit does not start after the upgrade; see: journalctl -u $unit" >&2
        done
    fi
fi

if [ -z "$former" ]; then
    cat <<'TEXT'
keelson is installed and not enabled: nothing on this node has changed.
  settings:    /etc/keelson/keelson.toml, checked by: keelson config check
  the agent:   systemctl enable --now keelson-cri.socket keelson-debug.socket keelson.service
  the proxy:   systemctl enable --now keelson-proxy.service
  before that: /usr/share/doc/keelson/packaging/README.md
TEXT
fi
