"""The folder of the model that a recipe names, built into the cache when it is one we make.

model_folder(section, say) -> Path    a Hugging Face folder, complete or a ConfigError
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError
from .sections import ModelSection

Say = Callable[[str], None]


def model_folder(section: ModelSection, say: Say = lambda text: None) -> Path:
    """Where config.json, the tokenizer and the weights of the recipe's model are.

    say    told before something that may take minutes
    """
    cache = Path(section.cache).expanduser()
    # The builders load torch, which takes seconds, so only the one that is asked for is imported.
    if section.path == "tiny":
        from .models.tiny import ensure_tiny

        say("the tiny model (built once, about two minutes, then cached)")
        return ensure_tiny(cache, seed=section.seed)
    if section.path == "smollm2":
        say("SmolLM2-135M-Instruct (converted once, then cached)")
        return _smollm2(cache / "smollm2")
    folder = Path(section.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            source="recipe",
            key="model.path",
            value=section.path,
            why="is no Hugging Face folder (no config.json in it).",
            remedy='Use "tiny", "smollm2" or the path of a folder that from_pretrained reads.',
        )
    return folder


def _smollm2(folder: Path) -> Path:
    from .models.smollm2 import convert_smollm2

    if folder.exists():
        return folder
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
