"""What a getter is, and who the getters are.

    @GETTERS.add("vm_file")
    async def vm_file(place: Place, config: Mapping[str, Any]) -> Any: ...

A getter fetches one value that a metric compares: a text, a JSON value, or the path of a file that it has put
into `place.folder`. Invariants: it never changes what is judged, and parses nothing of it here: `place.judge`
does (`judge.py`); what it gives is made of JSON's values; FileNotFoundError means that the machine has
no such file, which scores 0; what the machine itself did wrong is a `SandboxError` and masks the episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..judge import Judge
from ..machine import Machine
from ..registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a getter looks and where it puts files.

    judge       reads and compares what the policy made
    folder      this episode's own; steps whose output is kept write here too (`cache_file`)
    downloads   the web files that somebody fetched before (`downloads.py`); None: there are none
    """

    machine: Machine
    folder: Path
    judge: Judge
    downloads: Path | None = None

    def keep(self, name: str, content: bytes) -> str:
        """Write a file into the folder; returns its path. A name that leads out of it is refused."""
        path = self.inside(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    def inside(self, name: str) -> Path:
        """The path of that name in the folder. ValueError for one that leads out of it."""
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise ValueError(f"{name!r} leads out of the episode's folder; a task names files below it")
        return path


Getter = Callable[[Place, Mapping[str, Any]], Awaitable[Any]]
GETTERS = Registry[Getter]("getter")
