"""From one task to one trajectory: the loop between policy and environment.

    env --messages--> Conversation --ids--> Engine --ids, mu, version--> SegmentBuilder
    env <--text of the sampled turn-- Conversation <--ids-- Engine

Invariants: the engine is given exactly the ids that the segment holds; every sampled token enters the
segment with its own log-probability and version; an episode ends in exactly one of three ways:
"ok" (the environment terminated), "truncated" (turns, tokens or time ran out; its reward counts) or
"masked" (infrastructure failed: what it holds is kept for the record and never trained on).
A missing log-probability, a dead engine or a bug in an environment is not an outcome of the episode:
it is raised and stops the run.

Waits: the episode for the engine and for its environment, each under a deadline; nobody for it.
Cancelling the coroutine aborts the request and closes the environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ..envs.env import Action, AgentEnv
from ..sandboxes.provider import SandboxError
from ..trajectory import Sampling, Segment, Status, Trajectory
from .conversation import Conversation, room
from .dispatcher import EpisodeRequest, Signals, seed_of
from .engine import Completion, Engine
from .renderer import Renderer
from .segment_builder import SegmentBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Bounds of one episode; passing one truncates it, except a step of the environment, which masks it.

    max_tokens          sampled tokens of one turn
    max_turns           turns of the policy
    context_len         tokens of one segment
    step_deadline_s     one call of the environment: its tools have deadlines of their own, so passing
                        this one means that the environment hangs
    episode_deadline_s  the whole episode
    """

    max_tokens: int
    max_turns: int
    context_len: int
    step_deadline_s: float
    episode_deadline_s: float


class _Infrastructure(Exception):
    """The place failed, not the policy."""


@dataclass(slots=True)
class _Record:
    """What has happened in one running episode."""

    segments: list[Segment] = field(default_factory=list)
    open: SegmentBuilder | None = None
    reward: float = 0.0
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    env_metrics: dict[str, float] = field(default_factory=dict)

    def close_segment(self) -> None:
        """Keep the open segment; one in which nothing was sampled says nothing and is dropped."""
        if self.open is not None and self.open.num_actions:
            self.segments.append(self.open.build())
        self.open = None


class EpisodeRunner:
    """Runs episodes of one environment on one engine. Holds no episode: one serves all coroutines."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        make_env: Callable[[], AgentEnv],
        sampling: Sampling,
        limits: EpisodeLimits,
        seeded: bool,
    ) -> None:
        self._engine, self._renderer, self._make_env = engine, renderer, make_env
        self._sampling, self._limits, self._seeded = sampling, limits, seeded

    async def run(self, request: EpisodeRequest, signals: Signals) -> Trajectory:
        """Play the episode to its end; raises only what must stop the run."""
        record, started = _Record(), time.monotonic()
        status, reason = "ok", ""
        try:
            async with asyncio.timeout(self._limits.episode_deadline_s) as deadline:
                status = await self._play(request, signals, record)
        except TimeoutError:
            if not deadline.expired():
                raise
            status = "truncated"
        except _Infrastructure as failure:
            status, reason = "masked", str(failure)
        record.close_segment()
        metrics = {
            **record.env_metrics,
            "episode/turns": float(record.turns),
            "episode/seconds": time.monotonic() - started,
            "rollout/prompt_tokens": float(record.prompt_tokens),
            "rollout/cached_tokens": float(record.cached_tokens),
        }
        return Trajectory(
            episode_id=request.episode_id,
            group_id=request.group_id,
            task_id=request.task.id,
            segments=tuple(record.segments),
            reward=0.0 if status == "masked" else record.reward,
            status=status,
            mask_reason=reason,
            metrics=metrics,
        )

    async def _play(self, request: EpisodeRequest, signals: Signals, record: _Record) -> Status:
        async with self._environment(request) as env:
            observation, info = await self._within_step(
                env.areset(seed=request.seed, options={"task": request.task}), "reset"
            )
            self._refuse_masked(info)
            talk = Conversation(self._renderer, observation["messages"], env.tool_schemas)
            self._open_segment(record, talk.prompt)
            while record.turns < self._limits.max_turns:
                completion = await self._sample(request, signals, record)
                if completion is None:
                    return "truncated"
                text = talk.act(completion.token_ids)
                observation, reward, terminated, truncated, info = await self._within_step(
                    env.astep(Action(text=text)), f"step {record.turns}"
                )
                self._refuse_masked(info)
                record.reward += float(reward)
                record.env_metrics |= info.get("metrics", {})
                if terminated or truncated:
                    return "ok" if terminated else "truncated"
                turn = talk.observe(observation["messages"])
                if not turn.extends:
                    record.close_segment()
                    self._open_segment(record, turn.token_ids)
                elif record.open is not None:
                    record.open.context(turn.token_ids)
            return "truncated"

    async def _sample(
        self, request: EpisodeRequest, signals: Signals, record: _Record
    ) -> Completion | None:
        """One turn of the policy; None where the context has no room for another token."""
        assert record.open is not None, "a segment is open while the episode plays"
        most = room(len(record.open), context=self._limits.context_len, cap=self._limits.max_tokens)
        if not most:
            return None
        signals.first_request()
        completion = await self._engine.generate(
            record.open.ids,
            self._sampling,
            max_tokens=most,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=seed_of(request.seed, record.turns) if self._seeded else None,
        )
        record.open.actions(completion)
        record.turns += 1
        record.prompt_tokens += completion.prompt_tokens
        record.cached_tokens += completion.cached_tokens
        signals.first_token()
        return completion

    def _open_segment(self, record: _Record, prompt: object) -> None:
        record.open = SegmentBuilder(sampling=self._sampling, contract=self._engine.contract)
        record.open.context(prompt)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _environment(self, request: EpisodeRequest) -> AsyncIterator[AgentEnv]:
        env = self._make_env()
        try:
            yield env
        finally:
            await asyncio.shield(env.aclose())

    async def _within_step(self, call, what: str):
        """Await the environment under the step's deadline; its infrastructure failures become ours."""
        try:
            async with asyncio.timeout(self._limits.step_deadline_s) as deadline:
                return await call
        except TimeoutError:
            if not deadline.expired():
                raise
            raise _Infrastructure(
                f"the environment did not answer {what} within {self._limits.step_deadline_s:g} s"
            ) from None
        except SandboxError as error:
            if error.blame != "infra":
                raise
            raise _Infrastructure(f"{what}: {error}") from error

    @staticmethod
    def _refuse_masked(info: dict[str, object]) -> None:
        if reason := info.get("mask"):
            raise _Infrastructure(str(reason))
