"""A recorded episode: what was said, kept whole, and a page that shows it and runs nothing of it."""

from __future__ import annotations

import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.envs import (
    AgentEnv,
    Episode,
    InfraFailure,
    ListTaskset,
    Observation,
    Task,
    call,
    pictured,
    reward,
    tool,
)
from rz_agent.envs.play import play
from rz_agent.envs.recording import Recorder, Recording, Said
from rz_agent.envs.recording_page import load_recording, page, save
from rz_agent.envs.script import Agent, Script, replayed, scripted
from rz_agent.errors import ConfigError, EnvironmentBug

HOSTILE = "<script>alert(1)</script></pre></section><img src=x onerror=alert(2)>&amp;\"'"
TASKS = ListTaskset([Task(id=f"task {HOSTILE}", prompt="Look.", answer="done")], name="one")


class Camera(AgentEnv):
    """Shows a picture, and what it is told to show."""

    taskset = TASKS

    @tool
    async def show(self, text: str) -> Observation:
        """Show it."""
        return pictured("tool", text, b"\x89PNG", name="show")

    @tool
    async def fail(self) -> str:
        """Lose the camera."""
        raise InfraFailure("the camera is gone")

    @reward
    def right(self, task: Task, episode: Episode) -> float:
        return float(episode.answer == task.answer)


def recorded(*turns: str) -> Recording:
    async def run() -> Recording:
        env, task = Camera(), TASKS.load("train")[0]
        agent: Agent = replayed(turns)(task)
        try:
            return await play(env, agent, Recorder("camera", {"word": HOSTILE}, task))
        finally:
            await env.aclose()

    return asyncio.run(run())


class Page(HTMLParser):
    """What a browser would make of a page: its tags, the addresses in them, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags = [""]
        self.attributes: list[tuple[str, str | None]] = []
        self.shown, self.data = "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags[-1] == "script":
            self.data += data
        elif self.tags[-1] != "style":
            self.shown += data


def test_an_episode_is_recorded_as_it_happened() -> None:
    episode = recorded(f"<think>hm</think>{call('show', text='cat')}<tool_call>{{</tool_call>", "done")
    assert [(one.role, one.text) for one in episode.said] == [
        ("user", "Look."),
        ("assistant", f"<think>hm</think>{call('show', text='cat')}<tool_call>{{</tool_call>"),
        ("tool", "[image]cat"),
        ("tool", episode.said[3].text),
        ("assistant", "done"),
    ]
    assert episode.said[2].images == (b"\x89PNG",)
    assert [one["status"] for one in episode.said[1].calls] == ["ok", "not_json"]
    assert (episode.reward, episode.fate, episode.reason) == (1.0, "terminated", "answered")
    assert episode.figures["malformed_calls"] == 1
    assert episode.actions[-1] == "done"


def test_a_bug_of_a_script_is_told_with_its_line() -> None:
    def stumble(task: Task, shown: Observation) -> Script:
        yield call("show", text="cat")
        raise KeyError("lost")

    with pytest.raises(
        EnvironmentBug, match=r"(?s)Camera, agent, turn 2.*KeyError: 'lost'.*test_envs_recording"
    ):
        asyncio.run(
            play(
                Camera(), scripted(stumble)(TASKS.load("train")[0]), Recorder("", {}, TASKS.load("train")[0])
            )
        )


def test_a_masked_episode_says_why() -> None:
    episode = recorded(call("fail"))
    assert (episode.fate, episode.reason) == ("masked", "InfraFailure: the camera is gone")


def test_an_episode_that_nobody_ends_is_truncated_at_its_turns() -> None:
    episode = recorded(*[call("show", text="again")] * 20)
    assert (episode.fate, episode.reason, len(episode.actions)) == ("truncated", "turns", Camera.max_turns)


def test_a_page_loads_nothing_and_runs_nothing_of_what_was_said() -> None:
    episode = recorded(HOSTILE + call("show", text=HOSTILE) + f"<tool_call>{HOSTILE}</tool_call>", HOSTILE)
    seen = Page(page(episode))
    assert seen.tags.count("script") == 1  # its data, which is no program
    assert ("type", "application/json") in seen.attributes
    assert [value for name, value in seen.attributes if name == "src"] == ["data:image/png;base64,iVBORw=="]
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name == "href"]
    assert ("content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in seen.attributes
    assert seen.shown.count(HOSTILE) >= 6
    assert "http" not in page(episode).replace("http-equiv", "")


texts = st.text() | st.sampled_from([HOSTILE, "</script>", "<!--", "[image]", "\ud800"])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant", "policy"]), texts), max_size=4), texts
)
def test_whatever_was_said_a_page_has_one_section_for_each_of_it_and_gives_it_back(
    said: list[tuple[str, str]], title: str
) -> None:
    episode = Recording(
        environment=title, task_id=title, said=tuple(Said(role=role, text=text) for role, text in said)
    )
    seen = Page(page(episode).encode(errors="replace").decode())
    assert (seen.tags.count("section"), seen.tags.count("script")) == (len(said), 1)
    assert Recording.load(json.loads(seen.data)) == episode


@pytest.mark.parametrize("name", ["episode.html", "episode.json"])
def test_a_saved_episode_is_read_back(name: str, tmp_path: Path) -> None:
    episode = recorded(call("show", text=HOSTILE), "done")
    save(episode, tmp_path / name)
    again = load_recording(tmp_path / name)
    assert (again.actions, again.task, again.reward) == (episode.actions, episode.task, 1.0)
    assert (again == episode) == name.endswith(".json")  # the page shows its pictures, and holds them once
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", "<html></html>"])
def test_what_is_no_recording_is_refused_by_name(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.html.*is no recorded episode"):
        load_recording(file)


def test_a_page_of_another_ending_and_one_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for file, words in (
        (tmp_path / "x.txt", "must end in .html or .json"),
        (tmp_path / "no" / "x.html", "No such"),
    ):
        with pytest.raises(ConfigError, match=words):
            save(recorded("done"), file)
