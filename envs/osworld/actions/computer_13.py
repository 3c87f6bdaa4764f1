"""OSWorld's action space "computer_13": one JSON object for each action.

    {"action_type": "CLICK", "x": 100, "y": 200}
    {"action_type": "HOTKEY", "parameters": {"keys": ["ctrl", "s"]}}

Thirteen actions, then WAIT, DONE and FAIL, which may also be bare words. Several objects in blocks of their
own, or a list of them, are done one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ....sandboxes.desktop.actions import Scroll
from ...options import suggestion
from .calls import Hand, do
from .parsed import SIGNALS, Malformed, Parsed, Screen, Signal, fenced, spoken, total

# action -> (pyautogui's function, names here -> names there)
_SAME: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "MOVE_TO": ("moveTo", {"x": "x", "y": "y"}),
    "CLICK": ("click", {"button": "button", "x": "x", "y": "y", "num_clicks": "clicks"}),
    "MOUSE_DOWN": ("mouseDown", {"button": "button"}),
    "MOUSE_UP": ("mouseUp", {"button": "button"}),
    "RIGHT_CLICK": ("rightClick", {"x": "x", "y": "y"}),
    "DOUBLE_CLICK": ("doubleClick", {"x": "x", "y": "y"}),
    "DRAG_TO": ("dragTo", {"x": "x", "y": "y"}),
    "TYPING": ("write", {"text": "message"}),
    "PRESS": ("press", {"key": "keys"}),
    "KEY_DOWN": ("keyDown", {"key": "key"}),
    "KEY_UP": ("keyUp", {"key": "key"}),
}
_NEEDED = {"MOVE_TO": ("x", "y"), "DRAG_TO": ("x", "y"), "TYPING": ("text",), "PRESS": ("key",)}
_OTHERS = ("SCROLL", "HOTKEY", *SIGNALS)


@total
def computer_13_action(text: str, screen: Screen) -> Parsed:
    """See the module."""
    said = spoken(text)
    hand = Hand(screen)
    for block in fenced(said) or [said]:
        if block in SIGNALS:
            return Parsed(events=tuple(hand.events), signal=SIGNALS[block])
        for action in _objects(block):
            if signal := _done(action, hand):
                return Parsed(events=tuple(hand.events), signal=signal)
    return Parsed(events=tuple(hand.events))


def _objects(block: str) -> list[Any]:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise Malformed(f'it is not valid JSON ({why}): write {{"action_type": "CLICK", ...}}') from None
    return value if isinstance(value, list) else [value]


def _done(action: Any, hand: Hand) -> Signal | None:
    kind = action.get("action_type") if isinstance(action, dict) else None
    if not isinstance(kind, str):
        raise Malformed('an action is a JSON object with "action_type"')
    if kind in SIGNALS:
        return SIGNALS[kind]
    inner = action.get("parameters")
    values = inner if isinstance(inner, dict) else {k: v for k, v in action.items() if k != "action_type"}
    try:
        _act(kind, values, hand)
    except Malformed:
        raise
    except (ValueError, OverflowError) as error:
        raise Malformed(f"{kind}: {error}") from None
    return None


def _act(kind: str, values: Mapping[str, Any], hand: Hand) -> None:
    if kind == "SCROLL":
        across, up = (_notches(values, name) for name in ("dx", "dy"))
        hand.events.append(Scroll(up=up, right=across))
    elif kind == "HOTKEY":
        do("hotkey", [values.get("keys")], {}, hand, call=kind)
    elif kind in _SAME:
        name, names = _SAME[kind]
        if unknown := set(values) - set(names):
            raise Malformed(f"{kind}: {suggestion(min(unknown), names, 'parameters')}")
        for needed in _NEEDED.get(kind, ()):
            if values.get(needed) is None:
                raise Malformed(f'{kind} needs "{needed}"')
        do(name, [], {names[key]: value for key, value in values.items()}, hand, call=kind)
    else:
        raise Malformed(f"there is no action {kind!r}. {suggestion(kind, _names(), 'actions')}")


def _notches(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Malformed(f"SCROLL: {name} = {value!r} is no whole number")
    return value


def _names() -> Sequence[str]:
    return (*_SAME, *_OTHERS)
