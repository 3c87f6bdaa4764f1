"""`rz/SWEBenchPro-v0`: an issue of a real repository, to be resolved by a patch that hidden tests judge.

    user        The repository is in /app. ... Requirements: ... New interfaces introduced: ...
    assistant   <tool_call>{"name": "bash", "arguments": {"command": "grep -rn parse_date src"}}</tool_call>
    tool        src/dates.py:12:def parse_date(text):
    assistant   <tool_call>{"name": "submit", "arguments": {}}</tool_call>

Invariants: the policy acts in a sandbox of its own, without a network, in a repository without a future
(`scrub.py`); what it hands in is a patch; that is graded elsewhere (`grader.py`), once, when the first
sandbox is gone, so an episode never holds two. An episode that ends without `submit` is graded as it stands.
Waits: an episode for its commands and its tests, never for another episode's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...sandboxes.config import SandboxConfig
from ...sandboxes.kept import KeptSandbox
from ...sandboxes.pool import SandboxPool
from ..env import AgentEnv
from ..message import Message
from ..rubric import Episode, Rubric, metric, reward
from ..self_test import Case
from ..task import Task, Taskset
from ..tool import ToolError, tool
from .dataset import SAMPLE, instance_of, load_dataset, scripts_of
from .editor import Editor
from .grader import Grade, Grader, longest_s
from .instance import Instance
from .options import SWEBenchProOptions
from .repository import Repositories
from .room import room
from .scripted import cases, solve
from .scripts import Scripts
from .shell import Shell
from .tree import ENVIRONMENT, Tree, Unreadable

T = TypeVar("T")
_ASK = "The repository is in {path}. Change it so that what follows is resolved.\n\n{statement}"
_A_DAY_S = 86400.0  # each step of a grading has a deadline of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the episodes of a run share."""

    sandboxes: SandboxPool
    repositories: Repositories
    grader: Grader


@dataclass(slots=True, kw_only=True)
class _Work:
    """What one episode holds: made by `begin`, gone when the patch is taken."""

    instance: Instance
    scripts: Scripts
    sandbox: KeptSandbox
    tree: Tree
    shell: Shell
    editor: Editor


class SWEBenchProEnv(AgentEnv):
    """See the module. The reward is 1 where the patch resolves the issue, else 0."""

    Options = SWEBenchProOptions
    scripted = staticmethod(solve)
    options: SWEBenchProOptions
    shared: Shared
    rubric = Rubric(deadline_s=_A_DAY_S)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._sandbox: KeptSandbox | None = None
        self._work: _Work | None = None
        self._grade: asyncio.Task[Grade] | None = None

    @classmethod
    def open_shared(
        cls, options: SWEBenchProOptions, sandboxes: SandboxPool | None
    ) -> AbstractAsyncContextManager[Shared]:
        return _shared(options, sandboxes)

    @classmethod
    def load_taskset(cls, options: SWEBenchProOptions) -> Taskset:
        name = options.taskset or "sample"
        if name == "sample" or Path(name).suffix in (".jsonl", ".parquet"):
            return load_dataset(SAMPLE if name == "sample" else name, options)
        return super().load_taskset(options)

    @classmethod
    def longest_step_s(cls, options: SWEBenchProOptions) -> float:
        """The last one: it may hold a turn's tools, and holds the grading."""
        return options.turn_s + longest_s(options)

    @classmethod
    def self_test(cls, tasks: Taskset, scratch: Path) -> list[Case]:
        """The gold patch resolves; an empty and a wrong one do not."""
        return cases(tasks)

    async def begin(self, task: Task) -> tuple[Message, ...]:
        self._grade = None
        instance = instance_of(task)
        # First: an episode that cannot be graded need not be played.
        scripts = scripts_of(task)
        pack = None
        if instance.local is not None:
            pack = await self.shared.repositories.pack(instance.local, [instance.base_commit])
        spec = room(self.shared.sandboxes.spec, instance, self.options, task.resources)
        sandbox = self._sandbox = await self.shared.sandboxes.lease(spec)
        tree = await Tree.fill(
            sandbox, instance, pack=pack, path=self.options.repo_path, deadline_s=self.options.setup_s
        )
        await tree.scrub()
        home = {"HOME": "/root"} if instance.local is None else {}
        self._work = _Work(
            instance=instance,
            scripts=scripts,
            sandbox=sandbox,
            tree=tree,
            shell=Shell(sandbox, cwd=tree.path, env=ENVIRONMENT | home | {"TERM": "dumb"}),
            editor=Editor(sandbox, root=tree.path, chars=self.options.output_chars),
        )
        return _prompt(self.options.system_prompt, _ASK.format(path=tree.path, statement=instance.statement))

    async def end(self) -> None:
        sandbox, self._sandbox, self._work = self._sandbox, None, None
        grade, self._grade = self._grade, None
        if grade is not None:
            grade.cancel()
            await asyncio.wait([grade])
        if sandbox is not None:
            await sandbox.close()

    @tool
    async def bash(self, command: str) -> str:
        """Run a command in a bash shell that starts in the repository; its state stays for the next call.

        There is no network and no terminal: commands that ask questions get no answer.

        Args:
            command: one command or several lines
        """
        limit = self.options.command_s
        return await self._working.shell.run(command, timeout_s=limit, chars=self.options.output_chars)

    @tool
    async def str_replace_edit(
        self,
        command: Literal["view", "create", "str_replace", "insert"],
        path: str,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: list[int] | None = None,
    ) -> str:
        """View, create or edit a file. str_replace needs old_str to stand exactly once in the file.

        Args:
            command: view (needs path), create (file_text), str_replace (old_str, new_str), insert
            path: absolute, or from the repository's folder on
            file_text: create: all that the file shall hold
            old_str: str_replace: the passage to replace, with its white space
            new_str: str_replace: what to put there, nothing if left out; insert: the lines
            insert_line: insert: the line after which they come, 0 for the beginning
            view_range: view: first and last line, -1 for the end
        """
        editor = self._working.editor
        if command == "view":
            return await editor.view(path, view_range)
        if command == "create":
            return await editor.create(path, _given(file_text, "file_text", command))
        if command == "str_replace":
            return await editor.str_replace(path, _given(old_str, "old_str", command), new_str or "")
        text = _given(new_str, "new_str", command)
        return await editor.insert(path, _given(insert_line, "insert_line", command), text)

    @tool
    async def submit(self) -> str:
        """Hand in the repository as it is now. This ends the task."""
        self.finish()
        return "Submitted."

    @reward
    async def resolved(self, task: Task, episode: Episode) -> float:
        """1 where every test that decides passes under the patch, else 0."""
        return float((await self._graded()).resolved)

    @metric
    async def patch_applied(self, task: Task, episode: Episode) -> float:
        """1 where there was a patch and it could be applied."""
        return float((await self._graded()).applied)

    @metric
    async def fail_to_pass(self, task: Task, episode: Episode) -> float:
        """Share of the tests that had failed and now pass."""
        return (await self._graded()).fail_to_pass

    @metric
    async def pass_to_pass(self, task: Task, episode: Episode) -> float:
        """Share of the tests that had passed and still do."""
        return (await self._graded()).pass_to_pass

    @metric
    async def submitted(self, task: Task, episode: Episode) -> float:
        """1 where the policy called submit."""
        return float(episode.ended == "finished")

    @property
    def _working(self) -> _Work:
        assert self._work is not None, "a tool runs between begin and end"
        return self._work

    async def _graded(self) -> Grade:
        """The one grading of this episode, for all who ask."""
        if self._grade is None:
            self._grade = asyncio.create_task(self._submission(self._working))
        return await asyncio.shield(self._grade)

    async def _submission(self, work: _Work) -> Grade:
        await work.shell.close()  # nothing of the policy's runs while its change is read
        try:
            patch = await work.tree.diff()
        except Unreadable as error:
            return Grade(resolved=False, applied=False, why=str(error))
        self.state["patch"] = patch
        await work.sandbox.close()
        if not patch.strip():
            return Grade(resolved=False, applied=False, why="nothing was changed")
        grade = await self.shared.grader.grade(work.instance, work.scripts, patch, self.task.resources)
        self.state["verdict"] = grade.why or "resolved"
        return grade


@asynccontextmanager
async def _shared(options: SWEBenchProOptions, sandboxes: SandboxPool | None) -> AsyncIterator[Shared]:
    async with AsyncExitStack() as stack:
        # A pool that was given belongs to the run; its own is closed with the environment.
        pool = sandboxes
        if pool is None:
            pool = await stack.enter_async_context(SandboxPool.of(SandboxConfig()))
        repositories = Repositories()
        yield Shared(sandboxes=pool, repositories=repositories, grader=Grader(pool, options, repositories))


def _prompt(system: str | None, text: str) -> tuple[Message, ...]:
    first = (Message(role="system", content=system),) if system else ()
    return (*first, Message(role="user", content=text))


def _given(value: T | None, name: str, command: str) -> T:
    if value is None:
        raise ToolError(f"{command} needs {name}")
    return value
