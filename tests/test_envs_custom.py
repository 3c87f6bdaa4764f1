"""An environment with an `areset`, `astep` or `aclose` of its own keeps the same contract and deadlines."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rz_agent.envs import AgentEnv, Episode, ListTaskset, Task, calls, reward
from rz_agent.envs.message import NOTHING
from rz_agent.envs.step_result import Place, checked_reset, checked_step, metrics_of
from rz_agent.errors import EnvironmentBug, NonFinite
from rz_agent.rollout.renderer import Renderer
from rz_agent.trajectory import Trajectory
from test_episode import LIMITS, Scripted, play
from test_renderer import QWEN3, say, write_model

SOON_S = 20.0


def step(action: str) -> Any:
    """Whose return value is looked at; its line is what an error names."""


PLACE = Place(environment="Env", hook="step 1", task_id="t", episode_id="g-0", function=step)
LINE = f"  at {__file__}:{step.__code__.co_firstlineno}"


# --- what was returned ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [None, "1.0", b"1", 10**400, 1j, True, np.bool_(True), [1.0], np.array([1.0]), float]
)
def test_a_reward_that_is_no_number_is_told_with_its_place_and_what_to_return(given: Any) -> None:
    with pytest.raises(EnvironmentBug) as told:
        checked_step((NOTHING, given, True, False, {}), PLACE)
    first, source, remedy = str(told.value).splitlines()
    assert first.startswith("environment Env, step 1, episode g-0, task t: the reward is ")
    assert (source, remedy) == (LINE, "  Return a float, as in float(right). Then resume the run.")


@pytest.mark.parametrize("given", [math.nan, -math.inf, np.float32("nan"), np.float16("inf")])
def test_a_reward_that_is_not_finite_is_told_with_its_place(given: float) -> None:
    with pytest.raises(NonFinite, match=r"Env, step 1, episode g-0, task t: the reward is (nan|-?inf)\n"):
        checked_step((NOTHING, given, True, False, {}), PLACE)


@pytest.mark.parametrize("given", [2, 2.0, np.float16(2), np.float64(2), np.int8(2), np.uint64(2)])
def test_a_number_of_python_or_numpy_is_a_reward_and_a_metric(given: Any) -> None:
    _, value, *_, info = checked_step((NOTHING, given, np.True_, False, {"metrics": {"m": given}}), PLACE)
    assert (type(value), value, metrics_of(info, PLACE)) == (float, 2.0, {"m": 2.0})


@pytest.mark.parametrize(
    "returned",
    [
        None,
        (NOTHING, 1.0, True, False),
        (NOTHING, 1.0, True, False, None),
        (NOTHING, 1.0, None, False, {}),
        (NOTHING, 1.0, False, "no", {}),
        ("text", 1.0, True, False, {}),
        ({}, 1.0, True, False, {}),
        ({"messages": ({"content": "no role"},)}, 1.0, True, False, {}),
        ({"messages": "text"}, 1.0, True, False, {}),
    ],
)
def test_a_step_of_another_shape_is_told_with_its_place(returned: Any) -> None:
    with pytest.raises(EnvironmentBug, match=rf"Env, step 1, episode g-0, task t: .*\n{LINE}\n  \w"):
        checked_step(returned, PLACE)


@pytest.mark.parametrize("returned", [None, NOTHING, (NOTHING,), (NOTHING, None), ("text", {})])
def test_a_reset_of_another_shape_is_told_with_its_place(returned: Any) -> None:
    with pytest.raises(EnvironmentBug, match=rf"Env, step 1, episode g-0, task t: .*\n{LINE}\n  \w"):
        checked_reset(returned, PLACE)


@pytest.mark.parametrize(
    "metrics", [None, [1.0], {"m": math.nan}, {"m": math.inf}, {"m": "1"}, {"m": None}, {"m": True}, {3: 1.0}]
)
def test_a_metric_that_is_no_finite_number_is_told_with_its_place(metrics: Any) -> None:
    with pytest.raises(EnvironmentBug, match=rf"Env, step 1, episode g-0, task t: .*\n{LINE}\n  \w"):
        metrics_of({"metrics": metrics}, PLACE)


def test_the_reward_of_a_masked_step_does_not_matter() -> None:
    _, value, *_ = checked_step((NOTHING, math.nan, False, True, {"mask": "lost"}), PLACE)
    assert value == 0.0


# --- in an episode ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    return Renderer(write_model(folder, QWEN3))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What hangs waits for; opened at the end, so that no thread outlives its test."""
    monkeypatch.setattr(calls, "GRACE_S", 0.1)
    monkeypatch.setattr(calls, "UNWIND_S", 0.3)
    opened = threading.Event()
    yield opened
    opened.set()


class Custom(AgentEnv):
    """Answers every action with 1; `returned` replaces that."""

    taskset = ListTaskset([Task(id="only", prompt="Go.", deadlines={"setup_s": 0.1})], name="one")
    returned: Any = (NOTHING, 1, True, False, {"metrics": {"m": np.float32(0.5)}})

    @reward
    def unused(self, task: Task, episode: Episode) -> float:
        return 0.0

    async def astep(self, action: Any) -> Any:
        return self.returned


def played(qwen3: Renderer, env_class: type[AgentEnv]) -> Trajectory:
    limits = replace(LIMITS, step_deadline_s=0.2)
    began = time.monotonic()
    trajectory = play(Scripted(say(qwen3, "done")), qwen3, limits, env_class=env_class)
    assert time.monotonic() - began < SOON_S
    return trajectory


def test_an_episode_takes_the_reward_and_metrics_of_a_step_of_its_own(qwen3: Renderer) -> None:
    trajectory = played(qwen3, Custom)
    assert (trajectory.status, trajectory.reward, trajectory.metrics["m"]) == ("ok", 1.0, 0.5)


def test_an_episode_tells_where_a_wrong_result_came_from(qwen3: Renderer) -> None:
    class Wrong(Custom):
        returned: Any = (NOTHING, "1.0", True, False, {})

    place = (
        r"environment Wrong, step 1, episode g-0, task only: the reward is '1\.0', .*\n  at .*_custom\.py:\d+"
    )
    with pytest.raises(EnvironmentBug, match=place):
        played(qwen3, Wrong)


@pytest.mark.parametrize("method", ["areset", "astep"])
def test_a_method_that_looks_cancelled_by_itself_is_a_bug(qwen3: Renderer, method: str) -> None:
    async def cancelled(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise asyncio.CancelledError

    what = {"areset": "reset", "astep": "step 1"}[method]
    with pytest.raises(EnvironmentBug, match=rf"Custom, {what}, task only: CancelledError\n"):
        played(qwen3, type("Custom", (Custom,), {method: cancelled}))


def hangs(method: str, kind: str, gate: threading.Event) -> type[AgentEnv]:
    """An environment whose method hangs: politely, deaf to its cancellation, or in a plain function."""

    async def polite(self: Any, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(3600)

    async def deaf(self: Any, *args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + 3  # asyncio.run waits for it in the end
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        gate.wait(60)

    name = method.removeprefix("a") if kind == "synchronous" else method
    function = {"polite": polite, "deaf": deaf}.get(kind, plain)
    return type("Custom", (Custom,), {name: function})


KINDS = ["polite", "deaf", "plain", "synchronous"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_that_hangs_masks_after_the_tasks_setup_and_a_grace(
    qwen3: Renderer, gate: threading.Event, kind: str
) -> None:
    trajectory = played(qwen3, hangs("areset", kind, gate))
    assert (trajectory.status, trajectory.segments) == ("masked", ())
    assert trajectory.mask_reason == "reset: no answer within the task's deadlines.setup_s = 0.1 and a grace"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_hangs_masks_at_the_steps_deadline(
    qwen3: Renderer, gate: threading.Event, kind: str
) -> None:
    trajectory = played(qwen3, hangs("astep", kind, gate))
    assert trajectory.mask_reason == "step 1: no answer within rollout.step_deadline_s = 0.2"


@pytest.mark.parametrize("kind", KINDS)
def test_a_close_that_hangs_leaves_the_episodes_result(
    qwen3: Renderer, gate: threading.Event, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    trajectory = played(qwen3, hangs("aclose", kind, gate))
    assert (trajectory.status, trajectory.reward) == ("ok", 1.0)
    assert "Custom.aclose did not end within 0.3 s" in caplog.text


def test_scoring_that_hangs_masks_at_the_steps_deadline(qwen3: Renderer, gate: threading.Event) -> None:
    class Endless(Custom):
        returned: Any = (NOTHING, 0.0, False, False, {})

        async def atruncate(self, ended: Any = "tokens") -> Any:
            await asyncio.sleep(3600)

    limits = replace(LIMITS, step_deadline_s=0.2, max_turns=1)
    trajectory = play(Scripted(say(qwen3, "done")), qwen3, limits, env_class=Endless)
    assert trajectory.mask_reason == "scoring: no answer within rollout.step_deadline_s = 0.2"
