#!/usr/bin/env bash
# Prints cargo's target folder, wherever the environment or a configuration file puts it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo metadata --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/'
