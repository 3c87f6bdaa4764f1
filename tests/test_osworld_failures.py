"""A desktop that fails masks its episode and leaves nothing; a policy that breaks its own masks nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from desktops import NEEDS
from rz_agent.envs.osworld import setup
from rz_agent.envs.osworld.backends import desktop as backend
from rz_agent.envs.osworld.env import OSWorldEnv
from rz_agent.sandboxes.agent import sandbox as agent_sandbox
from rz_agent.sandboxes.desktop import hand
from rz_agent.sandboxes.desktop.provider import DesktopProvider
from rz_agent.sandboxes.keeper import Keeper
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.limiter import Limiter
from rz_agent.sandboxes.local import census
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.local.sandbox import LocalSandbox
from rz_agent.sandboxes.pool import SandboxPool
from rz_agent.sandboxes.sandbox import Process
from rz_agent.sandboxes.spec import SandboxSpec
from rz_agent.sandboxes.tables import DesktopTable, LocalTable

pytestmark = [pytest.mark.anyio, *NEEDS]
# Of no other test's screens, nor of this file's tests that another worker runs.
SIZE = (650 + 2 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")), 490)
EPISODES = 16
PROVIDER = "desktop-that-fails"
Strike = Callable[[LocalProvider, LocalSandbox], Awaitable[None]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# -- what can happen to a sandbox ---------------------------------------------------------------------------


async def crash(provider: LocalProvider, sandbox: LocalSandbox) -> None:
    """All its processes are killed, from outside."""
    assert await provider.kill(sandbox.id)


async def freeze(provider: LocalProvider, sandbox: LocalSandbox) -> None:
    """Its processes stand still: nothing answers and nothing ends."""
    for pid in census.take_census()[sandbox.id].pids:
        os.kill(pid, signal.SIGSTOP)


async def cut(provider: LocalProvider, sandbox: LocalSandbox) -> None:
    """The connection to it breaks."""
    assert sandbox.channel._writer is not None
    sandbox.channel._writer.transport.abort()


STRIKES: dict[str, Strike] = {"crash": crash, "timeout": freeze, "lost connection": cut}
# What the desktop is asked at each stage: the first request of all, a step's command, typing, a getter's.
STAGES = {"create": b"", "setup": b"AT-SETUP", "step": b"AT-STEP", "grading": b"AT-GRADING"}
EVALUATOR = {
    "func": "exact_match",
    "result": {"type": "vm_command_line", "command": ["echo", "AT-GRADING"]},
    "expected": {"type": "rule", "rules": {"expected": "AT-GRADING\n"}},
}
TASK = {
    "id": "t",
    "instruction": "Do nothing.",
    "config": [{"type": "execute", "parameters": {"command": ["echo", "AT-SETUP"]}}],
    "evaluator": EVALUATOR,
}


class Unlucky(LocalProvider):
    """Makes sandboxes that are struck when something with `word` in it is sent to their desktop."""

    def __init__(self, word: bytes, strike: Strike) -> None:
        super().__init__(LocalTable())
        self._word, self._strike = word, strike

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        sandbox = await super().create(spec)
        sandbox.start = self._striking(sandbox)  # type: ignore[method-assign]
        return sandbox

    def _striking(self, sandbox: LocalSandbox) -> Any:
        start = sandbox.start

        async def started(argv: Sequence[str], **options: Any) -> Process:
            process = await start(argv, **options)
            write = process.write

            async def written(data: bytes) -> None:
                if self._word in data:
                    await self._strike(self, sandbox)
                await write(data)

            process.write = written  # type: ignore[method-assign]
            return process

        return started


# -- an episode, and what is left of it ---------------------------------------------------------------------


def pool_over(under: LocalProvider, *, a11y: bool = False) -> SandboxPool:
    limiter = Limiter(PROVIDER, max_live=EPISODES, max_starting=EPISODES, creates_per_s=None)
    provider = DesktopProvider(DesktopTable(settle_s=0.05, a11y=a11y), under)
    return SandboxPool(Keeper(provider, limiter=limiter, ledger=Ledger()), SandboxSpec(), 1)


@asynccontextmanager
async def environment(pool: SandboxPool, task: Any) -> AsyncIterator[OSWorldEnv]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(task))
        env = OSWorldEnv(taskset=str(path), sandboxes=pool, screen=SIZE, pause_s=0.1, feasible_only=False)
        try:
            yield env
        finally:
            await env.aclose()


async def mask_of(under: LocalProvider) -> str:
    """Why an episode that does nothing is masked; "" where it is not."""
    async with pool_over(under) as pool, environment(pool, TASK) as env:
        _, info = await env.areset(options={"position": 0})
        for turn in ("pyautogui.write('AT-STEP')", "DONE"):
            if "mask" in info:
                break
            info = (await env.astep(turn))[4]
        return str(info.get("mask", ""))


def remains(scratch: Path) -> dict[str, Any]:
    """What episodes could leave on this machine."""
    commands = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            commands.append(process.read_bytes())
    ours, screen = f"{os.getpid()}-", "x".join(map(str, SIZE))
    slots = Limiter(PROVIDER, max_live=EPISODES, max_starting=EPISODES, creates_per_s=None).live
    free = [slot for _ in range(EPISODES) if (slot := slots.take_free())]
    for slot in free:
        slot.release()
    return {
        "processes": [command for command in commands if screen.encode() in command],
        "sandboxes": [name for name in census.take_census() if name.startswith(ours)],
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if ours in line],
        "folders": list(scratch.iterdir()),
        "books": Ledger().entries("desktop"),
        "slots in use": EPISODES - len(free),
    }


async def fails(stage: str, kind: str) -> None:
    reason = await mask_of(Unlucky(STAGES[stage], STRIKES[kind]))
    assert reason.startswith(f"InfraFailure: {stage}: "), (stage, kind, reason)


@pytest.mark.parametrize(
    ("stages", "start_s", "answer_s"),
    [(["create"], 1, 1), (["setup", "step", "grading"], 60, 8)],
    ids=["making it", "using it"],
)
async def test_a_desktop_that_fails_at_any_stage_masks_the_episode_names_it_and_leaves_nothing(
    stages: list[str], start_s: float, answer_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hand, "START_S", start_s)
    monkeypatch.setattr(hand, "ANSWER_S", answer_s)
    monkeypatch.setattr(agent_sandbox, "ANSWER_S", answer_s)
    await asyncio.gather(*(fails(stage, kind) for stage in stages for kind in STRIKES))
    assert not any(remains(tmp_path).values()), remains(tmp_path)


# -- what a policy does to its own desktop ------------------------------------------------------------------

# What it types into a terminal -> a step of the evaluator that this stands in the way of.
ACTS: dict[str, Any] = {
    "head -c 999M /dev/zero > ~/f; head -c 999M /dev/zero > /tmp/f": ("sleep", {"seconds": 0}),
    "pkill openbox; rm -r ~/.local": ("launch", {"command": ["google-chrome"]}),
    "chmod a-w /tmp": ("sleep", {"seconds": 0}),
    "kill -9 -1": ("sleep", {"seconds": 0}),
}
TERMINAL = [
    {
        "type": "launch",
        "parameters": {"command": ["gnome-terminal", "--", "sh", "-c", "touch ready; exec sh"]},
    },
    {"type": "activate_window", "parameters": {"window_name": "Terminal"}},
    {"type": "execute", "parameters": {"command": ["test", "-e", "ready"], "until": {"returncode": 0}}},
    {"type": "sleep", "parameters": {"seconds": 1}},
]


async def broken(command: str) -> None:
    kind, parameters = ACTS[command]
    evaluator = {**EVALUATOR, "postconfig": [{"type": kind, "parameters": parameters}]}
    task = {**TASK, "config": TERMINAL, "evaluator": evaluator}
    async with pool_over(LocalProvider(LocalTable())) as pool, environment(pool, task) as env:
        _, info = await env.areset(options={"position": 0})
        reward, over = 0.0, "mask" in info
        for turn in (f"pyautogui.write({command!r} + '\\n')\ntime.sleep(4)", "DONE"):
            if not over:
                _, reward, over, _, info = await env.astep(turn)
    assert "mask" not in info, (command, info["mask"])
    assert (info["ended"], reward) == ("broken", 0.0), (command, info)


@pytest.mark.skipif(shutil.which("gnome-terminal") is None, reason="gnome-terminal is not installed")
async def test_a_policy_that_breaks_its_own_desktop_is_not_masked_and_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "GRACE_S", -112.0)  # a command of the evaluator has 120 s and this
    await asyncio.gather(*map(broken, ACTS))


# How it ends the very program that the task is about, which the evaluator then looks for.
CLOSINGS = (
    "pyautogui.hotkey('alt', 'F4')",
    "pyautogui.write('pkill -f gnome-terminal\\n')",
)
SHOWN = {
    "func": ["exact_match", "exact_match"],
    "postconfig": [
        {"type": "activate_window", "parameters": {"window_name": "Terminal"}},
        {"type": "close_window", "parameters": {"window_name": "Terminal"}},
    ],
    "result": [
        {"type": "vm_window_size", "app_class_name": "gnome-terminal"},
        {"type": "vm_terminal_output"},
    ],
    "expected": [{"type": "rule", "rules": {"expected": "text"}}] * 2,
    "conj": "or",
}


async def titles(env: OSWorldEnv) -> list[str]:
    return await env._here.machine.window_titles()


async def closed(action: str) -> None:
    task = {**TASK, "config": TERMINAL, "evaluator": SHOWN}
    async with pool_over(LocalProvider(LocalTable()), a11y=True) as pool, environment(pool, task) as env:
        _, info = await env.areset(options={"position": 0})
        assert "mask" not in info, (action, info["mask"])
        assert await titles(env), action
        await env.astep(f"{action}\ntime.sleep(2)")
        assert not await titles(env), action
        _, reward, over, _, info = await env.astep("DONE")
    assert (reward, over, info.get("ended"), "mask" in info) == (0.0, True, "finished", False), (action, info)


@pytest.mark.skipif(shutil.which("gnome-terminal") is None, reason="gnome-terminal is not installed")
async def test_a_policy_that_closes_the_tasks_own_program_is_scored_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "WINDOW_S", 0.5)
    await asyncio.gather(*map(closed, CLOSINGS))
