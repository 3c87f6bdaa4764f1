"""What libraries print goes to a file of the run, so that the terminal shows the run.

The engine, its child process and Megatron log and warn by the page, past Python's own streams too, so
the process's file descriptors are redirected. Invariant: they are put back however the block ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

FILE = "libraries.log"


@contextmanager
def libraries_write_to(run_dir: Path) -> Iterator[TextIO]:
    """Within the block, stdout and stderr of this process and its children go to run_dir/libraries.log.

    Yields what stdout was before: the terminal or the pipe that the run is shown on.
    """
    _flush()
    stdout, stderr = os.dup(1), os.dup(2)
    try:
        with (run_dir / FILE).open("ab") as log, open(stdout, "w", closefd=False) as shown:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            yield shown
    finally:
        _flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
