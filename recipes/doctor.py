"""What is installed here, what works, and what to do about what does not.

    checks()             names of the checks, in order
    diagnose(names)      -> Iterator[Finding], as each one ends

Each check runs the real part in a process of its own, with a deadline: an engine that dies of an
illegal instruction, or hangs, is a finding and not the end of the doctor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

DEADLINE_S = 180.0

Status = Literal["ok", "absent", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check's outcome.

    status    "ok"; "absent" for something a run can do without; "failed" for something it needs
    remedy    what to do, empty when ok
    """

    check: str
    status: Status
    detail: str
    remedy: str = ""


def checks() -> list[str]:
    """Names of the checks, in the order they are run."""
    from .doctor_checks import CHECKS

    return list(CHECKS)


def diagnose(names: Sequence[str] = ()) -> Iterator[Finding]:
    """Run the checks of these names, or all, and yield each finding when it is there."""
    for name in names or checks():
        yield _run_apart(name)


def _run_apart(name: str) -> Finding:
    command = [sys.executable, "-m", f"{__package__}.doctor_checks", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            check=name,
            status="failed",
            detail=f"no answer within {DEADLINE_S:g} s",
            remedy="See what the machine is busy with, then try again.",
        )
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0 and answer.startswith("{"):
        return Finding(**json.loads(answer))
    last = done.stderr.strip().rpartition("\n")[2] or "it printed nothing"
    died = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return Finding(
        check=name,
        status="failed",
        detail=f"{died}: {last}",
        remedy="Run `make quickstart` again to repair the installation; this check must not crash.",
    )


def as_json(finding: Finding) -> str:
    """One line that `diagnose` reads back."""
    return json.dumps(asdict(finding))
