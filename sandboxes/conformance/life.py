"""A sandbox's life: made, listed, renewed, reset, killed, closed; and nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib

from ..errors import Died, SandboxError
from ..exec_result import ExecResult
from ..sandbox import Sandbox
from .place import Place
from .promise import Topic, expect, same

TOPIC = Topic("life")


async def _gone(place: Place, name: str) -> None:
    for _ in range(50):
        if name not in await place.mine():
            return
        await asyncio.sleep(0.1)
    expect(False, f"{name} is still listed 5 s later")


async def _died(*calls: asyncio.Task[ExecResult]) -> None:
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    same([type(answer).__name__ for answer in answers], ["Died"] * len(calls), "what each waiter got")
    for answer in answers:
        if isinstance(answer, Died):
            same((answer.blame, answer.retryable), ("infra", True), "blame and retryable")


async def _names(sandbox: Sandbox) -> list[str]:
    return [entry.name for entry in await sandbox.list_dir(".")]


def _waiters(sandbox: Sandbox) -> list[asyncio.Task[ExecResult]]:
    commands = [asyncio.create_task(sandbox.exec(["sleep", "600"], timeout_s=600)) for _ in range(2)]
    cell = asyncio.create_task(sandbox.python("while True: pass", session="w", timeout_s=600))
    return [*commands, cell]


@TOPIC.promise()
async def the_provider_looks_at_what_it_needs_and_finds_it(place: Place) -> None:
    failed = [result for result in await place.provider.check() if result.status == "failed"]
    expect(not failed, "; ".join(f"{result.name}: {result.detail} {result.remedy}" for result in failed))


@TOPIC.promise()
async def a_sandbox_is_listed_with_its_owner_and_run_while_it_lives(place: Place) -> None:
    async with place.fresh() as sandbox:
        infos = {info.id: info for info in await place.provider.live()}
        expect(sandbox.id in infos, f"{sandbox.id} is not among {sorted(infos)}")
        info = infos[sandbox.id]
        same(info.state, "running", "state")
        same((info.owner, info.run_id), (place.owner, place.run_id), "owner and run_id")
        expect(0 <= info.age_s < 600, f"its age is {info.age_s} s")
        same(await place.provider.live(run_id="another-run"), [], "those of another run")
    await _gone(place, sandbox.id)


@TOPIC.promise()
async def sandboxes_have_names_and_files_of_their_own(place: Place) -> None:
    async with place.fresh() as one, place.fresh() as other:
        expect(one.id != other.id, f"both are called {one.id}")
        await one.write("note", b"of one")
        same(await _names(one), ["note"], "what lies in one after a file was written there")
        same(await _names(other), [], "what lies in the other, which is new")


@TOPIC.promise()
async def a_killed_sandbox_is_an_infrastructure_error_to_every_waiter(place: Place) -> None:
    async with place.fresh() as sandbox:
        waiting = _waiters(sandbox)
        await asyncio.sleep(1)
        same(await place.provider.kill(sandbox.id), True, "kill()")
        await _died(*waiting)
        same(await sandbox.alive(), False, "alive()")
        with contextlib.suppress(Died):
            await sandbox.keepalive(10)
            expect(False, "keepalive() of a dead sandbox raises nothing")
        await _gone(place, sandbox.id)
    same(await place.provider.kill(sandbox.id), False, "kill() of one that is gone")


@TOPIC.promise()
async def closing_twice_at_once_and_cancelled_is_one_end(place: Place) -> None:
    async with place.fresh() as sandbox:
        closing = [asyncio.create_task(sandbox.close()) for _ in range(3)]
        await asyncio.sleep(0)
        closing[0].cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        await sandbox.close()
        same(await sandbox.alive(), False, "alive()")
        await _gone(place, sandbox.id)


@TOPIC.promise()
async def closing_reaches_who_waits_and_who_comes_later(place: Place) -> None:
    async with place.fresh() as sandbox:
        waiting = _waiters(sandbox)
        await asyncio.sleep(1)
        await sandbox.close()
        await _died(*waiting)
        await _died(asyncio.create_task(sandbox.exec(["true"])))


@TOPIC.promise()
async def a_create_that_is_cancelled_leaves_nothing(place: Place) -> None:
    before = await place.mine()
    for wait_s in (0.0, 0.02, 0.1, 0.3):
        making = asyncio.create_task(place.provider.create(place.spec))
        await asyncio.sleep(wait_s)
        making.cancel()
        await asyncio.wait([making])  # which does not take a cancellation of this task for that one's
        if not making.cancelled() and making.exception() is None:
            await making.result().close()  # it was quicker
    for _ in range(50):
        if await place.mine() <= before:
            return
        await asyncio.sleep(0.1)
    expect(False, f"left 5 s later: {await place.mine() - before}")


@TOPIC.promise()
async def reaping_leaves_what_living_owners_hold(place: Place) -> None:
    sandbox = await place.sandbox()
    removed = await place.provider.reap(run_id=place.run_id)
    expect(sandbox.id not in removed, "it removed a sandbox of a living owner")
    same(await sandbox.alive(), True, "alive()")


@TOPIC.promise()
async def a_life_can_be_renewed(place: Place) -> None:
    sandbox = await place.sandbox()
    await sandbox.keepalive(120)
    same(await sandbox.alive(), True, "alive()")


@TOPIC.promise()
async def reset_stops_programs_and_drops_files_and_sessions(place: Place) -> None:
    async with place.fresh() as sandbox:
        await sandbox.write("old", b"x")
        await sandbox.python("x = 1", session="old")
        running = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0.5)
        await sandbox.reset()
        with contextlib.suppress(SandboxError):  # a provider may end the call with an error
            same((await asyncio.wait_for(running, 20)).signal, 9, "the signal that ended a program")
        same((await sandbox.python("1", session="old")).fresh, True, "fresh of an old session's next cell")
        same(await _names(sandbox), [], "what lies there afterwards")


@TOPIC.promise()
async def reset_drops_what_lies_deep_or_behind_a_closed_folder(place: Place) -> None:
    code = (
        "import os\nbox = os.getcwd()\nos.makedirs('closed/inner'); open('closed/inner/file', 'w')\n"
        "os.chmod('closed/inner', 0o500); os.chmod('closed', 0)\n"
        "for _ in range(1500): os.mkdir('deeper'); os.chdir('deeper')\n"
        "os.chmod(box, 0o500)"
    )
    async with place.fresh() as sandbox:
        same(
            (await sandbox.exec(["python3", "-c", code], timeout_s=60)).exit_code,
            0,
            "exit code of making them",
        )
        running = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0.5)
        await sandbox.reset()
        await asyncio.gather(running, return_exceptions=True)
        same(await _names(sandbox), [], "what lies there afterwards")
        await sandbox.write("new", b"x")  # into a folder that was closed to writers


@TOPIC.promise("snapshots")
async def a_snapshot_brings_the_files_back(place: Place) -> None:
    async with place.fresh() as sandbox:
        await sandbox.write("kept.txt", b"then")
        taken = await sandbox.snapshot()
        await sandbox.write("kept.txt", b"now")
        await sandbox.write("new.txt", b"x")
        await sandbox.reset(to=taken)
        same(await sandbox.read("kept.txt"), b"then", "a file of the snapshot")
        same(await _names(sandbox), ["kept.txt"], "what lies there, without a later file")
