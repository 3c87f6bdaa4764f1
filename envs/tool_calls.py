"""Reading tool calls out of a reply: Hermes JSON, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    parse(text) -> Reply(thought, content, calls)

Invariants: `parse` is total (any text gives a Reply, nothing raises); one malformed call never hides a
well-formed one beside it; a call inside a thought is no call; a marker inside a call's JSON string is text.
A thought is `<think>...</think>`; a `</think>` without its opening (templates that open it in the prompt)
makes all before it a thought; a thought that never ends takes the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

Status = Literal[
    "ok", "not_closed", "not_json", "not_an_object", "no_name", "no_arguments", "not_unicode", "too_many"
]
MAX_CALLS = 100  # of one reply: reading a call costs time in proportion to the reply's length

_MARKER = re.compile(r"<think>|</think>|<tool_call>")
_SPACE = re.compile(r"\s*")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply taken apart: what was thought, what was said outside of calls, and the calls in order."""

    thought: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def parse(text: str) -> Reply:
    """Take a reply apart.

    >>> reply = parse('<think>hm</think>So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> reply.content, reply.calls[0].name, reply.calls[0].status
    ('So ', 'add', 'ok')
    """
    thought, content, position = "", "", 0
    calls: list[ToolCall] = []
    while marker := _MARKER.search(text, position):
        content += text[position : marker.start()]
        if len(calls) == MAX_CALLS:
            calls.append(_malformed("too_many", f"a reply has at most {MAX_CALLS} calls", ""))
            return Reply(thought=thought, content=content, calls=tuple(calls))
        if marker[0] == _OPEN:
            call, position = _call(text, marker.end())
            calls.append(call)
        elif marker[0] == "<think>":
            end = text.find("</think>", marker.end())
            if end < 0:
                return Reply(thought=thought + text[marker.end() :], content=content, calls=tuple(calls))
            thought, position = thought + text[marker.end() : end], end + len("</think>")
        else:
            thought, content, calls, position = text[: marker.start()], "", [], marker.end()
    return Reply(thought=thought, content=content + text[position:], calls=tuple(calls))


def _call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call whose JSON begins at or after `start`, and where to read on."""
    body = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches the empty string too
    try:
        value, end = _DECODER.raw_decode(text, body)
        fault = ""
    except (ValueError, RecursionError) as error:
        # RecursionError: a policy may well write ten thousand opening brackets.
        value, end, fault = None, body, _json_fault(error, body)
    close = text.find(_CLOSE, end)
    following = text.find(_OPEN, end)
    if close < 0 or 0 <= following < close:
        stop = following if following >= 0 else len(text)
        return _malformed("not_closed", f"it has no closing {_CLOSE}", text[start:stop]), stop
    raw, after = text[start:close], close + len(_CLOSE)
    if fault:
        return _malformed("not_json", fault, raw), after
    if trailing := text[end:close].strip():
        return _malformed("not_json", f"text follows the JSON: {trailing[:40]!r}", raw), after
    return _checked(value, raw), after


def _checked(value: object, raw: str) -> ToolCall:
    if not isinstance(value, dict):
        return _malformed("not_an_object", "it must be a JSON object with name and arguments", raw)
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return _malformed("no_name", 'it needs "name", a string', raw)
    if not isinstance(arguments, dict):
        return _malformed("no_arguments", '"arguments" must be a JSON object', raw)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        # "\ud800" is valid JSON and no valid text: a sandbox could not even encode it.
        return _malformed("not_unicode", "it holds half of a surrogate pair", raw)
    return ToolCall(name=name, arguments=arguments, raw=raw)


def _malformed(status: Status, error: str, raw: str) -> ToolCall:
    return ToolCall(status=status, error=error, raw=raw)


def _json_fault(error: Exception, body: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is not valid JSON: {error.msg} at character {max(error.pos - body, 0)}"
    return "it is not valid JSON: it is nested too deeply or a number has too many digits"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
