"""OSWorld on desktops in E2B's sandboxes: the real client against a loopback server, never against E2B."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from desktops import NEEDS
from e2b_loopback import KEY, Loopback
from rz_agent.envs import load
from rz_agent.envs.osworld.env import OSWorldEnv
from rz_agent.envs.osworld.scripted import cases
from rz_agent.envs.play import play_one
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.pool import SandboxPool

pytestmark = [
    pytest.mark.anyio,
    *NEEDS,
    pytest.mark.skipif(os.geteuid() != 0, reason="the stand-in for E2B's machines needs root for namespaces"),
    pytest.mark.skipif(shutil.which("gnome-terminal") is None, reason="gnome-terminal is not installed"),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def service() -> Iterator[Loopback]:
    with Loopback() as running:
        yield running
        assert not running.machines, "sandboxes were left"


@pytest.fixture
def config(service: Loopback, tmp_path: Path) -> SandboxConfig:
    (tmp_path / "key").write_text(KEY)
    e2b = {"api_key": {"file": str(tmp_path / "key")}, "api_url": service.url, "sandbox_url": service.url}
    tables = {"provider": "desktop", "desktop": {"over": "e2b"}, "e2b": e2b}
    return SandboxConfig.load(tables, source="test")


async def test_a_published_task_is_solved_there_and_a_machine_that_vanishes_masks_the_episode(
    service: Loopback, config: SandboxConfig
) -> None:
    found = cases(OSWorldEnv(feasible_only=False).tasks)
    case = next(case for case in found if case.name == "rename a folder, solved")
    options = {"feasible_only": False, "pause_s": 0.5}
    async with SandboxPool.of(config) as pool, load("osworld", sandboxes=pool, **options) as factory:
        played = await play_one(factory, case.task, case.agent, name="osworld", options=options)
        assert (played.reward, played.fate) == (1.0, "terminated"), played.reason
        assert not service.machines

        env = factory.create()
        _, info = await env.areset(options={"task": case.task})
        assert "mask" not in info
        (machine,) = service.machines.values()
        machine.end()
        info = (await env.astep("pyautogui.press('a')"))[4]
        assert str(info["mask"]).startswith("InfraFailure: step: Died")
        await env.aclose()
