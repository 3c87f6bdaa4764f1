"""The quickstart's policy at about 100 million parameters: imitates the same noisy teacher, on a GPU.

    python benchmarks/gpu_policy.py models/policy100m
    rz-agent train --env python --set 'model.path="models/policy100m"' --set model.dtype=bfloat16

A folder in Hugging Face layout. Everything but the sizes is the tiny model's (`rz_agent.recipes.models`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rz_agent.recipes.models.qwen3_torch import Qwen3, Qwen3Shape
from rz_agent.recipes.models.sft import WarmStart, warm_start
from rz_agent.recipes.models.tokenizer import END_ID, PAD_ID, build_tokenizer, write_json
from rz_agent.rollout.renderer import Renderer
from safetensors.torch import save_file

SHAPE = Qwen3Shape(hidden=768, layers=15, heads=12, kv_heads=4, head_dim=64, intermediate=2304)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=5e-4)
    given = parser.parse_args()
    began = time.perf_counter()
    build_tokenizer(given.out, seed=0, context=SHAPE.context)
    model = Qwen3(SHAPE, seed=0).cuda()
    plan = WarmStart(steps=given.steps, lr=given.lr)
    with torch.device("cuda"):
        losses = warm_start(model, Renderer(given.out), plan, seed=0)
    write_json(given.out / "config.json", SHAPE.hf_config(end=END_ID, pad=PAD_ID))
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    save_file(weights, given.out / "model.safetensors", metadata={"format": "pt"})
    count = sum(parameter.numel() for parameter in model.parameters())
    taken = time.perf_counter() - began
    print(f"{count:,} parameters, loss {sum(losses[-20:]) / 20:.4f} nats a token, {taken:.0f} s")


if __name__ == "__main__":
    main()
