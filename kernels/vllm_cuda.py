"""What the plugin changes in a CUDA engine that asked for kernels = "aligned".

    linear layers, norms, rotary embedding, activation   the Triton kernels that the learner calls
    attention           FlashAttention-3 with one split (VLLM_BATCH_INVARIANT), the causal kernel for decoding
                        too; other attention is refused
    log-probabilities   our kernel, on the logits as the sampler drew from them
    prompt scores       at the temperature of their request                           (also "standard")

A layer is changed where it is made, so that a step costs nothing to look up what its engine asked for. What
the learner does not compute is refused rather than computed otherwise.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import cuda_attention, cuda_linear, cuda_rows
from .vllm_settings import KernelsName, kernels_of

Wrap = Callable[[Any, str, Callable[..., Any]], None]

_SAMPLING_FOR: contextvars.ContextVar[KernelsName | None] = contextvars.ContextVar(
    "rz_sampling_for", default=None
)


def install(wrap: Wrap) -> None:
    """Wrap the functions named above; `wrap(owner, name, wrapper)` replaces one, once."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample import logprob

    for layer, forward in ((RMSNorm, _norm), (RotaryEmbedding, _rotary), (SiluAndMul, _activation)):
        wrap(layer, "__init__", partial(_made, forward))
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        wrap(method, "create_weights", _weights_made)
    wrap(FlashAttentionImpl, "__init__", _attention_made)
    wrap(FlashAttentionMetadataBuilder, "build", _attention_planned)
    wrap(GPUModelRunner, "load_model", _model_loaded)
    wrap(GPUModelRunner, "sample_tokens", _sample_tokens)
    wrap(logprob, "compute_token_logprobs", _token_logprobs)


def _aligned_now() -> bool:
    """Whether the engine that is being built asked for aligned kernels."""
    from vllm.config.vllm import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or kernels_of(config) != "aligned":
        return False
    if not config.use_v2_model_runner:
        raise _refused("model runner", "version 1")
    return True


def _made(
    forward: Callable[..., Any], original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any
) -> None:
    original(layer, *args, **kwargs)
    if _aligned_now():
        layer._forward_method = partial(forward, layer)


def _norm(layer: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if not layer.has_weight or layer.variance_size_override is not None:
        raise _refused("norm", "one without weights, or of a part of its row")
    if residual is None:
        return cuda_rows.rms_norm(x, layer.weight.data, layer.variance_epsilon)
    return cuda_rows.add_rms_norm(x, residual, layer.weight.data, layer.variance_epsilon)


def _activation(layer: Any, x: Tensor) -> Tensor:
    return cuda_rows.silu_and_mul(x)


def _rotary(layer: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    if not layer.is_neox_style or layer.rotary_dim != layer.head_size or key is None:
        raise _refused("rotary embedding", "one in pairs, of a part of a head, or without keys")
    table = layer._match_cos_sin_cache_dtype(query)
    rotated = [
        cuda_rows.rotate(x.view(x.shape[0], -1, layer.head_size), positions, table).view(x.shape)
        for x in (query, key)
    ]
    return rotated[0], rotated[1]


def _weights_made(original: Callable[..., None], method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    original(method, layer, *args, **kwargs)
    if _aligned_now():
        method.apply = _apply


def _apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    product = cuda_linear.product(x, layer.weight)
    return product if bias is None else product + bias


def _attention_made(original: Callable[..., None], attention: Any, *args: Any, **kwargs: Any) -> None:
    original(attention, *args, **kwargs)
    if not _aligned_now():
        return
    wanted = {
        "FlashAttention": (attention.vllm_flash_attn_version, 3),
        "one split": (attention.batch_invariant_enabled, True),
        "sliding_window": (attention.sliding_window, (-1, -1)),
        "logits_soft_cap": (attention.logits_soft_cap, 0),
        "alibi_slopes": (attention.alibi_slopes, None),
        "sinks": (attention.sinks, None),
        "kv_cache_dtype": (attention.kv_cache_dtype, "auto"),
        "head size": (cuda_attention.supports(attention.head_size), True),
    }
    for name, (found, aligned) in wanted.items():
        if found is not aligned and found != aligned:
            raise _refused(f"attention's {name}", repr(found))


def _attention_planned(original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep FlashAttention-3 from taking another kernel for steps of few queries than for a prefill.

    Its choice differs in the tiles of keys; for one query a request it even leaves the mask out, and a CUDA
    graph captured like that would compute longer queries without it.
    """
    plan = original(builder, *args, **kwargs)
    if kernels_of(builder.vllm_config) == "aligned":
        plan.max_query_len = max(plan.max_query_len, cuda_attention.LEAST_QUERIES)
    return plan


def _model_loaded(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a model whose attention is computed by another backend, and products that split sums."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    original(runner, *args, **kwargs)
    if kernels_of(runner.vllm_config) != "aligned":
        return
    cuda_linear.require_whole_sums()
    for name, layer in runner.vllm_config.compilation_config.static_forward_context.items():
        if not isinstance(layer.impl, FlashAttentionImpl):
            raise _refused(f"attention of {name}", type(layer.impl).__name__)


def _refused(what: str, found: str) -> NotImplementedError:
    return NotImplementedError(f'{what} = {found} has no aligned learner on CUDA; use kernels = "standard"')


def _sample_tokens(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    kernels, state = kernels_of(runner.vllm_config), runner.execute_model_state
    if kernels is None or state is None:
        return original(runner, *args, **kwargs)
    token, worker = _SAMPLING_FOR.set(kernels), runner.prompt_logprobs_worker
    worker.compute_prompt_logprobs = partial(_prompt_logprobs, runner, worker.compute_prompt_logprobs)
    try:
        return original(runner, *args, **kwargs)
    finally:
        del worker.compute_prompt_logprobs
        _SAMPLING_FOR.reset(token)


def _prompt_logprobs(
    runner: Any,
    original: Callable[..., Any],
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    batch: Any,
    *rest: Any,
) -> Any:
    """vLLM scores a prompt at temperature 1 whatever was asked; score each request at its own."""
    of_requests = batch.idx_mapping_np
    if not runner.prompt_logprobs_worker.uses_prompt_logprobs[of_requests].any():
        return original(logits_of, hidden, batch, *rest)
    of_tokens = np.repeat(of_requests, batch.num_scheduled_tokens)
    asked = runner.sampler.sampling_states.temperature.np[of_tokens]
    temperatures, done = torch.from_numpy(asked).to(hidden.device), 0

    def tempered(rows: Tensor) -> Tensor:
        nonlocal done
        # vLLM asks for the rows in order, some at a time.
        of_rows, done = temperatures[done : done + len(rows)], done + len(rows)
        return cuda_rows.tempered(logits_of(rows), of_rows)

    return original(tempered, hidden, batch, *rest)


def _token_logprobs(original: Callable[..., Tensor], logits: Tensor, ids: Tensor) -> Tensor:
    """logits [R, V], ids [R, n] -> float32 [R, n]."""
    if _SAMPLING_FOR.get() != "aligned":
        return original(logits, ids)
    columns = [column.contiguous() for column in ids.to(torch.int64).unbind(1)]
    return torch.stack([cuda_rows.token_logprobs(logits, column)[0] for column in columns], 1)
