"""What several commands of `rz-agent` share: options, the recipe that they stand for, and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import ConfigError

if TYPE_CHECKING:
    from .recipes.recipe import Recipe


def _key_and_value(overrides: list[str] | None) -> list[str] | None:
    """Refuse `--set updates 3` for what it is, before the 3 is called an unexpected argument."""
    if overrides:
        from .recipes.recipe_file import key_and_value

        for override in overrides:
            key_and_value(override)
    return overrides


RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", "-r", help="A shipped recipe's name or a TOML file.", show_default=False),
]
EnvOption = Annotated[
    str | None,
    typer.Option("--env", "-e", help="An environment; see `rz-agent env list`.", show_default=False),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, as TOML.",
        callback=_key_and_value,
    ),
]
SandboxOption = Annotated[
    Path | None, typer.Option("--sandbox", help="A TOML file whose [sandbox] table replaces the recipe's.")
]
RootOption = Annotated[Path, typer.Option("--runs", help="The folder that runs are kept in.")]
RunArgument = Annotated[str, typer.Argument(help="Name of a run, or its folder.")]


def chosen_recipe(
    env: str | None, recipe: str | None, overrides: Sequence[str] | None, sandbox: Path | None
) -> Recipe:
    """The recipe that --env, --recipe, --set and --sandbox stand for; ConfigError where they say nothing."""
    from .recipes import recipe_file

    overrides = list(overrides or ())
    if env is not None and recipe is not None:
        overrides = [f"env.id={json.dumps(env)}", *overrides]
    if recipe is not None:
        return recipe_file.load(recipe, overrides, sandbox)
    if env is None:
        raise ConfigError(
            source="command line",
            key="--env",
            value="",
            why="is missing.",
            remedy="Name an environment (--env python), a recipe (--recipe FILE) or a run (--resume RUN).",
        )
    return recipe_file.for_environment(env, overrides, sandbox)


def table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
