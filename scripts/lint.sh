#!/usr/bin/env bash
# Checks scripts, Go programs, and that no modules depend on each other; clippy is a command of its own in the Makefile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

shellcheck .ci/run packaging/*.sh packaging/package/*.sh scripts/*.sh tests/boot/*.sh tests/boot/node/*.sh tests/packages/*.sh tests/peers/*.sh \
    tests/suites/tests/docs/*.sh tests/systemd/*.sh tests/vm/*.sh tests/windows/*.sh
scripts/module-cycles.pl
unformatted=$(gofmt -l tests/peers)
if [ -n "$unformatted" ]; then
    printf 'gofmt would change: %s\n' "$unformatted" >&2
    exit 1
fi
cd tests/peers/cri-driver
go vet -mod=readonly ./...
