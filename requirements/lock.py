"""Rewrite cpu.lock and the locks beside it but cuda.lock from the packages that are installed now.

Run by `make lock` after an upgrade by hand (`.venv/bin/pip install NAME==VERSION`). A package stays in
the file that names it; one that no file names goes to cpu.lock. cuda.lock is resolved on a GPU machine.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
NOT_LOCKED = {"pip", "rz-agent"}


def normal(name: str) -> str:
    """A distribution's name as indexes compare it.

    >>> normal("Foo_Bar.baz")
    'foo-bar-baz'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: Path) -> dict[str, str]:
    """Normal name -> "name==version" of a lock file, in its order."""
    lines = [line.strip() for line in file.read_text().splitlines()]
    return {
        normal(line.partition("==")[0]): line for line in lines if "==" in line and not line.startswith("#")
    }


def relock() -> None:
    """Write these files; comments at their top are kept, torch stays first."""
    installed = {
        normal(dist.name): f"{dist.name}=={dist.version}"
        for dist in metadata.distributions()
        if normal(dist.name) not in NOT_LOCKED
    }
    others = [HERE / f"{name}.lock" for name in ("dev", "osworld", "sandboxes", "smollm2", "swebench")]
    elsewhere = {name for file in others for name in pins(file)}
    for file in [HERE / "cpu.lock", *others]:
        own = pins(file) if file in others else {name: "" for name in installed if name not in elsewhere}
        lines = sorted((installed[name] for name in own if name in installed), key=str.lower)
        lines.sort(key=lambda line: not line.startswith("torch=="))
        head = [line for line in file.read_text().splitlines() if line.startswith("#")]
        file.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    relock()
