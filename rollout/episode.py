"""From one task to one trajectory: the loop between policy and environment.

    env --messages--> ContextPolicy --> Conversation --ids--> Engine --ids, mu, version--> SegmentBuilder
    env <--text of the sampled turn------ Conversation <--ids-- Engine

Invariants: the engine is given exactly the ids that the segment holds; every sampled token enters the
segment with its own log-probability and version; an episode ends in exactly one of three ways:
"ok" (the environment terminated), "truncated" (turns, tokens or time ran out; its reward counts) or
"masked" (infrastructure failed: what it holds is kept for the record and never trained on).
A missing log-probability, a dead engine or a bug in an environment is not an outcome of the episode:
it is raised and stops the run.

Waits: the episode for the engine (until the episode's deadline) and for its environment (until the
step's deadline, and a grace where it does not let itself be cancelled; time spent waiting for a sandbox that
others hold counts against neither); nobody for it. Cancelling the coroutine aborts the request and closes
the environment.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..envs import calls
from ..envs.action import Action
from ..envs.bug import blamed
from ..envs.env import AgentEnv, unwinds
from ..envs.failure import last_step
from ..envs.message import Message, Observation, text_of
from ..envs.recording import Recorder
from ..envs.step_result import Place, Step, checked_reset, checked_step, metrics_of
from ..envs.task import Task
from ..errors import MissingLogprob, NonFinite, RzError
from ..sandboxes.deadline import deadline
from ..trajectory import Int32, Sampling, Segment, Status, Trajectory
from .conversation import Conversation, Turn, room
from .engine import Completion, Engine
from .episode_request import EpisodeRequest, Signals, seed_of
from .renderer import Renderer
from .segment_builder import SegmentBuilder

log = logging.getLogger(__name__)
Limit = Literal["turns", "time", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Bounds of one episode; passing one truncates it, except a step of the environment, which masks it.

    max_tokens          sampled tokens of one turn
    max_turns           turns of the policy
    context_len         tokens of one segment
    step_deadline_s     one call of the environment: its tools have deadlines of their own, so passing
                        this one means that the environment hangs
    episode_deadline_s  the whole episode; checked when the policy is to act, so that a tool call in
                        progress ends by its own deadline and the episode can still be scored
    """

    max_tokens: int
    max_turns: int
    context_len: int
    step_deadline_s: float
    episode_deadline_s: float


class _Infrastructure(Exception):
    """The place failed, not the policy."""


class _Reached(Exception):
    """A limit of the episode was reached before the environment ended it."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit


@dataclass(slots=True)
class _Record:
    """What has happened in one running episode."""

    environment: str
    request: EpisodeRequest
    calls: calls.Calls
    open: SegmentBuilder
    recorder: Recorder | None = None
    segments: list[Segment] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    env_metrics: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0  # for sandboxes that others held: no deadline counts it

    def open_segment(self, builder: SegmentBuilder) -> None:
        """Keep the segment so far; one in which nothing was sampled says nothing and is dropped."""
        if self.open.num_actions:
            self.segments.append(self.open.build())
        self.open = builder

    def place(self, hook: str, function: Callable[..., Any]) -> Place:
        """Where something of the environment happened, for the message of an error."""
        return Place(
            environment=self.environment,
            hook=hook,
            task_id=self.request.task.id,
            episode_id=self.request.episode_id,
            function=function,
        )

    def rollout_metrics(self) -> dict[str, float]:
        return {
            "episode/turns": float(self.turns),
            "episode/seconds": time.monotonic() - self.started,
            "rollout/prompt_tokens": float(self.prompt_tokens),
            "rollout/cached_tokens": float(self.cached_tokens),
            "rollout/sandbox_waited_s": self.waited_s,
        }


class EpisodeRunner:
    """Runs episodes of one environment on one engine. Holds no episode: one serves all coroutines.

    make_env   a fresh environment for each episode
    seeded     give each request a seed that follows from the episode's and the turn
    watch      who listens to the episode of a task, if anybody
    """

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        make_env: Callable[[], AgentEnv],
        sampling: Sampling,
        limits: EpisodeLimits,
        seeded: bool,
        watch: Callable[[Task], Recorder] | None = None,
    ) -> None:
        self._engine, self._renderer, self._make_env = engine, renderer, make_env
        self._watch = watch
        self._sampling, self._limits, self._seeded = sampling, limits, seeded
        self._step_limit = f"rollout.step_deadline_s = {limits.step_deadline_s:g}"
        self._abandoned = calls.Abandoned()

    async def run(self, request: EpisodeRequest, signals: Signals) -> Trajectory:
        """Play the episode to its end; raises only what must stop the run."""
        status: Status = "ok"
        reason = ""
        env = self._make_env()
        name = type(env).__name__
        record = _Record(
            environment=name,
            request=request,
            calls=calls.Calls(name, grace_s=calls.UNWIND_S, abandoned=self._abandoned),
            open=self._segment([]),
            recorder=self._watch(request.task) if self._watch else None,
        )
        try:
            status = await self._play(env, request, signals, record)
        except _Infrastructure as failure:
            status, reason = "masked", str(failure)
            if record.recorder:
                record.recorder.masked(reason)
        finally:
            await self._close(env, record)
        record.open_segment(self._segment([]))
        return Trajectory(
            episode_id=request.episode_id,
            group_id=request.group_id,
            task_id=request.task.id,
            segments=tuple(record.segments),
            reward=0.0 if status == "masked" else record.reward,
            status=status,
            mask_reason=reason,
            metrics={**record.env_metrics, **record.rollout_metrics()},
        )

    async def _play(
        self, env: AgentEnv, request: EpisodeRequest, signals: Signals, record: _Record
    ) -> Status:
        history = await self._reset(env, request, record)
        shown = self._shown(env, history)
        talk = Conversation(self._renderer, shown["messages"], env.prompt_tools)
        record.open_segment(self._segment(talk.prompt, shown["images"]))
        try:
            while True:
                completion = await self._sample(request, signals, record)
                ids = completion.token_ids.tolist()
                text = talk.act(ids)
                action = Action(text=text, token_ids=tuple(ids))
                step = await self._step(f"step {record.turns}", record, env.astep, action)
                if record.recorder:
                    record.recorder.stepped(text, env.parse(text).calls, step)
                observation, _, terminated, truncated, _ = step
                if terminated or truncated:
                    return "ok" if terminated else "truncated"
                history = _continued(history, text, observation)
                shown = self._shown(env, history)
                if self._cannot_fit(shown):
                    raise _Reached("tokens")
                self._hear(talk.see(shown["messages"]), shown["images"], record)
        except _Reached as reached:
            step = await self._step("scoring", record, env.atruncate, reached.limit)
            if record.recorder:
                record.recorder.ended(step)
            return "truncated"

    def _shown(self, env: AgentEnv, history: Observation) -> Observation:
        """The history as the environment wants it to be seen, as far as the model can see."""
        shown = env.context.shown(history)
        return shown if self._renderer.reads_images else Observation(messages=shown["messages"], images=())

    def _cannot_fit(self, shown: Observation) -> bool:
        """Known without tokenizing, which would hold up every other episode where a tool says a library."""
        characters = sum(len(text_of(message["content"])) for message in shown["messages"])
        return characters > self._limits.context_len * self._renderer.longest_token

    def _hear(self, turn: Turn, images: tuple[bytes, ...], record: _Record) -> None:
        """Take in what the environment said; raises _Reached where no turn may follow it.

        images   all that are shown now
        What the policy never answers is left out: a segment ends with an action, within `context_len`.
        """
        if record.turns >= self._limits.max_turns:
            raise _Reached("turns")
        before = len(record.open) if turn.extends else 0
        if not room(before + len(turn.token_ids), context=self._limits.context_len):
            raise _Reached("tokens")
        if turn.extends:
            record.open.context(turn.token_ids, images[len(record.open.images) :])
        else:
            record.open_segment(self._segment(turn.token_ids, images))

    async def _sample(self, request: EpisodeRequest, signals: Signals, record: _Record) -> Completion:
        """One turn of the policy, in the segment; raises _Reached where a limit leaves no room for it."""
        most = room(len(record.open), context=self._limits.context_len, cap=self._limits.max_tokens)
        if not most:
            raise _Reached("tokens")
        if not record.turns:
            signals.first_request()
        left_s = record.started + record.waited_s + self._limits.episode_deadline_s - time.monotonic()
        try:
            async with deadline(left_s) as clock:
                completion = await self._engine.generate(
                    record.open.prompt(),
                    self._sampling,
                    max_tokens=most,
                    stop_token_ids=self._renderer.stop_token_ids,
                    seed=seed_of(request.seed, record.turns) if self._seeded else None,
                    images=record.open.images,
                )
            record.open.actions(completion)
        except TimeoutError:
            if not clock.expired():
                raise
            raise _Reached("time") from None
        except (MissingLogprob, NonFinite) as error:
            place = f"episode {request.episode_id}, turn {record.turns}"
            raise type(error)(f"{place}: {error}") from error
        if not record.turns:
            signals.first_token(int(completion.versions[0]))
        record.turns += 1
        record.prompt_tokens += completion.prompt_tokens
        record.cached_tokens += completion.cached_tokens
        return completion

    def _segment(self, prompt: Int32 | list[int], images: tuple[bytes, ...] = ()) -> SegmentBuilder:
        builder = SegmentBuilder(sampling=self._sampling, contract=self._engine.contract)
        builder.context(prompt, images)
        return builder

    async def _reset(self, env: AgentEnv, request: EpisodeRequest, record: _Record) -> Observation:
        """Set the task up. Its deadline is the task's own, which may be longer than a step's; an environment
        keeps it by itself, and the grace leaves it the time to say so."""
        task = request.task.in_steps_of(self._limits.step_deadline_s)
        setup_s, options = task.deadlines.setup_s, {"task": task}
        asked = functools.partial(env.areset, seed=request.seed, options=options)
        limit = f"the task's deadlines.setup_s = {setup_s:g} and a grace"
        returned = await self._ask("reset", record, setup_s + 2 * calls.GRACE_S, limit, asked)
        observation, info = checked_reset(returned, record.place("reset", env.areset))
        if record.recorder:
            record.recorder.began(observation, info)
        self._refuse_masked(info)
        return observation

    async def _step(self, what: str, record: _Record, method: Callable[..., Any], given: object) -> Step:
        """One step of the environment; keeps its reward and metrics."""
        seconds, place = self._limits.step_deadline_s, record.place(what, method)
        step = checked_step(await self._ask(what, record, seconds, self._step_limit, method, given), place)
        self._refuse_masked(step[4])
        record.reward += step[1]
        record.env_metrics |= metrics_of(step[4], place)
        return step

    async def _ask(
        self,
        what: str,
        record: _Record,
        limit_s: float,
        limit: str,
        function: Callable[..., Any],
        *given: object,
    ) -> Any:
        """Await the environment: past the deadline it hangs, which masks the episode, as a failure of its
        infrastructure does. Any other exception than our own is an `EnvironmentBug`."""
        try:
            async with deadline(limit_s) as clock:
                try:
                    with blamed(record.environment, what, record.request.task.id, function):
                        if unwinds(function):
                            return await function(*given)
                        return await record.calls.call(function, *given)
                finally:
                    record.waited_s += clock.waited_s
        except TimeoutError:
            raise _Infrastructure(f"{what}: no answer within {limit}") from None
        except RzError as error:
            if (last := last_step(error, acted=record.turns > 0)) is None:
                raise
            if reason := last[4].get("mask"):
                raise _Infrastructure(f"{what}: {reason}") from error
            return last

    async def _close(self, env: AgentEnv, record: _Record) -> None:
        """Close the environment; the episode's result stands where that does not end."""
        try:
            async with asyncio.timeout(calls.UNWIND_S):
                with blamed(record.environment, "aclose", record.request.task.id, env.aclose):
                    await record.calls.call(env.aclose)
        except TimeoutError:
            log.warning("%s.aclose did not end within %g s", record.environment, calls.UNWIND_S)

    @staticmethod
    def _refuse_masked(info: Mapping[str, Any]) -> None:
        if reason := info.get("mask"):
            raise _Infrastructure(str(reason))


def _continued(history: Observation, said: str, observed: Observation) -> Observation:
    """The history after one more turn of the policy and what it was answered."""
    turn = Message(role="assistant", content=said)
    return Observation(
        messages=(*history["messages"], turn, *observed["messages"]),
        images=history["images"] + observed["images"],
    )
