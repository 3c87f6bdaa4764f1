"""What an engine of ours tells the plugin, inside vLLM's own configuration.

`VllmConfig.additional_config["rz_agent"]` is the switch: vLLM carries it, pickled with the rest of its
configuration, into every process it starts, so nothing depends on environment variables and two engines of
one process may differ. An engine without the entry is not ours, and every function of the plugin passes
through to vLLM's own.

The version of the weights that an engine holds is in the same entry: worker and scheduler of an engine share
its configuration, in one process and one thread.
"""

from __future__ import annotations

from typing import Any, Literal, cast

KernelsName = Literal["aligned", "standard", "batch_invariant"]

_KEY = "rz_agent"
_VERSION = "version"


def additional_config(kernels: KernelsName, version: int) -> dict[str, Any]:
    """The entry to pass as `additional_config` when an engine is built that begins with a version."""
    return {_KEY: {"kernels": kernels, _VERSION: version}}


def kernels_of(vllm_config: Any) -> KernelsName | None:
    """What the engine of this configuration asked for; None where it is not ours."""
    extra = vllm_config.additional_config
    if not isinstance(extra, dict) or _KEY not in extra:
        return None
    return cast(KernelsName, extra[_KEY]["kernels"])


def version_of(vllm_config: Any) -> int:
    """The version of the weights that an engine of ours holds."""
    return int(vllm_config.additional_config[_KEY][_VERSION])


def set_version(vllm_config: Any, version: int) -> None:
    """The engine of this configuration now holds that version."""
    vllm_config.additional_config[_KEY][_VERSION] = version
