"""OSWorld's tasks as tasks of ours: the published task travels in the metadata as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from ...errors import ConfigError
from ..task import Deadlines, ListTaskset, Task
from .feasibility import OSWORLD_VM, desktop_here, feasibility
from .options import OsworldOptions
from .task_file import OsworldTask, read_tasks

SHIPPED = Path(__file__).parent / "published"
_KEY = "osworld"
_ADAPTER = TypeAdapter(OsworldTask)
# A machine and the start of the task's programs: minutes on a busy computer.
_DEADLINES = Deadlines(setup_s=600.0)


def taskset(options: OsworldOptions) -> ListTaskset:
    """The tasks that the options name, without those that their backend cannot run.

    ConfigError where there is none, with the first reason.
    """
    path = Path(options.taskset) if options.taskset else SHIPPED
    tasks, reason = read_tasks(path), ""
    if options.feasible_only:
        backend = desktop_here() if options.backend == "desktop" else OSWORLD_VM
        downloads = Path(options.downloads) if options.downloads else None
        found = feasibility(tasks, [backend], downloads=downloads)
        tasks = tuple(one.task for one in found if one.feasible)
        reason = next((f"{one.task.id} {one.reasons[0]}" for one in found if not one.feasible), "")
    if not tasks:
        raise ConfigError(
            source="environment OSWorldEnv",
            key="taskset",
            value=str(path),
            why=f"has no task that runs on the {options.backend} backend: {reason}.",
            remedy="`rz-agent env osworld list` says why for each; or set feasible_only = false.",
        )
    return ListTaskset([as_task(task, options.split) for task in tasks], name=path.stem)


def as_task(task: OsworldTask, split: str = "train") -> Task:
    """The prompt is the instruction; the environment shows the screen with it."""
    return Task(
        id=task.id,
        split=split,
        prompt=task.instruction,
        metadata={_KEY: asdict(task)},
        deadlines=_DEADLINES,
    )


def published(task: Task) -> OsworldTask:
    """The published task in it."""
    return _ADAPTER.validate_python(task.metadata[_KEY])
