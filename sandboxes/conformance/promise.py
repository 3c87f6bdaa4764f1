"""One thing that every provider promises, as a function that tries it.

A promise that needs a capability is tried where the provider says it has it; where it does not, the run says
that it was not tried. What is broken is said in words, so that somebody who never saw this code can act.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from ..provider import Capabilities
from .place import Place

Body = Callable[[Place], Awaitable[None]]
Need = Literal[
    "isolates_files",
    "isolates_network",
    "isolates_processes",
    "isolates_sessions",
    "bounds_total_memory",
    "bounds_session_memory",
    "bounds_pids",
    "bounds_disk",
    "filters_syscalls",
    "images",
    "snapshots",
    "desktop",
    "open_network",
]


class BrokenPromise(AssertionError):
    """What was promised, and what came instead."""


def expect(holds: object, why: str) -> None:
    """BrokenPromise with `why` unless it holds."""
    if not holds:
        raise BrokenPromise(why)


def same(actual: object, promised: object, what: str) -> None:
    """BrokenPromise unless they are equal."""
    expect(actual == promised, f"{what}: promised {_short(promised)}, got {_short(actual)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """`name` reads as a sentence; `needs` are capabilities without which it is not tried."""

    name: str
    topic: str
    body: Body
    needs: tuple[Need, ...] = ()

    def lacks(self, can: Capabilities) -> list[str]:
        """The needed capabilities that a provider has not."""
        return [need for need in self.needs if not getattr(can, need)]


@dataclass(slots=True)
class Topic:
    """Promises about one thing; fill it with the decorator `promise`.

    >>> topic = Topic("programs")
    >>> @topic.promise()
    ... async def an_exit_code_is_told(place): ...
    >>> topic.promises[0].name
    'an exit code is told'
    """

    name: str
    promises: list[Promise] = field(default_factory=list)

    def promise(self, *needs: Need) -> Callable[[Body], Body]:
        """Adds the function under its own name."""

        def add(body: Body) -> Body:
            self.add(body.__name__.replace("_", " "), body, *needs)
            return body

        return add

    def add(self, name: str, body: Body, *needs: Need) -> None:
        """Adds one of several that share a body."""
        self.promises.append(Promise(name=name, topic=self.name, body=body, needs=needs))
