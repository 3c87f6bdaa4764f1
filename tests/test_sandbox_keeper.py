"""The books on sandboxes: what is written and when, what is shared between processes, what is reaped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rz_agent.errors import ConfigError
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.errors import CreateError, Misconfigured, RateLimited
from rz_agent.sandboxes.keeper import Keeper
from rz_agent.sandboxes.kept import KeptSandbox
from rz_agent.sandboxes.ledger import Ledger
from rz_agent.sandboxes.limiter import Limiter, Rate, Slots
from rz_agent.sandboxes.local import census
from rz_agent.sandboxes.local.provider import LocalProvider
from rz_agent.sandboxes.local.sandbox import LocalSandbox
from rz_agent.sandboxes.owner import EXPIRES_LABEL, LABEL, RUN_LABEL, Owner
from rz_agent.sandboxes.pool import SandboxPool
from rz_agent.sandboxes.spec import Limits, SandboxSpec
from rz_agent.sandboxes.state_folder import state_folder
from rz_agent.sandboxes.tables import LocalTable

pytestmark = pytest.mark.anyio
BARE = LocalTable(isolation="none")
SPEC = SandboxSpec()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Scripted(LocalProvider):
    """The real provider, which first raises what a test tells it to, and writes down what it was asked."""

    def __init__(self, ledger: Ledger, *refusals: Exception) -> None:
        super().__init__(BARE, ledger)
        self.refusals, self.asked = list(refusals), list[SandboxSpec]()
        self.entries_before = list[int]()
        self.delay_s = 0.0

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        self.asked.append(spec)
        self.entries_before.append(len(self._ledger.entries()))
        await asyncio.sleep(self.delay_s)
        if self.refusals:
            raise self.refusals.pop(0)
        return await super().create(spec)


class Books:
    """A ledger and a limiter in a test's own folder, and a keeper that uses them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger")

    @contextlib.asynccontextmanager
    async def keeper(
        self, *refusals: Exception, max_live: int = 8, warm: int = 0
    ) -> AsyncIterator[tuple[Keeper, Scripted]]:
        limiter = Limiter(
            "local", max_live=max_live, max_starting=2, creates_per_s=None, folder=self.folder / "limits"
        )
        provider = Scripted(self.ledger, *refusals)
        async with Keeper(provider, limiter=limiter, ledger=self.ledger, run_id="run 7", warm=warm) as keeper:
            yield keeper, provider


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.02)


# -- one sandbox ------------------------------------------------------------------------------------------


async def test_a_sandbox_is_in_the_ledger_from_before_it_is_made_until_after_it_is_closed(
    books: Books,
) -> None:
    async with books.keeper() as (keeper, provider):
        sandbox = await keeper.create(SPEC)
        assert provider.entries_before == [1]
        (entry,) = books.ledger.entries("local")
        assert (entry.sandbox_id, entry.run_id, entry.spec_key) == (sandbox.id, "run 7", SPEC.key)
        assert entry.owner == str(Owner.here())
        assert not entry.is_left_behind
        await sandbox.close()
        assert books.ledger.entries() == []


async def test_a_provider_gets_the_labels_by_which_a_stranger_finds_out_whose_it_is(books: Books) -> None:
    async with books.keeper() as (keeper, provider):
        await keeper.create(replace(SPEC, labels={"task": "t1"}))
        labels = provider.asked[0].labels
        assert (labels["task"], labels[RUN_LABEL], labels[LABEL]) == ("t1", "run 7", str(Owner.here()))
        assert 0 < int(labels[EXPIRES_LABEL]) - time.time() <= SPEC.lifetime_s
        (info,) = [i for i in await provider.live(run_id="run 7") if i.owner == str(Owner.here())]
        assert (info.state, info.provider) == ("running", "local")


async def test_a_create_that_fails_or_is_cancelled_leaves_no_entry_and_no_slot(books: Books) -> None:
    async with books.keeper(CreateError("no", provider="local"), max_live=1) as (keeper, provider):
        with pytest.raises(CreateError):
            await keeper.create(SPEC)
        provider.delay_s = 60
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await keeper.create(SPEC)
        assert books.ledger.entries() == []
        provider.delay_s = 0
        async with asyncio.timeout(20), await keeper.create(SPEC) as sandbox:
            assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


async def test_closing_twice_at_once_and_cancelled_gives_everything_back_once(books: Books) -> None:
    async with books.keeper(max_live=1) as (keeper, _):
        sandbox = await keeper.create(SPEC)
        closing = [asyncio.create_task(sandbox.close()) for _ in range(3)]
        await asyncio.sleep(0)
        closing[0].cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        await sandbox.close()
        assert books.ledger.entries() == []
        async with asyncio.timeout(20):
            await keeper.create(SPEC)


async def test_what_could_not_be_closed_gives_its_slot_back_and_stays_in_the_ledger(books: Books) -> None:
    class Stuck(LocalSandbox):
        async def close(self) -> None:
            await super().close()
            raise OSError("the service does not answer")

    async with books.keeper(max_live=1) as (keeper, _):
        sandbox = await keeper.create(SPEC)
        assert isinstance(sandbox.inner, LocalSandbox)
        sandbox.inner.__class__ = Stuck
        with pytest.raises(OSError, match="does not answer"):
            await sandbox.close()
        assert [entry.sandbox_id for entry in books.ledger.entries()] == [sandbox.id]
        async with asyncio.timeout(20):
            await (await keeper.create(SPEC)).close()


async def test_a_provider_that_asks_for_patience_gets_it_and_other_refusals_are_heard_at_once(
    books: Books,
) -> None:
    later = RateLimited("slow down", provider="local", retry_after=0.2)
    async with books.keeper(later, later) as (keeper, provider):
        begun = time.monotonic()
        await keeper.create(SPEC)
        assert len(provider.asked) == 3
        assert time.monotonic() - begun >= 0.4
        provider.refusals = [RateLimited("come tomorrow", provider="local", retry_after=86400)]
        with pytest.raises(RateLimited):
            await keeper.create(SPEC)


async def test_what_cannot_be_written_down_is_not_made(books: Books) -> None:
    (books.folder / "ledger").touch()  # where its folder should be
    async with books.keeper(max_live=1) as (keeper, provider):
        with pytest.raises(CreateError, match="so it is not made"):
            await keeper.create(SPEC)
        assert provider.asked == []


async def test_what_was_made_and_cannot_be_written_down_is_closed(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    async with books.keeper(max_live=1) as (keeper, provider):
        monkeypatch.setattr(books.ledger, "complete", full)
        with pytest.raises(CreateError, match="no space left\n  Make room on that disk"):
            await keeper.create(SPEC)
        assert len(provider.asked) == 1
        assert await provider.live(run_id="run 7") == []
        assert books.ledger.entries() == []
        assert [task for task in asyncio.all_tasks() if "alive" in task.get_name()] == []
        monkeypatch.undo()
        async with asyncio.timeout(20):
            await keeper.create(SPEC)


async def test_renewing_a_life_is_written_down(books: Books) -> None:
    async with books.keeper() as (keeper, _):
        sandbox = await keeper.create(replace(SPEC, lifetime_s=10))
        await sandbox.keepalive(1000)
        await sandbox.keepalive(10)  # no less than before
        assert books.ledger.entries()[0].expires - time.time() > 900


async def test_what_is_held_is_kept_alive_past_its_lifetime_and_nothing_else_is(books: Books) -> None:
    short = replace(SPEC, lifetime_s=1.5)
    async with books.keeper() as (keeper, provider):
        forgotten = await provider.create(short)
        held = await keeper.create(short)
        await asyncio.sleep(2.5)
        assert await held.alive()
        assert not await forgotten.alive()
        assert books.ledger.entries()[0].expires > time.time()
        await held.close()
        assert [t for t in asyncio.all_tasks() if "alive" in t.get_name()] == []


STALLED = """
import asyncio, os, signal, sys
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.keeper import Keeper

async def main():
    config = SandboxConfig.load({"lifetime_s": 2.0, "local": {"isolation": "none"}}, source="test")
    print((await Keeper.of(config).create(config.spec())).id, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main())
"""


def test_a_harness_that_stands_still_keeps_nothing_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", STALLED], stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        name = harness.stdout.readline().strip()
        try:
            assert census.take_census()[name].pids
            asyncio.run(until(lambda: not census.take_census()[name].pids))  # its folder waits for its owner
        finally:
            harness.kill()
    asyncio.run(until(lambda: name not in census.take_census()))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SandboxSpec(network="open"), 'sandbox.network.mode = "open"'),
        (SandboxSpec(image="x"), "image 'x'"),
        (SandboxSpec(screen=(1, 1)), "screen"),
    ],
)
async def test_asking_for_what_a_provider_has_not_is_refused_with_a_remedy(
    books: Books, spec: SandboxSpec, words: str
) -> None:
    async with books.keeper() as (keeper, provider):
        with pytest.raises(Misconfigured, match=r"or name another sandbox\.provider") as caught:
            await keeper.create(spec)
        assert words in str(caught.value)
        assert provider.asked == []


# -- limits between processes -------------------------------------------------------------------------------

HOLDER = """
import asyncio, sys
from pathlib import Path
from rz_agent.sandboxes.limiter import Slots

slots = Slots(Path(sys.argv[1]), int(sys.argv[2]))
held = [slots.take_free() for _ in range(int(sys.argv[3]))]
print(sum(slot is not None for slot in held), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(folder: Path, size: int, wanted: int) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Another process that holds slots; how many it got."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(size), str(wanted)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process
        finally:
            process.kill()


async def test_slots_are_shared_with_another_process_and_freed_when_it_is_killed(tmp_path: Path) -> None:
    slots = Slots(tmp_path / "live", 5)
    with holder(tmp_path / "live", 5, 3) as (got, other):
        assert got == 3
        mine = [slots.take_free() for _ in range(3)]
        assert [slot is None for slot in mine] == [False, False, True]
        waiting = asyncio.create_task(slots.take())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        os.kill(other.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            (await waiting).release()


async def test_a_process_with_a_lower_bound_keeps_it_beside_one_with_a_higher(tmp_path: Path) -> None:
    with holder(tmp_path / "live", 64, 8) as (got, _):
        assert got == 8
        assert Slots(tmp_path / "live", 8).take_free() is None
        assert Slots(tmp_path / "live", 9).take_free() is not None


async def test_those_who_wait_are_served_in_order_and_one_who_gives_up_holds_nothing(tmp_path: Path) -> None:
    slots, served = Slots(tmp_path, 1), list[int]()

    async def one(number: int) -> None:
        async with slots.held():
            served.append(number)
            await asyncio.sleep(0)

    first = await slots.take()
    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(one(number)))
        await asyncio.sleep(0.01)
    tasks[1].cancel()
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    first.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert served == [2, 3]
    assert slots.take_free() is not None


RACER = """
import asyncio, sys
from pathlib import Path
from rz_agent.sandboxes.limiter import Rate

async def main():
    rate = Rate(Path(sys.argv[1]), float(sys.argv[2]))
    for _ in range(int(sys.argv[3])):
        await rate.wait()

asyncio.run(main())
"""


def test_two_processes_together_keep_the_rate(tmp_path: Path) -> None:
    begun = time.monotonic()
    command = [sys.executable, "-c", RACER, str(tmp_path / "rate"), "20", "25"]
    racers = [subprocess.Popen(command) for _ in range(2)]
    assert [racer.wait() for racer in racers] == [0, 0]
    assert time.monotonic() - begun >= (50 - 20 - 1) / 20  # all but the first second's worth wait


async def test_an_unlimited_rate_and_a_time_from_before_the_last_boot_hold_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "rate"
    path.write_text("99999999999")
    async with asyncio.timeout(0.5):
        await Rate(path, 4.0).wait()
        for _ in range(100):
            await Rate(path, None).wait()


async def test_max_live_holds_for_two_keepers_of_one_user(books: Books) -> None:
    async with books.keeper(max_live=2) as (one, _), books.keeper(max_live=2) as (other, _):
        held = [await one.create(SPEC), await other.create(SPEC)]
        waiting = asyncio.create_task(other.create(SPEC))
        await asyncio.sleep(0.4)
        assert not waiting.done()
        await held[0].close()
        async with asyncio.timeout(10):
            await waiting


async def test_who_comes_later_does_not_overtake_who_waits(books: Books) -> None:
    async with books.keeper(max_live=1, warm=1) as (keeper, _):
        first, order = await keeper.create(SPEC), list[str]()

        async def ask(name: str) -> None:
            async with await keeper.create(SPEC):
                order.append(name)

        early = asyncio.create_task(ask("early"))
        await asyncio.sleep(0.2)
        closing = asyncio.create_task(first.close())
        late = asyncio.create_task(ask("late"))
        async with asyncio.timeout(20):
            await asyncio.gather(early, closing, late)
        assert order == ["early", "late"]


# -- what others left -------------------------------------------------------------------------------------

DEAD = replace(Owner.here(), boot="00000000")  # this machine before its last start


async def test_what_a_dead_owner_left_is_killed_by_the_next_keeper_that_makes_one(books: Books) -> None:
    stranger = LocalProvider(BARE, books.ledger)
    left = await stranger.create(SPEC)
    entry = books.ledger.intend(
        provider="local", place="", owner=str(DEAD), run_id="old", spec_key="k", lifetime_s=9
    )
    books.ledger.complete(entry, left.id)
    async with books.keeper() as (keeper, _):
        await keeper.create(SPEC)
        assert not await left.alive()
        assert [e.run_id for e in books.ledger.entries()] == ["run 7"]
    await stranger.aclose()


async def test_reap_tells_apart_what_it_removed_what_had_ended_and_what_was_never_made(books: Books) -> None:
    stranger = LocalProvider(BARE, books.ledger)
    left = await stranger.create(SPEC)
    for name in (left.id, "1-0-00000000", ""):
        entry = books.ledger.intend(
            provider="local", place="", owner=str(DEAD), run_id="old", spec_key="k", lifetime_s=9
        )
        if name:
            books.ledger.complete(entry, name)
    async with books.keeper() as (keeper, _):
        found = {(one.id, one.what, one.run_id) for one in await keeper.reap(run_id="old")}
    assert found == {
        (left.id, "removed", "old"),
        ("1-0-00000000", "had ended", "old"),
        ("", "was never made", "old"),
    }
    await stranger.aclose()


async def test_reap_leaves_the_living_and_other_machines_alone_until_their_time_is_over(
    books: Books,
) -> None:
    elsewhere = str(replace(DEAD, host="another-machine"))
    for owner, lifetime_s in ((str(Owner.here()), -1.0), (elsewhere, 100.0), (elsewhere, -1.0)):
        books.ledger.intend(
            provider="local", place="", owner=owner, run_id="", spec_key="k", lifetime_s=lifetime_s
        )
    books.ledger.intend(provider="other", place="", owner=str(DEAD), run_id="", spec_key="k", lifetime_s=1)
    async with books.keeper() as (keeper, _):
        assert len(await keeper.reap()) == 1
        assert len(books.ledger.entries("local")) == 2
        assert len(books.ledger.entries("other")) == 1


async def test_reap_strikes_no_entry_of_a_place_that_it_does_not_see_and_counts_them(books: Books) -> None:
    for place in ("", "tcp://here", "tcp://there", "tcp://there"):
        books.ledger.intend(
            provider="local", place=place, owner=str(DEAD), run_id="", spec_key="k", lifetime_s=-1
        )
    async with books.keeper() as (keeper, provider):
        provider.place = "tcp://here"
        assert len(await keeper.reap()) == 2
        assert keeper.out_of_sight() == {"tcp://there": 2}
        sandbox = await keeper.create(SPEC)
        assert [e.place for e in books.ledger.entries() if e.sandbox_id == sandbox.id] == ["tcp://here"]
    assert {entry.place for entry in books.ledger.entries()} == {"tcp://there"}


async def test_an_entry_from_before_places_were_written_is_still_reaped(books: Books) -> None:
    entry = books.ledger.intend(
        provider="local", place="x", owner=str(DEAD), run_id="old", spec_key="k", lifetime_s=9
    )
    path = books.folder / "ledger" / f"{entry.token}.json"
    path.write_text(json.dumps({k: v for k, v in asdict(entry).items() if k != "place"}))
    async with books.keeper() as (keeper, _):
        assert [one.run_id for one in await keeper.reap()] == ["old"]
    assert not path.exists()


async def test_half_an_entry_and_one_of_another_version_are_passed_over(books: Books) -> None:
    (books.folder / "ledger").mkdir()
    (books.folder / "ledger" / "a.json").write_text('{"token": "a"')
    (books.folder / "ledger" / "b.json").write_text('{"token": "b", "colour": "red"}')
    assert books.ledger.entries() == []


def test_a_user_without_a_home_gets_a_closed_folder_below_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = state_folder()
    assert folder == tmp_path / f"rz-agent-{os.geteuid()}" / "sandboxes"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # as somebody else might have made it beforehand
    with pytest.raises(ConfigError, match="Set it to a folder of yours"):
        state_folder()


# -- warm ---------------------------------------------------------------------------------------------------


async def test_ready_sandboxes_are_handed_out_once_and_replaced(books: Books) -> None:
    async with books.keeper(warm=2) as (keeper, provider):
        first = await keeper.create(SPEC)
        await until(lambda: keeper.ready == 2)
        second = await keeper.create(SPEC)
        await until(lambda: keeper.ready == 2)
        assert len(provider.asked) == 4
        await second.close()
        await asyncio.sleep(0.1)
        third = await keeper.create(SPEC)
        assert len({first.id, second.id, third.id}) == 3


async def test_one_that_died_while_it_waited_is_not_handed_out(books: Books) -> None:
    async with books.keeper(warm=1) as (keeper, provider):
        await keeper.create(SPEC)
        await until(lambda: keeper.ready == 1)
        waiting = books.ledger.entries()[-1].sandbox_id
        await provider.kill(waiting)
        await asyncio.sleep(0.2)
        taken = await keeper.create(SPEC)
        assert taken.id != waiting
        assert await taken.alive()


async def test_a_ready_one_of_another_spec_gives_way_to_who_would_wait(books: Books) -> None:
    other = replace(SPEC, limits=Limits(pids=33))
    async with books.keeper(warm=1, max_live=2) as (keeper, _):
        await keeper.create(SPEC)
        await until(lambda: keeper.ready == 1)
        async with asyncio.timeout(10):
            await keeper.create(other)
        assert keeper.ready == 0


# -- the pool -----------------------------------------------------------------------------------------------


async def test_episodes_never_share_a_sandbox_whose_sessions_are_not_apart(books: Books) -> None:
    async with books.keeper(max_live=2) as (keeper, _):
        pool = SandboxPool(keeper, SPEC, size=1)
        first, second = await pool.acquire(), await pool.acquire()
        assert first.id != second.id
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await pool.release(first)
        async with asyncio.timeout(10):
            third = await waiting
        assert third.id not in (first.id, second.id)
        assert not await first.alive()


async def test_a_lease_is_nobody_elses_and_ends_with_its_close() -> None:
    config = SandboxConfig(local=BARE)
    async with SandboxPool.of(config, run_id="r") as pool:
        leased = await pool.lease()
        assert isinstance(leased, KeptSandbox)
        assert leased.id != (await pool.lease(replace(SPEC, env={"A": "1"}))).id
        await leased.close()
        assert not await leased.alive()
