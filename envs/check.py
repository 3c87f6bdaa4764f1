"""Whether an environment keeps its promises: Gymnasium's own checker and wrappers, then its self-test.

    findings = await check("python", {}, heard=print)

Each finding is a row: what was tried, whether it held, and where it did not, why. Nothing is raised for a
promise that is broken; what cannot be loaded at all is a ConfigError.
Waits: for one trial at a time. Gymnasium's tools block, so they run in a thread.
"""

from __future__ import annotations

import functools
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from ..sandboxes.pool import SandboxPool
from .bug import located
from .factory import EnvFactory
from .hooks import in_thread
from .play import play_one
from .registry import load, make
from .self_test import Case
from .spaces import ChatSpace

Make = Callable[[], gymnasium.Env[Any, Any]]
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row. `detail` says what came of it, or why it could not be tried."""

    trial: str
    status: Literal["passed", "failed", "skipped"]
    detail: str = ""
    seconds: float = 0.0


class _Broken(Exception):
    """A promise that was not kept."""


async def check(
    name: str,
    options: Mapping[str, Any],
    *,
    heard: Callable[[Finding], None],
    only: str = "",
    sandboxes: SandboxPool | None = None,
) -> list[Finding]:
    """Try everything whose name has `only` in it; each finding is told to `heard` at once.

    sandboxes   for the self-test; Gymnasium's tools always use the environment's own
    """
    findings: list[Finding] = []

    async def tried(trial: str, attempt: Callable[[], Awaitable[str]]) -> None:
        finding = await _tried(trial, attempt)
        findings.append(finding)
        heard(finding)

    factory = load(name, sandboxes=sandboxes, **options)
    made = functools.partial(make, name, **options)
    for trial, function in _WRAPPERS.items():
        if only in trial:
            await tried(trial, functools.partial(in_thread, function, made))
    with tempfile.TemporaryDirectory(prefix="rz-self-test-") as scratch:
        cases = await in_thread(factory.self_test, Path(scratch))
        if not cases:
            findings.append(Finding(trial="self-test", status="skipped", detail="the environment has none"))
            heard(findings[-1])
        async with factory:
            for case in cases:
                if only in case.name:
                    await tried(case.name, functools.partial(_play, factory, case))
    return findings


async def _tried(trial: str, attempt: Callable[[], Awaitable[str]]) -> Finding:
    began = time.monotonic()
    status: Literal["passed", "failed", "skipped"] = "passed"
    try:
        detail = await attempt()
    except _Skipped as skipped:
        status, detail = "skipped", str(skipped)
    except _Broken as broken:
        status, detail = "failed", str(broken)
    except Exception as error:  # whatever Gymnasium, or the environment, raises is what is wrong with it
        status, detail = "failed", located(error)
    return Finding(trial=trial, status=status, detail=detail, seconds=time.monotonic() - began)


class _Skipped(Exception):
    """What cannot be tried here."""


async def _play(factory: EnvFactory, case: Case) -> str:
    if case.skip:
        raise _Skipped(case.skip)
    played = await play_one(factory, case.task, case.agent, name=case.name, options={})
    if played.fate == "masked":
        raise _Broken(f"the episode was masked: {played.reason}")
    if abs(played.reward - case.reward) > _TOLERANCE:
        last = played.said[-1].text.strip().splitlines()[-1:] if played.said else []
        raise _Broken(
            f"reward {played.reward:g} instead of {case.reward:g}; last was said: {''.join(last)[:80]}"
        )
    return f"reward {played.reward:g}"


def _checker(make: Make) -> str:
    with closing(make()) as env, warnings.catch_warnings():
        warnings.simplefilter("error")
        # The checker advises Box and Discrete; a chat is neither.
        warnings.filterwarnings("ignore", message=".*(observation|action) space.*")
        check_env(env.unwrapped, skip_render_check=True)
    return ""


def _time_limit(make: Make) -> str:
    with closing(gymnasium.wrappers.TimeLimit(make(), max_episode_steps=1)) as env:
        env.reset(seed=0)
        if not env.step("")[3]:
            raise _Broken("the step that reached the limit was not truncated")
    return ""


def _vector(kind: Callable[..., Any], make: Make) -> str:
    with closing(kind([make, make])) as envs:
        observations, _ = envs.reset(seed=3)
        stepped = envs.step(("", ""))[0]
        if not all(ChatSpace().contains(one) for one in (*observations, *stepped)):
            raise _Broken("an observation is not in its space: messages, and one image for each image part")
    return ""


_WRAPPERS: Mapping[str, Callable[[Make], str]] = {
    "gymnasium: check_env": _checker,
    "gymnasium: TimeLimit": _time_limit,
    "gymnasium: SyncVectorEnv": functools.partial(_vector, SyncVectorEnv),
    # Spawned: a fork of a process with threads may stand still.
    "gymnasium: AsyncVectorEnv": functools.partial(
        _vector, functools.partial(AsyncVectorEnv, shared_memory=False, context="spawn")
    ),
}
