"""One episode: what the engine is given, what enters its segments, and the three ways in which it ends.

Renderer, conversation and environment are the real ones; the engine says what each test wants said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from rz_agent.envs import AgentEnv, Episode, InfraFailure, ListTaskset, Task, reward, tool
from rz_agent.errors import MissingLogprob, NonFinite
from rz_agent.rollout.engine import Completion, Engine, EngineDead
from rz_agent.rollout.episode import EpisodeLimits, EpisodeRunner
from rz_agent.rollout.episode_request import EpisodeRequest, Signals, seed_of
from rz_agent.rollout.renderer import Renderer
from rz_agent.trajectory import Sampling, Segment, Trajectory
from test_renderer import CALL, QWEN3, say, write_model

LIMITS = EpisodeLimits(
    max_tokens=500, max_turns=8, context_len=2000, step_deadline_s=20, episode_deadline_s=20
)
SAMPLING = Sampling(temperature=0.7)
HANGS = "<tool_call>" + '{"name":"wait","arguments":{}}' + "</tool_call>"
FAILS = "<tool_call>" + '{"name":"fail","arguments":{}}' + "</tool_call>"

Reply = list[int] | Exception | None
"""Ids to sample, an error to raise, or None: never to answer."""


class Scripted:
    """The part of an engine that an episode uses: answers with the next reply, keeps what it was asked.

    The second half of each completion is of a later version, as after an update in its middle.
    """

    contract = "scripted"

    def __init__(
        self, *replies: Reply, tamper: Callable[[Completion], Completion] = lambda completion: completion
    ) -> None:
        self.replies, self.tamper = list(replies), tamper
        self.prompts: list[list[int]] = []
        self.images: list[tuple[bytes, ...]] = []
        self.given: list[Completion] = []
        self.budgets: list[int] = []
        self.seeds: list[int | None] = []
        self.aborted = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        seed: int | None,
        images: Sequence[bytes] = (),
    ) -> Completion:
        assert sampling == SAMPLING
        self.images.append(tuple(images))
        turn = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        self.budgets.append(max_tokens)
        self.seeds.append(seed)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if reply is None:
            try:
                await asyncio.sleep(3600)
            finally:
                self.aborted += 1
        ids = np.array(reply, np.int32)
        positions = np.arange(len(ids))
        completion = Completion(
            token_ids=ids,
            logprobs=-(turn + positions / 256).astype(np.float32),
            versions=(3 + turn + (positions >= len(ids) / 2)).astype(np.int32),
            finish_reason="stop" if ids[-1] in stop_token_ids else "length",
            prompt_tokens=len(prompt_ids),
            cached_tokens=0,
        )
        self.given.append(completion)
        return self.tamper(completion)


class Talk(AgentEnv):
    """Answers "more" to whatever is said, until it hears "done"; that it was closed, its class remembers."""

    taskset = ListTaskset([Task(id="only", prompt="Go.", answer="done")], name="one")
    max_turns = 20
    closed = 0

    async def reply(self, text: str) -> str | None:
        return None if text == "done" else "more"

    async def aclose(self) -> None:
        await super().aclose()
        type(self).closed += 1

    @tool
    async def python(self, code: str) -> str:
        """Run it."""
        return "5"

    @tool
    async def wait(self) -> str:
        """Hang."""
        await asyncio.sleep(3600)
        return ""

    @tool
    async def fail(self) -> str:
        """Lose the place."""
        raise InfraFailure("the sandbox is gone")

    @reward
    def right(self, task: Task, episode: Episode) -> float:
        return 1.0 if episode.answer == task.answer else 0.25


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    return Renderer(write_model(folder, QWEN3))


def play(
    engine: Scripted,
    renderer: Renderer,
    limits: EpisodeLimits = LIMITS,
    heard: list[object] | None = None,
    env_class: type[AgentEnv] = Talk,
) -> Trajectory:
    """The episode with seed 7 of the class's first task, to its end."""
    heard = [] if heard is None else heard
    runner = EpisodeRunner(
        engine=cast(Engine, engine),
        renderer=renderer,
        make_env=env_class,
        sampling=SAMPLING,
        limits=limits,
        seeded=True,
    )
    task = env_class().tasks.load("train")[0]
    request = EpisodeRequest(task=task, group_id="g", episode_id="g-0", index=0, seed=7)
    signals = Signals(first_request=lambda: heard.append("request"), first_token=heard.append)
    return asyncio.run(asyncio.wait_for(runner.run(request, signals), 30))


def first_prompt(renderer: Renderer) -> list[int]:
    """Ids of the task's prompt and of the tools that the environment offers."""
    ids: list[int] = renderer.first([{"role": "user", "content": "Go."}], Talk().prompt_tools).tolist()
    return ids


def sampled(segment: Segment) -> list[list[int]]:
    """The ids of each turn of the policy."""
    return [segment.token_ids[turn.start : turn.stop].tolist() for turn in segment.turns()]


# --- tokens -----------------------------------------------------------------------------------------------


def test_three_turns_are_one_segment_of_what_the_engine_was_given_and_sampled(qwen3: Renderer) -> None:
    said = [say(qwen3, f"<think>{word}</think>{CALL}") for word in ("one", "two")] + [say(qwen3, "done")]
    engine = Scripted(*said)
    trajectory = play(engine, qwen3)
    (segment,) = trajectory.segments
    assert (trajectory.status, trajectory.reward) == ("ok", 1.0)
    assert engine.prompts[0] == first_prompt(qwen3)
    for before, turn, after in zip(engine.prompts, said, engine.prompts[1:], strict=False):
        assert after[: len(before) + len(turn)] == before + turn
        assert "<tool_response>\n5\n</tool_response>" in qwen3.decode(after[len(before) + len(turn) :])
    assert segment.token_ids.tolist() == engine.prompts[2] + said[2]
    assert sampled(segment) == said
    assert [turn.start for turn in segment.turns()] == [len(prompt) for prompt in engine.prompts]
    assert (segment.sampling, segment.contract) == (SAMPLING, "scripted")


def test_every_action_has_the_engines_logprob_and_version_and_nothing_else_has_any(qwen3: Renderer) -> None:
    engine = Scripted(say(qwen3, CALL), say(qwen3, CALL), say(qwen3, "done"))
    (segment,) = play(engine, qwen3).segments
    logprobs, versions = np.full(len(segment), np.nan, np.float32), np.full(len(segment), -1, np.int32)
    for turn, completion in zip(segment.turns(), engine.given, strict=True):
        logprobs[turn.start : turn.stop] = completion.logprobs
        versions[turn.start : turn.stop] = completion.versions
    np.testing.assert_array_equal(segment.behaviour_logprobs, logprobs)
    np.testing.assert_array_equal(segment.policy_version, versions)
    assert segment.oldest_version == 3


def test_a_rewritten_history_opens_a_segment_that_later_turns_extend_and_the_reward_counts_once(
    qwen3: Renderer,
) -> None:
    said = [say(qwen3, "<think>\nsure\n</think>\n\n4"), say(qwen3, "5"), say(qwen3, "done")]
    engine = Scripted(*said)
    trajectory = play(engine, qwen3)
    first, second = trajectory.segments
    assert (sampled(first), sampled(second)) == ([said[0]], said[1:])
    assert second.token_ids[: len(engine.prompts[1])].tolist() == engine.prompts[1]
    shown = qwen3.decode(engine.prompts[1])
    assert "sure" not in shown
    assert "<|im_start|>user\nmore<|im_end|>" in shown
    assert (trajectory.reward, trajectory.num_actions) == (1.0, sum(map(len, said)))


def test_an_episode_asks_with_seeds_that_follow_from_its_own_and_tells_its_first_request_and_token_once(
    qwen3: Renderer,
) -> None:
    heard: list[object] = []
    engine = Scripted(say(qwen3, CALL), say(qwen3, "done"))
    play(engine, qwen3, heard=heard)
    assert engine.seeds == [seed_of(7, 0), seed_of(7, 1)]
    assert heard == ["request", 3]


# --- limits: truncated, and the reward counts -------------------------------------------------------------


def test_a_prompt_that_fills_the_context_is_never_sent(qwen3: Renderer) -> None:
    engine = Scripted()
    trajectory = play(engine, qwen3, replace(LIMITS, context_len=len(first_prompt(qwen3))))
    assert engine.prompts == []
    assert (trajectory.status, trajectory.reward, trajectory.segments) == ("truncated", 0.25, ())


def test_a_turn_may_use_what_the_context_has_left_and_no_more(qwen3: Renderer) -> None:
    engine = Scripted(say(qwen3, "done"))
    play(engine, qwen3, replace(LIMITS, context_len=len(first_prompt(qwen3)) + 6))
    assert engine.budgets == [6]


@pytest.mark.parametrize("cut", [0, 1])
def test_feedback_that_leaves_no_room_for_an_answer_is_no_part_of_the_segment(
    qwen3: Renderer, cut: int
) -> None:
    said = say(qwen3, CALL)
    whole = Scripted(said, say(qwen3, "done"))
    play(whole, qwen3)
    engine = Scripted(said)
    trajectory = play(engine, qwen3, replace(LIMITS, context_len=len(whole.prompts[1]) - cut))
    (segment,) = trajectory.segments
    assert (trajectory.status, trajectory.reward) == ("truncated", 0.25)
    assert segment.token_ids.tolist() == engine.prompts[0] + said


def test_a_segment_ends_with_an_action_when_the_turns_run_out(qwen3: Renderer) -> None:
    engine = Scripted(say(qwen3, CALL), say(qwen3, CALL))
    (segment,) = play(engine, qwen3, replace(LIMITS, max_turns=2)).segments
    assert segment.action_mask[-1]


def test_turns_run_out_before_the_engine_is_asked_again(qwen3: Renderer) -> None:
    engine = Scripted(say(qwen3, CALL), say(qwen3, CALL))
    trajectory = play(engine, qwen3, replace(LIMITS, max_turns=2))
    assert (trajectory.status, trajectory.reward, len(engine.prompts)) == ("truncated", 0.25, 2)


def test_an_engine_that_does_not_answer_in_time_leaves_the_turns_before_and_no_half_of_one(
    qwen3: Renderer,
) -> None:
    said = say(qwen3, CALL)
    engine = Scripted(said, None)
    trajectory = play(engine, qwen3, replace(LIMITS, episode_deadline_s=0.5))
    (segment,) = trajectory.segments
    assert (trajectory.status, trajectory.reward, engine.aborted) == ("truncated", 0.25, 1)
    assert sampled(segment) == [said]


def test_an_engine_that_never_answers_leaves_no_segment(qwen3: Renderer) -> None:
    engine = Scripted(None)
    trajectory = play(engine, qwen3, replace(LIMITS, episode_deadline_s=0.2))
    assert (trajectory.status, trajectory.segments, engine.aborted) == ("truncated", (), 1)


# --- infrastructure: masked, and nothing counts -----------------------------------------------------------


def test_tools_that_outlast_a_step_are_told_to_the_policy_which_cannot_mask_itself_by_them(
    qwen3: Renderer,
) -> None:
    engine = Scripted(say(qwen3, HANGS + CALL), say(qwen3, "done"))
    trajectory = play(engine, qwen3, replace(LIMITS, step_deadline_s=2))
    assert (trajectory.status, trajectory.reward, trajectory.mask_reason) == ("ok", 1.0, "")
    told = qwen3.decode(engine.prompts[1])
    assert "Error: wait did not finish within 1 s" in told
    assert "Error: not run: the turn's 1 s were over" in told


def test_a_tool_that_says_more_than_any_context_holds_up_nobody(qwen3: Renderer) -> None:
    async def python(self: Talk, code: str) -> str:
        """Run it."""
        return "x" * 50_000_000

    env_class = type("Library", (Talk,), {"python": tool(python)})
    began = time.monotonic()
    trajectory = play(Scripted(say(qwen3, CALL)), qwen3, env_class=env_class)
    assert (trajectory.status, trajectory.reward) == ("truncated", 0.25)
    assert time.monotonic() - began < 10  # to tokenize it takes minutes


def test_lost_infrastructure_masks_the_episode_and_keeps_its_record(qwen3: Renderer) -> None:
    said = [say(qwen3, CALL), say(qwen3, FAILS)]
    trajectory = play(Scripted(*said), qwen3)
    assert (trajectory.status, trajectory.reward) == ("masked", 0.0)
    assert "the sandbox is gone" in trajectory.mask_reason
    assert [sampled(segment) for segment in trajectory.segments] == [said]


# --- what is no outcome of an episode ---------------------------------------------------------------------


@pytest.mark.parametrize("column", ["logprobs", "versions"])
def test_a_token_without_its_record_stops_the_run_and_the_environment_is_closed(
    qwen3: Renderer, column: str
) -> None:
    def lose_one(completion: Completion) -> Completion:
        shorter = {column: getattr(completion, column)[:-1]}
        return replace(completion, **shorter)

    closed = Talk.closed
    with pytest.raises(MissingLogprob, match=r"episode g-0, turn 0: .* each sampled token needs one of each"):
        play(Scripted(say(qwen3, CALL), tamper=lose_one), qwen3)
    assert Talk.closed == closed + 1


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_logprob_that_is_no_number_stops_the_run_with_its_episode_turn_and_token(
    qwen3: Renderer, value: float
) -> None:
    said = [say(qwen3, CALL), say(qwen3, CALL)]

    def spoil(completion: Completion) -> Completion:
        logprobs = completion.logprobs.copy()
        if logprobs[0] <= -1:  # the second turn's
            logprobs[3] = value
        return replace(completion, logprobs=logprobs)

    place = rf"episode g-0, turn 1: token 3 of {len(said[1])} has the log-probability {value}"
    with pytest.raises(NonFinite, match=place):
        play(Scripted(*said, tamper=spoil), qwen3)


def test_a_dead_engine_stops_the_run_instead_of_ending_an_episode(qwen3: Renderer) -> None:
    closed = Talk.closed
    with pytest.raises(EngineDead, match="out of memory"):
        play(Scripted(say(qwen3, CALL), EngineDead("out of memory")), qwen3)
    assert Talk.closed == closed + 1
