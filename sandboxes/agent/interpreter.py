"""The Python that runs in the sandbox: where it lives, and the agent compiled for it.

It need not be the harness's own. It is asked once, from outside, for its folders and version, and it
compiles the agent's modules into one archive that a sandbox mounts; so no sandbox reads our source tree.
"""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import Misconfigured

PACKAGE = "rz_agent_inside"
MODULES = (
    "wire",
    "output",
    "files",
    "control",
    "confine",
    "family",
    "container",
    "session",
    "jobs",
    "programs",
    "spawner",
    "spawners",
    "streams",
    "timers",
    "supervisor",
)
# argv: the control socket's descriptor, the archive
BOOT = f"import sys; sys.path.insert(0, sys.argv[2]); from {PACKAGE}.supervisor import main; main()"
_ASK = """
import base64, ctypes, importlib.util, json, marshal, os, select, sys
compiled = {}
for name, source in json.load(sys.stdin).items():
    code = compile(source, name + ".py", "exec", dont_inherit=True)
    data = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
    compiled[name] = base64.b64encode(data).decode()
print(json.dumps({"version": list(sys.version_info[:3]), "compiled": compiled,
                  "folders": [sys.prefix, sys.base_prefix, sys.exec_prefix]}))
"""
OLDEST = (3, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python that can run the agent: its folders to be seen in the sandbox, and the agent's archive."""

    path: str
    version: tuple[int, int, int]
    folders: tuple[str, ...]
    archive: bytes


def _sources() -> dict[str, str]:
    here = Path(__file__).parent.parent / "inside"
    return {"__init__": "", **{name: (here / f"{name}.py").read_text() for name in MODULES}}


def _archive(compiled: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, data in compiled.items():
            bundle.writestr(f"{PACKAGE}/{name}.pyc", base64.b64decode(data))
    return buffer.getvalue()


def _venv(path: str) -> list[str]:
    folder = os.path.dirname(os.path.dirname(path))
    return [folder] if os.path.exists(os.path.join(folder, "pyvenv.cfg")) else []


def inspect(path: str) -> Interpreter:
    """Ask the interpreter at `path`. Misconfigured when it is missing, too old or lacks ctypes."""
    command = [path, "-I", "-S", "-c", _ASK]
    try:
        asked = subprocess.run(
            command,
            input=json.dumps(_sources()),
            capture_output=True,
            text=True,
            timeout=60,
            env={},
            check=True,
        )
        answer = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise Misconfigured(
            f"sandbox.local.python = {path!r} cannot run the agent: {detail.strip()}\n"
            f"  Name a CPython of at least {OLDEST[0]}.{OLDEST[1]} with its standard library, "
            "for example /usr/bin/python3.",
            provider="local",
        ) from error
    version = tuple(answer["version"])
    if version[:2] < OLDEST:
        raise Misconfigured(
            f"sandbox.local.python = {path!r} is Python {version[0]}.{version[1]}\n"
            f"  Name one of at least {OLDEST[0]}.{OLDEST[1]}.",
            provider="local",
        )
    real = os.path.dirname(os.path.dirname(os.path.realpath(path)))
    folders = dict.fromkeys([*_venv(path), *answer["folders"], real])
    return Interpreter(
        path=path, version=version, folders=tuple(folders), archive=_archive(answer["compiled"])
    )


def unreachable(folder: str) -> str | None:
    """The first folder on the way to `folder` that an unprivileged uid cannot pass, or None.

    A root harness starts each sandbox as a uid that owns nothing, so what it shows must be open to all.
    """
    path = Path(folder)
    for step in [*reversed(path.parents), path]:
        if not step.stat().st_mode & stat.S_IXOTH:
            return str(step)
    return None
