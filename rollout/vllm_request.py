"""Our requests in vLLM's words, and vLLM's answers in ours; shared by both engines.

Every sampling parameter is set here, so a model's generation_config.json can change nothing. Every answer
is checked here: as many log-probabilities and versions as tokens, each finite and of the sampled token, or
an error.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ..errors import ConfigError, MissingLogprob, NonFinite
from ..kernels import vllm_settings, vllm_versions
from ..trajectory import Float32, Int32, Sampling
from ..weight_store import WeightManifest
from . import vllm_device
from .engine import Completion, FinishReason
from .engine_config import EngineConfig

_GIB = 1 << 30


def engine_args(config: EngineConfig) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs or AsyncEngineArgs. Raises ConfigError for a context the model lacks."""
    _check_context(config)
    from ..kernels.vllm_child import RzExecutor

    return {
        "model": str(config.model),
        "dtype": config.dtype,
        # One more than promised: a score samples one token after its last.
        "max_model_len": config.max_model_len + 1,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "kv_cache_memory_bytes": int(config.kv_cache_gb * _GIB),
        "seed": config.seed,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "rz"},
        "worker_extension_cls": "rz_agent.kernels.vllm_weights.RzWorker",
        "additional_config": vllm_settings.additional_config(config.kernels, config.initial_version),
        # A class and not the name "uni", which vLLM turns into one more process on a CPU. Ours, because an
        # engine in a process of its own learns from it whose that is.
        "distributed_executor_backend": RzExecutor,
        **vllm_device.engine_args(config),
    }


def _check_context(config: EngineConfig) -> None:
    model = json.loads((config.model / "config.json").read_text())
    longest = {**model, **model.get("text_config", {})}.get("max_position_embeddings")
    if longest is not None and config.max_model_len > longest:
        raise ConfigError(
            source="engine",
            key="max_model_len",
            value=config.max_model_len,
            why=f"is more than the model's max_position_embeddings = {longest}.",
            remedy=f"Use at most {longest}.",
        )


def salt(version: int, cold: int | None = None) -> str:
    """What keeps apart in the prefix cache what may not be shared: the versions, and a cold request from all.

    cold  number of a request that neither reads a prefix nor leaves one

    >>> salt(3), salt(3, cold=17)
    ('3', 'score-17')
    """
    return str(version) if cold is None else f"score-{cold}"


def prompt(ids: Sequence[int], images: Sequence[bytes], salt: str) -> dict[str, Any]:
    """vLLM's prompt: ids, images, and the salt of their prefixes in the cache."""
    request: dict[str, Any] = {"prompt_token_ids": [int(i) for i in ids], "cache_salt": salt}
    if images:
        from PIL import Image

        opened = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        request["multi_modal_data"] = {"image": opened}
    return request


def check_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Raises ValueError for an id that the model has no row for: the engine would read its padding."""
    array = np.asarray(ids)
    if strange := np.flatnonzero((array < 0) | (array >= vocabulary)).tolist():
        at = strange[0]
        raise ValueError(f"prompt id {array[at]} at position {at} is outside the vocabulary of {vocabulary}")


def sampling_params(
    config: EngineConfig,
    sampling: Sampling,
    *,
    prompt_tokens: int,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int | None,
) -> Any:
    """vLLM's SamplingParams of a request. Raises ValueError naming what cannot be served."""
    room = config.max_model_len - prompt_tokens
    if prompt_tokens < 1 or room < 1:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens leaves no room in max_model_len = {config.max_model_len}"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: a request samples at least one token")
    if not sampling.temperature > 0:
        raise ValueError(f"temperature = {sampling.temperature}: mu needs a temperature above 0")
    return _params(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(max_tokens, room),
        stop_token_ids=list(stop_token_ids),
        seed=seed,
    )


def scoring_params(config: EngineConfig, *, prompt_tokens: int, temperature: float) -> Any:
    """vLLM's SamplingParams that score a prompt. Raises ValueError for a prompt that does not fit."""
    if not 1 <= prompt_tokens <= config.max_model_len:
        raise ValueError(
            f"{prompt_tokens} tokens cannot be scored with max_model_len = {config.max_model_len}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: a log-probability needs a temperature above 0")
    return _params(
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        max_tokens=1,
        stop_token_ids=[],
        seed=0,
        prompt_logprobs=0,
    )


def _params(**chosen: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=1,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        ignore_eos=True,
        stop=None,
        logit_bias=None,
        bad_words=None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache="prompt_logprobs" in chosen,
        **chosen,
    )


def completion(output: Any) -> Completion:
    """Check and convert a finished RequestOutput."""
    sampled = output.outputs[0]
    token_ids = np.asarray(sampled.token_ids, dtype=np.int32)
    return Completion(
        token_ids=token_ids,
        logprobs=_logprobs(sampled.logprobs, token_ids, output.request_id),
        versions=vllm_versions.token_versions(output),
        finish_reason=_finish_reason(sampled.finish_reason, output.request_id),
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens or 0,
    )


def scores(output: Any) -> Float32:
    """float32 [T] of a scored prompt; NaN first."""
    ids = np.asarray(output.prompt_token_ids, dtype=np.int32)
    flat = output.prompt_logprobs
    found = np.full(len(ids), np.nan, dtype=np.float32)
    if flat is None or len(flat) != len(ids):
        count = "no" if flat is None else len(flat)
        raise MissingLogprob(f"request {output.request_id}: {count} scores for {len(ids)} tokens")
    if len(ids) > 1:
        found[1:] = _checked(flat.token_ids, flat.logprobs, ids[1:], output.request_id)
    return found


def _logprobs(flat: Any, token_ids: Int32, request: str) -> Float32:
    if flat is None:
        if len(token_ids):
            raise MissingLogprob(f"request {request}: {len(token_ids)} tokens without log-probabilities")
        return np.zeros(0, dtype=np.float32)
    return _checked(flat.token_ids, flat.logprobs, token_ids, request)


def _checked(of_ids: Sequence[int], values: Sequence[float], token_ids: Int32, request: str) -> Float32:
    if len(of_ids) != len(token_ids) or len(values) != len(token_ids):
        raise MissingLogprob(
            f"request {request}: {len(values)} log-probabilities for {len(token_ids)} tokens"
        )
    if strange := np.flatnonzero(np.asarray(of_ids, dtype=np.int32) != token_ids).tolist():
        at = strange[0]
        raise MissingLogprob(
            f"request {request}: token {at} is {token_ids[at]}, its log-probability is that of {of_ids[at]}"
        )
    logprobs = np.asarray(values, dtype=np.float32)
    if bad := np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= 0))).tolist():
        raise NonFinite(f"request {request}: token {bad[0]} has log-probability {logprobs[bad[0]]}")
    return logprobs


def _finish_reason(reason: str | None, request: str) -> FinishReason:
    if reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"request {request} ended with finish_reason {reason!r}")
    return cast(FinishReason, reason)


def update_info(manifest: WeightManifest) -> dict[str, Any]:
    """What the transfer engine "rz" is sent for a manifest."""
    return {
        "version": manifest.version,
        "path": str(manifest.path),
        "checksums": dict(manifest.checksums),
    }


def check_newer(manifest: WeightManifest, version: int, *, first: bool) -> None:
    """Raises ValueError unless the manifest is newer than what is served.

    first  nothing was published yet: the version that the engine began with may be, which proves it
    """
    if manifest.version < version or (manifest.version == version and not first):
        raise ValueError(f"update to version {manifest.version}, but the engine already serves {version}")
