#!/usr/bin/env bash
# Finds words that the style of this project avoids (docs/glossary.md, "Words that are replaced") in the files that git
# tracks. Prints each line that has one, and fails if there is any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

words='whoever|as it has it|mend|mends|mended|mending|note-book|so many|fare|fares|chore|chores'
# These are names in code, and therefore searched for in documents alone.
words_of_documents='told'

# Names in code and data have these words, too, and are therefore left alone: comments and documents are searched.
words_of_comments='nobody|somebody|anybody|thrown away|trouble|on and on'

# The glossary and this script list them.
exclude=(':!docs/glossary.md' ':!scripts/words.sh' ':!*.lock' ':!*go.sum' ':!*go.mod')

found=0
git grep -nIwiE "$words" -- . "${exclude[@]}" && found=1
git grep -nIwiE "$words_of_documents" -- '*.md' "${exclude[@]}" && found=1
git grep -nIiE "(//[/!]?|#|/\*|^ *\*) .*\b($words_of_comments)\b" -- . "${exclude[@]}" && found=1
# With case: `Trouble` was a name in the code.
git grep -nIE "\b($words_of_comments)\b" -- '*.md' "${exclude[@]}" && found=1
if [ "$found" = 1 ]; then
    echo 'write these lines with the words of docs/glossary.md' >&2
    exit 1
fi
