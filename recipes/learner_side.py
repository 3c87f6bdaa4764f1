"""Build what trains: a learner in this process, one that torchrun's ranks share, or one of Ray's actors.

    learner_of(recipe, model_dir, run_dir)   the controller's learner
    follow_rank_0(recipe)                    what the other ranks of torchrun do instead of a run

Waits: every rank for all the others to come up.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..learner.learner import Learner
from ..learner.ranks import AnyLearner, LearnerOfRanks, Link, follow, gathered, launched
from .model_source import model_folder
from .recipe import Recipe


def learner_of(recipe: Recipe, model_dir: Path, run_dir: Path) -> AnyLearner:
    """The learner of a run. With Ray, the caller is connected."""
    if recipe.runtime == "ray":
        from .cluster import connected, learner_ranks
        from .cluster_learner import RayLearner

        with connected(recipe) as cluster:
            return RayLearner(cluster, model_dir, recipe.learner_config(), learner_ranks(recipe), run_dir)
    return gathered(lambda: Learner(model_dir, recipe.learner_config()))


def let_go(learner: AnyLearner) -> None:
    """End what other processes do for it."""
    if isinstance(learner, LearnerOfRanks):
        learner.close()


def follow_rank_0(recipe: Recipe) -> None:
    """Be one of the ranks above 0 until the run ends. Writes no file but its part of checkpoints."""
    check_launcher(recipe)
    learner = Learner(model_folder(recipe.model), recipe.learner_config())
    follow(learner, Link())


def check_launcher(recipe: Recipe) -> None:
    """Raises ConfigError for what cannot run under several ranks of torchrun."""
    _, ranks = launched()
    if ranks == 1:
        return
    if recipe.runtime == "ray":
        raise ConfigError(
            source="recipe",
            key="runtime",
            value="ray",
            why=f"starts its own ranks, but torchrun started {ranks}.",
            remedy='Start one process without torchrun, or use runtime = "local".',
        )
    if recipe.rollout.engine.mode == "inprocess":
        raise ConfigError(
            source="recipe",
            key="rollout.engine.mode",
            value="inprocess",
            why=f"would put the engine into the process group of {ranks} ranks.",
            remedy='Use "async".',
        )
