"""What an engine is told because of the device it runs on: the GPU where torch has one, else the CPU.

One module, so that everything else of the rollout side is the same on both. On CUDA an aligned engine runs
its steps as full CUDA graphs and without Inductor, whose fusions have bits that no separate call reproduces;
a standard one is vLLM with its defaults.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError
from ..kernels import operations
from ..kernels.contract import contract_hash
from .engine_config import EngineConfig

# vLLM refuses to start where less of the GPU is free than it may use. The size of its cache is given, so
# this share need only hold the weights of a small model beside a learner's.
_MEMORY_SHARE = 0.1
_LARGEST_GRAPH = 8192  # tokens: its activations stay allocated


def device() -> str:
    """ "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def contract_of(config: EngineConfig) -> str:
    """The learner's contract for aligned kernels; for stock ones a hash that no learner has.

    Raises ConfigError for a dtype without aligned kernels on this device, and for kernels it does not have.
    """
    place = device()
    if config.kernels == "batch_invariant" and place == "cpu":
        raise ConfigError(
            source="engine",
            key="kernels",
            value=config.kernels,
            why="is a mode of vLLM on GPUs.",
            remedy='Use "aligned" or "standard", or a GPU.',
        )
    if config.kernels != "aligned" and place == "cuda":
        from ..kernels import cuda_library

        return contract_hash(config.kernels, cuda_library.describe())
    if place == "cuda" and config.dtype != "bfloat16":
        raise ConfigError(
            source="recipe",
            key="model.dtype",
            value=config.dtype,
            why="has no aligned kernels on CUDA.",
            remedy='Use "bfloat16", or kernels = "standard".',
        )
    aligned = operations("aligned", place).contract()
    return aligned if config.kernels == "aligned" else contract_hash("stock", {"as": aligned})


def engine_args(config: EngineConfig) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs that depend on the device."""
    if device() == "cpu":
        return {"enforce_eager": True}
    if not config.graphs:
        return {"enforce_eager": True, "gpu_memory_utilization": _MEMORY_SHARE}
    if config.kernels != "aligned":  # vLLM as it comes: the fast baseline
        return {"gpu_memory_utilization": _MEMORY_SHARE}
    return {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": graph_sizes(config),
        },
        "gpu_memory_utilization": _MEMORY_SHARE,
    }


def graph_sizes(config: EngineConfig) -> list[int]:
    """Tokens of the steps that CUDA graphs are made for; a step is padded to the next one.

    vLLM's own sizes, which end at 512, and on to whole steps: otherwise Python launches each operation of a
    prefill, which takes longer than the GPU does. vLLM captures requests of one length and gives the last one
    what is left of the step: where that is longer than the context, it would read past its pages.

    >>> config = EngineConfig(model="m", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=4096)
    >>> graph_sizes(config)[-4:], graph_sizes(config.model_copy(update={"max_num_seqs": 1}))[-1]
    ([896, 1024, 1536, 2048], 512)
    """
    most = min(config.max_num_batched_tokens, _LARGEST_GRAPH, config.max_num_seqs * config.max_model_len)
    sizes = {
        1,
        2,
        4,
        *range(8, 256, 8),
        *range(256, 512, 16),
        *range(512, 1024, 128),
        *range(1024, most, 512),
    }
    requests = config.max_num_seqs
    return sorted(
        size
        for size in {*sizes, most}
        if size <= most and size // min(size, requests) + size % min(size, requests) <= config.max_model_len
    )


def environment(config: EngineConfig) -> dict[str, str]:
    """Settings that vLLM takes from the environment alone, while an engine is built."""
    if device() == "cpu":
        return {}
    return {
        # A fork would share the CUDA context that the learner may be making in another thread.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_BATCH_INVARIANT": str(int(config.kernels != "standard")),
        # It is compiled at its first use, and draws only for filters that training refuses.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
