"""Any Gymnasium environment that can be told in words, as an environment of ours.

    Lake = from_gymnasium("FrozenLake-v1", actions=("left", "down", "right", "up"), render_mode="ansi",
                          prompt="Reach G. Answer with a direction.")

A task is a seed. What is shown is the observation where it is a text, else what `render()` returns in the
mode "ansi" (what a terminal would highlight stands in brackets), else the observation as Python writes it.
An action is the policy's turn where the space takes text; where it is `Discrete`, the last number in the
turn, or the last name where its actions have names. The reward is the sum of the rewards.
Invariants: a turn that is no action is answered in words and costs a turn; the inner environment is closed
with its episode. Its calls run in threads, one after another.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
from gymnasium.spaces import Discrete, Text

from ..errors import ConfigError
from .bug import located
from .env import AgentEnv
from .message import text_of
from .rubric import Episode, reward
from .spaces import ActionSpace
from .task import LazyTasks, Task, TaskOrder, check_split

_HIGHLIGHTED = re.compile("\x1b\\[[\\d;]+m(.*?)\x1b\\[0m", re.S)


def from_gymnasium(
    id: str,
    *,
    prompt: str = "",
    actions: Sequence[str] = (),
    max_turns: int = 64,
    test_size: int = 64,
    **kwargs: Any,
) -> type[GymnasiumEnv]:
    """The environment class; raises ConfigError where a text cannot be an action of it.

    prompt     stands before the first observation
    actions    names of a Discrete space's actions, in order
    kwargs     for `gymnasium.make`
    """
    try:
        with_spaces = gymnasium.make(id, **kwargs)
    except Exception as error:  # Gymnasium's own errors, and whatever its constructor raises
        raise ConfigError(
            source="from_gymnasium",
            key="id",
            value=id,
            why=f"cannot be made with {kwargs} ({located(error)})",
            remedy="Register it, or mend the id or its arguments.",
        ) from error
    space = with_spaces.action_space
    with_spaces.close()
    if not isinstance(space, Discrete | Text | ActionSpace):
        raise ConfigError(
            source=f"from_gymnasium {id}",
            key="action_space",
            value=str(space),
            remedy="A policy speaks text: wrap it so that its actions are Text or Discrete.",
        )
    if actions and not (isinstance(space, Discrete) and len(actions) == space.n):
        raise ConfigError(
            source=f"from_gymnasium {id}",
            key="actions",
            value=tuple(actions),
            remedy=f"Name each action of {space} once, in order, or leave the names out.",
        )
    fields = {
        "taskset": SeedTaskset(id, prompt=prompt, test_size=test_size),
        "max_turns": max_turns,
        "names": tuple(actions),
        "inner": (id, dict(kwargs)),
        "__doc__": f"Gymnasium's {id}.",
    }
    return type(re.sub(r"\W", "_", id), (GymnasiumEnv,), fields)


class SeedTaskset:
    """One task for each seed: "train" without end, "test" a fixed few that "train" never has."""

    splits: tuple[str, ...] = ("train", "test")

    def __init__(self, name: str, *, prompt: str, test_size: int) -> None:
        self.name, self._prompt, self._test_size = name, prompt, test_size

    def load(self, split: str) -> LazyTasks:
        return LazyTasks(self.order(0, split).task_at, self._test_size)

    def order(self, seed: int, split: str = "train") -> TaskOrder:
        """ "test" is the same `test_size` seeds whatever the seed of the run."""
        check_split(self, split)
        if split == "test":
            size = self._test_size
            return TaskOrder(task_at=lambda p: self._task(split, 0, p % size), epoch_size=size)
        return TaskOrder(task_at=lambda p: self._task(split, seed, p))

    def _task(self, split: str, seed: int, position: int) -> Task:
        drawn = random.Random(f"{self.name}/{split}/{seed}/{position}").getrandbits(30)
        own = 2 * drawn + (split == "test")  # odd seeds are for the test
        return Task(id=f"{self.name}:{own}", split=split, prompt=self._prompt, metadata={"seed": own})


class GymnasiumEnv(AgentEnv):
    """Base of what `from_gymnasium` makes.

    inner   id and arguments of the environment inside; names: what its actions are called
    """

    inner: ClassVar[tuple[str, dict[str, Any]]]
    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._inner: gymnasium.Env[Any, Any] | None = None

    def begin(self, task: Task) -> str:  # type: ignore[override]  # a hook may be plain
        id, arguments = self.inner
        self._inner = gymnasium.make(id, **arguments)
        self.state["total"] = 0.0
        seen, _ = self._inner.reset(seed=task.metadata["seed"])
        return "\n\n".join(filter(None, (text_of(task.prompt[0]["content"]), self._told(seen))))

    def reply(self, text: str) -> str:  # type: ignore[override]  # a hook may be plain
        assert self._inner is not None
        action = self._action(self._inner.action_space, text)
        if action is None:
            known = ", ".join(self.names) or str(self._inner.action_space)
            return f"Error: there is no action in that. The actions are: {known}."
        seen, value, terminated, truncated, _ = self._inner.step(action)
        self.state["total"] += float(value)
        if terminated or truncated:
            self.finish()
        return self._told(seen)

    def end(self) -> None:  # type: ignore[override]  # a hook may be plain
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    @reward
    def total(self, task: Task, episode: Episode) -> float:
        """The sum of the rewards of the environment inside."""
        return float(episode.state["total"])

    def _told(self, seen: object) -> str:
        assert self._inner is not None
        if isinstance(seen, str):
            return seen
        shown = self._inner.render() if self._inner.render_mode == "ansi" else seen
        return _HIGHLIGHTED.sub(r"[\1]", str(shown))

    def _action(self, space: gymnasium.Space[Any], text: str) -> Any:
        """The action that a turn names; None where it names none."""
        if not isinstance(space, Discrete):
            return text.strip() if space.contains(text.strip()) else None
        spoken = "|".join(rf"\b{re.escape(name)}\b" for name in self.names)
        found = re.findall(spoken or r"-?\b\d{1,9}\b", text, re.IGNORECASE)
        if not found:
            return None
        lower = [name.lower() for name in self.names]
        action = lower.index(found[-1].lower()) + int(space.start) if lower else int(found[-1])
        return action if space.contains(action) else None
