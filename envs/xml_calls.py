"""Tool calls as XML functions, which Qwen3-Coder, Qwen3.5 and Nemotron-3 write:

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A value is the text between its tags without one line break at either end, and is typed by the tool's JSON
schema: a string is taken as it stands, everything else is JSON (Python's True, False and None too). Nothing
is escaped in this format, so a value may hold any text but for what ends it: a `</parameter>` that the next
parameter or the end of the function follows, and the beginning of another call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .tool_call import CLOSE, JSON, OPEN, Schemas, Status, ToolCall, checked, closing, malformed, not_closed

_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?")
_VALUE_ENDS = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_ENDS = re.compile(r"\s*</function>\s*")
_ANOTHER = re.compile(OPEN + r"\s*<function=")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class _Fault(Exception):
    """What is wrong with a call."""

    def __init__(self, status: Status, error: str) -> None:
        self.status, self.error = status, error


def read(text: str, start: int, schemas: Schemas) -> tuple[ToolCall, int]:
    """The call whose `<function=...>` begins at or after `start`, and where to read on."""
    another = _ANOTHER.search(text, start)
    # Bounded by the next call, so that no value can swallow it.
    stop = another.start() if another else len(text)
    try:
        name, arguments, end = _function(text, start, stop, schemas)
    except _Fault as fault:
        end, after, closed = closing(text[:stop], start)
        raw = text[start:end]
        return (malformed(fault.status, fault.error, raw) if closed else not_closed(raw)), after
    if not text.startswith(CLOSE, end):
        end, after, closed = closing(text[:stop], end)
        raw = text[start:end]
        if closed:
            return malformed("not_xml", "text follows </function>", raw), after
        return not_closed(raw), after
    return checked(name, arguments, text[start:end]), end + len(CLOSE)


def write(name: str, arguments: Mapping[str, Any]) -> str:
    """
    >>> print(write("add", {"a": 1}))
    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>
    """
    values = {
        key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for key, v in arguments.items()
    }
    lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items()]
    return "\n".join([OPEN, f"<function={name}>", *lines, "</function>", CLOSE])


def _function(text: str, start: int, stop: int, schemas: Schemas) -> tuple[str, dict[str, Any], int]:
    """Name, arguments and the end of the function at `start`; raises `_Fault`."""
    opened = _FUNCTION.match(text, start, stop)
    if opened is None:
        raise _Fault("not_xml", "it must begin with <function=NAME>")
    name, position = opened[1].strip(), opened.end()
    if not name:
        raise _Fault("no_name", "<function=> needs the name of a tool")
    schema, arguments = schemas.get(name, {}), dict[str, Any]()
    while parameter := _PARAMETER.match(text, position, stop):
        key, ends = parameter[1].strip(), _VALUE_ENDS.search(text, parameter.end(), stop)
        if ends is None:
            raise _Fault("not_xml", f"parameter {key} has no closing </parameter>")
        if key in arguments:
            raise _Fault("not_xml", f"parameter {key} is given twice")
        arguments[key] = _typed(key, text[parameter.end() : ends.start()], schema)
        position = ends.end()
    closed = _FUNCTION_ENDS.match(text, position, stop)
    if closed is None:
        found = text[position:stop].strip()[:40]
        raise _Fault("not_xml", f"<parameter=NAME> or </function> must follow, not {found!r}")
    return name, arguments, closed.end()


def _typed(key: str, text: str, schema: Mapping[str, Any]) -> Any:
    """The value of a parameter; raises `_Fault` where its type does not allow that text."""
    kinds = _kinds(schema.get("properties", {}).get(key, {}), schema.get("$defs", {}))
    if kinds <= {"string"}:
        return text
    bare = text.strip()
    try:
        value = JSON.decode(_PYTHON.get(bare, bare))
    except (ValueError, RecursionError):
        value = text
    if not kinds.isdisjoint(_KINDS.get(type(value), ())) or _whole(value, kinds):
        return value
    if "string" in kinds:
        return text
    raise _Fault("wrong_type", f"parameter {key} must be JSON of type {' or '.join(sorted(kinds))}")


def _whole(value: object, kinds: frozenset[str]) -> bool:
    return "integer" in kinds and isinstance(value, float) and value.is_integer()


def _kinds(schema: Mapping[str, Any], shared: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return _kinds(shared.get(name, {}), {key: entry for key, entry in shared.items() if key != name})
    found = schema.get("type", ())
    kinds = {found} if isinstance(found, str) else set(found)
    for branch in ("anyOf", "oneOf", "allOf"):
        for entry in schema.get(branch, ()):
            kinds |= _kinds(entry, shared)
    return frozenset(kinds)
