"""A shell that outlives the harness by seconds and removes the folders it leaves behind.

The kernel ends the processes of a dead harness's sandboxes (see `inside.supervisor`), but nobody removes
their cgroups and scratch folders. This child waits for the end of its standard input, which the harness's
end is, however it ends. If it is killed as well, the next harness sweeps.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

# $1 is a scratch folder or "-", the rest are cgroups: rmdir only, deepest first.
SCRIPT = """
cat >/dev/null
for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  left=0
  scratch=$1
  [ "$scratch" = - ] || rm -rf -- "$scratch"
  [ -e "$scratch" ] && left=1
  for folder in "$@"; do
    [ "$folder" = - ] || [ "$folder" = "$scratch" ] && continue
    find "$folder" -depth -type d -exec rmdir {} ';'
    [ -e "$folder" ] && left=1
  done
  [ $left = 0 ] && exit 0
  sleep 0.2
done
"""


class Janitor:
    """The child. `scratch` is deleted with its files; `groups` are cgroup folders."""

    def __init__(self, scratch: Path | None, groups: Sequence[Path]) -> None:
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "rz-agent-janitor", str(scratch or "-"), *map(str, groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin"},
            cwd="/",
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Let it clean up now; waits for its end (a moment, as everything has been closed), not for ever."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on by itself
            self._child.wait(timeout=10)
