"""`rz-agent runs ...`: arguments in, one call into `recipes/runs.py`, a table or files out.

Exit codes: 0 done; 2 usage or configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import RootOption, RunArgument, table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at runs, take things out of them.")


@app.command("list", epilog="Example: rz-agent runs list")
def runs_list(root: RootOption = Path("runs")) -> None:
    """All runs: state, updates, last reward."""
    from .recipes import runs
    from .recipes.progress import number

    found = runs.list_runs(root)
    if not found:
        typer.echo(f"no runs in {root}")
    for run in found:
        typer.echo(
            f"{run.path.name:<24} {run.state:<12} update {run.updates_done}/{run.recipe.updates}"
            f"  reward {number(run.last.get('reward/mean'))}  max lag {run.recipe.lag.max_lag}"
            f"  {run.recipe.env.id}"
        )


@app.command("show", epilog="Example: rz-agent runs show python")
def runs_show(
    run: RunArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last figures and the summary as JSON.")
    ] = False,
    root: RootOption = Path("runs"),
) -> None:
    """How one run went and where its files are; redraws its summary.png."""
    from .recipes import runs, summary_plot

    found = runs.open_run(runs.find_run(root, run))
    if as_json:
        typer.echo(json.dumps({"last": found.last, "summary": found.summary}, indent=2))
        return
    summary_plot.draw(found.path)
    table(runs.describe(found))


@app.command(
    "export", epilog="Example: rz-agent runs export python out/python --trajectories out/episodes.jsonl"
)
def runs_export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="A new folder for the model.")],
    trajectories: Annotated[
        Path | None, typer.Option("--trajectories", help="Also write the trained episodes, one JSON a line.")
    ] = None,
    root: RootOption = Path("runs"),
) -> None:
    """Write the newest weights as a Hugging Face folder, and the episodes if asked."""
    from .recipes import runs

    found = runs.open_run(runs.find_run(root, run))
    version = runs.export_model(found, out)
    typer.echo(f"{out}: the weights of version {version}")
    if trajectories is not None:
        count = runs.export_trajectories(found, trajectories)
        typer.echo(f"{trajectories}: {count} episodes")


@app.command(epilog="Example: rz-agent runs episode python g000003-1 --html episode.html")
def episode(
    run: RunArgument,
    episode: Annotated[str, typer.Argument(help="An episode's id, as `runs export --trajectories` has it.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write it as a page (.html) or as data (.json).")
    ] = None,
    root: RootOption = Path("runs"),
) -> None:
    """Show one episode from a run's journal: what the policy saw and sampled, and what it was worth."""
    from .envs.recording_page import save
    from .recipes import runs
    from .recipes.journal_recording import recording_of

    recording = recording_of(runs.open_run(runs.find_run(root, run)), episode)
    if html is not None:
        save(recording, html)
        typer.echo(f"{html}: episode {episode}, reward {recording.reward:g}, {recording.fate}")
        return
    for one in recording.said:
        typer.echo(f"--- {one.role}\n{one.text}")
    typer.echo(f"--- reward {recording.reward:g}, {recording.fate} {recording.reason}".rstrip())
