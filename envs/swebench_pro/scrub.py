"""Shell programs that take a repository's future out of it, and that look for what is left of it.

What may tell a policy how the issue was resolved: branches, tags, notes, stashes and replacements (refs,
loose or packed), remotes, reflogs, heads that git leaves behind (ORIG_HEAD, FETCH_HEAD ...), other worktrees,
packs that are never repacked, commit graphs, borrowed object stores, and objects that nothing names any more.

Invariant: after SCRUB and CHECK every object is of the base commit's history, or of a file that is checked
out.
"""

from __future__ import annotations

# $1: the base commit, which is checked out. HEAD is detached: it is the only name that is left.
SCRUB = r"""
set -eu
[ -d .git ] || { echo ".git is no folder"; exit 1; }
git update-ref --no-deref HEAD "$1"
git remote | while read -r name; do git remote remove "$name"; done
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
git config --name-only --get-regexp '^branch\.' | sed 's/\.[^.]*$//' | sort -u |
  while read -r section; do git config --remove-section "$section"; done
for name in logs hooks worktrees rebase-merge rebase-apply sequencer objects/info/commit-graph \
  objects/info/commit-graphs; do rm -rf ".git/$name"; done
find .git -maxdepth 1 -name '*_HEAD' -exec rm -f {} +
find .git -maxdepth 1 \( -name 'BISECT_*' -o -name 'AUTO_MERGE' -o -name '*_MSG' \) -exec rm -f {} +
find .git/objects/pack \( -name '*.keep' -o -name '*.promisor' \) -exec rm -f {} +
git repack -a -d -q
rm -f .git/objects/info/alternates .git/objects/info/http-alternates
git pack-refs --all --prune
git prune --expire=now
# What the image left beside the sources is not the policy's: git shall not show it as new.
mkdir -p .git/info
git ls-files --others --exclude-standard | sed 's/[][*?\\!# ]/\\&/g; s#^#/#' >>.git/info/exclude
"""

# $1: the base commit. Prints what should not be there; fails where an object of its history is not.
CHECK = r"""
set -eu
[ "$(git rev-parse HEAD)" = "$1" ] || echo "HEAD is not $1"
! git symbolic-ref -q HEAD || echo "HEAD is not detached"
git for-each-ref --format='ref %(refname)'
git remote | sed 's/^/remote /'
[ ! -e .git/objects/info/alternates ] || echo "a borrowed object store"
find .git -path .git/modules -prune -o -name logs -print | sed 's/^/reflog /'
there=$(mktemp) mine=$(mktemp)
trap 'rm -f "$there" "$mine"' EXIT
git cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u >"$there"
git rev-list --objects --no-object-names --indexed-objects "$1" | sort -u >"$mine"
comm -23 "$there" "$mine" | head -5 | sed 's/^/object /'
"""
