"""A skip that an installation would have prevented is a failure where the installation can be made.

As root on Debian `requirements/install.sh` installs the system packages, so a test that was skipped because
one of them "is not installed" means that it did not, and that nobody would notice. A hook of `conftest.py`;
under pytest-xdist the process that reports to the terminal counts.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

INSTALL = Path(__file__).parent.parent / "requirements" / "install.sh"


def installs_itself() -> bool:
    """Whether install.sh installs system packages here, instead of printing the command."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("apt-get") is not None


def system_packages() -> set[str]:
    """The Debian packages that install.sh installs where they are missing."""
    found = re.findall(r"need\+=\(([^)]+)\)", INSTALL.read_text())
    return {package for packages in found for package in packages.split()}


def skipped_for_a_tool(config: pytest.Config) -> list[str]:
    """Reasons of skips that name a package which should have been installed; [] in a worker of xdist."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not installs_itself():
        return []
    # longrepr of a skip: (file, line, reason)
    reasons = {skip.longrepr[2].removeprefix("Skipped: ") for skip in reporter.stats.get("skipped", ())}
    packages = system_packages()
    return sorted(r for r in reasons if "not installed" in r and packages & set(re.split(r"[^\w.+-]+", r)))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost, so that what it writes is read last
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    for reason in skipped_for_a_tool(session.config):
        session.exitstatus = pytest.ExitCode.USAGE_ERROR  # which running the failed tests again does not mend
        writer = session.config.get_terminal_writer()
        writer.line(f"FAILED tests were skipped: {reason}. Run requirements/install.sh", red=True)
