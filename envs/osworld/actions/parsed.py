"""What one turn of the policy means: events for the machine, a signal for the episode, or what is wrong.

Invariants: every parser is total (any text gives a `Parsed`, nothing raises, nothing is executed); an
action with a fault does nothing at all, not even its first half.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ....sandboxes.desktop.actions import Action as InputEvent
from ....sandboxes.desktop.actions import Wait

Signal = Literal["wait", "done", "fail"]
SIGNALS: dict[str, Signal] = {"WAIT": "wait", "DONE": "done", "FAIL": "fail"}
MAX_TEXT = 50_000  # characters of one reply that are looked at
MAX_EVENTS = 1000
MAX_WAIT_S = 120.0  # of all waiting in one action


class Malformed(ValueError):
    """What the policy did wrong, in words for the policy. Leaves no parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """One turn taken apart.

    events   for the machine, in order; before the signal where there are both
    signal   "wait", "done" and "fail" are OSWorld's WAIT, DONE and FAIL
    error    what is wrong with it; then there are neither events nor a signal
    """

    events: tuple[InputEvent, ...] = ()
    signal: Signal | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What positions are read against.

    pointer   where the pointer is, for movements from there
    """

    width: int
    height: int
    pointer: tuple[int, int] = (0, 0)


Parser = Callable[[str, Screen], Parsed]


def total(parse: Parser) -> Parser:
    """The parser with its faults as a `Parsed`, and with the bounds of one action."""

    def bounded(text: str, screen: Screen) -> Parsed:
        if len(text) > MAX_TEXT:
            return Parsed(error=f"a reply has at most {MAX_TEXT} characters, this one {len(text)}")
        try:
            parsed = parse(text, screen)
        except Malformed as fault:
            return Parsed(error=str(fault))
        if len(parsed.events) > MAX_EVENTS:
            return Parsed(error=f"an action has at most {MAX_EVENTS} steps, this one {len(parsed.events)}")
        waits = sum(event.seconds for event in parsed.events if isinstance(event, Wait))
        if waits > MAX_WAIT_S:
            return Parsed(error=f"an action waits at most {MAX_WAIT_S:g} s, this one {waits:g} s")
        return parsed

    return bounded


def spoken(text: str) -> str:
    """The reply without its thought; a thought that never ends takes the rest.

    >>> spoken("<think>click?</think>DONE"), spoken("<think>still")
    ('DONE', '')
    """
    _, closed, after = text.rpartition("</think>")
    return (after if closed else text).partition("<think>")[0].strip()


_FENCED = re.compile(r"```(?:[a-zA-Z]+[ \t]*\n|[ \t]*\n?)?(.*?)```", re.DOTALL)


def fenced(text: str) -> list[str]:
    """What stands in fences of three backticks.

    >>> fenced("Now: ```python\\nf()\\n``` and ```WAIT```")
    ['f()', 'WAIT']
    """
    return [block.strip() for block in _FENCED.findall(text)]
