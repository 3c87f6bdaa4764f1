"""The tiny model: a real Qwen3 that a laptop builds in two minutes and improves in two more.

    build_tiny(out, seed=0)           tokenizer, warm start, Hugging Face folder
    ensure_tiny(cache_dir, seed=0)    the same, built once for each version of this code

0.64 million parameters in float32, trained to imitate a noisy teacher who solves arithmetic with a
Python tool, so that its sampled reward is about 0.2: enough to learn from, far from learned.
The same seed, steps and threads give the same files on the same machine and torch.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from ... import rollout
from ...errors import ConfigError
from ...rollout.renderer import Renderer
from .qwen3_torch import Qwen3, Qwen3Shape
from .sampled_reward import sampled_reward
from .sft import Progress, WarmStart, torch_threads, warm_start
from .tokenizer import END_ID, PAD_ID, build_tokenizer, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyReport:
    """What was built.

    loss            mean over the last 20 steps of the warm start, nats a token
    sampled_reward  mean reward at temperature 1 on fresh problems; None where none was sampled
    seconds, cpu_seconds   of the whole build: wall clock and this process's own
    sha256          of model.safetensors and tokenizer.json
    """

    path: Path
    seed: int
    parameters: int
    loss: float
    sampled_reward: float | None
    seconds: float
    cpu_seconds: float
    sha256: Mapping[str, str]


def build_tiny(
    out: Path,
    *,
    seed: int = 0,
    steps: int = 800,
    batch: int = 32,
    threads: int = 2,
    episodes: int = 512,
    progress: Progress | None = None,
) -> TinyReport:
    """Build the model into `out`, which must be new or empty.

    steps, batch   of the warm start; below some hundred steps the policy cannot call the tool yet
    threads        torch threads of the warm start; part of what the bits depend on
    episodes       sampled for `TinyReport.sampled_reward`; 0 samples none
    progress       called after each step with (steps done, steps in all, loss)
    """
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            source="build_tiny", key="out", value=str(out), why="is not empty", remedy="Name a new folder."
        )
    began, cpu_began = time.perf_counter(), time.process_time()
    shape, plan = Qwen3Shape(), WarmStart(steps=steps, batch=batch, threads=threads)
    build_tokenizer(out, seed=seed, context=shape.context)
    renderer, model = Renderer(out), Qwen3(shape, seed=seed)
    losses = warm_start(model, renderer, plan, seed=seed, progress=progress)
    write_json(out / "config.json", shape.hf_config(end=END_ID, pad=PAD_ID))
    save_file(model.state_dict(), out / "model.safetensors", metadata={"format": "pt"})
    with torch_threads(1):  # one token a row is too little work to share
        # The warm start draws its problems from the seed too; another seed makes these fresh.
        fresh = seed + 1_000_003
        reward = sampled_reward(model, renderer, episodes=episodes, seed=fresh) if episodes else None
    return TinyReport(
        path=out,
        seed=seed,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        loss=sum(losses[-20:]) / len(losses[-20:]),
        sampled_reward=reward,
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu_began,
        sha256={name: _sha256(out / name) for name in ("model.safetensors", "tokenizer.json")},
    )


def ensure_tiny(
    cache_dir: Path, seed: int = 0, *, steps: int = 800, threads: int = 2, progress: Progress | None = None
) -> Path:
    """The folder of that model in `cache_dir`, built now if this version of the code has not yet.

    progress  as in `build_tiny`; what it raises ends the build, which then leaves nothing behind
    Safe when several processes ask at once: each builds for itself and the first one is kept.
    """
    folder = Path(cache_dir) / f"tiny-seed{seed}-steps{steps}-threads{threads}-{code_version()}"
    if folder.exists():
        return folder
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="tiny-", dir=cache_dir))
    try:
        build_tiny(building, seed=seed, steps=steps, threads=threads, episodes=0, progress=progress)
        building.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def code_version() -> str:
    """12 hex digits over everything that the model's bits come from: this code, torch, tokenizers."""
    here, rooms = Path(__file__).parent, Path(str(rollout.__file__)).parent
    mine = ("traces", "tokenizer", "qwen3_torch", "sft", "tiny")
    theirs = ("special_tokens", "chat_template", "renderer", "conversation")
    sources = [here / f"{name}.py" for name in mine] + [rooms / f"{name}.py" for name in theirs]
    digest = hashlib.sha256(f"{torch.__version__} {tokenizers.__version__}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
