"""Build what samples: the environment, the engine and the episode runner of a recipe.

Training and evaluation share it, so a policy is measured in the very place where it learns.
Everything opened goes onto the caller's exit stack and is closed in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from .. import envs
from ..envs.factory import EnvFactory
from ..envs.recording import Recorder
from ..envs.task import Task
from ..envs.tool_calls import format_of
from ..rollout.chat_template import ChatTemplate
from ..rollout.engine import Engine, make_engine
from ..rollout.engine_config import EngineConfig
from ..rollout.episode import EpisodeLimits, EpisodeRunner
from ..rollout.renderer import Renderer
from ..sandboxes.pool import SandboxPool
from ..trajectory import Sampling
from .recipe import Recipe


async def open_environment(
    stack: AsyncExitStack, recipe: Recipe, model_dir: Path | None = None
) -> EnvFactory:
    """The environment's factory, the run's sandboxes and whatever its episodes share.

    model_dir   the policy's folder, whose way to write tool calls the environment reads; None: no model plays
    """
    sandboxes = await stack.enter_async_context(SandboxPool.of(recipe.sandbox, run_id=recipe.name))
    options = dict(recipe.env.options)
    if model_dir is not None:
        options.setdefault("tool_format", tool_format(recipe, model_dir))
    factory = envs.load(recipe.env.id, sandboxes=sandboxes, **options)
    return await stack.enter_async_context(factory)


def tool_format(recipe: Recipe, model_dir: Path) -> str:
    """How the policy writes its tool calls: as the recipe says, else as its chat template asks it to."""
    asked = recipe.model.tool_format
    return format_of(ChatTemplate.load(model_dir).text) if asked == "auto" else asked


async def start_engine(stack: AsyncExitStack, recipe: Recipe, model_dir: Path, version: int) -> Engine:
    """A started engine. `version` is the one that the run stands at; the caller publishes its weights."""
    config = engine_config(recipe, model_dir, version)
    engine: Engine
    if recipe.runtime == "ray":
        from .cluster import connected, engine_pool

        cluster = stack.enter_context(connected(recipe))
        engine = engine_pool(cluster, config, recipe.rollout.engine.replicas)
    else:
        engine = make_engine(config)
    stack.push_async_callback(engine.close)
    await engine.start()
    return engine


def engine_config(recipe: Recipe, model_dir: Path, version: int) -> EngineConfig:
    """The engine's view of the recipe."""
    rollout, engine = recipe.rollout, recipe.rollout.engine
    return EngineConfig(
        model=model_dir,
        dtype=recipe.model.dtype,
        max_model_len=rollout.context_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        kv_cache_gb=engine.kv_cache_gb,
        kernels=recipe.kernels,
        threads=engine.threads,
        mode=engine.mode,
        seed=recipe.seed,
        initial_version=version,
    )


def episode_runner(
    recipe: Recipe,
    model_dir: Path,
    engine: Engine,
    environment: EnvFactory,
    sampling: Sampling | None = None,
    watch: Callable[[Task], Recorder] | None = None,
) -> EpisodeRunner:
    """Runs the recipe's episodes; `sampling` replaces the recipe's, for evaluation; `watch` records them."""
    rollout = recipe.rollout
    return EpisodeRunner(
        engine=engine,
        renderer=Renderer(model_dir),
        make_env=environment.create,
        sampling=sampling
        or Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
        limits=EpisodeLimits(
            max_tokens=rollout.max_tokens,
            max_turns=rollout.max_turns,
            context_len=rollout.context_len,
            step_deadline_s=rollout.step_deadline_s,
            episode_deadline_s=rollout.episode_deadline_s,
        ),
        seeded=rollout.seeded,
        watch=watch,
    )
