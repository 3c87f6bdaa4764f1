"""vLLM's compiled FlashAttention-3 without vLLM's Python, and what the bits depend on, on CUDA.

The learner needs one compiled operation but not `import vllm`, which costs seconds. Loading a library that is
already loaded changes nothing, whichever of engine and learner comes first. Nothing waits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from . import cpu_library

_LIBRARY = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
_HOPPER = (9, 0)


def library_path() -> Path:
    """The shared library of FlashAttention-3. Raises ConfigError where no CUDA build of vLLM is installed."""
    found = importlib.util.find_spec("vllm")
    path = None if found is None or found.origin is None else Path(found.origin).parent / _LIBRARY
    if path is None or not path.exists():
        raise ConfigError(
            source="kernels",
            key="vllm",
            value=cpu_library.vllm_version(),
            why=f"has no {_LIBRARY}, which the aligned attention on CUDA is.",
            remedy='Install the CUDA set (requirements/install.sh cuda), or use kernels = "standard".',
        )
    return path


@functools.cache
def load() -> str:
    """Load the library into this process (once) and return a fingerprint of its bytes.

    Raises ConfigError without a GPU that it was built for.
    """
    there = torch.cuda.is_available()
    if not there or torch.cuda.get_device_capability() != _HOPPER:
        raise ConfigError(
            source="kernels",
            key="device",
            value=torch.cuda.get_device_name() if there else None,
            why="is not a Hopper GPU, and FlashAttention-3 is built for those only.",
            remedy='Use kernels = "standard", or an H100 or H200.',
        )
    path = library_path()
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return f"{path.name}:{digest.hexdigest()}"


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(output [T, H, D], float32 [H, T] log of the sums) of packed causal sequences, no split over keys.

    boundaries  int32[S + 1]  where the sequences begin, and T
    """
    load()
    out, log_sums, *_ = torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, None,  # no new keys and values, no second query, a new output
        boundaries, boundaries, None, None, None, longest, longest,
        None, None, None, None, None, None, None, None, None,  # no pages, no padding, no rotary, no scales
        scale, True, -1, -1, 0.0, True, None,  # causal, no window, no cap, no plan made ahead
        1, None, 0, None, 1, 0, None,  # one split; one rank holds all keys
    )  # fmt: skip
    return out, log_sums


def describe() -> dict[str, str]:
    """What the bits depend on besides the arithmetic: GPU, compilers and libraries."""
    import triton

    return {
        "device": "cuda",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": cpu_library.vllm_version(),
    }
