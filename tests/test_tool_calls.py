"""Tool calls in a reply: the parser takes any text, and keeps every well-formed call."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Task, reward, tool
from rz_agent.envs.tool import tool_spec
from rz_agent.envs.tool_calls import FORMATS, MAX_CALLS, FormatName, format_of, parse
from rz_agent.recipes.recipe import Recipe
from rz_agent.recipes.rollout_side import tool_format
from rz_agent.recipes.sections import ModelSection
from rz_agent.rollout.renderer import Renderer
from test_episode import LIMITS, Scripted, Talk, play, sampled
from test_renderer import QWEN3, SPELLINGS, say, structure, write_model

FRAGMENTS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name":"python","arguments":{}}',
    "<function=work>",
    "</function>",
    "<parameter=text>",
    "</parameter>",
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
        ('{"name": "python", "arguments": {"x": -1e999}}', "not_json"),
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


# --- XML functions ----------------------------------------------------------------------------------------


@tool
def work(
    text: str,
    count: int = 0,
    share: float = 0.0,
    sure: bool = False,
    names: list[str] | None = None,
    note: str | None = None,
    mode: Literal["fast", "safe"] = "fast",
    table: dict[str, int] | None = None,
    anything: Any = None,
) -> str:
    """A tool with a parameter of each kind."""
    return ""


SCHEMAS = {"work": tool_spec(work).parameters}


def xml(name: str, **arguments: object) -> str:
    return FORMATS["xml"].write(name, arguments)


def test_an_xml_call_as_qwen3_coder_and_nemotron_write_it() -> None:
    text = (
        "<think>\nhm\n</think>\n\nFirst.\n\n<tool_call>\n<function=work>\n<parameter=text>\nif a < b:\n"
        "    print('</x>')\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    reply = parse(text, "xml", SCHEMAS)
    assert reply.content.strip() == "First."
    assert [(c.name, c.arguments, c.status) for c in reply.calls] == [
        ("work", {"text": "if a < b:\n    print('</x>')", "count": 3}, "ok")
    ]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", '"quoted"', '"quoted"'),
        ("count", " 5 ", 5),
        ("count", "5.0", 5.0),
        ("share", "5", 5),
        ("sure", "True", True),
        ("sure", "false", False),
        ("names", '["a", "b"]', ["a", "b"]),
        ("names", "None", None),
        ("note", "null", None),
        ("note", "12", "12"),
        ("mode", "safe", "safe"),
        ("table", '{"a": 1}', {"a": 1}),
        ("anything", "[1]", "[1]"),
        ("unknown", "1", "1"),
    ],
)
def test_a_value_has_the_type_of_the_tools_schema(parameter: str, text: str, value: object) -> None:
    written = (
        f"<tool_call><function=work><parameter={parameter}>\n{text}\n</parameter></function></tool_call>"
    )
    (one,) = parse(written, "xml", SCHEMAS).calls
    assert (one.status, one.arguments) == ("ok", {parameter: value})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", "not_xml"),
        ('{"name": "work", "arguments": {}}', "not_xml"),
        ("<function=></function>", "no_name"),
        ("<function=work>words</function>", "not_xml"),
        ("<function=work><parameter=text>a</function>", "not_xml"),
        ("<function=work><parameter=text>a</parameter>", "not_xml"),
        ("<function=work><parameter=text>a</parameter><parameter=text>b</parameter></function>", "not_xml"),
        ("<function=work><parameter=count>three</parameter></function>", "wrong_type"),
        ("<function=work><parameter=count>2.5</parameter></function>", "wrong_type"),
        ("<function=work><parameter=share>NaN</parameter></function>", "wrong_type"),
        ("<function=work><parameter=share>1e999</parameter></function>", "wrong_type"),
        ("<function=work><parameter=names>a, b</parameter></function>", "wrong_type"),
        ('<function=work><parameter=names>["\\ud800"]</parameter></function>', "not_unicode"),
        ("<function=work></function> and more", "not_xml"),
        ("<function=work><parameter=names>" + "[" * 50_000 + "</parameter></function>", "wrong_type"),
    ],
)
def test_a_malformed_xml_call_says_what_is_wrong_and_hides_no_other(body: str, status: str) -> None:
    reply = parse(f"{xml('a')}<tool_call>{body}</tool_call>{xml('b')}", "xml", SCHEMAS)
    assert [c.status for c in reply.calls] == ["ok", status, "ok"]
    assert reply.calls[1].error


@pytest.mark.parametrize(
    "half", ["<function=a>", "<function=a><parameter=x>1", "<function=a></function>", ""]
)
def test_an_xml_call_that_is_never_closed_does_not_swallow_the_next(half: str) -> None:
    reply = parse(f"<tool_call>{half} {xml('b', x='2')}", "xml")
    assert [(c.status, c.arguments) for c in reply.calls] == [("not_closed", {}), ("ok", {"x": "2"})]
    assert [c.status for c in parse(f"<tool_call>{half}", "xml").calls] == ["not_closed"]


def test_the_tags_of_the_format_inside_a_value_are_text_where_nothing_of_it_follows() -> None:
    code = "print('</parameter>', '</function>', '</tool_call>', '<tool_call>', '<parameter=x>')"
    (one,) = parse(xml("work", text=code), "xml", SCHEMAS).calls
    assert (one.status, one.arguments) == ("ok", {"text": code})


def test_an_environment_reads_the_format_that_its_options_name() -> None:
    class Echo(AgentEnv):
        taskset = ListTaskset([Task(id="t", prompt="Go.")], name="one")

        @tool
        async def double(self, number: int) -> str:
            """Twice the number."""
            return str(number + number)

        @reward
        def nothing(self, task: Task, episode: Episode) -> float:
            return 0.0

    async def answers(env: AgentEnv, text: str) -> list[object]:
        await env.areset()
        shown, *_ = await env.astep(text)
        await env.aclose()
        return [message["content"] for message in shown["messages"]]

    wrong = "<tool_call><function=double><parameter=number>x</parameter></function></tool_call>"
    assert asyncio.run(answers(Echo(tool_format="xml"), f"{wrong}{xml('double', number=4)}")) == [
        "Error: the tool call was not understood: parameter number must be JSON of type integer",
        "8",
    ]
    assert asyncio.run(answers(Echo(), call("double", number=4))) == ["8"]


def test_the_format_is_the_one_that_the_chat_template_asks_for() -> None:
    assert format_of(QWEN3) == "hermes"
    assert format_of("{{ '<tool_call>\n<function=f>\n<parameter=p>\nvalue' }}") == "xml"


def test_a_run_takes_the_format_from_the_model_unless_its_recipe_says_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "{# <function=f> <parameter=p> #}" + QWEN3)
    assert tool_format(Recipe(), folder) == "xml"
    assert tool_format(Recipe(model=ModelSection(tool_format="hermes")), folder) == "hermes"


# --- any text ---------------------------------------------------------------------------------------------

ANY = st.text() | st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3)).map("".join)
formats = st.sampled_from(sorted(FORMATS))


@settings(deadline=None)
@given(formats, ANY)
def test_any_text_is_parsed(name: FormatName, text: str) -> None:
    reply = parse(text, name, SCHEMAS)
    for one in reply.calls:
        assert (one.status == "ok") == (not one.error)
        assert one.name or one.status != "ok"


@settings(deadline=None)
@given(formats, ANY)
def test_a_well_formed_call_is_kept_whatever_stands_before_it(tool_format: FormatName, text: str) -> None:
    # A thought, and a string of Hermes JSON, may hold a call as text.
    before = text.replace("<think>", "").replace('"', "")
    last = parse(before + FORMATS[tool_format].write("b", {"x": "1"}), tool_format).calls[-1]
    assert (last.name, last.arguments, last.status) == ("b", {"x": "1"}, "ok")


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=5), st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3))
def test_every_well_formed_call_is_read_back(name: str, arguments: dict[str, object]) -> None:
    (one,) = parse(FORMATS["hermes"].write(name, arguments)).calls
    assert (one.name, one.arguments, one.status) == (name, arguments, "ok")


@settings(max_examples=50, deadline=None)
@given(
    st.fixed_dictionaries(
        {"text": st.text()},
        optional={
            "count": st.integers(),
            "sure": st.booleans(),
            "names": st.lists(st.text(max_size=5), max_size=3),
            "table": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        },
    )
)
def test_every_well_formed_xml_call_is_read_back_with_its_types(arguments: dict[str, object]) -> None:
    (one,) = parse(xml("work", **arguments), "xml", SCHEMAS).calls
    assert (one.name, one.arguments, one.status) == ("work", arguments, "ok")


@pytest.mark.parametrize(
    ("tool_format", "piece"),
    [("hermes", "<tool_call>{"), ("xml", "<tool_call><function=a><parameter=b>")],
)
def test_a_long_hostile_reply_is_parsed_in_no_time(tool_format: FormatName, piece: str) -> None:
    began = time.monotonic()
    statuses = [c.status for c in parse(piece * 20_000, tool_format).calls]
    assert statuses == ["not_closed"] * MAX_CALLS + ["too_many"]
    assert time.monotonic() - began < 2


# --- token accounting -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_model(tmp_path_factory.mktemp("qwen3"), QWEN3))


def printing(text: str, tool_format: FormatName) -> type[AgentEnv]:
    """An environment whose tool prints this, and whose user says it."""

    class Printing(Talk):
        def __init__(self) -> None:
            super().__init__(tool_format=tool_format)

        async def reply(self, said: str) -> str:
            return text

        @tool
        async def python(self, code: str) -> str:
            """Print it."""
            return text

    return Printing


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_neither_sampled_tokens_nor_what_a_tool_prints_change_the_accounting(
    qwen3: Renderer, data: st.DataObject
) -> None:
    """An episode trains on exactly what was sampled, and found text brings no special token into it."""
    tool_format = data.draw(formats)
    stop = qwen3.stop_token_ids[0]
    token = st.integers(0, max(qwen3.special.ids)).filter(lambda token: token != stop)
    tokens = st.lists(token, max_size=12).map(lambda ids: [*ids, stop])
    calls = st.just(say(qwen3, FORMATS[tool_format].write("python", {"code": "1"})))
    turns = data.draw(st.lists(tokens | calls, min_size=1, max_size=4))
    hostile = data.draw(
        st.lists(st.sampled_from([*SPELLINGS, *FRAGMENTS]) | st.text(max_size=4)).map("".join)
    )

    def context(text: str) -> list[list[int]]:
        limits = replace(LIMITS, max_turns=len(turns))
        seen = play(Scripted(*turns), qwen3, limits, env_class=printing(text, tool_format))
        assert [ids for segment in seen.segments for ids in sampled(segment)] == turns
        return [structure(qwen3, segment.token_ids[~segment.action_mask]) for segment in seen.segments]

    assert context(hostile) == context("")
