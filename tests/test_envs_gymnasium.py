"""The shipped environments are Gymnasium's too, and what Gymnasium has can be one of ours."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text
from gymnasium.utils import seeding
from rz_agent.envs import AgentEnv, from_gymnasium, names
from rz_agent.envs.check import check
from rz_agent.envs.osworld.tasks import SHIPPED as SHIPPED_TASKS
from rz_agent.envs.play import play
from rz_agent.envs.recording import Recorder, Recording
from rz_agent.envs.script import replayed
from rz_agent.envs.spaces import ActionSpace, ChatSpace
from rz_agent.errors import ConfigError

ID = "rz/PythonMath-v0"
CALL = '<tool_call>{"name":"python","arguments":{"code":"6*7"}}</tool_call>'
SHIPPED = sorted(name for name, id in names().items() if id.startswith("rz/"))
# Its first sandbox of a kind takes long to make; its own tests play it.
SLOW = {"osworld", "swebench-pro"}


def quick_desktops(folder: Path) -> dict[str, Any]:
    """Tasks that begin without steps, one with a solution, and no pause to draw: 15 desktops are made."""
    for file in SHIPPED_TASKS.glob("*.json"):
        if not json.loads(file.read_text())["config"] or file.name.startswith("os__e0df059f"):
            shutil.copy(file, folder)
    return {"taskset": str(folder), "pause_s": 0.0, "screen": (640, 480), "feasible_only": False}


def make(**options: Any) -> gymnasium.Env[Any, Any]:

    return gymnasium.make(ID, **options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SHIPPED]
)
def test_gymnasiums_checker_and_wrappers_take_every_shipped_environment(name: str, tmp_path: Path) -> None:
    options = quick_desktops(tmp_path) if name == "osworld" else {}
    findings = asyncio.run(check(name, options, heard=print, only="gymnasium"))
    assert [finding.trial.removeprefix("gymnasium: ") for finding in findings] == [
        "check_env",
        "TimeLimit",
        "SyncVectorEnv",
        "AsyncVectorEnv",
    ]
    assert [finding for finding in findings if finding.status != "passed"] == []


def test_the_same_seed_draws_the_same_task() -> None:
    env = make()
    first, again, other = (env.reset(seed=seed)[0] for seed in (5, 5, 6))
    env.close()
    assert first == again
    assert first != other


def test_a_time_limit_truncates() -> None:
    env = make(max_episode_steps=1)
    env.reset(seed=0)
    observation, _, terminated, truncated, _ = env.step(CALL)
    env.close()
    assert (terminated, truncated) == (False, True)
    assert observation["messages"][0]["content"] == "42"


@pytest.mark.parametrize(
    "vector",
    [gymnasium.vector.SyncVectorEnv, functools.partial(gymnasium.vector.AsyncVectorEnv, shared_memory=False)],
    ids=["sync", "async"],
)
def test_vector_environments_step_it(vector: Any) -> None:
    envs = vector([make, make])
    observations, _ = envs.reset(seed=3)
    assert all(ChatSpace().contains(observation) for observation in observations)
    observations, rewards, terminated, truncated, _ = envs.step((CALL, "\\boxed{x}"))
    envs.close()
    assert observations[0]["messages"][0]["content"] == "42"
    assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == (
        [0, 0],
        [False, True],
        [False, False],
    )


@pytest.mark.parametrize("space", [ActionSpace, ChatSpace])
def test_a_space_contains_its_samples_and_seeds_them(space: Any) -> None:
    first, second = space(seed=1), space(seed=1)
    samples = [first.sample() for _ in range(50)]
    assert samples == [second.sample() for _ in range(50)]
    assert all(first.contains(sample) for sample in samples)
    assert first == second
    assert not first.contains(3)


def test_any_unicode_text_is_an_action() -> None:
    assert all(ActionSpace().contains(text) for text in ("", "é", "中", "🙂", "a\nb"))


@pytest.mark.parametrize(
    ("content", "images", "fits"),
    [
        ([{"type": "image"}, {"type": "text", "text": "a"}], (b"png",), True),
        ([{"type": "image"}], (), False),
        ("text", (b"png",), False),
        ([{"type": "sound"}], (), False),
        (3, (), False),
    ],
)
def test_an_observation_has_one_image_for_each_image_part(content: Any, images: Any, fits: bool) -> None:
    shown = {"messages": ({"role": "user", "content": content},), "images": images}
    assert ChatSpace().contains(shown) == fits


# --- what Gymnasium has -----------------------------------------------------------------------------------

DIRECTIONS = ("left", "down", "right", "up")


class Parrot(gymnasium.Env[str, str]):
    """Wants to hear its word, and is closed once."""

    observation_space = Text(20)
    action_space = Text(20)
    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = str(self.np_random.choice(["hello", "goodbye"]))
        return f"Say{self.word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "good", 0.5, action == self.word, False, {}

    def close(self) -> None:
        type(self).closed += 1


def played(env_class: type[AgentEnv], *turns: str, split: str = "test") -> Recording:
    async def run() -> Recording:
        env = env_class()
        task = env.tasks.load(split)[0]
        try:
            return await play(env, replayed(turns)(task), Recorder("inner", {}, task))
        finally:
            await env.aclose()

    return asyncio.run(run())


def test_frozen_lake_is_walked_in_words() -> None:
    options: dict[str, Any] = {"render_mode": "ansi", "is_slippery": False, "desc": ["SF", "FG"]}
    lake = from_gymnasium("FrozenLake-v1", actions=DIRECTIONS, prompt="Reach G.", **options)
    walk = played(lake, "Which way?", "I go DOWN, not up... no: Down!", "right")
    assert walk.said[0].text.split() == ["Reach", "G.", "[S]F", "FG"]
    assert walk.said[2].text == "Error: there is no action in that. The actions are: left, down, right, up."
    assert walk.said[4].text.split() == ["(Down)", "SF", "[F]G"]
    assert (walk.reward, walk.fate) == (1.0, "terminated")


def test_actions_without_names_are_numbers_and_the_observation_is_told_as_python_writes_it() -> None:
    game = played(from_gymnasium("Blackjack-v1", prompt="0 sticks, 1 hits."), "action 7", "I think 1, no, 0.")
    assert game.said[0].text.startswith("0 sticks, 1 hits.\n\n(")
    assert "The actions are: Discrete(2)" in game.said[2].text
    assert game.fate == "terminated"
    assert game.reward in (-1.0, 0.0, 1.0)


def test_a_text_environment_hears_the_turn_without_its_thought_and_is_closed_with_its_episode() -> None:
    gymnasium.register("test/Parrot-v0", entry_point=lambda **_: Parrot())
    parrot = from_gymnasium("test/Parrot-v0", disable_env_checker=True)
    before = Parrot.closed
    word = played(parrot, "x").said[0].text.removeprefix("Say")
    heard = played(parrot, "cracker", f"<think>easy</think>\n{word}")
    assert (heard.reward, heard.fate, heard.said[-1].text) == (1.0, "terminated", "good")
    assert Parrot.closed - before == 2


def test_train_and_test_have_seeds_of_their_own_and_positions_keep_theirs() -> None:
    tasks = from_gymnasium("Blackjack-v1").taskset
    assert not isinstance(tasks, str)
    assert tasks is not None
    test = {task.metadata["seed"] for task in tasks.load("test")}
    train = {tasks.order(seed)[position].metadata["seed"] for seed in (0, 1) for position in range(50)}
    assert (len(test), len(train), test & train) == (64, 100, set())
    assert tasks.order(3)[7] == tasks.order(3)[7]


def test_an_environment_that_cannot_be_spoken_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)action_space = 'Box.*Text or Discrete"):
        from_gymnasium("Pendulum-v1")
    with pytest.raises(ConfigError, match="Name each action"):
        from_gymnasium("Blackjack-v1", actions=("stick",))
    with pytest.raises(ConfigError, match="NoSuch-v0"):
        from_gymnasium("NoSuch-v0")


def test_random_numbers_are_those_that_gymnasium_makes_of_the_seed_and_go_on_without_one() -> None:
    env, theirs, first = make(), seeding.np_random(5)[0], {"position": 0}
    env.reset(seed=5, options=first)
    drawn = [env.unwrapped.np_random.random()]
    asyncio.run(env.unwrapped.areset(options=first))  # type: ignore[attr-defined]
    drawn.append(env.unwrapped.np_random.random())
    assert drawn == [theirs.random(), theirs.random()]
    assert env.unwrapped.np_random_seed == 5
    env.close()
