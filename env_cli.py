"""`rz-agent env ...`: arguments in, one call into `recipes/env_tools.py`, a table out.

Exit codes: 0 done; 1 a check failed, or an episode was masked; 2 usage or configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import osworld_cli, swebench_cli
from .cli_options import SandboxOption, SetOption, chosen_recipe, table
from .errors import ConfigError

if TYPE_CHECKING:
    from .envs.check import Finding
    from .envs.recording import Recording
    from .recipes.recipe import Recipe

    Heard = Callable[[Recording], None]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, check, play and begin environments."
)
app.add_typer(swebench_cli.app, name="swebench-pro")
app.add_typer(osworld_cli.app, name="osworld")
NameArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A short name, an id, or package.module:Class.")
]


@app.command("list", epilog="Example: rz-agent env list")
def list_() -> None:
    """Every environment that is installed: its short name, and its id or where its code is."""
    from .envs.registry import listed

    table(list(listed().items()))


@app.command(epilog="Example: rz-agent env check python")
def check(
    name: NameArgument,
    only: Annotated[str, typer.Option("--only", help="Only what has this in its name.")] = "",
    override: SetOption = None,
    sandbox: SandboxOption = None,
) -> None:
    """Try Gymnasium's checker and wrappers, then the environment's self-test; exit code 1 on a failure."""
    from .recipes.env_tools import checked

    counts: dict[str, int] = {}

    def heard(finding: Finding) -> None:
        counts[finding.status] = counts.get(finding.status, 0) + 1
        typer.echo(f"{finding.status:<8} {finding.seconds:6.1f} s  {finding.trial}")
        if finding.detail and finding.status != "passed":
            typer.echo(f"{'':<19}{finding.detail}")

    well = asyncio.run(checked(chosen_recipe(name, None, override, sandbox), only, heard))
    typer.echo(", ".join(f"{number} {status}" for status, number in counts.items()) or "nothing was tried")
    if not well:
        raise typer.Exit(1)


@app.command(epilog="Example: rz-agent env run python --agent scripted --record episode.html")
def run(
    name: NameArgument,
    agent: Annotated[
        Literal["scripted", "model", "replay"],
        typer.Option("--agent", help="The environment's own script, a model, or the turns of an episode."),
    ] = "scripted",
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="How many episodes.")] = 1,
    split: Annotated[str | None, typer.Option("--split", help="Which tasks.", show_default=False)] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="The id of the one task to play.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="--agent model: a Hugging Face folder; else the recipe's."),
    ] = None,
    episode: Annotated[
        Path | None, typer.Option("--episode", help="--agent replay: a file that --record wrote.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write the episode as a page (.html) or as data (.json)."),
    ] = None,
    override: SetOption = None,
    sandbox: SandboxOption = None,
) -> None:
    """Play episodes and say what they were worth; exit code 1 where one was masked."""
    from .envs.recording_page import check_name
    from .recipes.evaluate import with_split

    if record is not None:
        check_name(record)
    recipe = with_split(chosen_recipe(name, None, override, sandbox), split)
    masked = 0

    def heard(recording: Recording) -> None:
        nonlocal masked, record
        masked += recording.fate == "masked"
        why = f" ({recording.reason})" if recording.reason else ""
        typer.echo(f"{recording.task_id}: reward {recording.reward:g}, {recording.fate}{why}")
        if record is not None:
            _save(recording, record)
            record = _next_file(record)

    if agent == "replay":
        _replay(recipe, episode, heard)
    elif agent == "model":
        _play_model(recipe, episodes, task, model, heard)
    else:
        _play_script(recipe, episodes, task, heard)
    if masked:
        raise typer.Exit(1)


@app.command(epilog="Example: rz-agent env init word-game")
def init(
    name: Annotated[str, typer.Argument(help="Its name: letters, digits and dashes.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="A new folder; else one of that name here.")
    ] = None,
) -> None:
    """Write a package with a new environment: its class, its tasks, its entry point and a test."""
    from .recipes.new_environment import write_environment

    folder = write_environment(name, out or Path(name))
    typer.echo(f"{folder}: an environment called {name}. Next:")
    typer.echo(f"  pip install -e {folder}\n  rz-agent env check {name}\n  pytest {folder}")


def _play_script(recipe: Recipe, episodes: int, task: str | None, heard: Heard) -> None:
    from .recipes.env_tools import chosen_tasks, own_agent, played

    asyncio.run(played(recipe, chosen_tasks(recipe, episodes, task), own_agent(recipe), heard))


def _play_model(recipe: Recipe, episodes: int, task: str | None, model: Path | None, heard: Heard) -> None:
    from .recipes.library_output import libraries_are_quiet

    with libraries_are_quiet() as terminal:
        # Imported here: even its imports have things to say.
        from .recipes.env_tools import chosen_tasks, played_by_model
        from .recipes.model_source import model_folder

        tasks = chosen_tasks(recipe, episodes, task)
        folder = model or model_folder(recipe.model, lambda text: print(text, file=terminal, flush=True))
        recordings = asyncio.run(played_by_model(recipe, tasks, folder))
    for recording in recordings:
        heard(recording)


def _replay(recipe: Recipe, file: Path | None, heard: Heard) -> None:
    from .envs.recording_page import load_recording
    from .envs.script import replayed
    from .recipes.env_tools import played

    if file is None:
        raise ConfigError(
            source="command line",
            key="--episode",
            value="",
            why="is missing.",
            remedy="Name a file that --record wrote: --agent replay --episode episode.html",
        )
    recorded = load_recording(file)
    if recorded.task is None:
        raise ConfigError(
            source=str(file),
            key="task",
            value=recorded.task_id,
            why="is only known by its id, so nothing can be reset to it.",
            remedy="Replay an episode that `rz-agent env run --record FILE` wrote.",
        )
    typer.echo(f"recorded: reward {recorded.reward:g}, {recorded.fate}")
    asyncio.run(played(recipe, [recorded.task], replayed(recorded.actions), heard))


def _save(recording: Recording, file: Path) -> None:
    from .envs.recording_page import save

    save(recording, file)
    typer.echo(f"{file}: {sum(one.role == 'assistant' for one in recording.said)} turns")


def _next_file(file: Path) -> Path:
    """
    >>> str(_next_file(Path("a.html"))), str(_next_file(Path("a-2.html")))
    ('a-2.html', 'a-3.html')
    """
    name, _, number = file.stem.rpartition("-")
    return file.with_stem(f"{name}-{int(number) + 1}" if name and number.isdigit() else f"{file.stem}-2")
