"""Which way weights go from the learner of a run to its engines: the recipe's, or the fastest that is proven.

    in one process                                   the learner's own tensors
    "shared": one host, and one GPU or none          the learner's own tensors, opened by the engine
    "broadcast": different GPUs, or CPUs anywhere    NCCL or gloo
    "files": anywhere                                the weight store's file, read beside the steps

On GPUs "auto" is "files": CUDA IPC and NCCL have to be asked for. With Ray the tensors are with the actor of
rank 0, and so is the sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..errors import ConfigError
from ..kernels.transfer.broadcast import Broadcasting
from ..kernels.transfer.senders import FilesOnly, InProcess, Sender, Shared
from ..learner.ranks import AnyLearner
from ..rollout.engine import Engine
from ..rollout.vllm_device import device
from .recipe import Recipe
from .sections import Transport

Chosen = Literal["files", "shared", "broadcast"]


async def weight_sender(recipe: Recipe, engine: Engine, learner: AnyLearner) -> Sender:
    """Of a run whose engine and learner are started. Raises ConfigError for a way that is not there."""
    if recipe.runtime == "ray":
        from .cluster_weights import ray_sender

        return await ray_sender(recipe.weights.transport, engine, learner)
    return local_sender(recipe)


def check_transport(recipe: Recipe) -> None:
    """Raises ConfigError for a way that is not there, as far as can be told before anything is started."""
    if recipe.runtime == "local":
        local_sender(recipe)


def local_sender(recipe: Recipe) -> Sender:
    """Of `runtime = "local"`: one engine, beside the learner's rank 0 and on its device."""
    chosen = recipe.weights.transport
    if chosen == "files":
        return FilesOnly()
    if chosen == "broadcast":
        if device() == "cuda":
            raise _on_one_gpu()
        return Broadcasting("127.0.0.1", receivers=1)
    if chosen == "auto" and device() == "cuda":
        return FilesOnly()
    return InProcess() if recipe.rollout.engine.mode == "inprocess" else Shared()


def choose(transport: Transport, learner: str, engines: Sequence[str]) -> Chosen:
    """For a learner and engines at these places (`device_id`); ConfigError where the recipe's cannot be.

    >>> choose("auto", "GPU a", ["GPU a"]), choose("broadcast", "GPU a", ["GPU b", "GPU c"])
    ('files', 'broadcast')
    """
    together = {learner} == {*engines}
    on_gpus = learner.startswith("GPU ")
    apart = len({learner, *engines}) == 1 + len(engines)
    if transport == "auto":
        return "shared" if together and not on_gpus else "files"
    if transport == "broadcast" and on_gpus and not apart:
        raise _on_one_gpu()
    if transport == "shared" and not together:
        raise _refused("shared", f"but the learner is on {learner} and an engine elsewhere.", '"auto"')
    if transport == "shared" and on_gpus and len(engines) > 1:
        raise _refused("shared", "serves one engine on a GPU: a handle can be opened once.", '"files"')
    return transport


def _on_one_gpu() -> ConfigError:
    return _refused(
        "broadcast",
        "but learner and engines are not on different GPUs, and NCCL refuses two processes on one.",
        '"shared" or "auto", or runtime = "ray" with a GPU for each',
    )


def _refused(transport: str, why: str, use: str) -> ConfigError:
    return ConfigError(
        source="recipe", key="weights.transport", value=transport, why=why, remedy=f"Use {use}."
    )
