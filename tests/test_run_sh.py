"""What `make test` makes of tests that fail: run.sh runs up to three again, alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.sh")
PYTEST = Path(sys.executable).with_name("pytest")
SOURCE = """
import pathlib, pytest
@pytest.mark.parametrize("name", {names})
def test_races(name):
    seen = pathlib.Path({folder!r}, name)
    seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
    assert len(seen.read_text()) > {often}
def test_holds(): pass
"""


def run(folder: Path, *, names: int, often: int) -> subprocess.CompletedProcess[str]:
    tests = folder / "tests"
    tests.mkdir()
    shutil.copy(RUN, tests)
    source = SOURCE.format(names=[f"t{n}" for n in range(names)], folder=str(folder), often=often)
    (tests / "test_it.py").write_text(source)
    command = [str(tests / "run.sh"), str(PYTEST), "-q", "-p", "xdist"]
    quick = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, env=quick, capture_output=True, text=True, check=False, timeout=120)


def test_what_fails_beside_others_and_passes_alone_passes_and_is_named_last(tmp_path: Path) -> None:
    done = run(tmp_path, names=2, often=1)
    assert done.returncode == 0, done.stdout
    *_, said, first, second = done.stdout.splitlines()
    assert said.startswith("These failed beside others and passed alone")
    assert ["[t0]" in first, "[t1]" in second] == [True, True]


@pytest.mark.parametrize(("names", "often"), [(1, 2), (4, 1)], ids=["twice", "more than three"])
def test_what_fails_twice_or_many_at_once_fails(tmp_path: Path, names: int, often: int) -> None:
    done = run(tmp_path, names=names, often=often)
    assert done.returncode == 1
    assert "failed" in done.stdout.splitlines()[-1]
    assert len((tmp_path / "t0").read_text()) == (2 if names == 1 else 1)
