"""What a run may change when it goes on, and what it may not.

The journal is replayed: on resume from the last checkpoint, in an audit from the very start. So what decided
the recorded updates, or which task a position is, stays as it was when the run began; everything else (how
many updates, the lag, the audit, the engine, how the learner is split) is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..journal import Journal
from .recipe import Recipe

# A whole table stands for all of its keys but the FREE ones.
FIXED = ("seed", "kernels", "groups_per_batch", "model", "env", "learner", "rollout.group_size")
FREE = (
    "model.cache",
    "learner.tensor_parallel",
    "learner.pipeline_parallel",
    "learner.micro_batch_tokens",
    "learner.recompute",
    "learner.threads",
)
_MISSING = object()


def require_same(recipe: Recipe, journal: Path) -> None:
    """ConfigError for the first key that the run in this journal cannot go on with."""
    with Journal.open(journal, run=None) as reader:
        if not (lives := reader.lives()):
            return
    begun_with = lives[0]["recipe"]
    for key, value in _flat(recipe.model_dump(mode="json")):
        before = _at(begun_with, key)
        if _is_fixed(key) and before is not _MISSING and before != value:
            raise ConfigError(
                source=str(journal.parent),
                key=key,
                value=value,
                why=f"but the run began with {before!r}, by which its updates are repeated.",
                remedy="Leave it, or begin a new run from this one's weights: rz-agent runs export, then "
                "train --set model.path=DIR.",
            )


def _is_fixed(key: str) -> bool:
    if key in FREE:
        return False
    return any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values, in order. The options of an environment count as one value."""
    for name, value in table.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and key != "env.options":
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _at(table: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; _MISSING where an older recipe had no such key."""
    value: Any = table
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value
