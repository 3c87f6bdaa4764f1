"""The oracle: an agent that takes an instance's own patch through the tools, as a policy would have to.

solve          looks, writes the gold patch down, applies it, submits
wrong          changes the right files so that they are broken, and submits
cases(tasks)   what `rz-agent env check` plays
"""

from __future__ import annotations

import re

from ..message import Observation
from ..script import Script, call, replayed, scripted
from ..self_test import Case
from ..task import Task, Taskset
from .dataset import instance_of

_CHANGED = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)


def solve(task: Task, shown: Observation) -> Script:
    """The gold patch."""
    patch = instance_of(task).patch
    yield call("bash", command="git log --oneline | head -3; git status --short")
    yield call("str_replace_edit", command="create", path="/tmp/gold.patch", file_text=_ended(patch))
    yield call("bash", command="git apply --verbose /tmp/gold.patch")
    yield call("submit")


def wrong(task: Task, shown: Observation) -> Script:
    """A patch that touches what the gold patch touches, and resolves nothing."""
    files = _CHANGED.findall(instance_of(task).patch)
    for path in files:
        yield call("bash", command=f"printf '\\nthis is no program (\\n' >> '{path}'")
    yield call("submit")


def cases(tasks: Taskset) -> list[Case]:
    """Of the first task of the first split: the gold patch resolves; nothing, and a wrong patch, do not."""
    task = tasks.load(tasks.splits[0])[0]
    nothing = replayed([call("submit")])
    return [
        Case(name="the gold patch resolves", task=task, agent=scripted(solve), reward=1.0),
        Case(name="an empty patch does not", task=task, agent=nothing, reward=0.0),
        Case(name="a wrong patch does not", task=task, agent=scripted(wrong), reward=0.0),
    ]


def _ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"
