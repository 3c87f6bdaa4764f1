"""What libraries print goes to a file of the run, so that the terminal shows the run.

The engine, its child process and Megatron log and warn by the page, past Python's own streams too, so
the process's file descriptors are redirected. Invariant: they are put back however the block ends.

    libraries_write_to(run_dir)    for what makes a run: the file stays with it
    tracebacks_go_to(run_dir)      around it, for the errors that end the run
    libraries_are_quiet()          for what only looks at one: the file stays only if something broke
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import ConfigError, EnvironmentBug, RzError

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


@contextmanager
def tracebacks_go_to(run_dir: Path) -> Iterator[None]:
    """An error's traceback goes to the same file; its message goes on, with how to resume after a bug."""
    try:
        yield
    except RzError as error:
        with (run_dir / FILE).open("a") as log:
            traceback.print_exc(file=log)
        if not isinstance(error, EnvironmentBug):
            raise
        raise EnvironmentBug(f"{error}\n  Go on with: rz-agent train --resume {run_dir}") from error


@contextmanager
def libraries_are_quiet() -> Iterator[TextIO]:
    """The same with a file in the temporary folder, which is named and kept when the block fails.

    Yields what stderr was before: stdout is for the result, which is printed after the block.
    """
    folder = Path(tempfile.mkdtemp(prefix="rz-agent-"))
    keep = False
    try:
        with open(os.dup(2), "w") as shown, libraries_write_to(folder):
            yield shown
    except ConfigError:
        raise
    except Exception:
        keep = True
        print(f"what the libraries printed: {folder / FILE}", file=sys.stderr)
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
