"""A computer to be used: what is said of it, what is done to it, and what that was worth."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from osworld_server import OsworldServer
from rz_agent.envs import load
from rz_agent.envs.osworld.backends.tree import as_xml
from rz_agent.envs.osworld.env import OSWorldEnv
from rz_agent.envs.osworld.observation import in_words
from rz_agent.envs.osworld.scripted import SOLUTIONS, cases
from rz_agent.envs.recording_page import load_recording
from rz_agent.envs.self_test import Case
from rz_agent.errors import ConfigError
from rz_agent.sandboxes.desktop.desktop import Accessible

pytestmark = pytest.mark.anyio
EVALUATOR = {
    "func": "exact_match",
    "result": {"type": "vm_command_line", "command": ["cat", "greeting.txt"]},
    "expected": {"type": "rule", "rules": {"expected": "hello\n"}},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OsworldServer]:
    with OsworldServer(tmp_path) as running:
        yield running


class Player:
    """An environment on the machine behind the server, and how to play one task of it."""

    def __init__(self, server: OsworldServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.env: OSWorldEnv | None = None

    async def reset(self, evaluator: Any = EVALUATOR, config: Any = (), **options: Any) -> tuple[Any, Any]:
        task = {"id": "t", "instruction": "Greet.", "config": list(config), "evaluator": evaluator}
        path = self._folder / "task.json"
        path.write_text(json.dumps(task))
        self.env = OSWorldEnv(
            taskset=str(path), backend="http", servers=[self._server.url], pause_s=0, feasible_only=False,
            **options,
        )  # fmt: skip
        return await self.env.areset(options={"position": 0})

    async def say(self, text: str) -> Any:
        assert self.env is not None
        return await self.env.astep(text)


@pytest.fixture
async def player(server: OsworldServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Player]:
    player = Player(server, tmp_path_factory.mktemp("task"))
    yield player
    if player.env is not None:
        await player.env.aclose()


# -- an episode -----------------------------------------------------------------------------------------


async def test_an_episode_begins_with_the_instruction_and_the_screen(player: Player) -> None:
    shown, _ = await player.reset(accessibility_tree=True)
    system, first = shown["messages"]
    assert "640 x 480" in system["content"]
    image, text = first["content"]
    assert image == {"type": "image"}
    assert text["text"].startswith("Greet.\n\nrole\tname")
    assert [png[:4] for png in shown["images"]] == [b"\x89PNG"]


async def test_a_turn_that_cannot_be_read_is_answered_and_does_nothing(
    player: Player, server: OsworldServer
) -> None:
    await player.reset()
    shown, _, _, _, _ = await player.say("pyautogui.press('a'); os.remove('x')")
    assert "os.remove('x') cannot be done" in shown["messages"][0]["content"]
    assert server.sent("/execute") == []


async def test_too_many_of_them_in_a_row_end_the_episode_and_are_not_a_right_fail(player: Player) -> None:
    await player.reset({"func": "infeasible"}, malformed_limit=2)
    await player.say("")
    await player.say("pyautogui.press('a')")
    await player.say("")
    _, reward, terminated, _, info = await player.say("?")
    assert (reward, terminated) == (0.0, True)  # FAIL would have been right
    assert info["metrics"]["malformed_actions"] == 3


@pytest.mark.parametrize(("last", "reward"), [("FAIL", 1.0), ("DONE", 0.0)])
async def test_fail_is_the_right_answer_to_an_infeasible_task_alone(
    player: Player, server: OsworldServer, last: str, reward: float
) -> None:
    await player.reset({"func": "infeasible"})
    assert (await player.say(last))[1] == reward
    (server.home / "greeting.txt").write_text("hello\n")
    await player.reset()
    assert (await player.say(last))[1] == 1 - reward


async def test_a_turn_sees_the_last_screenshots_only(player: Player) -> None:
    first, _ = await player.reset(screenshots=2)
    second = (await player.say("pyautogui.press('a')"))[0]
    third = (await player.say("pyautogui.press('b')"))[0]
    assert player.env is not None
    history: Any = {
        "messages": (*first["messages"], *second["messages"], *third["messages"]),
        "images": (*first["images"], *second["images"], *third["images"]),
    }
    shown = player.env.context.shown(history)
    assert len(shown["images"]) == 2
    assert "earlier screenshot" in shown["messages"][1]["content"]


async def test_movements_from_where_the_pointer_is_go_on_over_turns(
    player: Player, server: OsworldServer
) -> None:
    await player.reset()
    for turn in ("pyautogui.moveTo(100, 50)", "pyautogui.press('a')", "pyautogui.moveRel(10, 20)"):
        await player.say(turn)
    assert "pyautogui.moveTo(110, 70)" in server.sent("/execute")[-1]["command"][2]


@pytest.mark.parametrize(
    ("last", "fate"), [("DONE", "terminated"), ("", "running")], ids=["ended", "given up"]
)
async def test_each_episode_becomes_a_page_with_its_screens_where_that_is_asked_for(
    player: Player, tmp_path: Path, last: str, fate: str
) -> None:
    shown, _ = await player.reset(record=str(tmp_path / "kept"))
    await player.say("pyautogui.press('a')")
    if last:
        await player.say(last)
    assert player.env is not None
    await player.env.aclose()
    (page,) = (tmp_path / "kept").iterdir()
    kept = load_recording(page)
    assert (kept.fate, kept.actions) == (fate, ("pyautogui.press('a')", *([last] if last else [])))
    picture = f"data:image/png;base64,{base64.b64encode(shown['images'][0]).decode()}"
    assert page.read_text().count(picture) == 2  # both screens of that server look the same


# -- a task's own steps ---------------------------------------------------------------------------------


async def test_an_unknown_step_is_refused_at_reset_with_those_that_there_are(player: Player) -> None:
    with pytest.raises(ConfigError, match=r"'lunch' is no step.*\n.*Did you mean 'launch'"):
        await player.reset(config=[{"type": "lunch", "parameters": {}}])
    with pytest.raises(ConfigError, match="launch has: command, shell"):
        await player.reset(config=[{"type": "launch", "parameters": {"cmd": "x"}}])


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            {"type": "download", "parameters": {"files": [{"url": "https://a.b/c", "path": "c"}]}},
            "needs network",
        ),
        ({"type": "upload_file", "parameters": {"files": [{"local_path": "/none", "path": "c"}]}}, "/none"),
        ({"type": "launch", "parameters": {"command": ["no-such-program"]}}, "no such program"),
        ({"type": "googledrive", "parameters": {}}, "Google Drive"),
        ({"type": "chrome_open_tabs", "parameters": {"urls_to_open": ["https://no.invalid"]}}, "no.invalid"),
    ],
)
async def test_a_step_that_cannot_be_done_here_masks_the_episode(
    player: Player, step: Any, words: str
) -> None:
    _, info = await player.reset(config=[step])
    assert words in info["mask"]


async def test_files_that_a_task_downloads_come_from_a_folder(player: Player, server: OsworldServer) -> None:
    folder = player._folder / "web"
    (folder / "a.b").mkdir(parents=True)
    (folder / "a.b" / "c.txt").write_text("hello\n")
    step = {
        "type": "download",
        "parameters": {"files": [{"url": "https://a.b/c.txt", "path": "greeting.txt"}]},
    }
    await player.reset(config=[step], downloads=str(folder))
    assert (await player.say("DONE"))[1] == 1.0


# -- in words -------------------------------------------------------------------------------------------


def test_the_tree_in_words_has_what_is_on_the_screen_and_counts_the_rest() -> None:
    box, states = (1, 2, 30, 40), frozenset({"showing"})
    button = Accessible(role="push button", name="O\x00K", box=box, states=states)
    hidden = Accessible(role="menu item", name="Quit")
    tree = as_xml(Accessible(role="desktop frame", name="main", children=(button, hidden, button)))
    line = "push-button\tOK\t\t(1, 2)\t(30, 40)"
    assert in_words(tree, 1000).splitlines()[1:] == [line, line]
    assert in_words(tree, len(line) + 1).splitlines()[1:] == [line, "[... 1 more ...]"]


# -- published tasks on a desktop of ours ----------------------------------------------------------------


def shipped(name: str) -> list[Case]:
    env = OSWorldEnv(feasible_only=False)
    return [case for case in cases(env.tasks) if case.name.startswith(name)]


async def play(case: Case) -> float:
    if case.skip:
        pytest.skip(case.skip)
    async with load("osworld", feasible_only=False, pause_s=1.0) as factory:
        env = factory.create()
        try:
            shown, info = await env.areset(options={"task": case.task})
            agent, over, reward = case.agent(case.task), "mask" in info, 0.0
            while not over:
                shown, reward, terminated, truncated, info = await env.astep(await agent(shown))
                over = terminated or truncated
        finally:
            await env.aclose()
    assert "mask" not in info, info["mask"]
    return reward


on_a_desktop = pytest.mark.skipif(
    not all(map(shutil.which, ("bwrap", "Xvfb", "openbox", "dbus-daemon", "gnome-terminal"))),
    reason="the programs of a desktop are not installed",
)


@on_a_desktop
@pytest.mark.parametrize("case", shipped("rename a folder"), ids=lambda case: case.name.split(", ")[1])
async def test_a_published_task_is_worth_1_when_it_is_solved_and_0_untouched(case: Case) -> None:
    assert await play(case) == case.reward


@pytest.mark.slow
@on_a_desktop
@pytest.mark.parametrize("name", ["a larger terminal for good", "several VLCs"])
async def test_published_tasks_are_solved_by_mouse_and_keyboard(name: str) -> None:
    solved, _ = shipped(name)
    assert await play(solved) == 1.0


def test_every_solution_is_of_a_shipped_task_and_there_are_more_than_eight() -> None:
    ids = {task.id for task in OSWorldEnv(feasible_only=False).tasks.load("train")}
    assert set(SOLUTIONS) <= ids
    assert len(SOLUTIONS) > 8
