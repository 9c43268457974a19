#!/usr/bin/env bash
# Builds for Windows what of the proxy runs there (the backend userspace, the frame of backends, the client), and runs its tests
# under Wine, with TCP and UDP on loopback. Packages: scripts/install-packages.sh windows. README.md has what is left out.
#
#   tests/windows/run.sh [ARGUMENT...]     for the test programs, such as a part of a name
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cargo=${CARGO:-cargo}
triple=x86_64-pc-windows-gnu

rustup target list --installed | grep -qx "$triple" || rustup target add "$triple"

folder=$(mktemp -d)
export TMPDIR=$folder WINEPREFIX=$folder/prefix WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml,winemenubuilder.exe='
finish() {
    # Ends the programs of this prefix alone.
    WINEPREFIX=$folder/prefix wineserver -k || true
    WINEPREFIX=$folder/prefix wineserver -w || true
    rm -rf "$folder"
}
trap finish EXIT
PATH=$PATH:/usr/lib/wine
wine=$(command -v wine64 || command -v wine)

x86_64-w64-mingw32-gcc -O2 -Wall -Werror -shared -o "$folder/bcryptprimitives.dll" tests/windows/bcryptprimitives.c -ladvapi32
"$wine" wineboot --init >&2
# Where programs look for a DLL that is not beside them.
WINEPATH=$("$wine" winepath --windows "$folder")
export WINEPATH

# Lints hold for this system, too: what is unused there is an error.
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=$wine
"$cargo" build --target "$triple" -p keelson-proxy-userspace
"$cargo" test --target "$triple" -p keelson-proxy-userspace --lib --test follow -- "$@"
