"""The entry point that vLLM calls in each of its processes: an engine batch invariant and updatable.

What it changes on a CPU, and only for engines that asked (see vllm_settings; vllm_cuda is for CUDA):

    linear layers   one product for every number of rows ("aligned"), parameters kept ("aligned", "standard")
    attention       requests cut into pseudo requests, no split over keys                       ("aligned")
                    one at a time in a process: its scratch area is shared                      (all engines)
    seeds           a seeded request whose prefill is chunked no longer stops the engine        (both)
    prompt scores   log-probabilities of a prompt are those of the request's temperature        (both)
    weights         the transfer engine "rz"                                                    (both)

Invariant: an engine that did not ask runs vLLM's functions unchanged. `install` may be called repeatedly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cpu_attention, cpu_library, vllm_linear, vllm_stamps, vllm_versions
from .vllm_settings import kernels_of

_MARK = "rz_agent_original"


def install() -> None:
    """Register the transfer engine and wrap the functions of this platform."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    vllm_versions.release()
    if "rz" not in WeightTransferEngineFactory._registry:
        module = f"{__package__}.vllm_weights"
        WeightTransferEngineFactory.register_engine("rz", module, "RzWeightTransferEngine")
    if not vllm_versions.tags_versions():
        _install_stamps()
    if current_platform.is_cpu():
        _install_cpu()
    elif current_platform.is_cuda():
        # Here, because it needs Triton, which a CPU engine does not.
        from . import vllm_cuda

        vllm_cuda.install(_wrap)


def _install_stamps() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    _wrap(Scheduler, "schedule", vllm_stamps.schedule)
    _wrap(Scheduler, "update_from_output", vllm_stamps.update_from_output)


def _install_cpu() -> None:
    import vllm._custom_ops as custom_ops
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    _wrap(layer_utils, "dispatch_cpu_unquantized_gemm", _dispatch)
    _wrap(CPUAttentionMetadataBuilder, "build", _build)
    for name in ("cpu_attn_get_scheduler_metadata", "cpu_attention_with_kv_cache"):
        _wrap(custom_ops, name, _alone)
    _wrap(CPUModelRunner, "_sample", _sample)
    _wrap(CPUModelRunner, "_bookkeeping_sync", _bookkeep)
    _wrap(CPUModelRunner, "_get_prompt_logprobs_dict", _prompt_logprobs)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace owner.name by wrapper(original, ...), once."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(call, _MARK, original)
    setattr(owner, name, call)


def _alone(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with cpu_library.SCRATCH:
        return original(*args, **kwargs)


def _dispatch(original: vllm_linear.Dispatch, layer: Any, remove_weight: bool) -> None:
    from vllm.config import get_current_vllm_config

    kernels = kernels_of(get_current_vllm_config())
    if kernels is None or layer.weight.is_meta or layer.weight.ndim != 2:
        original(layer, remove_weight)
    else:
        vllm_linear.attach(layer, kernels, original)


def _build(
    original: Callable[..., Any], builder: Any, common_prefix_len: int, common: Any, fast_build: bool = False
) -> Any:
    aligned = kernels_of(builder.vllm_config) == "aligned"
    if not aligned or builder.is_cross_attention or builder.is_encoder_only_attention:
        return original(builder, common_prefix_len, common, fast_build)
    _check_attention(builder, common)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    starts = common.query_start_loc[: common.num_reqs + 1].tolist()
    query_lens = [b - a for a, b in itertools.pairwise(starts)]
    pieces = cpu_attention.cut(query_lens, common.seq_lens[: common.num_reqs].tolist())
    plan = torch.ops._C.get_scheduler_metadata(
        len(pieces.owner), builder.num_heads, builder.num_kv_heads, builder.head_dim, pieces.seq_lens,
        builder.dtype, pieces.query_start_loc, True, -1, builder.isa, False, None, builder.kv_cache_dtype,
    )  # fmt: skip
    return CPUAttentionMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=pieces.longest,
        query_start_loc=pieces.query_start_loc,
        max_seq_len=common.max_seq_len,
        seq_lens=pieces.seq_lens,
        block_table=common.block_table_tensor[pieces.owner].contiguous(),
        slot_mapping=common.slot_mapping,
        scheduler_metadata=plan,
        causal=True,
    )


def _check_attention(builder: Any, common: Any) -> None:
    """Refuse what the learner's attention does not compute, rather than compute something else."""
    path = cpu_library.attention_path(builder.dtype, builder.head_dim, builder.block_size)
    wanted = {
        "causal": (common.causal, True),
        "sliding_window": (builder.window_size, -1),
        "kv_cache_dtype": (builder.kv_cache_dtype, "auto"),
        "vector path": (builder.isa, path),
    }
    for name, (found, aligned) in wanted.items():
        if found is not aligned and found != aligned:
            raise NotImplementedError(
                f"attention with {name} = {found!r} has no aligned learner (it computes {aligned!r}); "
                'use kernels = "standard"'
            )


def _sample(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Remember the generators of requests whose draw in this step is thrown away (their prefill goes on)."""
    runner.rz_unused_draws = {}
    if kernels_of(runner.vllm_config) is not None:
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        unused = {i: (generators[i], generators[i].get_state()) for i in discarded if i in generators}
        runner.rz_unused_draws = unused
    return original(runner, *args, **kwargs)


def _bookkeep(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Give those draws back, where vLLM would move an offset that generators on a CPU do not have."""
    generators = runner.input_batch.generators
    for index, (generator, state) in runner.rz_unused_draws.items():
        generator.set_state(state)
        del generators[index]
    try:
        return original(runner, *args, **kwargs)
    finally:
        for index, (generator, _) in runner.rz_unused_draws.items():
            generators[index] = generator


def _prompt_logprobs(
    original: Callable[..., Any], runner: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
) -> dict[str, Any]:
    """vLLM scores a prompt at temperature 1 whatever was asked; score each request at its own."""
    if kernels_of(runner.vllm_config) is None or not runner.num_prompt_logprobs:
        return dict(original(runner, hidden_states, num_scheduled_tokens))
    pending = runner.num_prompt_logprobs
    scores: dict[str, Any] = {}
    try:
        for request, count in list(pending.items()):
            runner.num_prompt_logprobs = {request: count}
            temperature = runner.requests[request].sampling_params.temperature
            runner.sampler.compute_logprobs = functools.partial(_logprobs_at, temperature)
            scores.update(original(runner, hidden_states, num_scheduled_tokens))
            if request not in runner.num_prompt_logprobs:
                del pending[request]
    finally:
        runner.num_prompt_logprobs = pending
        del runner.sampler.compute_logprobs
    return scores


def _logprobs_at(temperature: float, logits: Tensor) -> Tensor:
    divisor = torch.tensor(temperature, dtype=torch.float32, device=logits.device)
    return logits.to(torch.float32).div(divisor).log_softmax(dim=-1)
