"""Tasks from elsewhere: JSONL files and reasoning-gym's generators, and the names by which a recipe asks.

    from_jsonl("problems.jsonl")          rows {prompt, answer, ...}; the order is a permutation each epoch
    from_reasoning_gym("gcd")             an endless stream; entry p of a seed is always the same
    named_taskset("reasoning-gym:gcd")    what recipes write

Nothing here waits; a file is read whole, a generator makes one entry at a time.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError
from .bug import brief, located
from .options import suggestion
from .task import LazyTasks, ListTaskset, Task, TaskOrder, Taskset, check_split

REASONING_GYM = "reasoning-gym:"
_TASK_FIELDS = ("id", "split", "answer", "image", "resources", "deadlines")
# The generators take the size only as the end of iteration: entry i depends on seed + i alone.
_ENDLESS = 2**31 - 1


def named_taskset(name: str, *, source: str) -> Taskset:
    """The taskset a recipe names: a `.jsonl` path, `reasoning-gym:NAME`, or `pkg.mod:attribute`."""
    if name.startswith(REASONING_GYM):
        return from_reasoning_gym(name.removeprefix(REASONING_GYM))
    if name.endswith(".jsonl"):
        return from_jsonl(name)
    if ":" in name:
        return _imported(name, source=source)
    raise ConfigError(
        source=source,
        key="taskset",
        value=name,
        why="names no tasks",
        remedy="Use a path ending in .jsonl, reasoning-gym:NAME, or pkg.mod:attribute of a Taskset.",
    )


def _imported(name: str, *, source: str) -> Taskset:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        taskset = found() if callable(found) and not isinstance(found, Taskset) else found
    except Exception as error:  # whatever the author's module, or function, raises
        raise ConfigError(
            source=source,
            key="taskset",
            value=name,
            why=f"does not load: {located(error)}.",
            remedy="Name an importable Taskset.",
        ) from error
    if not isinstance(taskset, Taskset):
        raise ConfigError(
            source=source,
            key="taskset",
            value=name,
            why=f"is a {type(taskset).__name__}",
            remedy="It must be a Taskset (name, splits, load, order) or a function that returns one.",
        )
    return taskset


def from_jsonl(path: str | Path, *, prompt: str = "prompt", answer: str = "answer") -> ListTaskset:
    """Tasks of a JSONL file. `prompt` and `answer` name the columns; a prompt is text or a list of messages.

    Columns with the name of a field of `Task` fill it, every other one goes to `metadata`. A row without
    an id is called `<file>:<line>`, one without a split belongs to "train". `ConfigError` names the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            source=str(path), key="taskset", value=str(path), why=f"({error.strerror})", remedy="Name a file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            source=str(path),
            key="taskset",
            value=str(path),
            why=f"is no UTF-8 ({error}).",
            remedy="Convert it.",
        ) from error
    tasks = [
        _row(line, where=f"{path}:{number}", default_id=f"{path.stem}:{number}", prompt=prompt, answer=answer)
        for number, line in enumerate(text.split("\n"), 1)  # JSON may hold what else ends a line in Unicode
        if line.strip()
    ]
    if not tasks:
        remedy = f"Write a JSON object with {prompt!r} and {answer!r} into each line."
        raise ConfigError(source=str(path), key="tasks", value=[], why="has no line.", remedy=remedy)
    return ListTaskset(tasks, name=path.stem)


def _row(line: str, *, where: str, default_id: str, prompt: str, answer: str) -> Task:
    try:
        row = json.loads(line)
        text = row[prompt]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            source=where,
            key=prompt,
            value=line[:60],
            remedy=f"Every line is a JSON object with {prompt!r} and {answer!r}.",
        ) from error
    fields: dict[str, Any] = {"id": default_id, "prompt": text}
    metadata = row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ConfigError(source=where, key="metadata", value=metadata, remedy="Write an object.")
    for key, value in row.items():
        if key == answer:
            fields["answer"] = None if value is None else str(value)
        elif key in _TASK_FIELDS:
            fields[key] = str(value) if key == "id" else value
        elif key not in (prompt, "metadata"):
            metadata[key] = value
    try:
        return Task(**fields, metadata=metadata)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise ConfigError(source=where, key=key, value=fault["input"], remedy=f"{fault['msg']}.") from error


def from_reasoning_gym(name: str, *, test_size: int = 256, **config: Any) -> Taskset:
    """One of reasoning-gym's generators, with its own scorer recorded in `metadata["reasoning_gym"]`.

    config   the generator's own settings. Raises `ConfigError` for a name it does not have.
    """
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(
            source="reasoning-gym",
            key="taskset",
            value=f"{REASONING_GYM}{name}",
            remedy=suggestion(name, DATASETS, "generators"),
        )
    taskset = ReasoningGymTaskset(name, test_size=test_size, config=config)
    try:
        taskset.load("train")[0]
    except Exception as error:  # each generator refuses its settings in a way of its own
        raise ConfigError(
            source=f"{REASONING_GYM}{name}",
            key="config",
            value=config,
            why=f"is refused by the generator ({brief(error)}).",
            remedy="Mend its settings.",
        ) from error
    return taskset


class ReasoningGymTaskset:
    """Entries of one generator; "train" is endless, "test" is `test_size` entries of a seed of its own."""

    splits: tuple[str, ...] = ("train", "test")

    def __init__(self, dataset: str, *, test_size: int, config: Mapping[str, Any]) -> None:
        self.name = f"{REASONING_GYM}{dataset}"
        self._dataset, self._test_size, self._config = dataset, test_size, dict(config)

    def load(self, split: str) -> LazyTasks:
        return LazyTasks(self.order(0, split).task_at, self._test_size)

    def order(self, seed: int, split: str = "train") -> TaskOrder:
        import reasoning_gym

        check_split(self, split)
        test = split == "test"
        # A string seeds the same everywhere; the test entries must not depend on the run's seed.
        entry_seed = random.Random(f"{self.name}/{split}/{0 if test else seed}").getrandbits(30)
        entries = reasoning_gym.create_dataset(self._dataset, size=_ENDLESS, seed=entry_seed, **self._config)

        def task_at(position: int) -> Task:
            index = position % self._test_size if test else position
            entry = entries[index]
            return Task(
                id=f"{self.name}/{split}/{entry_seed}/{index}",
                split=split,
                prompt=entry["question"],
                answer=str(entry["answer"]),
                metadata={"reasoning_gym": {"dataset": self._dataset, "entry": entry}},
            )

        return TaskOrder(task_at=task_at, epoch_size=self._test_size if test else None)
