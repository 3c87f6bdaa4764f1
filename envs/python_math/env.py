"""`rz/PythonMath-v0`: a question with a short answer, and a Python interpreter to find it with.

    user        What is the remainder of 345 by 67?
    assistant   <tool_call>{"name":"python","arguments":{"code":"print(345%67)"}}</tool_call>
    tool        10
    assistant   \\boxed{10}

Invariants: each episode has an interpreter of its own, a fork in a sandbox that the run's episodes share, and
it is gone when the episode is; an answer is graded outside of every sandbox; a sandbox that dies masks the
episodes on it and no other. A turn without a call ends the episode; without a box it is worth 0 and
`format_ok` is 0.
Waits: an episode for its own calls and its own grade.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...sandboxes.config import SandboxConfig
from ...sandboxes.exec_result import ExecResult
from ...sandboxes.pool import SandboxPool
from ...sandboxes.sandbox import Sandbox
from ..env import AgentEnv
from ..message import Message
from ..rubric import Episode, metric, reward
from ..self_test import Case
from ..task import Task, Taskset
from ..tool import tool
from .answers import last_boxed
from .grader import Grader
from .options import PythonMathOptions
from .scripted import cases, solve
from .tasks import ArithmeticTaskset

# Some of reasoning-gym's scorers give a little for a wrong answer in the right form.
_RIGHT = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the episodes of a run share."""

    sandboxes: SandboxPool
    grader: Grader


class PythonMathEnv(AgentEnv):
    """See the module. The reward is 1 for the right answer in `\\boxed{}`, else 0."""

    Options = PythonMathOptions
    scripted = staticmethod(solve)
    options: PythonMathOptions
    shared: Shared

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.options.max_turns is None:
            # All calls, one that is answered "no calls left", and the answer.
            self.max_turns = self.options.calls_per_episode + 2
        self._sandbox: Sandbox | None = None
        self._session = ""
        self._calls = 0
        self._had_state = False

    @classmethod
    def open_shared(
        cls, options: PythonMathOptions, sandboxes: SandboxPool | None
    ) -> AbstractAsyncContextManager[Shared]:
        return _shared(sandboxes)

    @classmethod
    def load_taskset(cls, options: PythonMathOptions) -> Taskset:
        if options.taskset == "arithmetic":
            return ArithmeticTaskset(difficulty=options.difficulty)
        return super().load_taskset(options)

    @classmethod
    def self_test(cls, tasks: Taskset, scratch: Path) -> list[Case]:
        return cases(tasks, scratch)

    async def begin(self, task: Task) -> tuple[Message, ...]:
        self._session, self._calls, self._had_state = uuid4().hex, 0, False
        system = self.options.system_prompt
        first = (Message(role="system", content=system),) if system else ()
        return (*first, *task.prompt)

    async def end(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            try:
                await sandbox.end_session(self._session)
            finally:
                await self.shared.sandboxes.release(sandbox)

    @tool
    async def python(self, code: str) -> str:
        """Run Python code and see what it prints; the value of a last expression is shown too.

        Variables and imports stay for the next call.

        Args:
            code: the program text
        """
        if self._calls >= self.options.calls_per_episode:
            return f"Error: no calls left, all {self._calls} were used. Answer with what you have."
        self._calls += 1
        if self._sandbox is None:
            self._sandbox = await self.shared.sandboxes.acquire()
        limit = self.options.tool_timeout_s
        result = await self._sandbox.python(code, session=self._session, timeout_s=limit)
        lost = self._had_state and result.fresh
        self._had_state = not result.state_lost
        return _shown(result, limit_s=limit, chars=self.options.output_chars, lost=lost)

    @reward
    async def correct(self, task: Task, episode: Episode) -> float:
        """1 for the right answer, else 0."""
        answer = last_boxed(episode.answer)
        if answer is None:
            return 0.0
        if gym := task.metadata.get("reasoning_gym"):
            value = await self.shared.grader.reasoning_gym(gym["dataset"], gym["entry"], answer)
            return float(value >= _RIGHT)
        return float(await self.shared.grader.math(task.answer or "", answer))

    @metric
    async def format_ok(self, task: Task, episode: Episode) -> float:
        """1 where the episode ended with an answer in a box."""
        return float(episode.ended == "answered" and last_boxed(episode.answer) is not None)

    @metric
    async def python_calls(self, task: Task, episode: Episode) -> float:
        """Calls that ran."""
        return float(self._calls)


@asynccontextmanager
async def _shared(sandboxes: SandboxPool | None) -> AsyncIterator[Shared]:
    async with AsyncExitStack() as stack:
        # A pool that was given belongs to the run; its own is closed with the environment.
        pool = sandboxes
        if pool is None:
            pool = await stack.enter_async_context(SandboxPool.of(SandboxConfig()))
        workers = max(1, min(4, (os.cpu_count() or 1) - 1))
        yield Shared(sandboxes=pool, grader=await stack.enter_async_context(Grader(workers=workers)))


def _shown(result: ExecResult, *, limit_s: float, chars: int, lost: bool) -> str:
    """What the policy reads: the output, cut in the middle, and what else happened."""
    notes = []
    if result.oom:
        notes.append("The program ran out of memory.")
    elif result.timed_out:
        notes.append(f"The program was stopped after {limit_s:g} s.")
    elif result.flooded:
        notes.append("The program was stopped: it wrote too much.")
    elif result.state_lost:
        notes.append(f"The interpreter ended (exit code {result.exit_code}).")
    if result.state_lost or lost:
        notes.append("The interpreter was restarted: variables and imports are gone.")
    output = _cut(result.text.rstrip("\n"), chars)
    return "\n".join([*([output] if output or not notes else []), *notes]) or "(no output)"


def _cut(text: str, chars: int) -> str:
    """At most `chars` characters of text, and a notice where some are missing."""
    if len(text) <= chars:
        return text
    head, tail = text[: chars // 2], text[len(text) - (chars - chars // 2) :]
    return f"{head}\n[... {len(text) - chars} characters cut ...]\n{tail}"
