"""The lag certificate: no token is trained past max_lag, nothing gets stuck, nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.errors import ConfigError
from rz_agent.rollout.lag_certificate import UntrainedGroup, required_lag
from rz_agent.rollout.scheduler import Schedule, Scheduler, StaleToken, Ticket
from simulated_run import LagViolation, Run, Stuck, World

LAGS = [0, 1, 2, 8, 64]


@st.composite
def worlds(draw: st.DrawFn, max_lag: int | None = None, schedule: Schedule | None = None) -> World:
    lag = draw(st.sampled_from(LAGS[:-1])) if max_lag is None else max_lag
    return World(
        seed=draw(st.integers(0, 2**32)),
        groups_per_batch=draw(st.integers(1, 4)),
        group_size=draw(st.integers(1, 4)),
        max_lag=lag,
        total_updates=draw(st.integers(1, 12)) if lag < 64 else 80,
        schedule=draw(st.sampled_from(["bounded", "constant"])) if schedule is None else schedule,
        positions=draw(st.none() | st.integers(1, 40)),
        engines=draw(st.integers(1, 3)),
        slots=draw(st.sampled_from([1, 4, 32, 1000])),
        tail=draw(st.sampled_from([0.8, 1.1, 3.0])),
        masked_share=draw(st.sampled_from([0.0, 0.2, 0.6])),
        lost_share=draw(st.sampled_from([0.0, 0.4])),
        kills=draw(st.sampled_from([0, 1, 5])),
        engine_delay=draw(st.sampled_from([0.0, 1.0, 5.0])),
    )


def check_whole(run: Run) -> None:
    """Every position was admitted in order and trained once, or left because nothing in it counted."""
    tickets = list(run.records.tickets.values())
    trained = run.records.trained()
    assert [t.position for t in tickets] == list(range(len(tickets)))
    assert len(set(trained)) == len(trained)
    assert set(trained) | run.records.left() == {t.group_id for t in tickets}
    assert not set(trained) & run.records.left()
    if run.records.completed < run.world.total_updates:
        assert len(tickets) == run.world.positions
    sizes = [len(run.records.batches[u]) for u in range(run.records.completed)]
    assert run.world.positions is not None or set(sizes) <= {run.world.groups_per_batch}
    assert all(batch == sorted(batch) for batch in run.records.batches.values())


# The theorem (the simulation raises LagViolation and Stuck)


@given(world=worlds())
@settings(max_examples=250, deadline=None)
def test_no_token_is_trained_past_max_lag_and_every_position_is_trained_once(world: World) -> None:
    check_whole(Run(world).finish())


@given(world=worlds(max_lag=64))
@settings(max_examples=12, deadline=None)
def test_the_bound_of_64_holds_over_kills_failures_and_lagging_engines(world: World) -> None:
    check_whole(Run(world).finish())


@pytest.mark.parametrize("max_lag", LAGS)
def test_the_bound_is_reached_when_the_learner_is_slow(max_lag: int) -> None:
    """The certificate is not vacuous: rollouts run ahead as far as the bound lets them."""
    run = Run(World(seed=1, max_lag=max_lag, total_updates=max_lag + 6, slots=1000, tail=3.0)).finish()
    assert max(lag for lags in run.lags.values() for lag in lags) == max_lag


class NewestInsteadOfLowest(Scheduler):
    """Wrong: takes the newest engine's version for e, and trusts it."""

    def _raise_lowest(self) -> None:
        self._lowest = max([*self._engines.values(), self._lowest or 0])

    def _check_served(self, group: UntrainedGroup, version: int) -> None:
        pass

    def acknowledged(self, engine: str, version: int) -> None:
        self._engines[engine] = version
        self._raise_lowest()


class BatchLeavesWhenPicked(Scheduler):
    """Wrong: the batch in training no longer takes places."""

    def _places_taken(self) -> int:
        return len(self._groups) - len(self.in_training)


@pytest.mark.parametrize("wrong", [NewestInsteadOfLowest, BatchLeavesWhenPicked])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_the_simulation_finds_the_fault_of_a_wrong_certificate(wrong: type[Scheduler], max_lag: int) -> None:
    def breaks(seed: int) -> bool:
        try:
            Run(World(seed=seed, max_lag=max_lag, engines=3, slots=32, engine_delay=3.0), wrong).finish()
        except (LagViolation, Stuck):
            return True
        return False

    assert any(breaks(seed) for seed in range(60))


@given(versions=st.lists(st.integers(0, 9), max_size=12), size=st.integers(1, 4), lag=st.integers(0, 9))
def test_required_lag_within_bound_means_that_every_versions_groups_fit(
    versions: list[int], size: int, lag: int
) -> None:
    update = 9
    fits = all(
        sum(v0 <= v for v0 in versions) <= max(v + lag - update + 1, 0) * size for v in range(update + 1)
    )
    assert fits == (required_lag(versions, update, size) <= lag)


# Synchronous training


@given(world=worlds(max_lag=0), other=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_at_max_lag_0_the_batches_do_not_depend_on_durations(world: World, other: int) -> None:
    quiet = World(
        seed=world.seed,
        groups_per_batch=world.groups_per_batch,
        group_size=world.group_size,
        max_lag=0,
        schedule=world.schedule,
        positions=world.positions,
        masked_share=0.0,
    )
    first = Run(replace(quiet, kills=world.kills, slots=world.slots)).finish()
    second = Run(replace(quiet, seed=other, tail=0.8, engines=3)).finish()
    assert first.records.batches == second.records.batches
    assert {lag for lags in first.lags.values() for lag in lags} == {0}


def test_the_same_events_in_the_same_order_give_the_same_batches() -> None:
    world = World(seed=5, max_lag=2, masked_share=0.2, lost_share=0.3, kills=3, engines=3)
    assert Run(world).finish().records.batches == Run(world).finish().records.batches


# The constant schedule


@pytest.mark.parametrize("max_lag", LAGS)
def test_constant_trains_every_batch_exactly_max_lag_updates_after_its_version(max_lag: int) -> None:
    world = World(
        seed=3,
        max_lag=max_lag,
        schedule="constant",
        total_updates=max_lag + 6,
        engines=3,
        slots=100,
        tail=0.9,
    )
    run = Run(world).finish()
    for update, batch in run.records.batches.items():
        oldest = [min(run.records.kept_versions(name)) for name in batch]
        assert oldest == [max(0, update - max_lag)] * world.groups_per_batch
    assert max(lag for lags in run.lags.values() for lag in lags) == max_lag


def test_constant_admits_g_groups_a_version_and_the_first_ones_for_the_warm_up() -> None:
    scheduler = fresh(groups_per_batch=2, max_lag=2, schedule="constant", total_updates=9)
    planned = [t.planned_update for t in admit_all(scheduler)]
    assert planned == [0, 0, 1, 1, 2, 2]
    finish_all(scheduler, version=0)
    train(scheduler)
    assert [t.planned_update for t in admit_all(scheduler)] == [3, 3]


def test_constant_keeps_the_version_until_its_groups_have_begun() -> None:
    scheduler = fresh(groups_per_batch=1, max_lag=1, schedule="constant", total_updates=9)
    first, second = admit_all(scheduler)
    scheduler.finish_episode(first.group_id, 0, masked=False)
    assert scheduler.next_batch() is None
    scheduler.first_token(second.group_id, 0)
    assert scheduler.next_batch() == [first.group_id]


def test_constant_replaces_a_group_that_left_by_a_younger_one_in_the_same_batch() -> None:
    scheduler = fresh(groups_per_batch=1, max_lag=1, schedule="constant", total_updates=9)
    _, second = admit_all(scheduler)
    scheduler.finish_episode(second.group_id, 0, masked=True)
    (replacement,) = admit_all(scheduler)
    assert (replacement.position, replacement.planned_update) == (2, second.planned_update)


# Single rules


def fresh(
    *,
    groups_per_batch: int = 1,
    group_size: int = 1,
    max_lag: int = 0,
    total_updates: int = 10,
    positions: int | None = None,
    schedule: Schedule = "bounded",
) -> Scheduler:
    scheduler = Scheduler(
        groups_per_batch=groups_per_batch,
        group_size=group_size,
        max_lag=max_lag,
        total_updates=total_updates,
        positions=positions,
        schedule=schedule,
    )
    scheduler.acknowledged("engine", 0)
    return scheduler


def admit_all(scheduler: Scheduler) -> list[Ticket]:
    return list(iter(scheduler.admit, None))


def finish_all(scheduler: Scheduler, version: int) -> None:
    for name in scheduler.waiting_for():
        for _ in range(scheduler.group_size):
            scheduler.finish_episode(name, version, masked=False)


def train(scheduler: Scheduler) -> list[str]:
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.completed(scheduler.update)
    scheduler.acknowledged("engine", scheduler.update)
    return batch


def test_nothing_is_admitted_before_an_engine_has_acknowledged_a_version() -> None:
    scheduler = Scheduler(groups_per_batch=1, group_size=1, max_lag=1, total_updates=1)
    assert scheduler.admit() is None


def test_admission_follows_the_slowest_engine() -> None:
    scheduler = fresh(max_lag=0)
    scheduler.acknowledged("slow", 0)
    admit_all(scheduler)
    finish_all(scheduler, version=0)
    train(scheduler)
    assert scheduler.lowest_version == 0
    assert scheduler.admit() is None
    scheduler.acknowledged("slow", 1)
    assert scheduler.admit() is not None


def test_losing_the_slowest_engine_lets_the_others_go_on() -> None:
    scheduler = fresh(max_lag=0)
    scheduler.acknowledged("slow", 0)
    admit_all(scheduler)
    finish_all(scheduler, version=0)
    train(scheduler)
    scheduler.engine_lost("slow")
    assert scheduler.admit() is not None


def test_a_replaced_engine_must_hold_the_lowest_version_before_it_serves() -> None:
    scheduler = fresh()
    admit_all(scheduler)
    finish_all(scheduler, version=0)
    train(scheduler)
    scheduler.engine_lost("engine")
    with pytest.raises(StaleToken, match="engine b is at version 0 but must serve 1 or newer"):
        scheduler.acknowledged("b", 0)
    scheduler.acknowledged("b", 1)
    assert scheduler.lowest_version == 1


def test_an_engine_cannot_hold_a_version_that_no_update_has_made() -> None:
    with pytest.raises(ValueError, match="acknowledges version 1, the newest is 0"):
        fresh().acknowledged("engine", 1)


def test_a_younger_group_may_overtake_only_while_the_older_one_still_fits() -> None:
    scheduler = fresh(max_lag=1)
    slow, quick = admit_all(scheduler)
    scheduler.finish_episode(quick.group_id, 0, masked=False)
    assert train(scheduler) == [quick.group_id]
    (third,) = admit_all(scheduler)
    scheduler.finish_episode(third.group_id, 1, masked=False)
    assert scheduler.next_batch() is None
    assert scheduler.waiting_for() == (slow.group_id,)
    scheduler.finish_episode(slow.group_id, 0, masked=False)
    assert train(scheduler) == [slow.group_id]


def test_a_group_that_boots_slowly_counts_from_its_first_request() -> None:
    def overtaken(asks_late: bool) -> list[str] | None:
        scheduler = fresh(max_lag=1)
        slow, quick = admit_all(scheduler)
        scheduler.finish_episode(quick.group_id, 0, masked=False)
        train(scheduler)
        if asks_late:
            scheduler.first_request(slow.group_id)
        (third,) = admit_all(scheduler)
        scheduler.finish_episode(third.group_id, 1, masked=False)
        return scheduler.next_batch()

    assert overtaken(asks_late=False) is None
    assert overtaken(asks_late=True) == ["g0000002"]


def test_masked_groups_leave_and_the_next_position_takes_their_place() -> None:
    scheduler = fresh(max_lag=0, group_size=2)
    (ticket,) = admit_all(scheduler)
    scheduler.finish_episode(ticket.group_id, 0, masked=True)
    scheduler.finish_episode(ticket.group_id, None, masked=False)
    assert scheduler.untrained == ()
    assert [t.position for t in admit_all(scheduler)] == [1]


def test_a_group_with_one_unmasked_episode_stays() -> None:
    scheduler = fresh(group_size=2)
    (ticket,) = admit_all(scheduler)
    scheduler.finish_episode(ticket.group_id, 0, masked=True)
    scheduler.finish_episode(ticket.group_id, 0, masked=False)
    assert scheduler.next_batch() == [ticket.group_id]


def test_the_last_batch_is_short_when_the_data_ends() -> None:
    scheduler = fresh(groups_per_batch=2, max_lag=1, positions=3)
    assert len(admit_all(scheduler)) == 3
    finish_all(scheduler, version=0)
    assert train(scheduler) == ["g0000000", "g0000001"]
    assert scheduler.exhausted
    assert not scheduler.finished
    assert train(scheduler) == ["g0000002"]
    assert scheduler.finished


def test_no_more_groups_are_admitted_than_the_remaining_updates_train() -> None:
    scheduler = fresh(groups_per_batch=2, max_lag=8, total_updates=3)
    assert len(admit_all(scheduler)) == 6


def test_a_token_older_than_the_certificate_allows_stops_the_run() -> None:
    scheduler = fresh()
    for version in range(2):
        (ticket,) = admit_all(scheduler)
        scheduler.first_token(ticket.group_id, version)
        finish_all(scheduler, version)
        train(scheduler)
    (ticket,) = admit_all(scheduler)
    with pytest.raises(StaleToken, match=r"g0000002 has a token of version 1; .* versions 2 to 2 only"):
        scheduler.finish_episode(ticket.group_id, 1, masked=False)


def test_misuse_is_refused() -> None:
    scheduler = fresh()
    (ticket,) = admit_all(scheduler)
    with pytest.raises(ValueError, match="g0000009 is not known"):
        scheduler.first_request("g0000009")
    with pytest.raises(ValueError, match="update 0 completed, in training is none"):
        scheduler.completed(0)
    scheduler.finish_episode(ticket.group_id, 0, masked=False)
    with pytest.raises(ValueError, match="g0000000 is finished"):
        scheduler.finish_episode(ticket.group_id, 0, masked=False)
    scheduler.next_batch()
    with pytest.raises(ValueError, match="update 0 is in training"):
        scheduler.next_batch()
    with pytest.raises(ValueError, match="max_lag = -1"):
        fresh(max_lag=-1)


# Resume with other values


def recorded(count: int, version: int, planned: int | None = None) -> list[UntrainedGroup]:
    return [
        UntrainedGroup(
            group_id=f"g{i:07d}",
            position=i,
            remaining=0,
            oldest_version=version,
            kept_oldest=version,
            planned_update=planned,
        )
        for i in range(count)
    ]


def unused(max_lag: int, groups_per_batch: int = 2, schedule: Schedule = "bounded") -> Scheduler:
    return Scheduler(
        groups_per_batch=groups_per_batch,
        group_size=1,
        max_lag=max_lag,
        total_updates=99,
        schedule=schedule,
    )


@given(count=st.integers(1, 12), version=st.integers(0, 5), size=st.integers(1, 4))
def test_a_resume_that_cannot_keep_the_bound_is_refused_with_the_lag_it_needs(
    count: int, version: int, size: int
) -> None:
    groups = recorded(count, version)
    needed = required_lag([version] * count, 5, size)
    unused(needed, size).restore(update=5, next_position=count, groups=groups)
    if needed:
        with pytest.raises(ConfigError, match=f"(?s)resume: max_lag = {needed - 1} .* at least {needed}"):
            unused(needed - 1, size).restore(update=5, next_position=count, groups=groups)


def test_a_resume_with_a_smaller_lag_drains_before_it_admits() -> None:
    scheduler = unused(max_lag=2)
    scheduler.restore(update=5, next_position=6, groups=recorded(6, version=5))
    scheduler.acknowledged("engine", 5)
    assert scheduler.admit() is None
    train(scheduler)
    assert len(admit_all(scheduler)) == 2


def test_a_recorded_batch_is_trained_again_as_it_was_whatever_the_batch_size_is_now() -> None:
    scheduler = unused(max_lag=1, groups_per_batch=4)
    groups = recorded(2, version=4)
    scheduler.restore(update=5, next_position=2, groups=groups, in_training=["g0000000", "g0000001"])
    scheduler.acknowledged("engine", 5)
    assert scheduler.in_training == ("g0000000", "g0000001")
    assert len(admit_all(scheduler)) == 4  # the batch takes its 4 places though it has 2 groups
    scheduler.completed(5)
    assert scheduler.update == 6


def test_after_a_resume_engines_serve_the_resumed_version_or_newer() -> None:
    scheduler = unused(max_lag=8)
    scheduler.restore(update=5, next_position=0, groups=[])
    with pytest.raises(StaleToken):
        scheduler.acknowledged("engine", 4)


def test_constant_cannot_take_over_groups_without_a_plan() -> None:
    with pytest.raises(ConfigError, match="schedule = 'constant' does not fit"):
        unused(8, schedule="constant").restore(update=5, next_position=1, groups=recorded(1, version=5))
