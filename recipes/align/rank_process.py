"""Ranks as processes of their own: torchrun's on one side, each rank on the other.

    run_ranks(program, folder, ranks)    here: start them, wait for all of them, leave none
    with rank_of(folder): ...            in each rank: what it raises is said here

Invariant: no rank outlives the call or the process that made it. Ranks inherit a standard input whose other
end is here, and end with it, however this process ends.
Waits: the caller for the ranks, `LIMIT_S` at most.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import RzError

LIMIT_S = 1800.0
_END_S = 40.0  # torchrun gives its ranks 30


class RanksFailed(RzError):
    """A rank failed, or they were not done in time."""


def run_ranks(program: Sequence[str], folder: Path, ranks: int) -> None:
    """Have torchrun run `program FOLDER` that many times. Raises RanksFailed.

    program  a script, or "-m" and a module; with its first arguments
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log = folder / "ranks.log"
    with log.open("wb") as said:
        launcher = subprocess.Popen(
            [*launch, *program, str(folder)], stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT
        )
        with _ended(launcher):
            try:
                status = launcher.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise RanksFailed(f"{ranks} ranks were not done after {LIMIT_S:.0f} s") from None
    if status:
        failures = sorted(folder.glob("failed-*.txt"), key=lambda path: path.stat().st_mtime_ns)
        why = failures[0].read_text() if failures else f"torchrun says:\n{log.read_text()[-2000:]}"
        raise RanksFailed(f"of {ranks} ranks {why}")


@contextlib.contextmanager
def _ended(launcher: subprocess.Popen[bytes]) -> Iterator[None]:
    """The launcher and its ranks do not outlive the block, however it ends."""
    assert launcher.stdin is not None
    try:
        yield
    finally:
        launcher.stdin.close()
        launcher.terminate()
        try:
            launcher.wait(_END_S)
        finally:
            launcher.kill()


@contextlib.contextmanager
def rank_of(folder: Path) -> Iterator[None]:
    """What a rank does for the `run_ranks` that started it."""
    threading.Thread(target=_end_with_input, name="rz-parent", daemon=True).start()
    try:
        yield
    except Exception as error:
        rank = os.environ["RANK"]
        (folder / f"failed-{rank}.txt").write_text(f"rank {rank} failed: {type(error).__name__}: {error}")
        raise


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)  # no clean-up: whoever would wait for it is gone
