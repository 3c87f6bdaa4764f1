"""Reads and writes model folders: config.json, tokenizer files and safetensors, single or sharded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...errors import ConfigError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of a model folder, each read when it is asked for."""

    def __init__(self, model_dir: Path) -> None:
        self._files = _files(model_dir)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as held:
            tensor: Tensor = held.get_tensor(name)
        return tensor

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _files(model_dir: Path) -> dict[str, Path]:
    if (index := model_dir / _INDEX).exists():
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: model_dir / file for name, file in placed.items()}
    if not (single := model_dir / _SINGLE).exists():
        raise ConfigError(
            source=str(model_dir),
            key=_SINGLE,
            value=None,
            why="is missing",
            remedy=f"Give a folder with {_SINGLE} or {_INDEX}.",
        )
    with safe_open(single, framework="pt") as held:
        return dict.fromkeys(held.keys(), single)


def export(source: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a model folder: everything of `source` but its weights, and `tensors` as its weights.

    Raises FileExistsError where `target` holds anything.
    """
    target.mkdir(parents=True, exist_ok=True)
    if next(target.iterdir(), None) is not None:
        raise FileExistsError(f"{target} is not empty; a model is exported into a new folder")
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != _INDEX:
            shutil.copy2(file, target / file.name)
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, target / _SINGLE, {"format": "pt"})
