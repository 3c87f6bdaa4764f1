"""How an engine is built: all that vLLM is told; no default of its own may change a sample.

A configuration that exists can be started; what cannot run is refused where it is written, with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..kernels.vllm_settings import KernelsName

Mode = Literal["inprocess", "async"]
DtypeName = Literal["float32", "bfloat16"]


class EngineConfig(BaseModel):
    """One engine.

    model                   folder in Hugging Face layout: config.json and safetensors
    dtype                   of weights, activations and cache
    max_model_len           tokens of a prompt and its completion together
    max_num_seqs            requests in one engine step; more wait
    max_num_batched_tokens  tokens in one engine step; a longer prefill is cut into chunks
    block_size              tokens of a cache page, the unit of prefix caching
    kv_cache_gb             memory of the cache, in GiB
    kernels                 "aligned" (bit-identical with the learner), "standard" (vLLM's own), or on a GPU
                            "batch_invariant" (vLLM's own with VLLM_BATCH_INVARIANT, to compare with)
    threads                 OpenMP threads of the engine
    mode                    "inprocess": a thread of this process; "async": a process of its own
    seed                    of vLLM's global generator, which draws for requests without a seed
    graphs                  on a GPU, replay steps as CUDA graphs; False where modules must be seen to run
    initial_version         version of the weights in `model`
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: Path
    dtype: DtypeName = "float32"
    max_model_len: int = Field(default=4096, ge=2)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    block_size: int = Field(default=32, ge=32, multiple_of=32)
    kv_cache_gb: float = Field(default=1.0, gt=0)
    kernels: KernelsName = "aligned"
    threads: int = Field(default=1, ge=1)
    mode: Mode = "async"
    seed: int = 0
    graphs: bool = True
    initial_version: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is smaller than max_num_seqs = "
                f"{self.max_num_seqs}: a step could not decode every running request. Raise the first or "
                "lower the second."
            )
        return self
