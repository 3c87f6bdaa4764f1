"""Agentic RL environments and an aligned rollout harness that implements REINFORCE Zero.

    rz_agent.train(rz_agent.Recipe())       a run by the recipe's defaults, in a new folder under runs/
    rz_agent.evaluate(rz_agent.Recipe())    its model on held-out tasks, without training

The public names are loaded when they are first used, so `import rz_agent` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .envs.env import AgentEnv as AgentEnv
    from .envs.registry import make as make
    from .envs.registry import register as register
    from .envs.rubric import Rubric as Rubric
    from .envs.task import Task as Task
    from .envs.tool import tool as tool
    from .recipes.evaluate import evaluate as evaluate
    from .recipes.recipe import Recipe as Recipe
    from .recipes.train import train as train

__version__ = "0.1.0"

_WHERE = {
    "register": "envs.registry",
    "make": "envs.registry",
    "Task": "envs.task",
    "AgentEnv": "envs.env",
    "Rubric": "envs.rubric",
    "tool": "envs.tool",
    "Recipe": "recipes.recipe",
    "train": "recipes.train",
    "evaluate": "recipes.evaluate",
}

__all__ = ["AgentEnv", "Recipe", "Rubric", "Task", "evaluate", "make", "register", "tool", "train"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
