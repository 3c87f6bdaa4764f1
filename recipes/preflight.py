"""What must hold before a run has a folder: its environment can be made, its tasks and its model are there.

    check(recipe)     ConfigError naming the first fault; in the time that importing the environment takes

Nothing is opened or built here, and neither torch nor vLLM is imported.
"""

from __future__ import annotations

from .. import envs
from ..envs.bug import brief, users_place
from ..envs.task import Task, Taskset
from ..errors import ConfigError, RzError
from .model_source import model_folder
from .recipe import Recipe

# Built into the cache when the run starts: there is nothing to look for.
BUILT = ("tiny", "smollm2")


def check(recipe: Recipe) -> None:
    """Raise ConfigError where the run could not start: environment, options, tasks, `model.path`."""
    factory = envs.load(recipe.env.id, **recipe.env.options)
    _check_tasks(factory.taskset, recipe)
    if recipe.model.path not in BUILT:
        model_folder(recipe.model)


def _check_tasks(taskset: Taskset, recipe: Recipe) -> None:
    try:
        first = taskset.order(recipe.seed, recipe.env.split)[0]
        why = "" if isinstance(first, Task) else f"has a {type(first).__name__} for its first task."
    except RzError:
        raise
    except Exception as error:
        place = users_place(error)
        why = f"has no first task ({brief(error)}{f', at {place}' if place else ''})."
    if why:
        raise ConfigError(
            source=f"environment {recipe.env.id}",
            key="taskset",
            value=taskset.name,
            why=why,
            remedy="Its order(seed, split)[0] must be a Task.",
        )
