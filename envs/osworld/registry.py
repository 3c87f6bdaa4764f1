"""Functions by the name that a task file calls them by: metrics and getters, ours and other people's.

    METRICS = Registry[Metric]("metric", remedy="...")
    @METRICS.add("exact_match")
    def exact_match(result, expected, **options) -> float: ...
    METRICS["exact_match"]                     ConfigError with near misses when nobody has added it

Invariant: a name means one function; adding another under it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from ...errors import ConfigError
from ..options import suggestion

Entry = TypeVar("Entry", bound=Callable[..., Any])


class Registry(Generic[Entry]):
    """`what` is the noun that errors use.

    >>> colours = Registry[Callable[[], str]]("colour")
    >>> @colours.add("red")
    ... def red() -> str: return "#f00"
    >>> colours["red"](), "blue" in colours
    ('#f00', False)
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, Entry] = {}

    def add(self, name: str) -> Callable[[Entry], Entry]:
        """A decorator that puts a function under a name; `ConfigError` where the name is taken."""

        def put(entry: Entry) -> Entry:
            taken = self._entries.get(name)
            if taken is not None and _place(taken) != _place(entry):
                raise ConfigError(
                    source=f"OSWorld {self._what}s",
                    key="name",
                    value=name,
                    why=f"is taken by {_place(taken)}.",
                    remedy="Choose another name, and write that one into your task's evaluator.",
                )
            self._entries[name] = entry
            return entry

        return put

    def __getitem__(self, name: str) -> Entry:
        if name in self._entries:
            return self._entries[name]
        raise ConfigError(
            source="OSWorld task",
            key=self._what,
            value=name,
            why="is not known.",
            remedy=suggestion(name, self._entries, f"{self._what}s"),
        )

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def _place(entry: Callable[..., Any]) -> str:
    return f"{entry.__module__}.{entry.__qualname__}"
