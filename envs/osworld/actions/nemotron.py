"""How Nemotron-3-Nano-Omni says what it does: a description, then code.

    ## Action:
    Click OK.
    ## Code:
    ```python
    pyautogui.click(0.5, 0.25)
    ```

Positions are shares of the screen (0 to 1), or, for models trained so, thousandths of it, or pixels. Instead
of pyautogui code there may be `computer.wait()` or `computer.terminate(status="success")`, as a call or as
JSON `{"name": "computer.terminate", "arguments": {"status": "failure"}}`. Only what stands under `## Code` is
ever done: an example in a thought or in prose is none.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from .calls import Coordinates
from .constants import constant, shown
from .parsed import Malformed, Parsed, Parser, Screen, fenced, spoken, total
from .pyautogui_code import events_of

_CODE = re.compile(r"^[ \t]*##[ \t]*Code[ \t]*:?(.*)\Z", re.DOTALL | re.MULTILINE)


def nemotron_action(coordinates: Coordinates = "relative") -> Parser:
    """The parser for a model that writes positions so."""

    @total
    def parse(text: str, screen: Screen) -> Parsed:
        section = _CODE.search(spoken(text))
        if section is None:
            raise Malformed("there is no `## Code:` section; only what stands there is done")
        blocks = fenced(section[1])
        code = blocks[0] if blocks else section[1].strip()
        if not code:
            raise Malformed("the `## Code:` section is empty")
        function = _function(code)
        if function is not None:
            return _signal(*function)
        return Parsed(events=events_of(code, screen, coordinates=coordinates))

    return parse


def _function(code: str) -> tuple[str, dict[str, Any]] | None:
    """The `computer.` function that the code calls, with its arguments; None where it calls none."""
    try:
        value = json.loads(code)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        arguments = value.get("arguments", {})
        if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
            raise Malformed('a function is {"name": "computer.wait", "arguments": {}}')
        return value["name"], arguments
    try:
        called = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match called:
        case ast.Call(ast.Attribute(ast.Name("computer"), name), given, named):
            if given or any(keyword.arg is None for keyword in named):
                raise Malformed(f"{shown(called)}: write its arguments by name")
            return f"computer.{name}", {str(k.arg): constant(k.value) for k in named}
    return None


def _signal(name: str, arguments: dict[str, Any]) -> Parsed:
    if name == "computer.wait":
        return Parsed(signal="wait")
    if name != "computer.terminate":
        raise Malformed(f"there is no function {name}; there are computer.wait and computer.terminate")
    status = arguments.get("status")
    if status not in ("success", "failure"):
        raise Malformed('computer.terminate needs status="success" or status="failure"')
    return Parsed(signal="done" if status == "success" else "fail")
