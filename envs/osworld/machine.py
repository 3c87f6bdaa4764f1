"""The computer that an OSWorld task runs on, whatever stands behind it: what setup, agent and evaluator use.

    Machine.execute, launch, read, write     what the task's own steps and the evaluator do behind the agent
    Machine.screenshot, accessibility_tree   what the agent is shown
    Machine.perform                          what the agent does: mouse and keyboard, nothing else

Invariant: what a *program* did is an `Executed`; what the *machine* did (died, does not answer) is a
`SandboxError` and masks the episode; `Hindered` stands between the two. Paths are those of the machine; a
relative one begins at its `home`.
Waits: a caller for its own request; `perform` for the events before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...sandboxes.desktop.actions import Action as InputEvent
from ...sandboxes.errors import Blame, SandboxError
from .placeholders import Screenful

__all__ = ["Executed", "Hindered", "InputEvent", "Machine"]


class Hindered(SandboxError):
    """The machine answers and cannot do what it is asked: its disk is full, a program is gone, another one is
    in the way. Before the policy has acted that is the machine's fault; afterwards it is the policy's, who
    would otherwise choose which of its episodes count.
    """

    blame: Blame = "program"


@dataclass(frozen=True, slots=True)
class Executed:
    """How a program ended. Its text as UTF-8, what is not becomes U+FFFD.

    exit_code   124 when it was stopped at its deadline, 127 when there is no such program
    """

    stdout: str
    stderr: str
    exit_code: int


class Machine(Screenful, Protocol):
    """One computer with a screen, made for one episode."""

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120
    ) -> Executed:
        """Run a program to its end; a text without `shell` is split like a shell splits words."""
        ...

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        """Start a program on the screen and leave it running."""
        ...

    async def read(self, path: str) -> bytes:
        """A file's content. FileNotFoundError when there is none."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file, making its folders."""
        ...

    async def screenshot(self) -> bytes:
        """The screen as PNG."""
        ...

    async def accessibility_tree(self) -> str:
        """What the programs say is on the screen, as the XML of OSWorld's server."""
        ...

    async def window_titles(self) -> list[str]: ...

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Bring a window to the front; False when there is none.

        name     a part of its title, the whole title (`strict`), or its class (`by_class`)
        """
        ...

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Ask a window to close, found like by `activate_window`."""
        ...

    async def window_size(self, window_class: str) -> tuple[int, int]:
        """Width and height of the first window of a class. LookupError when there is none."""
        ...

    async def perform(self, events: Sequence[InputEvent]) -> None:
        """Mouse and keyboard, one after the other."""
        ...
