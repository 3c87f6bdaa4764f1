"""What a policy writes, taken apart into mouse and keyboard events. One file per way of writing it."""

from __future__ import annotations

from typing import Literal

from .calls import Coordinates
from .computer_13 import computer_13_action
from .nemotron import nemotron_action
from .parsed import Parsed, Parser, Screen
from .pyautogui_code import pyautogui_action

ActionSpace = Literal["pyautogui", "computer_13", "nemotron"]

__all__ = ["ActionSpace", "Coordinates", "Parsed", "Parser", "Screen", "parser"]


def parser(space: ActionSpace, coordinates: Coordinates = "relative") -> Parser:
    """The parser of an action space; `coordinates` are Nemotron's."""
    if space == "nemotron":
        return nemotron_action(coordinates)
    return pyautogui_action if space == "pyautogui" else computer_13_action
