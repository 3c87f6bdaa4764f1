"""What tests of several rooms share: a tiny model, and recipes small enough to run whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dockerd import dockerd as dockerd
from missing_tools import pytest_sessionfinish as pytest_sessionfinish
from rz_agent.recipes.models.tiny import ensure_tiny
from rz_agent.recipes.recipe import Recipe, parse

CACHE = Path(__file__).parent.parent / ".cache"


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The suite keeps its own books on sandboxes, apart from the user's and from another worker's."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def unskilled() -> Path:
    """The tiny model after 40 steps of its warm start: the right shapes and template, hardly any skill."""
    return ensure_tiny(CACHE, seed=0, steps=40, threads=1)


@pytest.fixture
def small(unskilled: Path) -> dict[str, Any]:
    return small_tables(unskilled)


def small_tables(model: Path) -> dict[str, Any]:
    """Tables of a recipe whose update takes about a second: 4 groups of 4 episodes.

    Its reward is dense, because a policy without skill would else never move a weight.
    """
    return {
        "name": "small",
        "updates": 4,
        "groups_per_batch": 4,
        "model": {"path": str(model)},
        "env": {"id": "length_env:LengthyPythonMathEnv"},
        "rollout": {
            "episodes_in_flight": 16,
            "group_size": 4,
            "max_tokens": 24,
            "max_turns": 3,
            "context_len": 128,
            "engine": {"max_num_seqs": 16, "kv_cache_gb": 0.25},
        },
        "lag": {"max_lag": 2},
        "learner": {"lr": 1e-3, "clip_grad": 1.0},
        "checkpoint": {"every": 2},
        "tracking": {"tensorboard": False},
    }


def recipe_of(tables: dict[str, Any], **changes: Any) -> Recipe:
    """The recipe of these tables, with dotted keys replaced: recipe_of(small, **{"lag.max_lag": 0})."""
    merged = {name: dict(value) if isinstance(value, dict) else value for name, value in tables.items()}
    for key, value in changes.items():
        *path, last = key.split(".")
        here = merged
        for part in path:
            here[part] = dict(here.get(part, {}))
            here = here[part]
        here[last] = value
    return parse(merged, "test")
