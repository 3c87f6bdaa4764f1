"""A task's own steps: what brings its machine into the first state, and what the evaluator wants done before
it looks (`postconfig`).

    await run_steps(task.config, place)

Invariants: a step that is not known, or has a parameter that is not, is a ConfigError at reset; one that
cannot be done on this machine (a file that nobody downloaded, an account that nobody has) is an InfraFailure
and masks the episode. A command may fail, as upstream: tasks end programs that do not run.
Waits: each step for the one before it; a program that is launched is not waited for.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigError
from ..failure import InfraFailure
from ..options import suggestion
from .downloads import downloaded, is_url
from .getters.registry import Place
from .machine import Executed, Hindered
from .placeholders import fill
from .task_file import Step

UNTIL_S = 300.0  # for a command that is repeated until it says the right thing
WINDOW_S = 20.0  # for a window to appear
Run = Callable[..., Awaitable[None]]


async def run_steps(steps: Sequence[Step], place: Place) -> None:
    """One after the other."""
    for step in steps:
        run, parameters = STEPS.get(step.type), fill(step.parameters, place.machine)
        if run is None:
            remedy = suggestion(step.type, STEPS, "steps")
            raise _fault("type", step.type, "is no step that is known.", remedy)
        try:
            inspect.signature(run).bind(place, **parameters)
        except TypeError as error:
            known = ", ".join(list(inspect.signature(run).parameters)[1:]) or "none"
            remedy = f"{step.type} has: {known}."
            raise _fault(f"{step.type}.parameters", dict(parameters), f"{error}.", remedy) from error
        await run(place, **parameters)


def _fault(key: str, value: object, why: str, remedy: str) -> ConfigError:
    return ConfigError(source="OSWorld task", key=key, value=value, why=why, remedy=remedy)


async def _download(place: Place, files: Sequence[Mapping[str, str]]) -> None:
    for file in files:
        found = downloaded(place.downloads, file["url"])
        if found is None:
            where = (
                f"in {place.downloads}" if place.downloads else "and env.options.downloads names no folder"
            )
            raise InfraFailure(f"needs network: {file['url']} is not downloaded {where}")
        await place.machine.write(file["path"], await asyncio.to_thread(found.read_bytes))


async def _upload_file(place: Place, files: Sequence[Mapping[str, str]]) -> None:
    for file in files:
        try:
            content = await asyncio.to_thread(Path(file["local_path"]).read_bytes)
        except OSError as error:
            raise InfraFailure(f"upload_file: {error}") from error
        await place.machine.write(file["path"], content)


async def _launch(place: Place, command: str | list[str], shell: bool = False) -> None:
    if not shell and isinstance(command, str) and len(command.split()) > 1:
        shell = True  # upstream splits it; tasks write shell commands so
    await place.machine.launch(command, shell=shell)


async def _execute(
    place: Place,
    command: str | list[str],
    shell: bool = False,
    stdout: str = "",
    stderr: str = "",
    until: Mapping[str, Any] | None = None,
) -> None:
    """`stdout` and `stderr` name files of the episode's folder that a getter reads later."""
    deadline = asyncio.get_running_loop().time() + UNTIL_S
    while True:
        executed = await place.machine.execute(command, shell=shell)
        for name, text in ((stdout, executed.stdout), (stderr, executed.stderr)):
            if name:
                place.keep(name, text.encode())
        if not until or _says(executed, until):
            return
        if asyncio.get_running_loop().time() > deadline:
            message = f"{command!r} did not come to {dict(until)!r} in {UNTIL_S:g} s"
            raise Hindered(message, provider="machine")
        await asyncio.sleep(0.3)


def _says(executed: Executed, until: Mapping[str, Any]) -> bool:
    return (
        until.get("returncode") == executed.exit_code
        or ("stdout" in until and until["stdout"] in executed.stdout)
        or ("stderr" in until and until["stderr"] in executed.stderr)
    )


async def _sleep(place: Place, seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _open(place: Place, path: str) -> None:
    await place.machine.launch(["xdg-open", path])


async def _activate_window(
    place: Place, window_name: str, strict: bool = False, by_class: bool = False
) -> None:
    """A program that has just been launched shows its window a little later."""
    deadline = asyncio.get_running_loop().time() + WINDOW_S
    while not await place.machine.activate_window(window_name, strict=strict, by_class=by_class):
        if asyncio.get_running_loop().time() > deadline:
            return  # the policy may have closed it: nothing is to be masked then
        await asyncio.sleep(0.2)


async def _close_window(place: Place, window_name: str, strict: bool = False, by_class: bool = False) -> None:
    await place.machine.close_window(window_name, strict=strict, by_class=by_class)


async def _change_wallpaper(place: Place, path: str) -> None:
    schema = ["gsettings", "set", "org.gnome.desktop.background"]
    await place.machine.execute([*schema, "picture-uri", f"file://{path}"])


async def _chrome_open_tabs(place: Place, urls_to_open: Sequence[str]) -> None:
    for host in {urlsplit(url).hostname for url in urls_to_open if is_url(url)} - {None}:
        if (await place.machine.execute(["getent", "hosts", str(host)])).exit_code:
            raise InfraFailure(f"needs network: the machine does not find {host}")
    await place.machine.launch(["google-chrome", *urls_to_open])


def _needs(what: str) -> Run:
    async def refuse(place: Place, **parameters: Any) -> None:
        raise InfraFailure(f"needs {what}")

    return refuse


# What a step needs that no machine here has.
REFUSED: Mapping[str, str] = {
    "googledrive": "a Google Drive account",
    "login": "an account of a website",
    "update_browse_history": "Chrome's history written into its profile, which is not offered",
}
STEPS: Mapping[str, Run] = {
    "download": _download,
    "upload_file": _upload_file,
    "launch": _launch,
    "execute": _execute,
    "command": _execute,
    "sleep": _sleep,
    "open": _open,
    "activate_window": _activate_window,
    "close_window": _close_window,
    "change_wallpaper": _change_wallpaper,
    "chrome_open_tabs": _chrome_open_tabs,
    **{step: _needs(what) for step, what in REFUSED.items()},
}
