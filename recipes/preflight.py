"""What must hold before a run has a folder: its environment can be made, its tasks, its model and
who makes its sandboxes are there.

    check(recipe)     ConfigError naming the first fault; in the time that importing the environment takes

Nothing is opened or built here, and neither torch nor vLLM is imported.
"""

from __future__ import annotations

from .. import envs
from ..envs.bug import located
from ..envs.task import Task, Taskset
from ..errors import ConfigError, RzError
from ..sandboxes.registry import make_provider
from .model_source import check_model
from .recipe import Recipe


def check(recipe: Recipe, *, source: str = "recipe") -> None:
    """Raise ConfigError where the run could not start: environment, tasks, model, sandboxes.

    source   where the recipe's sandboxes are described, for a person
    """
    factory = envs.load(recipe.env.id, **recipe.env.options)
    _check_tasks(factory.taskset, recipe)
    _check_step(factory.longest_step_s, recipe)
    check_model(recipe.model)
    make_provider(recipe.sandbox, source=source)


def _check_step(longest_s: float, recipe: Recipe) -> None:
    if recipe.rollout.step_deadline_s <= longest_s:
        raise ConfigError(
            source="recipe",
            key="rollout.step_deadline_s",
            value=recipe.rollout.step_deadline_s,
            why=f"is not longer than the {longest_s:g} s that a step of {recipe.env.id} may take by its own "
            "deadlines: an episode that is only slow would be masked instead of being scored.",
            remedy=f"Use more than {longest_s:g}, or shorten the deadlines in [env.options].",
        )


def _check_tasks(taskset: Taskset, recipe: Recipe) -> None:
    try:
        first = taskset.order(recipe.seed, recipe.env.split)[0]
        why = "" if isinstance(first, Task) else f"has a {type(first).__name__} for its first task."
    except RzError:
        raise
    except Exception as error:
        why = f"has no first task ({located(error)})."
    if why:
        raise ConfigError(
            source=f"environment {recipe.env.id}",
            key="taskset",
            value=taskset.name,
            why=why,
            remedy="Its order(seed, split)[0] must be a Task.",
        )
