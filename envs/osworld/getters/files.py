"""Files of the machine, and the right ones to compare them with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from ...failure import InfraFailure
from ..downloads import downloaded
from ..metrics.registry import chosen
from ..metrics.workbook import last_row
from .registry import GETTERS, Place


@GETTERS.add("vm_file")
async def vm_file(place: Place, config: Mapping[str, Any]) -> str | list[str | None]:
    """The path of a copy of the machine's file; with `multi`, those that `gives` selects (the first).

    path, dest    its path there and its name here; lists with `multi`
    time_suffix   append the time to the name here, in `time_format`

    One file that is missing raises FileNotFoundError; of several, a missing one is None.
    """
    several = bool(config.get("multi", False))
    found: list[str | None] = []
    for path, name in _wanted(config):
        try:
            content = await place.machine.read(path)
            found.append(await asyncio.to_thread(place.keep, _timed(name, config), content))
        except FileNotFoundError:
            if not several:
                raise
            found.append(None)
    return _given(found, config)


@GETTERS.add("cloud_file")
async def cloud_file(place: Place, config: Mapping[str, Any]) -> str | list[str | None]:
    """Like `vm_file`, of the web: only what is in the downloads already. `InfraFailure` for anything else."""
    found: list[str | None] = []
    for url, name in _wanted(config):
        path = downloaded(place.downloads, url)
        if path is None:
            raise InfraFailure(f"{url} is not among the downloads, and an evaluation never reaches the web")
        found.append(place.keep(name, await asyncio.to_thread(path.read_bytes)))
    return _given(found, config)


@GETTERS.add("cache_file")
async def cache_file(place: Place, config: Mapping[str, Any]) -> str:
    """A file that a step of this task has left in the episode's folder."""
    path = place.inside(str(config["path"]))
    if not path.is_file():
        raise FileNotFoundError(f"no step has written {config['path']}")
    return str(path)


@GETTERS.add("content_from_vm_file")
async def content_from_vm_file(place: Place, config: Mapping[str, Any]) -> list[str]:
    """The last row of the machine's workbook, as texts; OSWorld asks for nothing else by this name."""
    chosen("file_type", config["file_type"], ("xlsx",))
    chosen("file_content", config["file_content"], ("last_row",))
    path = str(config["path"])
    copy = place.keep(PurePosixPath(path).name, await place.machine.read(path))
    row: list[str] = await place.judge.call(last_row, copy)
    return row


def _wanted(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(where, name here) for each file."""
    if config.get("multi", False):
        return list(zip(config["path"], config["dest"], strict=True))
    return [(str(config["path"]), str(config["dest"]))]


def _given(found: Sequence[str | None], config: Mapping[str, Any]) -> str | list[str | None]:
    """What the metric receives: a path when it is one that exists, else a list."""
    given: list[str | None] = [found[index] for index in sorted(set(config.get("gives", [0])))]
    if len(given) > 1:
        return given
    only = given[0]
    if only is None:
        raise FileNotFoundError(f"the machine has no {config['path']}")
    return only


def _timed(name: str, config: Mapping[str, Any]) -> str:
    if not config.get("time_suffix", False):
        return name
    stem, suffix = PurePosixPath(name).stem, PurePosixPath(name).suffix
    return f"{stem}_{datetime.now().strftime(config.get('time_format', '%Y%m%d_%H%M%S'))}{suffix}"
