"""pyautogui code as events. It is read with `ast` and never run.

    events_of("import pyautogui; pyautogui.click(10, 20); time.sleep(0.5)", Screen(...)) -> events
    pyautogui_action(reply, screen) -> Parsed      a whole reply: code in fences, or WAIT, DONE, FAIL

What can be written: calls of pyautogui with constants (`constants.py`), `time.sleep`, imports of the two,
`with pyautogui.hold(key):`, settings such as `pyautogui.PAUSE = 1`, which say nothing here. Anything else is
Malformed with the piece of code that it is.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ....sandboxes.desktop.actions import Action as InputEvent
from ....sandboxes.desktop.actions import KeyDown, KeyUp
from .calls import Arguments, Coordinates, Hand, do
from .constants import Value, constant, shown
from .parsed import SIGNALS, Malformed, Parsed, Screen, fenced, spoken, total

_MODULES = ("pyautogui", "time")
_ONLY = "write calls of pyautogui and time.sleep only"


def events_of(code: str, screen: Screen, *, coordinates: Coordinates = "absolute") -> tuple[InputEvent, ...]:
    """The events of this code. Malformed with the line that cannot be read.

    >>> events_of("pyautogui.press(['down', 'enter'])", Screen(width=800, height=600))
    (Press(keys=('down', 'enter'), presses=1),)
    """
    hand = Hand(screen, coordinates)
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed(f"it is no Python: {error}") from None
    try:
        _Reader(hand).read(body)
    except Malformed:
        raise
    except (ValueError, OverflowError) as error:  # of the events themselves: no such key, no such position
        raise Malformed(str(error)) from None
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    return tuple(hand.events)


@total
def pyautogui_action(text: str, screen: Screen) -> Parsed:
    """OSWorld's action space "pyautogui": see the module. A reply without fences is code as a whole."""
    said = spoken(text)
    if not said:
        raise Malformed("there is no action in it: write pyautogui code in a ```python block, or DONE")
    events: list[InputEvent] = []
    for block in fenced(said) or [said]:
        lines = block.splitlines()
        # code may be followed by the word that ends the episode
        last = lines[-1].strip() if lines else ""
        code = "\n".join(lines[:-1]) if last in SIGNALS else block
        events += events_of(code, screen)
        if last in SIGNALS:
            return Parsed(events=tuple(events), signal=SIGNALS[last])
    return Parsed(events=tuple(events))


class _Reader:
    """Walks over statements."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._names = {name: name for name in _MODULES}  # what the code calls the two modules
        self._sleep: set[str] = set()  # and time.sleep, where it was imported by name

    def read(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Pass() | ast.Expr(ast.Constant()):
                pass
            case ast.Import(names):
                self._import(statement, names)
            case ast.ImportFrom("time", [ast.alias("sleep", other)]):
                self._sleep.add(other or "sleep")
            case ast.Assign([ast.Attribute(ast.Name(module), "PAUSE" | "FAILSAFE")]) if self._is_ours(module):
                pass
            case ast.With([ast.withitem(ast.Call() as held, None)], inner):
                self._holding(held, inner)
            case ast.Expr(ast.Call() as called):
                self._call(called)
            case _:
                raise Malformed(f"{shown(statement)} cannot be done: {_ONLY}")

    def _is_ours(self, module: str) -> bool:
        return self._names.get(module) == "pyautogui"

    def _import(self, statement: ast.stmt, names: Sequence[ast.alias]) -> None:
        for alias in names:
            if alias.name not in _MODULES:
                raise Malformed(f"{shown(statement)} cannot be done: there are pyautogui and time")
            self._names[alias.asname or alias.name] = alias.name

    def _call(self, called: ast.Call) -> None:
        name = self._called(called)
        given, named = self._arguments(called)
        do(name, given, named, self._hand, call=shown(called))

    def _called(self, called: ast.Call) -> str:
        match called.func:
            case ast.Name(name) if name in self._sleep:
                return "sleep"
            case ast.Attribute(ast.Name(module), name) if module in self._names:
                if self._names[module] == "pyautogui" or name == "sleep":
                    return name
        raise Malformed(f"{shown(called)} cannot be done: {_ONLY}")

    def _arguments(self, called: ast.Call) -> tuple[list[Value], dict[str, Value]]:
        if any(keyword.arg is None for keyword in called.keywords):
            raise Malformed(f"{shown(called)}: write each argument by itself")
        # how the pointer glides is nothing that programs see
        named = {k.arg: constant(k.value) for k in called.keywords if k.arg and k.arg != "tween"}
        return [constant(argument) for argument in called.args], named

    def _holding(self, held: ast.Call, inner: Sequence[ast.stmt]) -> None:
        if self._called(held) != "hold":
            raise Malformed(f"with {shown(held)}: there is only `with pyautogui.hold(key):`")
        given, named = self._arguments(held)
        keys = Arguments(shown(held), ("key",), given, named).texts("key")
        self._hand.events += [KeyDown(key) for key in keys]
        self.read(inner)
        self._hand.events += [KeyUp(key) for key in reversed(keys)]
