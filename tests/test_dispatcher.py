"""Episodes in flight: each is recorded once, failures end the run where they must, and nothing hangs.

Scheduler and journal are the real ones; an episode is whatever each test says it is.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from rz_agent.envs import Task
from rz_agent.envs.failure import mask_reason
from rz_agent.errors import ConfigError, EnvironmentBug, MissingLogprob, RunStopped
from rz_agent.journal import GroupProgress, GroupRecord, Journal
from rz_agent.recipes.controller import rollout_figures
from rz_agent.rollout.dispatcher import Dispatcher, Tally
from rz_agent.rollout.episode_request import EpisodeRequest, RunEpisode, Signals
from rz_agent.rollout.scheduler import Schedule, Scheduler
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.errors import SandboxError
from rz_agent.sandboxes.pool import InfraBreaker, SandboxPool
from rz_agent.sandboxes.registry import make_provider
from rz_agent.trajectory import Segment, Trajectory

GROUP_SIZE = 4


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.sqlite", run={}) as opened:
        yield opened


def played(request: EpisodeRequest, lost: str = "", version: int = 0) -> Trajectory:
    """One action of a version; masked where something was lost."""
    segment = Segment(
        token_ids=np.array([5, 6], np.int32),
        action_mask=np.array([False, True]),
        behaviour_logprobs=np.array([np.nan, -1.0], np.float32),
        policy_version=np.array([-1, version], np.int32),
    )
    return Trajectory(
        episode_id=request.episode_id,
        group_id=request.group_id,
        task_id=request.task.id,
        segments=(segment,),
        reward=0.0,
        status="masked" if lost else "ok",
        mask_reason=lost,
    )


def episodes(answer: Callable[[EpisodeRequest], Trajectory]) -> RunEpisode:
    async def run(request: EpisodeRequest, signals: Signals) -> Trajectory:
        signals.first_request()
        signals.first_token(0)
        await asyncio.sleep(0)
        return answer(request)

    return run


async def run_to_the_end(
    journal: Journal,
    run_episode: RunEpisode,
    *,
    updates: int,
    in_flight: int = 16,
    on_infra_failure: Literal["mask", "retry", "stop"] = "mask",
    task_at: Callable[[int], Task] = lambda position: Task(id=f"t{position}", prompt="Go."),
    unfinished: Sequence[GroupProgress] = (),
) -> Tally:
    """All updates, on an engine that serves version 0; half of the last 8 episodes may fail."""
    scheduler = Scheduler(groups_per_batch=2, group_size=GROUP_SIZE, max_lag=64, total_updates=updates)
    scheduler.acknowledged("engine", 0)
    dispatcher = Dispatcher(
        scheduler=scheduler,
        journal=journal,
        run_episode=run_episode,
        task_at=task_at,
        group_size=GROUP_SIZE,
        episodes_in_flight=in_flight,
        seed=0,
        breaker=InfraBreaker(share=0.5, window=8),
        on_infra_failure=on_infra_failure,
    )
    running = asyncio.create_task(dispatcher.run(unfinished))
    for update in range(updates):
        batch = asyncio.create_task(dispatcher.next_batch())
        await asyncio.wait({running, batch}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        if running.done() or not batch.done():
            batch.cancel()
            break
        scheduler.completed(update)
        dispatcher.wake()
    await asyncio.wait_for(running, 20)
    return dispatcher.take_tally()


def recorded(journal: Journal) -> list[Trajectory]:
    return [t for record in journal.groups() for t in journal.episodes(record.group_id).values()]


def test_a_run_in_which_everything_fails_stops_with_exit_code_3_and_keeps_its_record(
    journal: Journal,
) -> None:
    with pytest.raises(RunStopped, match=r"100% of the last 8 episodes lost their sandbox") as stopped:
        asyncio.run(run_to_the_end(journal, episodes(lambda r: played(r, "no sandbox")), updates=9))
    assert stopped.value.exit_code == 3
    assert len(recorded(journal)) >= 8
    assert {episode.mask_reason for episode in recorded(journal)} == {"no sandbox"}


def test_a_lost_episode_leaves_its_group_to_the_others_and_the_run_goes_on(journal: Journal) -> None:
    def first_of_each_group_is_lost(request: EpisodeRequest) -> Trajectory:
        return played(request, "" if request.index else "sandbox died")

    asyncio.run(run_to_the_end(journal, episodes(first_of_each_group_is_lost), updates=3))
    names = [record.group_id for record in journal.groups()]
    assert len(names) == 6
    assert all(len(journal.group(name).kept) == GROUP_SIZE - 1 for name in names)


def test_a_group_that_is_lost_whole_is_replaced_by_the_next_task(journal: Journal) -> None:
    def second_group_is_lost(request: EpisodeRequest) -> Trajectory:
        return played(request, "sandbox died" if request.group_id == "g0000001" else "")

    asyncio.run(run_to_the_end(journal, episodes(second_group_is_lost), updates=2))
    assert [record.task_id for record in journal.groups()] == ["t0", "t1", "t2", "t3", "t4"]


def test_an_error_that_is_no_outcome_of_an_episode_ends_the_run_for_all_of_them(journal: Journal) -> None:
    async def hangs_but_for_one(request: EpisodeRequest, signals: Signals) -> Trajectory:
        if request.episode_id == "g0000001-2":
            raise MissingLogprob("token 3 has no log-probability")
        await asyncio.sleep(3600)
        return played(request)

    with pytest.raises(MissingLogprob, match="token 3"):
        asyncio.run(run_to_the_end(journal, hangs_but_for_one, updates=9))
    assert recorded(journal) == []


def test_retry_plays_a_lost_episode_once_more_with_the_same_seed_and_records_one(journal: Journal) -> None:
    seen: dict[str, list[int]] = {}

    def lost_at_first(request: EpisodeRequest) -> Trajectory:
        seeds = seen.setdefault(request.episode_id, [])
        seeds.append(request.seed)
        return played(request, "sandbox died" if len(seeds) == 1 else "")

    asyncio.run(run_to_the_end(journal, episodes(lost_at_first), updates=1, on_infra_failure="retry"))
    assert [episode.masked for episode in recorded(journal)] == [False] * 2 * GROUP_SIZE
    assert all(len(seeds) == 2 and seeds[0] == seeds[1] for seeds in seen.values())
    assert len(journal.events("retry")) == len(seen) == 2 * GROUP_SIZE


def test_retry_plays_on_a_new_sandbox_and_only_what_is_the_places_fault_is_masked(journal: Journal) -> None:
    """Each episode has a sandbox of its own; the first one of every episode is killed under it."""
    used: dict[str, list[str]] = {}

    async def scenario() -> None:
        config = SandboxConfig.load({"max_live": 4, "local": {"isolation": "none"}}, source="test")
        provider = make_provider(config)
        async with SandboxPool.of(config) as pool:

            async def run(request: EpisodeRequest, signals: Signals) -> Trajectory:
                signals.first_request()
                signals.first_token(0)
                sandbox = await pool.acquire()
                try:
                    tries = used.setdefault(request.episode_id, [])
                    tries.append(sandbox.id)
                    if len(tries) == 1:
                        await provider.kill(sandbox.id)
                    assert (await sandbox.exec(["true"])).exit_code == 0
                    return played(request)
                except SandboxError as error:
                    return played(request, mask_reason(error) or "")
                finally:
                    await pool.release(sandbox)

            await run_to_the_end(journal, run, updates=1, on_infra_failure="retry")

    asyncio.run(scenario())
    assert [episode.masked for episode in recorded(journal)] == [False] * 2 * GROUP_SIZE
    assert all(len(set(names)) == 2 for names in used.values())
    assert {event.payload["why"].partition(":")[0] for event in journal.events("retry")} == {"Died"}


def test_stop_ends_the_run_at_the_first_lost_episode(journal: Journal) -> None:
    lost = episodes(lambda r: played(r, "disk full"))
    with pytest.raises(RunStopped, match="lost its infrastructure: disk full"):
        asyncio.run(run_to_the_end(journal, lost, updates=9, on_infra_failure="stop"))


def test_the_mean_wait_of_episodes_for_a_sandbox_is_a_figure(journal: Journal) -> None:
    waits = {"g0000000-0": 3.0, "g0000001-1": 1.0}
    seen = list[str]()

    def answer(request: EpisodeRequest) -> Trajectory:
        seen.append(request.episode_id)
        metrics = {"rollout/sandbox_waited_s": waits.get(request.episode_id, 0.0)}
        return replace(played(request), metrics=metrics)

    tally = asyncio.run(run_to_the_end(journal, episodes(answer), updates=1))
    figures = rollout_figures(tally, {"waited": 1.0, "published": 0.0, "audited": 0.0})
    assert waits.keys() <= set(seen)
    assert figures["sandbox/waited_s"] == 4.0 / len(seen)


def test_hundreds_of_episodes_are_in_flight_at_once_and_no_more_than_allowed(journal: Journal) -> None:
    running, most, full = 0, 0, asyncio.Event()

    async def waits_for_the_others(request: EpisodeRequest, signals: Signals) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 300:
            await asyncio.sleep(0.2)  # time to start one too many
            full.set()
        await full.wait()
        running -= 1
        return played(request)

    asyncio.run(run_to_the_end(journal, waits_for_the_others, updates=40, in_flight=300))
    assert most == 300
    assert len(recorded(journal)) == 40 * 2 * GROUP_SIZE


@pytest.mark.parametrize("in_flight", [1, GROUP_SIZE - 1, GROUP_SIZE + 1])
def test_places_in_flight_are_all_taken_whatever_the_size_of_a_group(
    journal: Journal, in_flight: int
) -> None:
    running, most, full = 0, 0, asyncio.Event()

    async def waits_for_the_others(request: EpisodeRequest, signals: Signals) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == in_flight:
            await asyncio.sleep(0.05)  # time to start one too many
            full.set()
        await asyncio.wait_for(full.wait(), 20)
        running -= 1
        return played(request)

    asyncio.run(run_to_the_end(journal, waits_for_the_others, updates=2, in_flight=in_flight))
    assert most == in_flight


def tasks_in_memory() -> int:
    """asyncio tasks that anything still refers to, running or done."""
    gc.collect()
    return sum(issubclass(type(thing), asyncio.Task) for thing in gc.get_objects())


@pytest.mark.parametrize("schedule", ["bounded", "constant"])
def test_thousands_of_finished_episodes_wait_for_a_slow_learner_as_records_and_not_as_tasks(
    journal: Journal, schedule: Schedule
) -> None:
    """64 updates ahead of a learner that takes a batch only when the rollout side can do nothing more."""
    batch_size, max_lag, updates = 12, 64, 68
    ahead = (max_lag + 1) * batch_size
    scheduler = Scheduler(
        groups_per_batch=batch_size,
        group_size=GROUP_SIZE,
        max_lag=max_lag,
        total_updates=updates,
        schedule=schedule,
    )
    scheduler.acknowledged("engine", 0)
    running = most_running = most_untrained = 0
    full = asyncio.Event()

    async def quick(request: EpisodeRequest, signals: Signals) -> Trajectory:
        nonlocal running, most_running, most_untrained
        running += 1
        most_running = max(most_running, running)
        most_untrained = max(most_untrained, len(scheduler.untrained))
        version = scheduler.update
        signals.first_request()
        signals.first_token(version)
        if running == 64:
            await asyncio.sleep(0.2)  # time to start one too many
            full.set()
        await full.wait()
        running -= 1
        return played(request, version=version)

    dispatcher = Dispatcher(
        scheduler=scheduler,
        journal=journal,
        run_episode=quick,
        task_at=lambda position: Task(id=f"t{position}", prompt="Go."),
        group_size=GROUP_SIZE,
        episodes_in_flight=64,
        seed=0,
        breaker=InfraBreaker(share=0.5, window=8),
    )

    async def until_nothing_more_can_start(rollouts: asyncio.Task[None], admitted: int) -> None:
        while scheduler.next_position < admitted or not all(g.finished for g in scheduler.untrained):
            assert not rollouts.done()
            await asyncio.sleep(0.001)  # a learner that looks up now and then

    async def train_slowly() -> list[int]:
        """Lag of each trained group, in the order of training."""
        rollouts, lags = asyncio.create_task(dispatcher.run()), list[int]()
        for update in range(updates):
            admitted = min(update * batch_size + ahead, updates * batch_size)
            await until_nothing_more_can_start(rollouts, admitted)
            if not update:
                await asyncio.sleep(0.05)  # time to start one too many
                assert len(scheduler.untrained) == ahead
                assert asyncio.all_tasks() == {asyncio.current_task(), rollouts}
                assert tasks_in_memory() - before == 2
            oldest = {group.group_id: group.oldest_version for group in scheduler.untrained}
            batch = await dispatcher.next_batch()
            assert batch is not None
            lags += [update - oldest[name] for name in batch]
            scheduler.completed(update)
            scheduler.acknowledged("engine", update + 1)
            dispatcher.wake()
        await asyncio.wait_for(rollouts, 20)
        return lags

    before = tasks_in_memory()
    lags = asyncio.run(train_slowly())
    assert len(lags) == updates * batch_size
    assert max(lags) == max_lag
    assert most_untrained <= ahead
    assert most_running == 64
    assert ahead * GROUP_SIZE == 3120 < len(recorded(journal)) == updates * batch_size * GROUP_SIZE


def silent(request: EpisodeRequest) -> Trajectory:
    """An episode whose prompt did not fit: nothing was sampled."""
    return replace(played(request), segments=(), status="truncated")


def test_prompts_that_never_fit_stop_the_run_and_do_not_go_on_for_ever(journal: Journal) -> None:
    with pytest.raises(RunStopped, match=r"last 64 episodes .* task t\d+\n.*rollout\.context_len"):
        asyncio.run(run_to_the_end(journal, episodes(silent), updates=1))
    assert len(recorded(journal)) < 64 + 16


def test_a_few_prompts_that_do_not_fit_are_no_reason_to_stop(journal: Journal) -> None:
    def mixed(request: EpisodeRequest) -> Trajectory:
        return silent(request) if int(request.task.id[1:]) % 4 else played(request)

    asyncio.run(run_to_the_end(journal, episodes(mixed), updates=20))
    assert len(recorded(journal)) > 64


def test_an_episode_that_cancels_itself_ends_the_run_with_its_name(journal: Journal) -> None:
    def cancelled(request: EpisodeRequest) -> Trajectory:
        if request.task.id == "t1":
            raise asyncio.CancelledError
        return played(request)

    with pytest.raises(EnvironmentBug, match=r"episode g0000001-\d of task t1 was cancelled from within"):
        asyncio.run(run_to_the_end(journal, episodes(cancelled), updates=3))


def test_a_task_order_that_raises_is_named_with_the_position(journal: Journal) -> None:
    def order(position: int) -> Task:
        return [Task(id="only", prompt="Go.")][position]

    with pytest.raises(
        EnvironmentBug, match=r"order at position 1: IndexError.*\n  at .*test_dispatcher\.py"
    ):
        asyncio.run(run_to_the_end(journal, episodes(played), updates=3, task_at=order))


def test_tasks_that_changed_under_a_run_are_refused_by_name(journal: Journal) -> None:
    record = GroupRecord(
        group_id="g0000000",
        task_id="t7",
        position=0,
        size=GROUP_SIZE,
        admitted_version=0,
        planned_update=None,
    )
    begun = GroupProgress(record=record, finished=frozenset(), oldest_version=None)
    with pytest.raises(ConfigError, match=r"taskset = 't0' is now at position 0, where the run had t7"):
        asyncio.run(run_to_the_end(journal, episodes(played), updates=1, unfinished=[begun]))
