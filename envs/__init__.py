"""What an agent does: tasks, observations, tools, rewards. One folder per environment."""

from __future__ import annotations

from .action import Action
from .adapters import from_jsonl, from_reasoning_gym
from .env import AgentEnv
from .factory import EnvFactory
from .failure import InfraFailure
from .message import Message, Observation
from .options import EnvOptions
from .registry import load, make, names, register, resolve
from .rubric import Episode, Rubric, Score, metric, reward
from .task import ListTaskset, Task, TaskOrder, Taskset
from .tool import ToolError, ToolSpec, tool

register(
    "rz/PythonMath-v0",
    entry_point="rz_agent.envs.python_math.env:PythonMathEnv",
    short_name="python",
)

__all__ = [
    "Action",
    "AgentEnv",
    "EnvFactory",
    "EnvOptions",
    "Episode",
    "InfraFailure",
    "ListTaskset",
    "Message",
    "Observation",
    "Rubric",
    "Score",
    "Task",
    "TaskOrder",
    "Taskset",
    "ToolError",
    "ToolSpec",
    "from_jsonl",
    "from_reasoning_gym",
    "load",
    "make",
    "metric",
    "names",
    "register",
    "resolve",
    "reward",
    "tool",
]
