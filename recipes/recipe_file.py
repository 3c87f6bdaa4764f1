"""Where a recipe comes from: a TOML file, a shipped name, an environment's short name, and `--set`.

    load(name_or_file, overrides, sandbox)   -> Recipe
    for_environment(env, overrides, sandbox) -> Recipe   the recipe shipped for it, else `default`
    shipped()                                -> names of the shipped recipes

An override is `table.key=value` with a TOML value; a bare word is taken as a string.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .recipe import Recipe, parse

Tables = dict[str, Any]


def shipped() -> list[str]:
    """Names of the recipes inside the package."""
    folder = resources.files(__package__).joinpath("shipped")
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load(name_or_file: str, overrides: Sequence[str] = (), sandbox: Path | None = None) -> Recipe:
    """The recipe of a shipped name or a file, with `--set` and `--sandbox` applied on top."""
    tables, source = _read(name_or_file)
    return _finish(tables, source, overrides, sandbox)


def for_environment(env: str, overrides: Sequence[str] = (), sandbox: Path | None = None) -> Recipe:
    """The recipe shipped under the environment's short name; for any other, the one named default."""
    if env in shipped():
        return load(env, overrides, sandbox)
    tables, _ = _read("default")
    tables["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", env).strip("-._") or "run"
    tables["env"] = {"id": env}
    return _finish(tables, f"recipe default on {env}", overrides, sandbox)


def apply_override(tables: Tables, override: str) -> None:
    """Set one key in place.

    >>> tables = {"lag": {"max_lag": 8}}
    >>> apply_override(tables, "lag.max_lag=0"); tables
    {'lag': {'max_lag': 0}}
    """
    parts, text = key_and_value(override)
    key, here = ".".join(parts), tables
    for part in parts[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(source="--set", key=key, value=text, remedy=f"{part} is a value, not a table.")
    here[parts[-1]] = _toml_value(key, text)


def key_and_value(override: str) -> tuple[list[str], str]:
    """The two sides of KEY=VALUE, the key in its parts; ConfigError where it is not written so.

    >>> key_and_value("lag.max_lag=0")
    (['lag', 'max_lag'], '0')
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in parts):
        raise ConfigError(
            source="--set",
            key="argument",
            value=override,
            why="is not KEY=VALUE.",
            remedy="Write it with = and without spaces, as in --set updates=3 or --set lag.max_lag=0",
        )
    return parts, text.strip()


def _toml_value(key: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[A-Za-z0-9_./:@~+-]+", text):
            return text
        raise ConfigError(
            source="--set",
            key=key,
            value=text,
            why="is no TOML value.",
            remedy='Numbers, true, false, "text", [1, 2] and {a = 1} are; quote it for the shell.',
        ) from None


def _finish(tables: Tables, source: str, overrides: Sequence[str], sandbox: Path | None) -> Recipe:
    if sandbox is not None:
        text = read_toml(sandbox)
        tables["sandbox"] = text.get("sandbox", text)
        source = f"{source} with {sandbox}"
    for override in overrides:
        apply_override(tables, override)
    return parse(tables, f"{source} with --set" if overrides else source)


def _read(name_or_file: str) -> tuple[Tables, str]:
    if name_or_file in shipped():
        entry = resources.files(__package__).joinpath("shipped", f"{name_or_file}.toml")
        return tomllib.loads(entry.read_text()), f"recipe {name_or_file}"
    path = Path(name_or_file)
    if not path.is_file():
        close = difflib.get_close_matches(name_or_file, shipped(), n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(
            source="--recipe",
            key="recipe",
            value=name_or_file,
            why="is no file and no shipped recipe.",
            remedy=f"{hint}Shipped: {', '.join(shipped())}.",
        )
    return read_toml(path), str(path)


def read_toml(path: Path) -> Tables:
    """The tables of a TOML file; ConfigError when there are none to be read."""
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            source=str(path), key="TOML", value=str(error), remedy="Mend the file at that line."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            source=str(path), key="file", value=str(error), remedy="Name a TOML file that can be read."
        ) from None
