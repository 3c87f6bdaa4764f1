"""One run's environments: one taskset, one set of shared resources, any number of episodes.

    async with load("python", taskset="arithmetic") as factory:
        env = factory.create()          a coroutine's own; hundreds side by side on one event loop

Invariant: what is shared is opened before the first episode and closed after the block, also on errors.
Waits: entering, until the shared resources stand; leaving, until they are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..sandboxes.pool import SandboxPool
from .bug import blamed
from .calls import Abandoned
from .env import AgentEnv
from .hooks import to_the_end
from .rubric import Rubric
from .script import Solve
from .self_test import Case
from .task import Taskset
from .threads import Threads
from .tool import ToolSpec

log = logging.getLogger(__name__)


class EnvFactory:
    """Makes the environments of a run. Options are checked on construction (`ConfigError`).

    taskset       the tasks; `taskset.order(seed)[position]` is what to reset to
    tool_specs    the tools; prompt_tools: what the chat template is given
    max_turns     actions an episode has
    longest_step_s   what a deadline on one step must exceed, in seconds; 0: not known
    """

    def __init__(
        self,
        env_class: type[AgentEnv],
        options: Mapping[str, Any],
        *,
        taskset: Taskset | str | None = None,
        rubric: Rubric | None = None,
        sandboxes: SandboxPool | None = None,
    ) -> None:
        arguments = dict(options)
        if taskset is not None:
            arguments.setdefault("taskset", taskset)
        self._class, self._options, self._rubric, self._sandboxes = env_class, arguments, rubric, sandboxes
        self._first = env_class(rubric=rubric, **arguments)
        self.taskset: Taskset = self._first.tasks
        self.tool_specs: tuple[ToolSpec, ...] = self._first.tool_specs
        self.prompt_tools: list[dict[str, Any]] = self._first.prompt_tools
        self.max_turns: int = self._first.max_turns
        self.longest_step_s: float = env_class.longest_step_s(self._first.options)
        self._stack: AsyncExitStack | None = None
        self._shared: Any = None
        self._abandoned, self._threads = Abandoned(), Threads()

    @property
    def scripted(self) -> Solve | None:
        """The environment's own agent, which is no model; None where it has none."""
        return self._class.scripted

    def self_test(self, scratch: Path) -> list[Case]:
        """The environment's episodes with a known outcome; they may keep files in `scratch`."""
        with blamed(self._class.__name__, "self_test", function=self._class.self_test):
            cases = list(self._class.self_test(self.taskset, scratch))
            if strange := [case for case in cases if not isinstance(case, Case)]:
                raise TypeError(f"it returned {strange[0]!r} among its cases; return Case(name=..., ...)")
            return cases

    async def __aenter__(self) -> Self:
        stack = AsyncExitStack()
        with blamed(self._class.__name__, "open_shared", function=self._class.open_shared):
            resources = self._class.open_shared(self._first.options, self._sandboxes)
            self._shared = await stack.enter_async_context(resources)
        self._stack = stack
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if stack := self._stack:
            self._stack, self._shared = None, None
            await to_the_end(self._close(stack))

    async def _close(self, stack: AsyncExitStack) -> None:
        if self._abandoned.counts:
            log.warning("hooks that were abandoned while they ran: %s", self._abandoned)
        with blamed(self._class.__name__, "open_shared, closing", function=self._class.open_shared):
            await stack.aclose()

    def create(self) -> AgentEnv:
        """A new environment that borrows what is shared; close it with `aclose` when its episode is over."""
        if self._stack is None:
            raise RuntimeError("create() outside of `async with factory`: what is shared is not open")
        # The taskset is handed on as an object: reading a file once a run is enough.
        arguments = {**self._options, "taskset": self.taskset}
        borrowed = {"sandboxes": self._sandboxes, "shared": self._shared}
        with blamed(self._class.__name__, "__init__", function=self._class.__init__):
            env = self._class(rubric=self._rubric, **borrowed, **arguments)
        # One count and one set of threads for the run.
        env.hook_calls.abandoned, env.hook_calls.threads = self._abandoned, self._threads
        return env
