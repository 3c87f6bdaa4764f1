"""Which weight version sampled each token, where vLLM does not say: stamped by engine step.

    schedule             a step is stamped with the version that the engine then holds
    update_from_output   its tokens take over the step's stamp, when they come back
    finished request     carries its runs of (version, tokens) to the caller

A step and its stamp are made between two updates, by the thread that also makes the updates, and the GPU runs
them in that order: the stamp is the version that samples the step's tokens, however late they come back.
Tokens of a step that an update overtakes are dropped by vLLM and get no stamp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .vllm_settings import kernels_of, version_of

_STEP = "rz_version"
_REQUESTS = "rz_stamps"
_CARRIED = "rz_versions"

Runs = list[list[int]]  # [version, tokens], in the order of sampling


def schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.schedule`."""
    step = original(scheduler, *args, **kwargs)
    if kernels_of(scheduler.vllm_config) is not None:
        step.__dict__[_STEP] = version_of(scheduler.vllm_config)
    return step


def update_from_output(original: Callable[..., Any], scheduler: Any, step: Any, output: Any) -> Any:
    """Around `Scheduler.update_from_output`."""
    answers = original(scheduler, step, output)
    if _STEP not in step.__dict__:
        return answers
    stamps: dict[str, Runs] = scheduler.__dict__.setdefault(_REQUESTS, {})
    for of_client in answers.values():
        for answer in of_client.outputs:
            runs = stamps.setdefault(answer.request_id, [])
            add_run(runs, step.__dict__[_STEP], len(answer.new_token_ids))
            if answer.finish_reason is not None:
                # The one field of an answer that vLLM hands through to the caller as it is.
                answer.kv_transfer_params = {_CARRIED: stamps.pop(answer.request_id)}
    for aborted in stamps.keys() - scheduler.requests.keys():
        del stamps[aborted]
    return answers


def add_run(runs: Runs, version: int, tokens: int) -> None:
    """Append some tokens of a version.

    >>> runs = [[3, 2]]
    >>> add_run(runs, 3, 1)
    >>> add_run(runs, 4, 2)
    >>> runs
    [[3, 3], [4, 2]]
    """
    if not tokens:
        return
    if runs and runs[-1][0] == version:
        runs[-1][1] += tokens
    else:
        runs.append([version, tokens])


def carried(params: Mapping[str, Any] | None) -> NDArray[np.int32]:
    """int32[n]: the version of each token of a finished request.

    params  `RequestOutput.kv_transfer_params`; None for a request that was aborted
    """
    runs: Runs = [] if params is None else params[_CARRIED]
    versions = [np.full(tokens, version, dtype=np.int32) for version, tokens in runs]
    return np.concatenate(versions) if versions else np.zeros(0, dtype=np.int32)
