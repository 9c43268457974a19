#!/bin/sh
# After the files are removed. Settings (/etc/keelson) and state (/var/lib/keelson) stay, until Debian's purge.
# Debian calls it with "remove", "purge" or "upgrade", RPM with the number of versions that stay.
set -e

reload() { [ ! -d /run/systemd/system ] || systemctl daemon-reload || true; }

case "${1:-}" in
remove | 0)
    # Sockets. A pod may have mounted the folder of the endpoints' socket: it stays.
    rm -rf /run/keelson /run/keelson-proxy
    rm -f /run/keelson-endpoints/endpoints.sock
    reload
    [ "$1" != 0 ] || echo "keelson: /etc/keelson, /var/lib/keelson and the groups of the sockets stay."
    ;;
purge)
    rm -rf /etc/keelson /var/lib/keelson /var/lib/keelson-proxy /var/lib/private/keelson-proxy \
        /run/keelson /run/keelson-endpoints /run/keelson-proxy
    # What systemctl enable has made.
    rm -f /etc/systemd/system/sockets.target.wants/keelson-cri.socket \
        /etc/systemd/system/sockets.target.wants/keelson-debug.socket \
        /etc/systemd/system/multi-user.target.wants/keelson.service \
        /etc/systemd/system/multi-user.target.wants/keelson-proxy.service
    reload
    for group in keelson keelson-cri keelson-inspect; do
        if getent group "$group" >/dev/null && command -v groupdel >/dev/null; then
            groupdel "$group" || echo "keelson: cannot delete the group $group" >&2
        fi
    done
    ;;
esac
