"""OSWorld tasks as they are published: one JSON file each, or the rows of a JSONL file of NeMo-Gym.

    read_task(path) -> OsworldTask            one file
    read_tasks(path) -> (OsworldTask, ...)    a file, a .jsonl, or a folder with *.json at any depth

Invariants: the evaluator's lists are as long as its `func`, so a `Check` is whole; what the evaluator says is
understood or refused, for a key that is passed over would change a reward. Elsewhere unknown keys are kept as
`metadata`. Nothing is filled in (`placeholders.py`) and no name is looked up (`feasibility.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...errors import ConfigError
from ..options import suggestion

Conjunction = Literal["and", "or"]
INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that is done to the machine before the agent comes, or before the evaluator looks."""

    type: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Which getter fetches a value, and what the task tells it."""

    type: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One metric with what it compares; `expected` is None where the metric needs nothing to compare with."""

    metric: str
    result: Get
    expected: Get | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """How the end is judged. `checks` is empty for an infeasible task, whose right answer is FAIL."""

    checks: tuple[Check, ...]
    conjunction: Conjunction = "and"
    postconfig: tuple[Step, ...] = ()

    @property
    def infeasible(self) -> bool:
        return not self.checks


@dataclass(frozen=True, slots=True, kw_only=True)
class OsworldTask:
    """A published task.

    domain     chrome, gimp, os, ...: the folder it is published in
    config     what puts the machine into its first state
    proxy      whether OSWorld reaches the web through a proxy for it
    metadata   every other key of the file, as it was
    file       where it was read; errors name it
    """

    id: str
    domain: str
    instruction: str
    config: tuple[Step, ...]
    evaluator: Evaluator
    snapshot: str = ""
    source: tuple[str, ...] = ()
    related_apps: tuple[str, ...] = ()
    proxy: bool = False
    possibility_of_env_change: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""


def read_task(path: Path) -> OsworldTask:
    """The task of a JSON file. `ConfigError` names file, field and value."""
    domain, separated, _ = path.stem.partition("__")
    return parse_task(
        _loaded(path.read_text(), str(path)), domain if separated else path.parent.name, str(path)
    )


def read_tasks(path: Path) -> tuple[OsworldTask, ...]:
    """All tasks of a file or folder, by domain and id. `ConfigError` where there is none, or one twice."""
    if path.is_dir():
        tasks = [read_task(file) for file in sorted(path.rglob("*.json"))]
    elif path.suffix == ".jsonl":
        lines = enumerate(path.read_text().splitlines(), start=1)
        tasks = [_parse_row(line, f"{path}:{number}") for number, line in lines if line.strip()]
    elif path.is_file():
        tasks = [read_task(path)]
    else:
        tasks = []
    if not tasks:
        remedy = "Name a task's .json, a .jsonl with a task in each row, or a folder with such .json files."
        raise ConfigError(source=str(path), key="tasks", value=str(path), why="has no task.", remedy=remedy)
    first: dict[str, OsworldTask] = {}
    for task in tasks:
        if task.id in first:
            remedy = f"It is in {first[task.id].file} as well; remove one of the two."
            raise ConfigError(source=task.file, key="id", value=task.id, why="is met twice.", remedy=remedy)
        first[task.id] = task
    return tuple(sorted(tasks, key=lambda task: (task.domain, task.id)))


def parse_task(content: object, domain: str, source: str) -> OsworldTask:
    """A task from its JSON value."""
    try:
        return _TaskFile.model_validate(content).task(domain, source)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        # Of a value that may have several forms, pydantic names the form it tried: no key of the file.
        parts = [str(part) for part in fault["loc"] if not str(part).startswith(("_", "list[", "dict["))]
        key, value, why = ".".join(parts) or "task", fault["input"], ""
        if fault["type"] == "extra_forbidden":
            known = _EvaluatorFile if parts[0] == "evaluator" and len(parts) == 2 else _StepFile
            remedy = suggestion(parts[-1], known.model_fields, "keys there")
            why = "is not understood."
        elif fault["type"] == "missing":
            value, remedy = None, "Every OSWorld task has it; add it."
        else:
            remedy = f"{fault['msg'].removeprefix('Value error, ').rstrip('.')}."
        raise ConfigError(source=source, key=key, value=value, why=why, remedy=remedy) from error


def _loaded(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        remedy = f"{error.msg}, column {error.colno}; a task is one JSON object."
        raise ConfigError(source=source, key="line", value=error.lineno, remedy=remedy) from error


def _parse_row(line: str, source: str) -> OsworldTask:
    """A row holds the task itself, or NeMo-Gym's request with the task in its `verifier_metadata`."""
    row = _loaded(line, source)
    metadata = row.get("verifier_metadata") if isinstance(row, dict) else None
    if not isinstance(metadata, dict):
        return parse_task(row, "", source)
    return parse_task(metadata.get("osworld_task"), str(metadata.get("domain", "")), source)


class _StepFile(BaseModel):
    """`{"type": "launch", "parameters": {...}}`."""

    model_config = ConfigDict(extra="forbid")

    type: str
    parameters: dict[str, Any] = Field(default_factory=dict)

    def step(self) -> Step:
        return Step(type=self.type, parameters=self.parameters)


class _GetFile(BaseModel):
    """`{"type": "vm_file", ...}`: every other key is the getter's."""

    model_config = ConfigDict(extra="allow")

    type: str

    def get(self) -> Get:
        return Get(type=self.type, config=dict(self.model_extra or {}))


class _EvaluatorFile(BaseModel):
    """`func`, with `result`, `expected` and `options` that are single values or, like it, lists."""

    model_config = ConfigDict(extra="forbid")

    func: str | list[str]
    conj: Conjunction = "and"
    result: _GetFile | list[_GetFile | None] | None = None
    expected: _GetFile | list[_GetFile | None] | None = None
    options: dict[str, Any] | list[dict[str, Any] | None] | None = None
    postconfig: list[_StepFile] = Field(default_factory=list)

    @field_validator("result", "expected", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        if isinstance(value, list):
            return [item or None for item in value]
        return value or None

    @model_validator(mode="after")
    def _as_long_as_func(self) -> _EvaluatorFile:
        for name, value in (("result", self.result), ("expected", self.expected), ("options", self.options)):
            if value and isinstance(value, list) != isinstance(self.func, list):
                raise ValueError(f"{name} must be a list exactly where func is one")
            if isinstance(value, list) and len(value) != len(self.func):
                raise ValueError(
                    f"func has {len(self.func)} entries, {name} has {len(value)}; make them equal"
                )
        metrics = [self.func] if isinstance(self.func, str) else self.func
        if not metrics:
            raise ValueError("func names no metric")
        if INFEASIBLE in metrics and len(metrics) > 1:
            raise ValueError(f"{INFEASIBLE} stands alone: the right answer to such a task is FAIL")
        if INFEASIBLE not in metrics and not all(_each(self.result, len(metrics))):
            raise ValueError("every metric but infeasible needs a result")
        return self

    def evaluator(self) -> Evaluator:
        metrics = [self.func] if isinstance(self.func, str) else self.func
        count = len(metrics)
        parts = zip(
            metrics,
            _each(self.result, count),
            _each(self.expected, count),
            _each(self.options, count),
            strict=True,
        )
        return Evaluator(
            checks=tuple(
                Check(
                    metric=metric,
                    result=result.get(),
                    expected=expected.get() if expected else None,
                    options=options or {},
                )
                for metric, result, expected, options in parts
                if metric != INFEASIBLE
            ),
            conjunction=self.conj,
            postconfig=tuple(step.step() for step in self.postconfig),
        )


class _TaskFile(BaseModel):
    """The keys that have a meaning here; the others are metadata."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(min_length=1)
    instruction: str = Field(min_length=1)
    evaluator: _EvaluatorFile
    config: list[_StepFile] = Field(default_factory=list)
    snapshot: str = ""
    source: str | list[str] = ""
    related_apps: list[str] = Field(default_factory=list)
    proxy: bool = False
    possibility_of_env_change: str = ""

    def task(self, domain: str, file: str) -> OsworldTask:
        sources = [self.source] if isinstance(self.source, str) else self.source
        return OsworldTask(
            id=self.id,
            domain=domain or self.snapshot,
            instruction=self.instruction,
            config=tuple(step.step() for step in self.config),
            evaluator=self.evaluator.evaluator(),
            snapshot=self.snapshot,
            source=tuple(source for source in sources if source),
            related_apps=tuple(self.related_apps),
            proxy=self.proxy,
            possibility_of_env_change=self.possibility_of_env_change,
            metadata=dict(self.model_extra or {}),
            file=file,
        )


def _each(value: Any, count: int) -> Sequence[Any]:
    """One entry for each metric, whichever of the two forms the file has."""
    return value if isinstance(value, list) else [value] * count
