"""Tool calls as Hermes JSON, which Qwen3 writes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A marker inside a JSON string is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .tool_call import (
    CLOSE,
    JSON,
    OPEN,
    Schemas,
    ToolCall,
    checked,
    closing,
    json_fault,
    malformed,
    not_closed,
)

_SPACE = re.compile(r"\s*")


def read(text: str, start: int, schemas: Schemas) -> tuple[ToolCall, int]:
    """The call whose JSON begins at or after `start`, and where to read on."""
    body = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches the empty string too
    try:
        value, end = JSON.raw_decode(text, body)
        fault = ""
    except (ValueError, RecursionError) as error:
        # RecursionError: a policy may well write ten thousand opening brackets.
        value, end, fault = None, body, json_fault(error, body)
    stop, after, closed = closing(text, end)
    raw = text[start:stop]
    if not closed:
        return not_closed(raw), after
    if fault:
        return malformed("not_json", fault, raw), after
    if trailing := text[end:stop].strip():
        return malformed("not_json", f"text follows the JSON: {trailing[:40]!r}", raw), after
    return _call(value, raw), after


def write(name: str, arguments: Mapping[str, Any]) -> str:
    """
    >>> write("add", {"a": 1})
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    """
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{OPEN}{body}{CLOSE}"


def _call(value: object, raw: str) -> ToolCall:
    if not isinstance(value, dict):
        return malformed("not_an_object", "it must be a JSON object with name and arguments", raw)
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return malformed("no_name", 'it needs "name", a string', raw)
    if not isinstance(arguments, dict):
        return malformed("no_arguments", '"arguments" must be a JSON object', raw)
    return checked(name, arguments, raw)
