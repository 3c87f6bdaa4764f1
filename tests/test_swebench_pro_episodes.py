"""`rz/SWEBenchPro-v0` in real sandboxes, on a real project's real fix."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from rz_agent.envs.failure import InfraFailure
from rz_agent.envs.hooks import Portal
from rz_agent.envs.play import play_one
from rz_agent.envs.registry import load
from rz_agent.envs.script import call, replayed, scripted
from rz_agent.envs.swebench_pro import grader
from rz_agent.envs.swebench_pro.dataset import instance_of, scripts_of
from rz_agent.envs.swebench_pro.editor import Editor
from rz_agent.envs.swebench_pro.env import SWEBenchProEnv
from rz_agent.envs.swebench_pro.grader import Grade, Grader
from rz_agent.envs.swebench_pro.make import Wish, make_instance
from rz_agent.envs.swebench_pro.options import SWEBenchProOptions
from rz_agent.envs.swebench_pro.repository import Repositories
from rz_agent.envs.swebench_pro.scripted import solve, wrong
from rz_agent.envs.swebench_pro.shell import Shell
from rz_agent.envs.swebench_pro.tree import ENVIRONMENT, Tree
from rz_agent.envs.tool import ToolError
from rz_agent.errors import ConfigError
from rz_agent.sandboxes.config import SandboxConfig
from rz_agent.sandboxes.errors import CreateError
from rz_agent.sandboxes.kept import KeptSandbox
from rz_agent.sandboxes.pool import SandboxPool
from rz_agent.sandboxes.sandbox import Sandbox
from rz_agent.sandboxes.spec import SandboxSpec
from xmltodict_instance import FAILING, SECRET, History, command, history, pytest_folder

T = TypeVar("T")


class PlantedPool(SandboxPool):
    """A real pool; `plant(number)` is awaited with each lease and may fail, or do harm to the sandbox."""

    plant: Callable[[int, KeptSandbox | None], Awaitable[None]] | None = None
    leased = 0
    _ids: frozenset[str] = frozenset()

    async def lease(self, spec: SandboxSpec | None = None) -> KeptSandbox:
        self.leased += 1
        if self.plant is not None:
            await self.plant(self.leased, None)
        sandbox = await super().lease(spec)
        self._ids |= {sandbox.id}
        if self.plant is not None:
            await self.plant(self.leased, sandbox)
        return sandbox

    async def kill(self, name: str) -> None:
        await self._keeper.provider.kill(name)

    async def living(self) -> list[str]:
        """Those of this pool that the provider still has."""
        return [info.id for info in await self._keeper.provider.live() if info.id in self._ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the tests share: one event loop, one pool, one instance that was made with them."""

    portal: Portal
    pool: PlantedPool
    past: History
    folder: Path
    command: str

    def run(self, work: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await work

        found: T = self.portal.run(awaited())
        return found

    @property
    def options(self) -> dict[str, Any]:
        return {"taskset": str(self.folder / "instances.jsonl")}

    def episode(self, *, agent: Any, **options: Any) -> Any:
        async def played() -> Any:
            async with load("swebench-pro", sandboxes=self.pool, **self.options, **options) as factory:
                (task,) = factory.taskset.load("train")
                return await play_one(factory, task, agent, name="swebench-pro", options={})

        return self.run(played())

    def with_sandbox(self, body: Callable[[Sandbox], Awaitable[T]]) -> T:
        async def opened() -> T:
            sandbox = await self.pool.lease()
            try:
                return await body(sandbox)
            finally:
                await sandbox.close()

        return self.run(opened())

    def grade(self, patch: str | None = None, tests_s: float = 60.0, **scripts: str) -> Grade:
        """Of the gold patch, or another; with its own scripts, or others."""
        options = SWEBenchProOptions(**self.options, tests_s=tests_s)
        (task,) = SWEBenchProEnv.load_taskset(options).load("train")
        found = instance_of(task)
        ours = Grader(self.pool, options, Repositories())
        chosen = found.patch if patch is None else patch
        return self.run(ours.grade(found, replace(scripts_of(task), **scripts), chosen, task.resources))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, portal = tmp_path_factory.mktemp("xmltodict"), Portal()
    past = history(folder / "clone")
    with pytest_folder() as shown:
        table = {"local": {"read_only": ["/usr", str(shown)]}}
        pool = PlantedPool.of(SandboxConfig.load(table, source="test"))
        made = Place(portal=portal, pool=pool, past=past, folder=folder / "made", command=command(shown))
        wish = Wish(repository=past.folder, fix=past.fix, out=made.folder, command=made.command)
        instance = made.run(make_instance(wish, pool))
        assert instance.fail_to_pass == (FAILING,)
        assert len(instance.pass_to_pass) == 23
        yield made
        assert made.run(pool.living()) == [], "a test left sandboxes"
        made.run(pool.aclose())
        portal.close()


@pytest.fixture(autouse=True)
def no_plant(place: Place) -> Iterator[None]:
    place.pool.leased = 0
    yield
    place.pool.plant = None


# -- the verdict ------------------------------------------------------------


def test_the_gold_patch_resolves_through_the_tools(place: Place) -> None:
    found = place.episode(agent=scripted(solve))
    assert (found.reward, found.fate, found.reason) == (1.0, "terminated", "finished")
    assert found.figures["patch_applied"] == found.figures["pass_to_pass"] == 1.0


def test_neither_an_empty_nor_a_wrong_patch_does(place: Place) -> None:
    empty = place.episode(agent=replayed([call("submit")]))
    assert (empty.reward, empty.figures["patch_applied"]) == (0.0, 0.0)
    broken = place.episode(agent=scripted(wrong))
    assert (broken.reward, broken.figures["patch_applied"], broken.figures["pass_to_pass"]) == (0.0, 1.0, 0.0)


def test_what_is_not_submitted_is_graded_as_it_stands(place: Place) -> None:
    edit = call(
        "bash", command="sed -i 's/v = _unicode(v)/v = _unicode(v).lower()/' xmltodict.py; git add -A"
    )
    found = place.episode(agent=replayed([edit, "I am done."]))
    assert (found.reward, found.figures["submitted"], found.reason) == (1.0, 0.0, "answered")


def test_a_policy_that_ruins_its_repository_has_handed_in_nothing(place: Place) -> None:
    found = place.episode(agent=replayed([call("bash", command="cd /; rm -rf /box/app"), call("submit")]))
    assert (found.reward, found.fate, found.figures["patch_applied"]) == (0.0, "terminated", 0.0)


def test_a_patch_that_does_not_apply_is_a_failed_episode_and_says_so(place: Place) -> None:
    grade = place.grade("diff --git a/no b/no\n--- a/no\n+++ b/no\n@@ -1 +1 @@\n-a\n+b\n")
    assert (grade.resolved, grade.applied) == (False, False)
    assert grade.why.startswith("the patch does not apply: ")


def test_a_log_that_the_parser_cannot_read_is_the_patchs_failure_a_broken_parser_is_not(place: Place) -> None:
    picky = "import json, sys\nassert not open(sys.argv[1]).read()\n"
    picky += 'json.dump({"tests": []}, open(sys.argv[3], "w"))\n'
    grade = place.grade(parser=picky)
    assert (grade.resolved, grade.applied) == (False, True)
    assert "the log of the tests cannot be read" in grade.why
    with pytest.raises(InfraFailure, match="parser does not run"):
        place.grade(parser="this is no program")


def test_the_log_is_read_where_the_tests_have_left_nothing(place: Place) -> None:
    parser = (
        "import json, os, sys\n"
        "assert not os.path.exists(os.path.expanduser('~/left'))\n"
        f"tests = [{{'name': name, 'status': 'PASSED'}} for name in {sorted(deciding(place))}]\n"
        "json.dump({'tests': tests}, open(sys.argv[3], 'w'))\n"
    )
    assert place.grade(run_script="touch ~/left\n", parser=parser).resolved


def test_a_log_that_is_made_to_be_slow_to_read_has_failed_and_holds_up_nobody(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grader, "_PARSE_S", 3.0)
    slow = "python3 -c \"print('[gw0] FAILED ' + 'a::' * 200000 + ' ' * 200000 + 'x')\"\n"
    grade = place.grade(run_script=slow)
    assert (grade.resolved, grade.applied) == (False, True)
    assert "the log of the tests cannot be read" in grade.why


def test_a_patch_cannot_take_the_solution_from_the_history_it_is_graded_with(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    thief = (
        "import os, subprocess\n"
        f'os.system("git checkout {place.past.fix} -- xmltodict.py; git log --all -p > all.txt")\n'
    )
    patch = "diff --git a/conftest.py b/conftest.py\nnew file mode 100644\n--- /dev/null\n+++ b/conftest.py\n"
    patch += "@@ -0,0 +1,2 @@\n" + "".join(f"+{line}\n" for line in thief.splitlines())
    assert not place.grade(patch).resolved

    async def nothing(self: Tree) -> None: ...

    monkeypatch.setattr(Tree, "scrub", nothing)
    assert place.grade(patch).resolved, "without the scrub it would have been its own solution"


# -- the future ------------------------------------------------------------

LOOK = """
git log --all -p --format=%H; git reflog --all; git stash list; git tag; git branch -a; git remote -v
git notes show; git worktree list; git for-each-ref; git config --list --local; git fetch origin 2>&1
git fsck --unreachable --no-reflogs --lost-found 2>/dev/null; git cat-file --batch-all-objects --batch
cat .git/packed-refs .git/*_HEAD .git/objects/info/*; ls -R .git; grep -r . .git/logs .git/refs .git/worktrees
"""


def test_future_history_cannot_be_read_from_inside(place: Place) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        tar.add(place.past.folder, "image")  # as a published image has it

    async def body(sandbox: Sandbox) -> tuple[bytes, bytes, str]:
        await sandbox.exec(["tar", "-xf", "-"], stdin=whole.getvalue())
        options = SWEBenchProOptions(**place.options)
        (task,) = SWEBenchProEnv.load_taskset(options).load("train")
        tree = await Tree.fill(sandbox, instance_of(task), pack=None, path="/box/image", deadline_s=60)

        async def look() -> bytes:
            seen = await sandbox.exec(
                ["bash", "-c", LOOK], env=ENVIRONMENT, cwd=tree.path, output_limit=8 << 20
            )
            return seen.stdout

        before = await look()
        await tree.scrub()
        log = await sandbox.exec(["git", "log", "--format=%s"], env=ENVIRONMENT, cwd=tree.path)
        return before, await look(), log.text

    before, after, log = place.with_sandbox(body)
    tells = [word.encode() for word in (*place.past.later, SECRET, "v0.12.0", str(place.past.folder))]
    assert all(word in before for word in tells), "this look finds them where they are"
    assert [word for word in tells if word in after] == []
    assert (place.past.base.encode() in after, log) == (True, "xmltodict 0.11.0\n")


def test_of_a_repository_of_this_machine_nothing_later_even_enters(place: Place) -> None:
    peek = replayed([call("bash", command=f"git cat-file -t {sha}") for sha in place.past.later])
    found = place.episode(agent=peek)
    answers = [said.text for said in found.said if said.role == "tool"]
    assert len(answers) == len(place.past.later)
    assert all("exit code 128" in answer for answer in answers), answers


# -- the tools ------------------------------------------------------------


def test_the_shell_keeps_its_state_and_every_command_ends(place: Place) -> None:
    async def body(sandbox: Sandbox) -> list[str]:
        shell = Shell(sandbox, cwd="/tmp", env={})
        commands = [
            "mkdir d && cd d && x=7 && f() { echo $x; }",
            "f; pwd; cat",
            "false",
            "echo 'not closed",
            "sleep 30 & sleep 30",
            "pwd; echo [$x]",
            "exec >/dev/null; echo lost",
            "cd /tmp/d && rm -rf /tmp/d; exit 3",
            "pwd",
            "head -c 100000 /dev/zero | tr '\\0' a",
        ]
        return [await shell.run(command, timeout_s=1.0, chars=200) for command in commands]

    told = place.with_sandbox(body)
    assert told[:3] == ["(no output)", "7\n/tmp/d", "(exit code 1)"]
    assert "unexpected EOF" in told[3]
    assert told[4].startswith("The command was stopped after 1 s. The next command starts in a new shell")
    assert told[5] == "/tmp/d\n[]"
    assert told[6] == "(no output)"
    assert "(exit code 3)\nThe shell ended." in told[7]
    assert "No such file or directory" in told[8]
    assert told[9] == f"{'a' * 100}\n[... 99800 characters cut ...]\n{'a' * 100}"


def test_an_edit_changes_one_place_and_keeps_mode_and_line_ends(place: Place) -> None:
    async def body(sandbox: Sandbox) -> None:
        edit = Editor(sandbox, root="/box/r", chars=1000)
        assert await edit.create("src/a.txt", "one\ntwo\n") == "src/a.txt was created."
        assert await edit.view("src/a.txt") == "     1\tone\n     2\ttwo"
        assert await edit.view("/box/r") == "./src\n./src/a.txt"
        await sandbox.write("r/run.sh", b"echo a\r\necho b\r\n", mode=0o755)
        shown = await edit.str_replace("run.sh", "echo b\n", "echo c\necho d\n")
        assert "     3\techo d" in shown
        await edit.insert("run.sh", 0, "#!/bin/sh")
        assert await sandbox.read("r/run.sh") == b"#!/bin/sh\r\necho a\r\necho c\r\necho d\r\n"
        assert (await sandbox.exec(["stat", "-c", "%a", "r/run.sh"])).text == "755\n"
        assert await edit.view("run.sh", [2, -1]) == "     2\techo a\r\n     3\techo c\r\n     4\techo d\r"

    place.with_sandbox(body)


def test_an_edit_that_cannot_be_made_says_what_to_do_instead(place: Place) -> None:
    async def body(sandbox: Sandbox) -> list[str]:
        edit = Editor(sandbox, root="/box", chars=1000)
        await edit.create("a.py", "def f():\n    return 1\n\ndef g():\n    return 1\n")
        await sandbox.write("b.bin", b"\xff\xfe")
        tries: list[Callable[[], Awaitable[str]]] = [
            lambda: edit.str_replace("a.py", "    return 1\n", "x"),
            lambda: edit.str_replace("a.py", "\treturn 1", "x"),
            lambda: edit.str_replace("a.py", "nothing like it", "x"),
            lambda: edit.str_replace("a.py", "", "x"),
            lambda: edit.insert("a.py", 9, "x"),
            lambda: edit.view("a.py", [4, 2]),
            lambda: edit.view("gone.py"),
            lambda: edit.view("b.bin"),
            lambda: edit.create("/usr/x", "x"),
            lambda: edit.create("/box", "x"),
        ]
        told = []
        for attempt in tries:
            with pytest.raises(ToolError) as refused:
                await attempt()
            told.append(str(refused.value))
        return told

    told = place.with_sandbox(body)
    expected = [
        "stands 2 times in a.py, at lines 2, 5", "is like line 2, 5", "view the file and copy", "use insert",
        "give 0 to 5", "the file has 5 lines", "does not exist", "no UTF-8 text", "cannot be written",
        "is a folder",
    ]  # fmt: skip
    assert [want for want, said in zip(expected, told, strict=True) if want not in said] == [], told


# -- failures of the infrastructure ------------------------------------------------------------


def masked(found: Any) -> str:
    assert (found.fate, found.reward) == ("masked", 0.0), found
    return str(found.reason)


@pytest.mark.parametrize("number", [1, 2, 3], ids=["create", "create for grading", "create for reading"])
def test_a_sandbox_that_cannot_be_made_masks(place: Place, number: int) -> None:
    async def plant(lease: int, sandbox: KeptSandbox | None) -> None:
        if lease == number and sandbox is None:
            raise CreateError("no room (planted)", provider="local")

    place.pool.plant = plant
    assert "no room (planted)" in masked(place.episode(agent=scripted(solve)))
    assert place.run(place.pool.living()) == []


@pytest.mark.parametrize(
    ("number", "after_s"), [(1, 0.0), (2, 0.0), (2, 2.5)], ids=["setup", "apply", "tests"]
)
def test_a_sandbox_that_is_lost_masks(place: Place, number: int, after_s: float) -> None:
    losing: list[asyncio.Task[None]] = []

    async def plant(lease: int, sandbox: KeptSandbox | None) -> None:
        async def lose() -> None:
            await asyncio.sleep(after_s)
            assert sandbox is not None
            await place.pool.kill(sandbox.id)

        if lease == number and sandbox is not None:
            losing.append(asyncio.create_task(lose()))

    place.pool.plant = plant
    script = place.folder / "run_scripts" / instance_id(place) / "run_script.sh"
    text = script.read_text()
    script.write_text("sleep 20\n" + text)
    try:
        assert masked(place.episode(agent=scripted(solve))).startswith("Died: ")
    finally:
        script.write_text(text)
    assert place.run(place.pool.living()) == []


def test_a_sandbox_that_is_lost_between_two_steps_masks(place: Place) -> None:
    async def played() -> tuple[Any, list[str]]:
        async with load("swebench-pro", sandboxes=place.pool, **place.options) as factory:
            env = factory.create()
            (task,) = factory.taskset.load("train")
            await env.areset(options={"task": task})
            await env.astep(call("bash", command="sleep 100 &"))
            (living,) = await place.pool.living()
            await place.pool.kill(living)
            step = await env.astep(call("bash", command="true"))
            await env.aclose()
            return step, await place.pool.living()

    step, left = place.run(played())
    assert (step[1:4], left) == ((0.0, False, True), [])
    assert step[4]["mask"].startswith("Died: ")


def test_what_takes_too_long_to_set_up_masks_and_what_cannot_be_graded_is_not_played(place: Place) -> None:
    late = place.episode(agent=scripted(solve), setup_s=0.01)
    assert "0.01 s" in masked(late)
    unscripted = place.episode(agent=scripted(solve), scripts=str(place.folder))
    assert "run_script.sh cannot be read" in masked(unscripted)
    assert place.run(place.pool.living()) == []


def test_tests_that_do_not_end_have_failed(place: Place) -> None:
    grade = place.grade(tests_s=1.0, run_script="sleep 60\n")
    assert (grade.resolved, grade.why) == (False, "the tests did not end within 1 s")


def deciding(place: Place) -> frozenset[str]:
    (task,) = SWEBenchProEnv.load_taskset(SWEBenchProOptions(**place.options)).load("train")
    return instance_of(task).tests


def instance_id(place: Place) -> str:
    return next(path.name for path in (place.folder / "run_scripts").iterdir())


# -- making one ------------------------------------------------------------


def test_a_commit_that_makes_no_instance_says_why(place: Place, tmp_path: Path) -> None:
    for fix, why in (("master", "changes no tests"), ("gone", "failed: "), (place.past.base, "failed: ")):
        wish = Wish(repository=place.past.folder, fix=fix, out=tmp_path, command=place.command)
        with pytest.raises(ConfigError, match=why):
            place.run(make_instance(wish, place.pool))
    wish = Wish(repository=place.past.folder, fix=place.past.fix, out=tmp_path, command="echo")
    with pytest.raises(ConfigError, match="no test that fails without it and passes with it"):
        place.run(make_instance(wish, place.pool))
