"""Environments that reward every answer a little: even an unskilled policy has something to learn."""

from __future__ import annotations

from rz_agent.envs.env import AgentEnv
from rz_agent.envs.message import Message
from rz_agent.envs.python_math.env import PythonMathEnv
from rz_agent.envs.python_math.tasks import ArithmeticTaskset
from rz_agent.envs.rubric import Episode, reward
from rz_agent.envs.task import Task


class LengthEnv(AgentEnv):
    """One turn; the reward is the answer's length in units of 40 characters."""

    taskset = ArithmeticTaskset()
    max_turns = 1

    @reward
    def length(self, task: Task, episode: Episode) -> float:
        return len(episode.answer) / 40


class LengthyPythonMathEnv(PythonMathEnv):
    """The Python-tool task, sandbox and grader included, with the same reward on top."""

    @reward
    def length(self, task: Task, episode: Episode) -> float:
        return len(episode.answer) / 40


class CallingPythonMathEnv(LengthyPythonMathEnv):
    """Every episode calls the tool once itself: it has a sandbox, whatever its policy has learnt."""

    async def begin(self, task: Task) -> tuple[Message, ...]:
        first = await super().begin(task)
        assert await self.python("6 * 7") == "42"
        return first


class LongTalkEnv(LengthEnv):
    """Six turns of any text, with some 70 tokens to read between them."""

    max_turns = 6

    async def reply(self, text: str) -> str | None:
        return "Tell me more about that, and do not forget what I asked first. " * 2
