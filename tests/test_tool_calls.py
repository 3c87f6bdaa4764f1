"""Tool calls in a reply: the parser takes any text, and keeps every well-formed call."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.envs.tool_calls import MAX_CALLS, parse

FRAGMENTS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name":"python","arguments":{}}',
    "{",
    '"',
    "\\",
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_call_as_the_tiny_policy_writes_it() -> None:
    reply = parse('<tool_call>{"name":"python","arguments":{"code":"print(345%67)"}}</tool_call>')
    assert [(c.name, c.arguments, c.status) for c in reply.calls] == [
        ("python", {"code": "print(345%67)"}, "ok")
    ]
    assert reply.content == ""


def test_text_around_calls_is_content() -> None:
    reply = parse(f"First {call('a')} then {call('b', x=1)} done")
    assert reply.content == "First  then  done"
    assert [c.name for c in reply.calls] == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{'name': 'python'}", "not_json"),
        ("", "not_json"),
        ('{"name": "python", "arguments": {}} and more', "not_json"),
        ('{"name": "python", "arguments": {"x": NaN}}', "not_json"),
        ("[" * 50_000, "not_json"),
        ('{"name": "python", "arguments": {"x": ' + "9" * 10_000 + "}}", "not_json"),
        ("[1]", "not_an_object"),
        ('{"arguments": {}}', "no_name"),
        ('{"name": 3, "arguments": {}}', "no_name"),
        ('{"name": "python"}', "no_arguments"),
        ('{"name": "python", "arguments": "code"}', "no_arguments"),
        ('{"name": "python", "arguments": {"code": "\\ud800"}}', "not_unicode"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_hides_no_other(body: str, status: str) -> None:
    reply = parse(f"{call('a')}<tool_call>{body}</tool_call>{call('b')}")
    assert [c.status for c in reply.calls] == ["ok", status, "ok"]
    assert reply.calls[1].error


def test_a_call_that_is_never_closed_does_not_swallow_the_next() -> None:
    reply = parse(f'<tool_call>{{"name": "a", "arguments": {{}}}} {call("b")}')
    assert [c.status for c in reply.calls] == ["not_closed", "ok"]
    assert [c.status for c in parse('<tool_call>{"name": "a"').calls] == ["not_closed"]


def test_a_call_in_a_thought_is_no_call() -> None:
    assert parse(f"<think>{call('a')}</think>{call('b')}").calls == parse(call("b")).calls


def test_a_thought_that_the_prompt_opened_ends_at_its_close() -> None:
    reply = parse(f"maybe {call('a')}</think>answer")
    assert (reply.content, reply.calls) == ("answer", ())
    assert reply.thought.startswith("maybe ")


def test_a_thought_that_never_ends_takes_the_rest() -> None:
    reply = parse(f"so <think>{call('a')}")
    assert (reply.content, reply.calls) == ("so ", ())


def test_markers_inside_a_string_of_a_call_are_text() -> None:
    code = "print('</tool_call>', '<think>', '</think>', '<tool_call>')"
    reply = parse(f"{call('python', code=code)}!")
    assert [c.arguments for c in reply.calls] == [{"code": code}]
    assert reply.content == "!"


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3)).map("".join))
def test_any_text_is_parsed(text: str) -> None:
    reply = parse(text)
    for one in reply.calls:
        assert (one.status == "ok") == (not one.error)
        assert one.name or one.status != "ok"


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=5), st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3))
def test_every_well_formed_call_is_read_back(name: str, arguments: dict[str, object]) -> None:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    (one,) = parse(f"<tool_call>{text}</tool_call>").calls
    assert (one.name, one.arguments, one.status) == (name, arguments, "ok")


def test_a_long_hostile_reply_is_parsed_in_no_time() -> None:
    began = time.monotonic()
    statuses = [c.status for c in parse("<tool_call>{" * 20_000).calls]
    assert statuses == ["not_closed"] * MAX_CALLS + ["too_many"]
    assert time.monotonic() - began < 2
