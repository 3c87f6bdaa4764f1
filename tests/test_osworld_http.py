"""A machine behind OSWorld's own server: the same contract, no action is sent twice, failures mask."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from osworld_server import SIZE, OsworldServer
from rz_agent.envs.osworld.backends import http
from rz_agent.envs.osworld.backends.http import HttpBackend, HttpMachine
from rz_agent.envs.osworld.env import OSWorldEnv
from rz_agent.envs.osworld.machine import Executed, Hindered
from rz_agent.sandboxes.desktop.actions import Click, Hotkey, Type
from rz_agent.sandboxes.errors import CallTimeout, Died

pytestmark = pytest.mark.anyio
TASK = {
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
    server.break_next("/execute", "hang")
    with pytest.raises(CallTimeout, match=r"/execute did not answer in 0\.3 s"):
        await machine.execute(["true"], timeout_s=0.1)
    server.break_next("/accessibility", "nonsense")
    with pytest.raises(Died, match="does not answer as OSWorld's server does"):
        await machine.accessibility_tree()


async def play(server: OsworldServer, folder: Path, revert: tuple[str, ...] = ()) -> dict[str, object]:
    """One episode of the task above, in which the machine itself greets between two turns."""
    (folder / "greet.json").write_text(json.dumps(TASK))
    env = OSWorldEnv(
        taskset=str(folder / "greet.json"), backend="http", servers=[server.url], revert=revert, pause_s=0
    )
    try:
        observation, info = await env.areset(options={"position": 0})
        if "mask" not in info:
            assert len(observation["images"]) == 1
            _, _, _, truncated, info = await env.astep("pyautogui.click(1, 2)")
            if not truncated:
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
