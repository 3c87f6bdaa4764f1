"""Reading tool calls out of a reply, in the format that the model was trained to write.

    parse(text) -> Reply(thought, content, calls)                   Hermes JSON
    parse(text, "xml", schemas)                                     XML functions, typed by the tools' schemas
    format_of(chat_template) -> "hermes" or "xml"

Invariants: `parse` is total (any text gives a Reply, nothing raises); one malformed call never hides a
well-formed one beside it; a call inside a thought is no call.
A thought is `<think>...</think>`; a `</think>` without its opening (templates that open it in the prompt)
makes all before it a thought; a thought that never ends takes the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from . import hermes_calls, xml_calls
from .tool_call import OPEN, Schemas, Status, ToolCall, ToolFormat, malformed

FormatName = Literal["hermes", "xml"]
FORMATS: Mapping[FormatName, ToolFormat] = {"hermes": hermes_calls, "xml": xml_calls}
MAX_CALLS = 100  # of one reply: reading a call costs time in proportion to the reply's length

_MARKER = re.compile(f"<think>|</think>|{OPEN}")

__all__ = ["FORMATS", "MAX_CALLS", "FormatName", "Reply", "Status", "ToolCall", "format_of", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply taken apart: what was thought, what was said outside of calls, and the calls in order."""

    thought: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def parse(text: str, tool_format: FormatName = "hermes", schemas: Schemas | None = None) -> Reply:
    """Take a reply apart. `schemas` type the values of a format that writes them as text.

    >>> reply = parse('<think>hm</think>So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> reply.content, reply.calls[0].name, reply.calls[0].status
    ('So ', 'add', 'ok')
    """
    read, types = FORMATS[tool_format].read, schemas or {}
    thought, content, position = "", "", 0
    calls: list[ToolCall] = []
    while marker := _MARKER.search(text, position):
        content += text[position : marker.start()]
        if len(calls) == MAX_CALLS:
            calls.append(malformed("too_many", f"a reply has at most {MAX_CALLS} calls", ""))
            return Reply(thought=thought, content=content, calls=tuple(calls))
        if marker[0] == OPEN:
            call, position = read(text, marker.end(), types)
            calls.append(call)
        elif marker[0] == "<think>":
            end = text.find("</think>", marker.end())
            if end < 0:
                return Reply(thought=thought + text[marker.end() :], content=content, calls=tuple(calls))
            thought, position = thought + text[marker.end() : end], end + len("</think>")
        else:
            thought, content, calls, position = text[: marker.start()], "", [], marker.end()
    return Reply(thought=thought, content=content + text[position:], calls=tuple(calls))


def format_of(chat_template: str) -> FormatName:
    """The format that a chat template asks its model for.

    >>> format_of("<tool_call>\\\\n<function=example_function_name>\\\\n<parameter=example_parameter_1>")
    'xml'
    """
    return "xml" if "<function=" in chat_template and "<parameter=" in chat_template else "hermes"
