"""A machine behind OSWorld's own server: the same contract, no action is sent twice, failures mask."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from osworld_server import SIZE, OsworldServer
from rz_agent.envs import threads
from rz_agent.envs.osworld import env as environment
from rz_agent.envs.osworld import patience
from rz_agent.envs.osworld.backends import http, wire
from rz_agent.envs.osworld.backends.http import HttpBackend, HttpMachine
from rz_agent.envs.osworld.env import OSWorldEnv
from rz_agent.envs.osworld.machine import Executed, Hindered
from rz_agent.sandboxes.desktop.actions import Click, Hotkey, Type
from rz_agent.sandboxes.errors import CallTimeout, Died

pytestmark = pytest.mark.anyio
TASK: dict[str, Any] = {
    "id": "greet",
    "instruction": "Write hello into greeting.txt.",
    "config": [
        {"type": "execute", "parameters": {"command": "echo {SCREEN_WIDTH} > size.txt", "shell": True}}
    ],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": ["cat", "greeting.txt"]},
        "expected": {"type": "rule", "rules": {"expected": "hello\n"}},
    },
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OsworldServer]:
    with OsworldServer(tmp_path) as running:
        yield running


@pytest.fixture
async def machine(server: OsworldServer) -> AsyncIterator[HttpMachine]:
    async with HttpBackend([server.url], [], "secret").machine() as found:
        server.requests.clear()
        yield found


async def test_it_keeps_the_machines_contract(machine: HttpMachine, server: OsworldServer) -> None:
    assert (machine.width, machine.height, machine.home, machine.password) == (*SIZE, "/home/user", "secret")
    assert await machine.execute("echo out; echo err >&2; exit 3", shell=True) == Executed(
        "out\n", "err\n", 3
    )
    assert (await machine.execute(["no-such-program"])).exit_code == 127
    await machine.write("Desktop/a.bin", b"\x00\r\n--\xff")
    assert await machine.read("/home/user/Desktop/a.bin") == b"\x00\r\n--\xff"
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        await machine.read("none.txt")
    assert (await machine.screenshot()).startswith(b"\x89PNG")
    assert await machine.accessibility_tree() == '<desktop-frame name="main"/>'
    await machine.launch(["true"])
    with pytest.raises(Hindered, match="no such program"):
        await machine.launch(["no-such-program"])
    assert await machine.activate_window("Editor")
    assert not await machine.activate_window("Editor", strict=True)
    assert await machine.close_window("editor.Editor", strict=True, by_class=True)
    assert await machine.window_size("Editor") == (300, 200)
    with pytest.raises(LookupError, match="Browser"):
        await machine.window_size("Browser")


async def test_events_are_one_request_of_pyautogui_code(machine: HttpMachine, server: OsworldServer) -> None:
    await machine.perform([Click(1, 2), Type("hi"), Hotkey(("ctrl", "s"))])
    (sent,) = server.sent("/execute")
    assert sent["command"][:2] == ["python", "-c"]
    assert sent["command"][2].splitlines()[2:] == [
        "pyautogui.click(x=1, y=2, clicks=1, button='left')",
        "pyautogui.write('hi', interval=0.0)",
        "pyautogui.hotkey(*['ctrl', 's'])",
    ]


async def test_what_acts_is_never_sent_again_and_what_looks_is(
    machine: HttpMachine, server: OsworldServer
) -> None:
    server.break_next("/execute", "cut")
    with pytest.raises(Died):
        await machine.perform([Click(1, 2)])
    assert len(server.sent("/execute")) == 1
    server.break_next("/screenshot", "cut", times=2)
    assert (await machine.screenshot()).startswith(b"\x89PNG")
    assert len(server.sent("/screenshot")) == 3


async def test_a_server_that_hangs_or_answers_nonsense_is_the_machines_fault(
    machine: HttpMachine, server: OsworldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "GRACE_S", 0.2)
    monkeypatch.setattr(http, "LOOK_S", 0.3)
    server.break_next("/execute", "hang")
    server.break_next("/screenshot", "hang")
    with pytest.raises(CallTimeout, match=r"/screenshot did not answer in 0\.3 s"):
        await machine.execute(["true"], timeout_s=0.1)
    server.break_next("/accessibility", "nonsense")
    with pytest.raises(Died, match="does not answer as OSWorld's server does"):
        await machine.accessibility_tree()
    server.break_next("/execute", "gateway")
    with pytest.raises(Died, match="answered 502"):
        await machine.execute(["true"])


async def test_a_server_that_shows_its_screen_and_cannot_do_the_rest_is_hindered(
    machine: HttpMachine, server: OsworldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "GRACE_S", 0.2)
    server.break_next("/execute", "hang")
    with pytest.raises(Hindered, match=r"/execute did not answer in 0\.3 s, and it still shows its screen"):
        await machine.execute(["true"], timeout_s=0.1)
    server.break_next("/execute", "error")  # not in the words in which it says that there is no such program
    with pytest.raises(Hindered, match=r"/execute answered 500"):
        await machine.execute(["true"])
    server.break_next("/screenshot", "error", times=2)
    assert (await machine.screenshot()).startswith(b"\x89PNG")
    server.break_next("/screenshot", "error", times=3)
    with pytest.raises(Hindered, match=r"/screenshot answered 500"):
        await machine.screenshot()


async def test_an_answer_has_a_most_and_an_end_however_slowly_it_comes(
    machine: HttpMachine, server: OsworldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (server.home / "sparse").open("wb") as file:
        file.truncate(3 << 20)
    assert len(await machine.read("sparse")) == 3 << 20
    monkeypatch.setattr(wire, "MAX_ANSWER", 2 << 20)
    with pytest.raises(FileNotFoundError, match="more than 2 MiB"):
        await machine.read("sparse")
    monkeypatch.setattr(http, "LOOK_S", 0.3)
    for fault in ("drip", "drip500"):
        server.break_next("/accessibility", fault)
        began = time.monotonic()
        with pytest.raises(Hindered, match="did not answer"):
            await machine.accessibility_tree()
        assert time.monotonic() - began < 5
    until = time.monotonic() + threads.FREE_S + 5
    while any(thread.name == "rz-hook" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread still reads"
        await asyncio.sleep(0.05)


async def play(
    server: OsworldServer, folder: Path, revert: tuple[str, ...] = (), task: Any = TASK
) -> dict[str, object]:
    """One episode of the task above, in which the machine itself greets between two turns."""
    (folder / "greet.json").write_text(json.dumps(task))
    env = OSWorldEnv(
        taskset=str(folder / "greet.json"), backend="http", servers=[server.url], revert=revert, pause_s=0
    )
    try:
        observation, info = await env.areset(options={"position": 0})
        if "mask" not in info:
            assert len(observation["images"]) == 1
            _, _, ended, truncated, info = await env.astep("pyautogui.click(1, 2)")
            if not (ended or truncated):
                (server.home / "greeting.txt").write_text("hello\n")
                _, reward, _, _, info = await env.astep("DONE")
                info["reward"] = reward
        return info
    finally:
        await env.aclose()


async def test_an_episode_runs_on_it_from_setup_to_reward(
    server: OsworldServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("task")
    mark = scratch / "reverted"
    revert = (sys.executable, "-c", f"open({str(mark)!r}, 'w').write('{{server}}')")
    info = await play(server, scratch, revert)
    assert info["reward"] == 1.0
    assert mark.read_text() == server.url
    assert (server.home / "size.txt").read_text() == f"{SIZE[0]}\n"


@pytest.mark.parametrize(
    ("path", "skip"),
    [("/screenshot", 2), ("/execute", 2)],
    ids=["step", "grading"],
)
async def test_a_server_that_answers_500_once_the_policy_has_acted_is_its_doing(
    server: OsworldServer, tmp_path_factory: pytest.TempPathFactory, path: str, skip: int
) -> None:
    server.spare[path] = skip
    server.break_next(path, "error", times=3)
    info = await play(server, tmp_path_factory.mktemp("task"))
    assert (info["ended"], "mask" in info) == ("broken", False)
    assert f"{path} answered 500" in str(info["why"])


async def test_a_server_that_answers_500_before_it_has_masks(
    server: OsworldServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server.break_next("/execute", "error")
    assert "setup: " in str((await play(server, tmp_path_factory.mktemp("task")))["mask"])


@pytest.mark.parametrize("hangs", [False, True], ids=["the policy's", "the machine's"])
async def test_scoring_past_its_deadline_masks_only_where_the_machine_does_not_answer(
    server: OsworldServer,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    hangs: bool,
) -> None:
    monkeypatch.setattr(environment, "SCORING_S", 0.3)
    monkeypatch.setattr(patience, "LOOK_S", 0.3)
    monkeypatch.setattr(http, "LOOK_S", 5.0)
    if hangs:
        server.spare["/screenshot"] = 3
        server.break_next("/screenshot", "hang")
    slow = {**TASK["evaluator"], "postconfig": [{"type": "sleep", "parameters": {"seconds": 60}}]}
    info = await play(server, tmp_path_factory.mktemp("task"), task={**TASK, "evaluator": slow})
    assert ("mask" in info) == hangs, info
    assert "the evaluation did not end in 0.3 s" in str(info.get("mask") or info["why"])


@pytest.mark.parametrize(
    ("path", "skip", "words"),
    [("/execute", 0, "/execute"), ("/execute", 1, "/execute"), ("/execute", 2, "/execute")],
    ids=["setup", "step", "grading"],
)
async def test_a_machine_that_is_lost_at_any_stage_masks_the_episode(
    server: OsworldServer, tmp_path_factory: pytest.TempPathFactory, path: str, skip: int, words: str
) -> None:
    server.spare[path] = skip
    server.break_next(path, "cut")
    info = await play(server, tmp_path_factory.mktemp("task"))
    assert "Died" in str(info["mask"])
    assert words in str(info["mask"])


async def test_a_machine_that_cannot_be_made_new_masks_the_episode(
    server: OsworldServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    revert = (sys.executable, "-c", "raise SystemExit('no such machine')")
    info = await play(server, tmp_path_factory.mktemp("task"), revert)
    assert "ended with 1: no such machine" in str(info["mask"])
