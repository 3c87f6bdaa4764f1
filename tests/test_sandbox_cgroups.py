"""Which groups local sandboxes get on a machine with cgroup version 2, wherever their harness runs.

Each harness is a process of its own in a group that the test makes. It makes no sandbox: the conformance
suite does that, in whatever group the tests run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rz_agent.sandboxes.local.cgroups import remove_tree
from rz_agent.sandboxes.local.hierarchy import FOLDER, HARNESS, find_hierarchies

ROOT = Path("/sys/fs/cgroup")
pytestmark = [
    pytest.mark.skipif(not (ROOT / "cgroup.controllers").exists(), reason="no cgroup version 2 here"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes groups anywhere"),
]

ALL = ["cpu", "memory", "pids"]
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
LOOK = """
import json
from rz_agent.sandboxes.local.hierarchy import find_hierarchies
found = [(sorted(h.controllers), str(h.path)) for h in find_hierarchies()]
print(json.dumps([found, open("/proc/self/cgroup").read().strip().rpartition("/")[2]]))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """One with all controllers, beside those of this process."""
    (hierarchy,) = find_hierarchies()
    made = hierarchy.path.parent / f"rz-agent-test-{os.getpid()}"
    made.mkdir()
    yield made
    assert remove_tree(made)


def look(group: Path, *started_by: str) -> tuple[list[tuple[list[str], str]], str]:
    """What a harness in that group finds, and the last part of its own group's name then."""
    command = ["sh", "-c", ENTER, str(group), *started_by, sys.executable, "-c", LOOK]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    found, own = json.loads(ran.stdout)
    return [(names, path) for names, path in found], own


def test_sandboxes_lie_beside_a_harness_whose_group_nobody_lent_it(group: Path) -> None:
    (group / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    own = group / "harness"
    own.mkdir()
    assert look(own) == ([(ALL, str(group / FOLDER))], own.name)


def test_a_controller_that_the_group_above_does_not_give_is_not_claimed(group: Path) -> None:
    (group / "cgroup.subtree_control").write_text("+pids")
    own = group / "harness"
    own.mkdir()
    assert look(own) == ([(["pids"], str(group / FOLDER))], own.name)


def test_in_a_group_that_is_lent_the_harness_makes_room_and_what_bounds_it_bounds_its_sandboxes(
    group: Path,
) -> None:
    os.setxattr(group, "trusted.delegate", b"1")
    beside = subprocess.Popen(["sleep", "60"])
    try:
        (group / "cgroup.procs").write_text(str(beside.pid))
        assert look(group) == ([(ALL, str(group / FOLDER))], HARNESS)
        assert (group / HARNESS / "cgroup.procs").read_text().split() == [str(beside.pid)]
        assert look(group / HARNESS) == ([(ALL, str(group / FOLDER))], HARNESS)  # and so does the next
    finally:
        beside.kill()
        beside.wait()


def test_a_container_divides_the_only_group_that_it_sees(group: Path) -> None:
    mount = 'umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
    found, own = look(group, "unshare", "--cgroup", "--mount", "sh", "-c", mount, "sh")
    assert (found, own) == ([(ALL, str(ROOT / FOLDER))], HARNESS)


def test_a_container_that_sees_the_machines_groups_but_not_its_own_claims_none(group: Path) -> None:
    assert look(group, "unshare", "--cgroup") == ([], "")
