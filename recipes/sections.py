"""The tables of a recipe, one model each; `recipe.py` puts them together and judges combinations.

Every model is frozen, refuses unknown keys, takes finite numbers only and does not convert: "8" is not 8, and
1 is not true.
A field's description is what a person reads when the value is refused, so it says what to write.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..learner.learner_config import MOST

MAX_LAG = 64
Transport = Literal["auto", "files", "shared", "broadcast"]
# Colder, one token has all of the probability; hotter, the model has no say in it.
COLDEST, HOTTEST = 0.01, 100.0


class Section(BaseModel):
    """Base of all tables."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """What is trained."""

    path: str = Field(
        "tiny",
        min_length=1,
        description='"tiny" (built from a seed), "smollm2" (SmolLM2-135M-Instruct) or a Hugging Face folder',
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="the type that both the engine and the learner compute in"
    )
    tool_format: Literal["auto", "hermes", "xml"] = Field(
        "auto",
        description='how it writes tool calls: "hermes" (JSON), "xml", or "auto": by its chat template',
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the tiny model, apart from the run's")
    cache: str = Field("~/.cache/rz-agent", description="folder that built models are kept in")


class EnvSection(Section):
    """What it is trained on."""

    id: str = Field(
        "rz/PythonMath-v0", min_length=1, description="a registered environment, see `rz-agent env list`"
    )
    split: str = Field("train", min_length=1, description="which tasks of its taskset")
    options: dict[str, Any] = Field(default_factory=dict, description="what the environment itself takes")


class EngineSection(Section):
    """How the inference engine is run."""

    mode: Literal["async", "inprocess"] = Field(
        "async", description='"async" (a process of its own) or "inprocess" (tests, determinism)'
    )
    replicas: int = Field(
        1, ge=1, le=MOST, description='engines side by side; more than one needs runtime = "ray"'
    )
    max_num_seqs: int = Field(64, ge=1, le=MOST, description="requests computed together")
    max_num_batched_tokens: int = Field(2048, ge=16, le=MOST, description="tokens of one engine step")
    block_size: int = Field(
        32, ge=32, le=MOST, multiple_of=32, description="tokens of one block of the cache, 32, 64, ..."
    )
    kv_cache_gb: float = Field(1.0, gt=0, le=100_000, description="memory of the key/value cache, in GiB")
    threads: int = Field(1, ge=1, le=1024, description="threads of the engine on a CPU")


class WeightsSection(Section):
    """How the weights of a version reach the engines."""

    transport: Transport = Field(
        "auto",
        description='"files", "shared" (one host and device), "broadcast" (NCCL, gloo), or "auto": the '
        "fastest that is proven",
    )


class RolloutSection(Section):
    """How episodes are run and what their actions are drawn from."""

    episodes_in_flight: int = Field(128, ge=1, le=MOST, description="episodes that run at once")
    group_size: int = Field(
        8, ge=2, le=MOST, description="episodes of one task, at least 2: their mean is the baseline"
    )
    temperature: float = Field(
        1.0, ge=COLDEST, le=HOTTEST, description="of the sampling; 1 is the model's own distribution"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="1 for training")
    top_k: int = Field(0, ge=0, le=MOST, description="0 (off) for training")
    max_tokens: int = Field(128, ge=1, le=MOST, description="tokens of one turn")
    max_turns: int = Field(8, ge=1, le=MOST, description="turns of one episode")
    context_len: int = Field(
        1024, ge=16, le=MOST, description="tokens of one segment: prompt, actions, observations"
    )
    step_deadline_s: float = Field(60.0, gt=0, description="seconds for one step of the environment")
    episode_deadline_s: float = Field(300.0, gt=0, description="seconds for one episode, sampling included")
    seeded: bool = Field(
        True, description="give each request a seed made from the run's, so it can be repeated"
    )
    engine: EngineSection = EngineSection()


class LagSection(Section):
    """How far behind the learner the sampled tokens may be."""

    max_lag: int = Field(
        8,
        ge=0,
        le=MAX_LAG,
        description=f"updates between sampling and training, 0 (synchronous) to {MAX_LAG}",
    )
    schedule: Literal["bounded", "constant"] = Field(
        "bounded",
        description='"bounded" (train as soon as it can) or "constant" (exactly max_lag updates later)',
    )


class AuditSection(Section):
    """Which sampled tokens are recomputed with the weights of their version, bit for bit."""

    share: float = Field(1.0, ge=0, le=1, description="share of the action tokens, 0 to 1")
    on_mismatch: Literal["stop", "warn"] = Field("stop", description='"stop" the run or "warn" and go on')
    every: int = Field(
        1, ge=1, le=MOST, description="keep every n-th version's weights; only its tokens are audited"
    )


class CheckpointSection(Section):
    """When the learner's whole state is saved."""

    every: int = Field(
        20, ge=1, le=MOST, description="updates between checkpoints; resume replays at most that many"
    )
    keep: int = Field(2, ge=1, le=MOST, description="checkpoints kept, the newest")


class EvalSection(Section):
    """A held-out split, measured during training."""

    every: int = Field(0, ge=0, le=MOST, description="updates between evaluations; 0 turns them off")
    split: str = Field("test", min_length=1, description="which tasks")
    episodes: int = Field(64, ge=1, le=MOST, description="episodes of one evaluation")
    temperature: float = Field(1.0, ge=COLDEST, le=HOTTEST, description="of the sampling")
    top_p: float = Field(1.0, gt=0, le=1, description="above 0, at most 1")
    top_k: int = Field(0, ge=0, le=MOST, description="0 turns it off")


class WandbSection(Section):
    """Weights & Biases; needs `pip install wandb`."""

    project: str = Field(..., min_length=1, description="the project to log to")
    entity: str | None = Field(None, description="the team or user; left out: your default")
    mode: Literal["online", "offline"] = Field("online", description='"online" or "offline"')


class TrackingSection(Section):
    """Where the figures go besides metrics.jsonl."""

    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: WandbSection | None = None


class RaySection(Section):
    """Which Ray cluster, with `runtime = "ray"`."""

    address: str | None = Field(
        None,
        min_length=1,
        description='"auto", "ray://HOST:PORT" or HOST:PORT; left out: a cluster on this machine',
    )
    learner_replicas: int = Field(
        1,
        ge=1,
        le=MOST,
        description="data-parallel copies of the learner, each of tensor_parallel * pipeline_parallel ranks",
    )
