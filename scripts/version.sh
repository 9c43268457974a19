#!/usr/bin/env bash
# Prints the version of what this checkout builds, as semantic versions have it:
#
#   0.1.0                    at the tag v0.1.0
#   0.1.0+5.g1a2b3c4         five commits after it
#   0.1.0-dev.812+g1a2b3c4   without a tag: the version of Cargo.toml, and the number of commits so that later ones sort later
#   0.1.0-dev                without git
#
# With uncommitted changes it ends in ".dirty" ("+dirty" at a tag).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

declared=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
if ! [ -e .git ] || ! commit=$(git rev-parse --short=7 HEAD 2>/dev/null); then
    printf '%s-dev\n' "$declared"
    exit 0
fi
dirty=''
[ -z "$(git status --porcelain --untracked-files=no)" ] || dirty=dirty
if described=$(git describe --tags --long --abbrev=7 --match 'v[0-9]*' 2>/dev/null); then
    # v0.1.0-rc.1-5-g1a2b3c4: the last two parts are git's.
    hash=${described##*-}
    described=${described%-*}
    count=${described##*-}
    version=${described%-*}
    version=${version#v}
    if [ "$count" != 0 ]; then
        version+=+$count.$hash
    fi
else
    version=$declared-dev.$(git rev-list --count HEAD)+g$commit
fi
if [ -n "$dirty" ]; then
    case $version in
    *+*) version+=.dirty ;;
    *) version+=+dirty ;;
    esac
fi
printf '%s\n' "$version"
