"""Which machine can run which task, and why the others cannot.

    feasibility(tasks, [desktop_here(), OSWORLD_VM], downloads=folder) -> (Feasibility, ...)

A task runs where its steps, getters and metrics are known, its web files are among the downloads, its
programs and settings are installed, and nothing else that it needs is missing. An infeasible task is one too:
its right answer is FAIL, and an agent can find that out only on a desktop that has the program.

Invariant: nothing is started and nothing is fetched; the reasons follow from the task's own words, but for
the few in `ALSO_NEEDS`, which no field of theirs says.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .downloads import downloaded, is_url
from .getters import GETTERS
from .metrics import METRICS
from .setup import REFUSED, STEPS
from .task_file import Get, OsworldTask, Step

SCHEMAS = Path("/usr/share/glib-2.0/schemas")
# What tasks call a program -> the program that must be installed for it; "" where the desktop has a stand-in.
INSTALLED_AS: Mapping[str, str] = {
    "google-chrome": "chromium",
    "soffice": "libreoffice",
    "localc": "libreoffice",
    "python": "python3",
    "export": "",
    "sudo": "",
}
# A program -> who has it, where that is not a Debian package of its name.
PROVIDERS: Mapping[str, str] = {
    "code": "Visual Studio Code, which is not in Debian",
    "gsettings": "apt-get install libglib2.0-bin",
    "xdg-mime": "apt-get install xdg-utils",
    "xdg-open": "apt-get install xdg-utils",
    "pkill": "apt-get install procps",
    "timedatectl": "apt-get install systemd",
}
APPS: Mapping[str, str] = {
    "chrome": "google-chrome",
    "gimp": "gimp",
    "thunderbird": "thunderbird",
    "vlc": "vlc",
    "vscode": "code",
    "vs_code": "code",
    "terminal": "gnome-terminal",
}
# Programs that a command line may call anywhere in it.
CALLED = re.compile(
    r"(?<![\w./-])(gsettings|timedatectl|xdg-mime|jq|bc|code|dconf|gnome-terminal)(?![\w./-])"
)
SCHEMA = re.compile(r"gsettings['\", ]+(?:get|set|reset)['\", ]+(org\.[\w.-]+)")
TERMINAL_KEY = re.compile(r"['\"]ctrl['\"], *['\"]alt['\"], *['\"]t['\"]")
SYSTEMD, NETWORK = "a running systemd", "the network"
CHROME_FLAG = "a Chromium that still has the flag chrome-refresh-2023 (it went in 2024)"
# Task -> what its instruction needs though no field says so.
ALSO_NEEDS: Mapping[str, str] = {
    "94d95f96-9699-4208-98ba-3c3119edf9c2": NETWORK,  # installs Spotify
    "48d05431-6cd5-4e76-82eb-12b60d823f7d": NETWORK,  # installs conda
    "eabc805a-bfcf-4460-b250-ac92135819f6": NETWORK,  # installs an extension
    "480bcfea-d68f-4aaa-a0a9-2589ef319381": CHROME_FLAG,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend's machines have.

    has_program   whether a program can be started; has_schema: whether a settings schema is installed
    has           of SYSTEMD, NETWORK and the like
    """

    backend: str
    has_program: Callable[[str], bool]
    has_schema: Callable[[str], bool]
    has: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """One task on one backend. `reasons` is empty where it can run there."""

    task: OsworldTask
    backend: str
    reasons: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        return not self.reasons


def desktop_here() -> Capabilities:
    """The desktops of this machine: its programs in a sandbox without a network."""
    return Capabilities(
        backend="desktop",
        has_program=lambda program: shutil.which(program) is not None,
        has_schema=lambda schema: any(
            f'id="{schema}"' in file.read_text(errors="replace") for file in SCHEMAS.glob("*.gschema.xml")
        ),
    )


# Desktops over E2B. Its template says which programs there are: one as docs/osworld.md makes it.
E2B_TEMPLATE = Capabilities(backend="e2b", has_program=lambda program: True, has_schema=lambda schema: True)
# OSWorld's own virtual machine, where the tasks were made, reached over its HTTP server.
OSWORLD_VM = Capabilities(
    backend="http",
    has_program=lambda program: True,
    has_schema=lambda schema: True,
    has=frozenset({SYSTEMD, NETWORK, CHROME_FLAG}),
)


def feasibility(
    tasks: Sequence[OsworldTask], backends: Sequence[Capabilities], *, downloads: Path | None = None
) -> tuple[Feasibility, ...]:
    """A row for each task on each backend, in their order."""
    return tuple(
        Feasibility(task=task, backend=backend.backend, reasons=tuple(_reasons(task, backend, downloads)))
        for task in tasks
        for backend in backends
    )


def _reasons(task: OsworldTask, backend: Capabilities, downloads: Path | None) -> Iterator[str]:
    yield from unknown_names(task)
    yield from sorted({f"needs {REFUSED[step.type]}" for step in _steps(task) if step.type in REFUSED})
    for url in web_files(task):
        if downloaded(downloads, url) is None:
            yield f"needs a download: {url}"
    needs = {NETWORK} if task.proxy or _tabs(task) else set()
    needs |= {ALSO_NEEDS[task.id]} if task.id in ALSO_NEEDS else set()
    needs |= {SYSTEMD} if "timedatectl" in programs(task) else set()
    for need in sorted(needs - backend.has):
        tabs = [url for url in _tabs(task) if need == NETWORK]
        yield f"needs {need}" + (f": {', '.join(tabs)}" if tabs else "")
    for program in sorted(programs(task)):
        installed = INSTALLED_AS.get(program, program)
        if installed and not backend.has_program(installed):
            yield f"needs {installed} ({PROVIDERS.get(installed, f'apt-get install {installed}')})"
    for schema in sorted(schemas(task)):
        if not backend.has_schema(schema):
            package = "gnome-shell-common" if schema == "org.gnome.shell" else "gsettings-desktop-schemas"
            yield f"needs the settings {schema} (apt-get install {package})"


def unknown_names(task: OsworldTask) -> Iterator[str]:
    """Steps, getters and metrics of the task that nobody has added."""
    for step in _steps(task):
        if step.type not in STEPS:
            yield f"unknown step {step.type}"
    for check in task.evaluator.checks:
        if check.metric not in METRICS:
            yield f"unknown metric {check.metric}"
    for get in _gets(task):
        if get.type not in GETTERS:
            yield f"unknown getter {get.type}"


def web_files(task: OsworldTask) -> list[str]:
    """URLs of the files that its steps download and its evaluator compares with."""
    found = [
        file["url"] for step in _steps(task) for file in step.parameters.get("files", ()) if "url" in file
    ]
    for get in _gets(task):
        paths = get.config.get("path", []) if get.type == "cloud_file" else []
        found += [paths] if isinstance(paths, str) else paths
    return list(dict.fromkeys(url for url in found if is_url(url)))


def programs(task: OsworldTask) -> set[str]:
    """What it launches, what its commands call, and the programs it is about."""
    found = {APPS[app] for app in task.related_apps if app in APPS}
    found |= {"libreoffice" for app in task.related_apps if app.startswith("libreoffice")}
    for step in _steps(task):
        found |= {_program(step.parameters["command"])} if step.type == "launch" else set()
        found |= {"xdg-open"} if step.type == "open" else set()
    for text in _commands(task):
        found |= set(CALLED.findall(text))
        found |= {"gnome-terminal"} if TERMINAL_KEY.search(text) else set()
    types = {get.type for get in _gets(task)}
    found |= {"xdg-mime"} if "default_video_player" in types else set()
    return found | ({"gnome-terminal"} if "vm_terminal_output" in types else set())


def schemas(task: OsworldTask) -> set[str]:
    """GSettings schemas that its commands name."""
    return {schema for text in _commands(task) for schema in SCHEMA.findall(text)}


def _program(command: Any) -> str:
    """The first word that is no assignment of a variable."""
    words = shlex.split(command) if isinstance(command, str) else list(command)
    return next((str(word) for word in words if not re.match(r"\w+=", str(word))), "")


def _commands(task: OsworldTask) -> Iterator[str]:
    """Every command that a step or getter runs, as one text each."""
    found = [step.parameters.get("command") for step in _steps(task)]
    found += [get.config.get("command") for get in _gets(task)]
    for command in found:
        if command:
            yield command if isinstance(command, str) else " ".join(map(str, command))


def _tabs(task: OsworldTask) -> list[str]:
    """Pages of the web that its browser begins with."""
    return [url for step in _steps(task) for url in step.parameters.get("urls_to_open", ()) if is_url(url)]


def _steps(task: OsworldTask) -> tuple[Step, ...]:
    return (*task.config, *task.evaluator.postconfig)


def _gets(task: OsworldTask) -> list[Get]:
    checks = task.evaluator.checks
    return [get for check in checks for get in (check.result, check.expected) if get is not None]
