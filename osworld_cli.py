"""`rz-agent env osworld ...`: arguments in, one call into `envs/osworld`, a table out.

Exit codes: 0 done; 2 usage or configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Tasks for --env osworld.")


@app.callback()
def _one_command_has_a_name() -> None:
    """Keeps `list` a word of its own: typer would else drop the name of an only command."""


@app.command("list", epilog="Example: rz-agent env osworld list --feasible")
def list_(
    taskset: Annotated[
        Path | None, typer.Option("--taskset", help="A .json, a .jsonl or a folder; else the shipped tasks.")
    ] = None,
    feasible: Annotated[
        bool, typer.Option("--feasible", help="For each task and backend whether it runs there, or why not.")
    ] = False,
    downloads: Annotated[
        Path | None, typer.Option("--downloads", help="The folder of files that tasks fetch from the web.")
    ] = None,
) -> None:
    """The tasks; with --feasible, where each of them can run and why it cannot elsewhere.

    Backends: desktop (this machine's programs), e2b (a template of E2B's, docs/osworld.md), http (OSWorld's
    own virtual machine).
    """
    from .envs.osworld.feasibility import E2B_TEMPLATE, OSWORLD_VM, desktop_here, feasibility
    from .envs.osworld.task_file import read_tasks
    from .envs.osworld.tasks import SHIPPED

    tasks = read_tasks(taskset or SHIPPED)
    if not feasible:
        table([(task.id, task.instruction) for task in tasks])
        return
    found = feasibility(tasks, [desktop_here(), E2B_TEMPLATE, OSWORLD_VM], downloads=downloads)
    table([(one.task.id, one.backend, "; ".join(one.reasons) or "runs") for one in found])
