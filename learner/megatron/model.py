"""The policy: a Megatron-core GPTModel whose arithmetic is `kernels` operations, in Hugging Face names to
the outside.

    log_probabilities(micro batch)   float32[R] on the last pipeline stage, the hidden state on the others
    load / tensors                   Hugging Face tensors in and out, exact
    holding(tensors)                 other weights for a while, the present ones back afterwards

The output layer runs only on rows that predict an action token, in chunks that are recomputed in the
backward pass, so the logits of a long micro-batch never exist all at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError
from ...kernels.operations import Operations
from ..packing import MicroBatch
from .architecture import Architecture
from .device import device, megatron_device
from .layers import Sequences, gathered_logits
from .packed_weights import PackedWeights
from .parallel import Parallel, first_found
from .spec import block_spec
from .weight_map import cut, entries, join, tensor_names

LOGIT_ROWS = 1024
"""Rows whose logits exist at once: 0.6 GB of float32 at a vocabulary of 152K."""


class PolicyModel:
    """This rank's part of the model."""

    def __init__(
        self,
        architecture: Architecture,
        operations: Operations,
        dtype: torch.dtype,
        parallel: Parallel,
        *,
        recompute: bool = False,
    ) -> None:
        """
        recompute  layers keep their input alone, and are computed again in the backward pass
        """
        architecture.require_divisible(parallel.tensor, parallel.pipeline)
        self.architecture, self.operations, self.parallel, self.dtype = (
            architecture,
            operations,
            parallel,
            dtype,
        )
        self.weights = PackedWeights(operations)
        self.config = _transformer_config(architecture, dtype, parallel)
        table = operations.rotary_table(
            architecture.head_dim, architecture.rotary_base, architecture.max_positions, dtype
        ).to(device())
        with megatron_device():
            self.module = GPTModel(
                self.config,
                block_spec(
                    self.config, self.weights, table, qk_norm=architecture.qk_norm, recompute=recompute
                ),
                vocab_size=architecture.vocabulary,
                max_sequence_length=architecture.max_positions,
                pre_process=parallel.first_stage,
                post_process=parallel.last_stage,
                share_embeddings_and_output_weights=architecture.tied,
                position_embedding_type="none",
                parallel_output=True,
            ).to(device=device(), dtype=dtype)

    def log_probabilities(self, batch: MicroBatch, run: Any) -> Tensor:
        """float32[R], or the hidden state [T, 1, 2H] where this is not the last stage.

        run  the module to call: the model itself or its data parallel wrapper
        """
        place = device()
        longest = max(b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False))
        boundaries = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=place)
        positions = torch.from_numpy(batch.positions).to(place)
        output: Tensor = run(
            torch.from_numpy(batch.token_ids).to(place)[None],
            positions[None],
            None,
            packed_seq_params=Sequences(
                qkv_format="thd",
                cu_seqlens_q=boundaries,
                cu_seqlens_kv=boundaries,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
                boundaries=batch.cu_seqlens,
                positions=positions,
            ),
            output_processor=self._token_logprobs,
            output_processor_context=batch,
        )
        return output

    def _token_logprobs(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: Any,
        **unused: Any,
    ) -> Tensor:
        """Megatron's hook after the last norm: log-probabilities of the action tokens, not all logits."""
        batch: MicroBatch = context
        place = hidden_states.device
        rows = torch.from_numpy(batch.rows).to(place)
        targets = torch.from_numpy(batch.targets).to(place)
        hidden = hidden_states[:, 0].index_select(0, rows)
        weight = output_layer.weight if output_weight is None else output_weight
        parts = []
        for first, end, temperature in _runs(batch):
            chunk = partial(self._chunk_logprobs, weight=weight, owner=output_layer, temperature=temperature)
            inputs = hidden[first:end], targets[first:end]
            whole = end - first == len(rows) or not torch.is_grad_enabled()
            parts.append(chunk(*inputs) if whole else checkpoint(chunk, *inputs, use_reentrant=False))
        return torch.cat(parts)

    def _chunk_logprobs(
        self, hidden: Tensor, targets: Tensor, *, weight: Tensor, owner: object, temperature: float
    ) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        logits = gathered_logits(hidden.contiguous(), weight, self.weights, owner, group)
        return self.operations.token_logprobs(logits, targets, temperature)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over whole Hugging Face tensors, rounded to the model's dtype. Raises ConfigError."""
        parameters = dict(self.module.named_parameters())
        for entry in self._entries():
            if missing := [name for name in entry.tensors if name not in tensors]:
                raise ConfigError(
                    source="weights",
                    key=missing[0],
                    value=None,
                    why="is missing",
                    remedy="Give every tensor.",
                )
            part = cut(entry, tensors, self.architecture, self.parallel.tensor_rank, self.parallel.tensor)
            held = parameters.pop(entry.parameter)
            if held.shape != part.shape:
                raise ConfigError(
                    source="weights",
                    key=" + ".join(entry.tensors),
                    value=tuple(part.shape),
                    why=f"does not fit {entry.parameter} of shape {tuple(held.shape)}",
                    remedy="Check that config.json and the weights belong together.",
                )
            held.copy_(part)
        if parameters:
            raise AssertionError(f"the weight map leaves out {sorted(parameters)}")
        self.weights.advance()

    def tensors(self) -> dict[str, Tensor]:
        """Whole Hugging Face tensors, copies, the same on every rank. Every rank must call it."""
        return self._whole({name: parameter.detach() for name, parameter in self.module.named_parameters()})

    def gradients(self) -> dict[str, Tensor]:
        """The summed float32 gradients in Hugging Face names; without data parallelism, which shards them."""
        if self.parallel.data > 1:
            raise NotImplementedError("gradients of data parallel replicas are never whole on one rank")
        return self._whole({name: parameter.main_grad for name, parameter in self.module.named_parameters()})

    @torch.no_grad()
    def _whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for stage in range(self.parallel.pipeline):
            for entry in entries(self.architecture, stage=stage, stages=self.parallel.pipeline):
                if entry.tensors[0] in found:
                    continue  # a tied output layer on another stage than the embedding
                held = own[entry.parameter] if stage == self.parallel.pipeline_rank else None
                found |= join(entry, self._gathered(held, stage), self.architecture)
        return {name: found[name] for name in tensor_names(self.architecture)}

    def _gathered(self, held: Tensor | None, stage: int) -> list[Tensor]:
        """Every tensor parallel rank's part of a parameter of `stage`, on all ranks."""
        parts: list[Tensor] = []
        if held is not None:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(held) for _ in range(self.parallel.tensor)]
            if self.parallel.tensor > 1:
                dist.all_gather(parts, held.detach().contiguous(), group=group)
            else:
                parts = [held.detach().clone()]
        if self.parallel.pipeline > 1:
            parts = self._from_stage(parts, stage)
        return parts

    def _from_stage(self, parts: list[Tensor], stage: int) -> list[Tensor]:
        group = parallel_state.get_pipeline_model_parallel_group()
        source = dist.get_global_rank(group, stage)
        described: list[Any] = [[(tuple(part.shape), part.dtype) for part in parts]]
        dist.broadcast_object_list(described, src=source, group=group)
        received = parts or [
            torch.empty(shape, dtype=dtype, device=device()) for shape, dtype in described[0]
        ]
        for part in received:
            dist.broadcast(part, src=source, group=group)
        return received

    @torch.no_grad()
    def first_not_finite(self) -> str | None:
        """Hugging Face name of the first parameter with a NaN or an infinity on any rank; None without one.

        The same on every rank. Every rank must call it.
        """
        held = dict(self.module.named_parameters())
        # Both ends of a tensor are NaN where it holds one; nothing as large as the tensor is allocated.
        ends = torch.stack([torch.stack(held[entry.parameter].aminmax()) for entry in self._entries()])
        finite = torch.isfinite(ends).all(1).tolist()
        broken = (entry for entry, whole in zip(self._entries(), finite, strict=True) if not whole)
        return first_found(next((" + ".join(entry.tensors) for entry in broken), None))

    @contextlib.contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Other weights inside the context; afterwards the present ones, bit for bit, still packed."""
        kept = [parameter.detach().clone() for parameter in self.module.parameters()]
        with self.weights.aside():
            try:
                self.load(tensors)
                yield
            finally:
                with torch.no_grad():
                    for parameter, value in zip(self.module.parameters(), kept, strict=True):
                        parameter.copy_(value)

    def _entries(self) -> list[Any]:
        return list(
            entries(self.architecture, stage=self.parallel.pipeline_rank, stages=self.parallel.pipeline)
        )


def _runs(batch: MicroBatch) -> Iterator[tuple[int, int, float]]:
    """Ranges of rows with one temperature and at most LOGIT_ROWS rows."""
    start = 0
    temperatures = batch.temperatures.tolist()
    for row in range(1, len(temperatures) + 1):
        if row == len(temperatures) or row - start == LOGIT_ROWS or temperatures[row] != temperatures[start]:
            yield start, row, temperatures[start]
            start = row


def _transformer_config(model: Architecture, dtype: torch.dtype, parallel: Parallel) -> Any:
    """No fusions (they need TransformerEngine or Apex), no dropout, sums instead of means."""
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.feed_forward,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        variable_seq_lengths=parallel.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # no experts here, but the default refuses variable lengths
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
