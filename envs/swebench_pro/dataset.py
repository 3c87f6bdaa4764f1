"""The dataset as a Taskset: parquet as published, or JSONL, one task for each row.

    load_dataset("swe-bench-pro.jsonl", ...) -> ListTaskset

A relative "local:PATH" is meant from the file's own folder, so that a folder with an instance can be moved.
Nothing here waits; a file is read whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..task import Deadlines, ListTaskset, Task
from .instance import Instance
from .options import SWEBenchProOptions
from .scripts import Scripts, find_scripts

SAMPLE = Path(__file__).parent / "sample" / "instances.jsonl"


def load_dataset(path: str | Path, options: SWEBenchProOptions) -> ListTaskset:
    """Tasks of a file. Raises `ConfigError` naming row and column."""
    path = Path(path)
    tasks = [_task(row, where=where, path=path, options=options) for where, row in _rows(path)]
    return ListTaskset(tasks, name=path.stem)


def _split(path: Path) -> str:
    """Of rows that do not say: the published file is called test-00000-of-00001.parquet."""
    return "test" if path.stem.startswith("test") else "train"


def _task(row: dict[str, Any], *, where: str, path: Path, options: SWEBenchProOptions) -> Task:
    instance = Instance.of(row, where=where)
    if instance.local is not None:
        found = (path.parent / instance.local).resolve()
        if not found.exists():
            raise ConfigError(
                source=where,
                key="dockerhub_tag",
                value=instance.dockerhub_tag,
                why=f"names {found}, which is not there.",
                remedy="Name a git checkout or a bundle, from this file's folder on or absolute.",
            )
        instance = instance.model_copy(update={"dockerhub_tag": f"local:{found}"})
    return Task(
        id=instance.instance_id,
        split=str(row.get("split") or _split(path)),
        prompt=instance.statement,
        metadata={
            "instance": instance.model_dump(mode="json"),
            "scripts": str(Path(options.scripts) if options.scripts else path.parent / "run_scripts"),
        },
        image=instance.image(options.images),
        deadlines=Deadlines(setup_s=options.setup_s, tool_s=options.turn_s),
    )


def instance_of(task: Task) -> Instance:
    """The row that a task was made of."""
    return Instance.of(task.metadata.get("instance", {}), where=f"task {task.id}, metadata.instance")


def scripts_of(task: Task) -> Scripts:
    """What it is graded with. Raises `InfraFailure` where that is missing."""
    return find_scripts(Path(task.metadata.get("scripts", "")), instance_of(task).instance_id)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of each row."""
    if not path.is_file():
        raise ConfigError(
            source=str(path),
            key="taskset",
            value=str(path),
            why="is no file.",
            remedy='Name the dataset\'s .parquet or .jsonl file, or write "sample".',
        )
    if path.suffix == ".parquet":
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(_parquet(path), 1))
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            yield f"{path}:{number}", _row(line, where=f"{path}:{number}")


def _row(line: str, *, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            source=where, key="row", value=line[:60], why=f"({error})", remedy="Write one JSON object a line."
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(source=where, key="row", value=line[:60], remedy="Write one JSON object a line.")
    return row


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise ConfigError(
            source=str(path),
            key="taskset",
            value=path.name,
            why="is parquet, and pyarrow is not installed.",
            remedy="pip install 'rz-agent[swebench]', or convert the file to JSONL.",
        ) from None
    try:
        rows: list[dict[str, Any]] = read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(
            source=str(path), key="taskset", value=path.name, why=f"({error})", remedy="Download it anew."
        ) from error
    return rows
