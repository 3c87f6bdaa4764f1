"""What an agent does: tasks, observations, tools, rewards. One folder per environment."""

from __future__ import annotations

from .action import Action
from .adapters import from_jsonl, from_reasoning_gym
from .context_policy import AppendOnly, ContextPolicy, SlidingImages
from .env import AgentEnv
from .factory import EnvFactory
from .failure import InfraFailure
from .gymnasium_env import from_gymnasium
from .message import Message, Observation, pictured
from .options import EnvOptions
from .registry import load, make, names, register, resolve
from .rubric import Episode, Rubric, Score, metric, reward
from .script import Script, call, replayed, scripted, silent
from .self_test import Case
from .task import ListTaskset, Task, TaskOrder, Taskset
from .tool import ToolError, ToolSpec, tool

register(
    "rz/PythonMath-v0",
    entry_point="rz_agent.envs.python_math.env:PythonMathEnv",
    short_name="python",
)
register(
    "rz/OSWorld-v0",
    entry_point="rz_agent.envs.osworld.env:OSWorldEnv",
    short_name="osworld",
    nondeterministic=True,
)
register(
    "rz/SWEBenchPro-v0",
    entry_point="rz_agent.envs.swebench_pro.env:SWEBenchProEnv",
    short_name="swebench-pro",
    nondeterministic=True,
)

__all__ = [
    "Action",
    "AgentEnv",
    "AppendOnly",
    "Case",
    "ContextPolicy",
    "EnvFactory",
    "EnvOptions",
    "Episode",
    "InfraFailure",
    "ListTaskset",
    "Message",
    "Observation",
    "Rubric",
    "Score",
    "Script",
    "SlidingImages",
    "Task",
    "TaskOrder",
    "Taskset",
    "ToolError",
    "ToolSpec",
    "call",
    "from_gymnasium",
    "from_jsonl",
    "from_reasoning_gym",
    "load",
    "make",
    "metric",
    "names",
    "pictured",
    "register",
    "replayed",
    "resolve",
    "reward",
    "scripted",
    "silent",
    "tool",
]
