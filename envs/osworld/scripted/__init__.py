"""An agent that is no model and solves some published tasks: by mouse and keyboard, as a policy would.

    solve(task, shown) -> Script       for `rz-agent env run --agent scripted`
    cases(tasks) -> [Case]             for `rz-agent env check`: solved 1, untouched 0

A solution looks at the screenshots for one thing only: whether the program's window is there yet.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from ...message import Observation
from ...script import Script, replayed, scripted
from ...self_test import Case
from ...task import Task, Taskset
from . import gimp, terminal, vlc
from .solution import Solution

SOLUTIONS: Mapping[str, Solution] = {**terminal.SOLUTIONS, **gimp.SOLUTIONS, **vlc.SOLUTIONS}
__all__ = ["SOLUTIONS", "cases", "solve"]


def solve(task: Task, shown: Observation) -> Script:
    """The solution of this task; FAIL at once where there is none."""
    solution = SOLUTIONS.get(task.id)
    if solution is None:
        yield "FAIL"
    else:
        yield from solution.play(shown)


def cases(tasks: Taskset) -> list[Case]:
    """For each task that has a solution, the solution and DONE without doing anything."""
    found = []
    for task in (task for split in tasks.splits for task in tasks.load(split)):
        if solution := SOLUTIONS.get(task.id):
            lacking = [program for program in solution.programs if shutil.which(program) is None]
            skip = f"{', '.join(lacking)}: not installed" if lacking else ""
            found += [
                Case(
                    name=f"{solution.name}, solved", task=task, agent=scripted(solve), reward=1.0, skip=skip
                ),
                Case(
                    name=f"{solution.name}, untouched",
                    task=task,
                    agent=replayed(["DONE"]),
                    reward=0.0,
                    skip=skip,
                ),
            ]
    return found
