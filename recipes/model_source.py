"""The folder of the model that a recipe names, built into the cache when it is one we make.

    check_model(section)                        ConfigError where there is none; builds nothing
    model_folder(section, say, stop) -> Path    a Hugging Face folder, complete, or an error

Invariant: the cache holds whole models only, however a build ends.
Waits: the caller for a build, which takes minutes; a build looks at `stop` after each of its steps.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError, Interrupted
from .sections import ModelSection

Say = Callable[[str], None]
Stop = Callable[[], bool]
SAY_EVERY_S = 5.0
BUILT = ("tiny", "smollm2")


def check_model(section: ModelSection) -> None:
    """Raise ConfigError where `model.path` is neither a model that we build nor a Hugging Face folder."""
    if section.path in BUILT or (Path(section.path) / "config.json").is_file():
        return
    raise ConfigError(
        source="recipe",
        key="model.path",
        value=section.path,
        why="is no Hugging Face folder (no config.json in it).",
        remedy='Use "tiny", "smollm2" or the path of a folder that from_pretrained reads.',
    )


def model_folder(section: ModelSection, say: Say = lambda text: None, stop: Stop = lambda: False) -> Path:
    """Where config.json, the tokenizer and the weights of the recipe's model are.

    say    told what is built and how far it is; nothing where the model is there already
    stop   asked while building; once it is true, Interrupted is raised
    """
    check_model(section)
    cache = Path(section.cache).expanduser()
    # The builders load torch, which takes seconds, so only the one that is asked for is imported.
    if section.path == "tiny":
        from .models.tiny import ensure_tiny

        return ensure_tiny(cache, seed=section.seed, progress=_building(say, stop))
    if section.path == "smollm2":
        return _smollm2(cache / "smollm2", say)
    return Path(section.path)


def _building(say: Say, stop: Stop) -> Callable[[int, int, float], None]:
    """The progress of the tiny model's build: said every few seconds, ended on request."""
    said = -SAY_EVERY_S

    def progress(step: int, steps: int, loss: float) -> None:
        nonlocal said
        if stop():
            raise Interrupted(f"the tiny model's build was stopped after {step} of {steps} steps")
        if time.monotonic() - said >= SAY_EVERY_S:
            said = time.monotonic()
            say(f"the tiny model: {step} of {steps} steps (built once, then cached)")

    return progress


def _smollm2(folder: Path, say: Say) -> Path:
    from .models.smollm2 import convert_smollm2

    if folder.exists():
        return folder
    say("SmolLM2-135M-Instruct (converted once, then cached)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    converting = Path(tempfile.mkdtemp(prefix="smollm2-", dir=folder.parent))
    try:
        convert_smollm2(converting)
        converting.rename(folder)  # whole or not at all
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(converting, ignore_errors=True)
    return folder
