"""A session that skipped tests for want of a system package fails where the package could be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import missing_tools
import pytest

TESTS = Path(__file__).parent


def session(
    folder: Path, *options: str, reason: str, installs: bool = True
) -> subprocess.CompletedProcess[str]:
    """A pytest session of one passing and one skipped test, with the hook of tests/conftest.py."""
    (folder / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "import missing_tools\n"
        "from missing_tools import pytest_sessionfinish\n"
        f"missing_tools.installs_itself = lambda: {installs}\n"
    )
    (folder / "test_it.py").write_text(
        f"import pytest\ndef test_passes(): pass\ndef test_skips(): pytest.skip({reason!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=alone, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_a_skip_for_want_of_bubblewrap_fails_the_session(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = session(tmp_path, *options, reason="bubblewrap is not installed")
    assert "1 passed, 1 skipped" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("FAILED tests were skipped: bubblewrap is not installed")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


def test_where_a_person_must_install_it_a_skip_stays_a_skip(tmp_path: Path) -> None:
    assert session(tmp_path, reason="bubblewrap is not installed", installs=False).returncode == 0


def test_a_skip_for_another_reason_stays_a_skip(tmp_path: Path) -> None:
    assert session(tmp_path, reason="no memory cgroup on this machine").returncode == 0


def test_the_packages_are_those_of_the_installation() -> None:
    desktop = {"xvfb", "openbox", "dbus", "mousepad", "at-spi2-core", "libnss-wrapper"}
    assert desktop <= missing_tools.system_packages()
    assert {"bubblewrap", "gcc", "libnuma1", "docker.io"} <= missing_tools.system_packages()


def test_the_sandbox_tests_say_what_is_missing_in_the_words_that_are_looked_for() -> None:
    for name in ("test_sandbox_local.py", "test_sandbox_hostile.py"):
        assert 'shutil.which("bwrap") is None, reason="bubblewrap is not installed"' in (
            (TESTS / name).read_text()
        )
