"""Between Hugging Face names and Megatron's: which tensors, merged and split how, make up each parameter.

    Entry      one Megatron parameter: its name, how it is cut, the Hugging Face tensors it is made of
    entries    all parameters of one pipeline stage

Cuts over tensor parallel ranks: "whole" (every rank has it), "rows" and "columns" of the matrix, "qkv" (per
group of heads: its queries, key, value) and "gate_up" (each rank: its part of gate, then of up). Both
directions are exact copies, so import after export gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .architecture import Architecture

Cut = Literal["whole", "rows", "columns", "qkv", "gate_up"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors in it."""

    parameter: str
    cut: Cut
    tensors: tuple[str, ...]


def entries(model: Architecture, *, stage: int, stages: int) -> list[Entry]:
    """The parameters of pipeline stage `stage` of `stages`, in the order of the layers."""
    first, last = stage == 0, stage == stages - 1
    found: list[Entry] = []
    if first:
        found.append(Entry("embedding.word_embeddings.weight", "rows", ("model.embed_tokens.weight",)))
    per_stage = model.layers // stages
    for local in range(per_stage):
        found += _layer(model, local, stage * per_stage + local)
    if last:
        found.append(Entry("decoder.final_layernorm.weight", "whole", ("model.norm.weight",)))
        if not model.tied:
            found.append(Entry("output_layer.weight", "rows", ("lm_head.weight",)))
        elif not first:
            found.append(Entry("output_layer.weight", "rows", ("model.embed_tokens.weight",)))
    return found


def _layer(model: Architecture, local: int, index: int) -> list[Entry]:
    ours, theirs = f"decoder.layers.{local}.", f"model.layers.{index}."
    attention = tuple(f"{theirs}self_attn.{name}_proj.weight" for name in "qkv")
    gate_up = (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight")
    found = [
        Entry(f"{ours}input_layernorm.weight", "whole", (f"{theirs}input_layernorm.weight",)),
        Entry(f"{ours}self_attention.linear_qkv.weight", "qkv", attention),
        Entry(f"{ours}self_attention.linear_proj.weight", "columns", (f"{theirs}self_attn.o_proj.weight",)),
        Entry(f"{ours}pre_mlp_layernorm.weight", "whole", (f"{theirs}post_attention_layernorm.weight",)),
        Entry(f"{ours}mlp.linear_fc1.weight", "gate_up", gate_up),
        Entry(f"{ours}mlp.linear_fc2.weight", "columns", (f"{theirs}mlp.down_proj.weight",)),
    ]
    if model.qk_norm:
        found += [
            Entry(
                f"{ours}self_attention.{name}_layernorm.weight",
                "whole",
                (f"{theirs}self_attn.{name}_norm.weight",),
            )
            for name in "qk"
        ]
    return found


def tensor_names(model: Architecture) -> list[str]:
    """Every Hugging Face tensor of the model, each once."""
    return list(dict.fromkeys(name for entry in entries(model, stage=0, stages=1) for name in entry.tensors))


def cut(entry: Entry, tensors: Mapping[str, Tensor], model: Architecture, rank: int, ranks: int) -> Tensor:
    """This rank's part of a parameter, from whole Hugging Face tensors."""
    parts = [tensors[name] for name in entry.tensors]
    match entry.cut:
        case "whole":
            return parts[0]
        case "rows":
            return parts[0].chunk(ranks, 0)[rank]
        case "columns":
            return parts[0].chunk(ranks, 1)[rank]
        case "qkv":
            return _merge_heads(parts, model).chunk(ranks, 0)[rank]
        case "gate_up":
            return torch.cat([part.chunk(ranks, 0)[rank] for part in parts])


def join(entry: Entry, parts: Sequence[Tensor], model: Architecture) -> dict[str, Tensor]:
    """The whole Hugging Face tensors of a parameter, from every rank's part; the inverse of `cut`."""
    match entry.cut:
        case "whole":
            whole = [parts[0]]
        case "rows":
            whole = [torch.cat(list(parts), 0)]
        case "columns":
            whole = [torch.cat(list(parts), 1)]
        case "qkv":
            whole = _split_heads(torch.cat(list(parts), 0), model)
        case "gate_up":
            halves = [part.chunk(2, 0) for part in parts]
            whole = [torch.cat([half[side] for half in halves], 0) for side in (0, 1)]
    return dict(zip(entry.tensors, (tensor.contiguous() for tensor in whole), strict=True))


def _merge_heads(parts: Sequence[Tensor], model: Architecture) -> Tensor:
    groups, width = model.kv_heads, model.head_dim
    by_group = [part.reshape(groups, -1, width, part.shape[-1]) for part in parts]
    return torch.cat(by_group, 1).reshape(-1, parts[0].shape[-1])


def _split_heads(merged: Tensor, model: Architecture) -> list[Tensor]:
    queries, columns = model.heads // model.kv_heads, merged.shape[-1]
    by_group = merged.view(model.kv_heads, queries + 2, model.head_dim, columns)
    parts = by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1]
    return [part.reshape(-1, columns) for part in parts]
