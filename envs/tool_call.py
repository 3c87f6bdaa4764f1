"""One tool call of a reply, and what a way of writing calls down must be able to do.

    ToolFormat.read(text, start, schemas) -> (call, where to read on)
    ToolFormat.write(name, arguments) -> the text a policy of that format would write

The formats are modules: `hermes_calls.py` and `xml_calls.py`; `tool_calls.py` reads whole replies.
Invariants of every format: `read` is total, its cost is linear in the text, it never reads past the
`<tool_call>` of another call, and a call that is not "ok" says in `error` what the policy should mend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

Status = Literal[
    "ok",
    "not_closed",
    "not_json",
    "not_xml",
    "not_an_object",
    "no_name",
    "no_arguments",
    "wrong_type",
    "not_unicode",
    "too_many",
]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the policy wrote it.

    status   "ok": name and arguments can be used; else what is wrong, and `error` says it to the policy
    raw      the text between the markers
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: Status = "ok"
    error: str = ""
    raw: str = ""

    def openai(self) -> dict[str, object]:
        """The entry of an assistant message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


class ToolFormat(Protocol):
    """How a family of models writes its tool calls down."""

    def read(self, text: str, start: int, schemas: Schemas) -> tuple[ToolCall, int]:
        """The call whose `<tool_call>` ends at `start`, and where in the text to read on."""

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The call as text, markers included; JSON values only."""


def malformed(status: Status, error: str, raw: str) -> ToolCall:
    """A call that cannot be made."""
    return ToolCall(status=status, error=error, raw=raw)


def checked(name: str, arguments: dict[str, Any], raw: str) -> ToolCall:
    """A call that can be made, if what it holds is text."""
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        # "\ud800" is valid JSON and no valid text: a sandbox could not even encode it.
        return malformed("not_unicode", "it holds half of a surrogate pair", raw)
    return ToolCall(name=name, arguments=arguments, raw=raw)


def closing(text: str, start: int) -> tuple[int, int, bool]:
    """Where the body of a call ends, where to read on, and whether it is closed before another one opens."""
    close, following = text.find(CLOSE, start), text.find(OPEN, start)
    if close < 0 or 0 <= following < close:
        stop = following if following >= 0 else len(text)
        return stop, stop, False
    return close, close + len(CLOSE), True


def not_closed(raw: str) -> ToolCall:
    """A call that ends with the reply, or where the next one begins."""
    return malformed("not_closed", f"it has no closing {CLOSE}", raw)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is no finite number")
    return number


JSON = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
"""JSON as the standard has it: Python's own decoder takes NaN, and reads 1e999 as infinity."""


def json_fault(error: Exception, body: int = 0) -> str:
    """What `JSON` did not like about a text that begins at `body`."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is not valid JSON: {error.msg} at character {max(error.pos - body, 0)}"
    return "it is not valid JSON: it is nested too deeply or a number is too large"
