#!/usr/bin/env bash
# Every test, two at a time. Up to three that fail there run once more, alone, and then have to pass.
#
# Many tests start real engines, ranks, desktops and containers on two cores. One that fails beside others and
# passes alone raced: its name is printed last, to be mended. One that fails twice fails.
#
#   tests/run.sh PYTEST [ARGUMENT...]     the arguments are those of the first run
set -euo pipefail
cd "$(dirname "$0")/.."
pytest=$1
shift
failed=.pytest_cache/v/cache/lastfailed # kept by pytest: {test: true}

rm -f "$failed"
status=0
"$pytest" -n 2 --dist worksteal "$@" || status=$?
[ "$status" = 0 ] && exit 0
count=$( [ -f "$failed" ] && grep -c ": true" "$failed" || true)
if [ "$status" != 1 ] || [ "${count:-0}" -lt 1 ] || [ "$count" -gt 3 ]; then
  exit "$status"
fi
names=$(grep ": true" "$failed" | sort)
printf '\n%s failed; once more, alone\n' "$count"
"$pytest" --last-failed --last-failed-no-failures none
printf '\nThese failed beside others and passed alone, so they race. Mend them:\n%s\n' "$names"
