"""What a desktop's answers say, as values. Each function raises ValueError for an answer that says it not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ..inside.wire import Header
from .desktop import Accessible, Window

Box = tuple[int, int, int, int]
MAX_DEPTH = 200  # of an accessibility tree; `inside.accessibility` cuts it there
T = TypeVar("T")


def nothing(header: Header, body: bytes) -> None:
    """It was done."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A program did not start. `missing` when there is none of its name."""

    words: str
    missing: bool


def started(header: Header, body: bytes) -> int | Refused:
    """The pid of a program."""
    if "refused" in header:
        return Refused(_text(header, "refused"), _of(bool, header, "missing"))
    return _of(int, header, "pid")


def windows(header: Header, body: bytes) -> list[Window]:
    """Those that the window manager knows."""
    return [
        Window(
            id=_of(int, found, "id"), title=_text(found, "title"), box=_box(found.get("box")),
            active=_of(bool, found, "active"), pid=_of(int, found, "pid"), kind=_text(found, "kind"),
        )
        for found in _objects(header, "windows")
    ]  # fmt: skip


def tree(header: Header, body: bytes) -> Accessible:
    """The root of an accessibility tree."""
    found = _of(dict, header, "tree")
    return _accessible(_of(dict, found, "root"), complete=_of(bool, found, "complete"))


def _accessible(node: dict[str, Any], *, complete: bool = True, depth: int = 0) -> Accessible:
    if depth > MAX_DEPTH:
        raise ValueError(f"an accessibility tree of more than {MAX_DEPTH} levels")
    states = _of(list, node, "states")
    if not all(isinstance(state, str) for state in states):
        raise ValueError("states that are no words")
    return Accessible(
        role=_text(node, "role"), name=_text(node, "name"), text=_text(node, "text"),
        box=None if node.get("box") is None else _box(node["box"]),
        states=frozenset(states), complete=complete,
        children=tuple(_accessible(child, depth=depth + 1) for child in _objects(node, "children")),
    )  # fmt: skip


def _of(kind: type[T], found: dict[str, Any], key: str) -> T:
    value = found.get(key)
    if type(value) is not kind:
        raise ValueError(f"{key} of {type(value).__name__}, not {kind.__name__}")
    return value


def _text(found: dict[str, Any], key: str) -> str:
    """Its characters can all be written: half a surrogate pair would fail wherever it is written down."""
    value = _of(str, found, key)
    value.encode()
    return value


def _objects(found: dict[str, Any], key: str) -> list[dict[str, Any]]:
    values = _of(list, found, key)
    if not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{key} that are no objects")
    return values


def _box(value: object) -> Box:
    if not isinstance(value, list) or [type(side) for side in value] != [int] * 4:
        raise ValueError("a box that is no four numbers")
    return cast(Box, tuple(value))
