"""An environment: what an agent does in an episode, as a Gymnasium environment with async twins.

    env = factory.create()
    await env.areset(options={"task": task}) -> observation, info
    await env.astep(text)                    -> observation, reward, terminated, truncated, info
    await env.aclose()

A subclass says what there is to do: `@tool` methods, `@reward` and `@metric` methods (or `rubric`),
`max_turns`, a `taskset`, and where it needs them `begin`, `reply`, `end`. Each may be plain or async.

Invariants: any text is a legal action, and a malformed one is an observation that says so; a failure of
the infrastructure ends the episode with `info["mask"] = reason`; `end` runs exactly once for each `begin`,
whether the episode ended, failed, was cancelled or was closed; nothing of an episode outlives `areset`,
`aclose`, or a cancelled call, but for a hook that could not be stopped (`calls.py`): `end` then follows once
that hook has returned, and never runs where it never does; until then `areset` masks.
Waits: an episode for its own tools and rubric, never for another episode; nothing here blocks an event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

from gymnasium.error import ResetNeeded

from ..errors import ConfigError
from ..sandboxes.deadline import deadline
from ..sandboxes.pool import SandboxPool
from . import calls
from . import rubric as scoring
from . import tool as tooling
from .action import Action
from .adapters import named_taskset
from .bug import blamed
from .context_policy import AppendOnly, ContextPolicy
from .failure import last_step, mask_reason
from .hooks import Portal, to_the_end
from .lazily_seeded import LazilySeeded
from .message import NOTHING, Message, Observation, copied, observation
from .options import EnvOptions, checked_turns, parse_options
from .progress import Progress
from .rubric import Ended, Rubric
from .script import Script
from .self_test import Case
from .spaces import ActionSpace, ChatSpace
from .step_result import Info, Step
from .task import Task, Taskset, checked_taskset
from .tool import ToolSpec, tool_spec
from .tool_answers import answer
from .tool_calls import Reply, parse
from .twins import add_twins, own

log = logging.getLogger(__name__)


class AgentEnv(LazilySeeded):
    """Base of every environment.

    tools      marked functions to offer besides the marked methods
    rubric     functions to score with besides the marked methods
    taskset    a Taskset, or its name (see `named_taskset`); the options or the registration may replace it
    max_turns  actions after which an episode is truncated
    context    which part of the history a turn is shown (`context_policy.py`)
    scripted   an agent that solves tasks (`script.py`), for `rz-agent env run --agent scripted`
    Options    a subclass of `EnvOptions` where there is more to set; read them as `self.options`

    In an episode: `self.task`, `self.state` (a dict for whatever the rubric shall see), `self.shared` (what
    `open_shared` made for all episodes of the run), `self.np_random`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # Gymnasium has no ClassVar
    Options: ClassVar[type[EnvOptions]] = EnvOptions
    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    taskset: ClassVar[Taskset | str | None] = None
    rubric: Rubric = Rubric()
    max_turns: int = 8
    context: ContextPolicy = AppendOnly()
    scripted: ClassVar[staticmethod[[Task, Observation], Script] | None] = None

    _tool_methods: ClassVar[tuple[str, ...]] = ()
    _score_methods: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        members = [(name, value) for name, value in vars(cls).items() if callable(value)]
        cls._tool_methods = _merged(cls._tool_methods, members, tooling.MARK)
        cls._score_methods = _merged(cls._score_methods, members, scoring.MARK)
        add_twins(cls)

    def __init__(
        self,
        *,
        taskset: Taskset | str | None = None,
        rubric: Rubric | None = None,
        sandboxes: SandboxPool | None = None,
        shared: Any = None,
        **options: Any,
    ) -> None:
        """`sandboxes` and `shared` are borrowed; without them the environment opens, and closes, its own."""
        if isinstance(taskset, str):
            options["taskset"], taskset = taskset, None
        source = f"environment {type(self).__name__}"
        self.options = parse_options(self.Options, options, source=source)
        tasks = self.load_taskset(self.options) if taskset is None else taskset
        self.tasks = checked_taskset(tasks, source=source)
        self.max_turns = self.options.max_turns or checked_turns(self.max_turns, source=source)
        self.tool_specs = self._specs()
        self._schemas = {spec.name: spec.parameters for spec in self.tool_specs}
        self.rubric = rubric or self._rubric()
        self.shared, self._sandboxes = shared, sandboxes
        self.observation_space, self.action_space = ChatSpace(), ActionSpace()
        self.state: dict[str, Any] = {}
        self._progress: Progress | None = None
        self._begun = False
        self._stack: AsyncExitStack | None = None
        self._borrows = shared is not None
        self._portal: Portal | None = None
        self.hook_calls = calls.Calls(type(self).__name__)

    # What an author writes ------------------------------------------------------------------------------

    @classmethod
    def open_shared(cls, options: Any, sandboxes: SandboxPool | None) -> AbstractAsyncContextManager[Any]:
        """What all episodes of a run share (graders, sandboxes): opened once, closed after the last.

        sandboxes   the run's pool, which the run closes; None: make one from the defaults, and close it
        """
        return nullcontext()

    @classmethod
    def load_taskset(cls, options: Any) -> Taskset:
        """The tasks, by the options; override it to know names of your own."""
        found = options.taskset or cls.taskset
        if found is None:
            raise ConfigError(
                source=f"environment {cls.__name__}",
                key="taskset",
                value=None,
                remedy="Set the class attribute `taskset`, the option, or register(..., taskset=...).",
            )
        return named_taskset(found, source=f"environment {cls.__name__}") if isinstance(found, str) else found

    async def begin(self, task: Task) -> Observation | Sequence[Message] | str | None:
        """Prepare the episode. What it returns is shown instead of the task's prompt; None shows that."""
        return None

    async def reply(self, text: str) -> Observation | Sequence[Message] | str | None:
        """Answer a turn that calls no tool. None ends the episode; a text is the user's next message."""
        return None

    async def end(self) -> None:
        """Undo `begin`. Runs to its end even where the episode is cancelled, but never beside another hook:
        one that was abandoned is waited for, in the background."""

    def parse(self, text: str) -> Reply:
        """Take a turn apart; override it for a format of your own. Must accept any text."""
        return parse(text, self.options.tool_format, self._schemas)

    @classmethod
    def self_test(cls, tasks: Taskset, scratch: Path) -> Iterable[Case]:
        """Episodes with a known outcome, for `rz-agent env check` (`self_test.py`).

        scratch   a folder that lasts as long as the cases are played
        """
        return ()

    @classmethod
    def longest_step_s(cls, options: Any) -> float:
        """Seconds that one step, its scoring included, may take by deadlines of the environment's own: what
        `rollout.step_deadline_s` of a recipe must exceed. 0: it has none."""
        return 0.0

    def clock(self, seconds: float) -> AbstractAsyncContextManager[None]:
        """A deadline of the running episode: TimeoutError after so long, waits for a sandbox not counted."""
        return self._running().clock(seconds)

    def finish(self) -> None:
        """End the episode after this action; for tools such as `submit`."""
        self._running().finished = True

    # What a rollout uses ----------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """The task of the current episode."""
        return self._running().task

    @property
    def finished(self) -> bool:
        """Whether `finish` was called in this episode."""
        return self._running().finished

    @property
    def prompt_tools(self) -> list[dict[str, Any]]:
        """What the chat template is given as `tools`; empty where the options keep them out."""
        return [spec.openai() for spec in self.tool_specs] if self.options.tools_in_prompt else []

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode: of options["task"] (a Task or its dictionary), of options["position"] in the
        order of seed 0, or of a task drawn by the seed. `info["mask"]` says why it could not be set up."""
        await self._leave()
        self.seed_with(seed)
        task = self._pick(options or {})
        if not await self.hook_calls.settled(calls.GRACE_S):
            why = "a hook of the episode before, which was abandoned, still runs"
            return copied(observation(task.prompt, "user")), {"task_id": task.id, "mask": why}
        self._progress, self.state = Progress(task), {}
        new, masked = await self._set_up(task)
        self._progress.messages.extend(new["messages"])
        info = {"task_id": task.id}
        if masked:
            await self._leave()
            info["mask"] = masked
        return copied(new), info  # whoever is shown a task's prompt may change what he was shown

    async def astep(self, action: str | Action) -> Step:
        """One turn of the policy. The last step of an episode carries its reward, `info["ended"]`,
        `info["rewards"]` and `info["metrics"]`; a masked one carries `info["mask"]`. An episode that ended
        must be reset before the next step (`ResetNeeded`)."""
        return await self._guarded(self._turn(action.text if isinstance(action, Action) else action))

    async def atruncate(self, ended: Ended = "tokens") -> Step:
        """End the running episode from outside (tokens, time) and score it as it stands."""
        return await self._guarded(self._conclude(NOTHING, ended))

    async def aclose(self) -> None:
        """Leave the episode and whatever the environment opened itself; the latter at once. Idempotent."""
        await self._leave()
        if stack := self._stack:
            self._stack, self.shared = None, None
            await to_the_end(self._close(stack))

    # The synchronous half: for Gymnasium's tools ------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        began: tuple[Observation, Info] = self._sync(own(self, "areset")(seed=seed, options=options))
        _ = self.np_random  # Gymnasium's checker looks at where it is kept
        return began

    def step(self, action: str) -> Step:
        stepped: Step = self._sync(own(self, "astep")(action))
        return stepped

    def close(self) -> None:
        self._sync(own(self, "aclose")())
        if self._portal:
            self._portal.close()
            self._portal = None

    # How it works -------------------------------------------------------------------------------------------

    def _sync(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        # One loop for the life of the environment: its sandboxes and processes belong to that loop.
        self._portal = self._portal or Portal()
        return self._portal.run(coroutine)

    def _specs(self) -> tuple[ToolSpec, ...]:
        free = [tool_spec(function) for function in self.tools]
        bound = [tool_spec(getattr(type(self), name), method=name) for name in self._tool_methods]
        return (*free, *bound)

    def _rubric(self) -> Rubric:
        methods = [getattr(self, name) for name in self._score_methods]
        rubric = Rubric(*self.rubric.functions, *methods, deadline_s=self.rubric.deadline_s)
        if not rubric.rewarded:
            raise ConfigError(
                source=f"environment {type(self).__name__}",
                key="rubric",
                value=[function.__name__ for function in rubric.functions],
                why="has no reward",
                remedy="Decorate a method with @reward, or set `rubric`: else every episode is worth 0.",
            )
        return rubric

    def _running(self) -> Progress:
        if self._progress is None:
            raise ResetNeeded(f"{type(self).__name__} has no running episode: call reset() first")
        return self._progress

    def _pick(self, options: dict[str, Any]) -> Task:
        if unknown := set(options) - {"task", "position"}:
            raise ConfigError(
                source=f"{type(self).__name__}.reset",
                key="options",
                value=min(unknown),
                remedy='The options of reset are "task" and "position".',
            )
        if (task := options.get("task")) is not None:
            return task if isinstance(task, Task) else Task.model_validate(task)
        split = "train" if "train" in self.tasks.splits else self.tasks.splits[0]
        position = options.get("position")
        if position is None:
            position = int(self.np_random.integers(2**31))
        return self.tasks.order(0, split)[position]

    async def _set_up(self, task: Task) -> tuple[Observation, str]:
        """What is shown first, and the reason to mask the episode ("" where there is none)."""
        name, prompt = type(self).__name__, observation(task.prompt, "user")
        try:
            async with deadline(task.deadlines.setup_s) as clock:
                if self._stack is None and not self._borrows:
                    with blamed(name, "open_shared", task.id, self.open_shared):
                        stack, resources = AsyncExitStack(), self.open_shared(self.options, self._sandboxes)
                        self.shared = await stack.enter_async_context(resources)
                        self._stack = stack
                self._begun = True
                if type(self).begin is AgentEnv.begin:
                    return prompt, ""
                with blamed(name, "begin", task.id, self.begin):
                    shown = await self.hook_calls.call(self.begin, task)
                    return (prompt if shown is None else observation(shown, "user")), ""
        except BaseException as error:
            if isinstance(error, TimeoutError) and clock.expired():
                return prompt, f"setup did not finish within {task.deadlines.setup_s:g} s"
            if reason := mask_reason(error, acted=False):
                return prompt, reason
            await self._leave()
            raise

    async def _guarded(self, stepping: Awaitable[Step]) -> Step:
        """A step; whatever goes wrong in it, cancellation included, ends the episode and leaves nothing."""
        progress = self._progress  # None afterwards, where it goes wrong while the episode is being left
        try:
            return await stepping
        except ResetNeeded:
            raise
        except BaseException as error:
            await self._leave()
            if progress and (last := last_step(error, info=progress.info(), counts=progress.counts())):
                return last
            raise

    async def _turn(self, text: str) -> Step:
        progress = self._running()
        if progress.overdue:
            return await self._conclude(NOTHING, "time")
        name = type(self).__name__
        with blamed(name, "parse", progress.task.id, self.parse):
            turn = self.parse(text)
            progress.record(text, turn)
        if turn.calls:
            new, answered = await answer(self, turn.calls), False
        else:
            with blamed(name, "reply", progress.task.id, self.reply):
                shown = await self.hook_calls.call(self.reply, turn.content)
                new, answered = (NOTHING, True) if shown is None else (observation(shown, "user"), False)
        progress.messages.extend(new["messages"])
        if progress.finished or answered:
            return await self._conclude(new, "finished" if progress.finished else "answered")
        if progress.turns >= self.max_turns:
            return await self._conclude(new, "turns")
        return new, 0.0, False, False, progress.info()

    async def _conclude(self, new: Observation, ended: Ended) -> Step:
        progress = self._running()
        episode = progress.episode(self.state, ended)
        score = await self.rubric.score(
            progress.task, episode, owner=type(self).__name__, calls=self.hook_calls
        )
        info = {
            **progress.info(),
            "ended": ended,
            "rewards": dict(score.rewards),
            "metrics": {**progress.counts(), **score.metrics},
        }
        await self._leave()
        terminated = ended in ("answered", "finished")
        return new, score.reward, terminated, not terminated, info

    async def _leave(self) -> None:
        """Forget the episode and undo its `begin`, exactly once, to the end; not while a hook still runs."""
        self._progress = None
        if self._begun:
            self._begun = False
            if type(self).end is not AgentEnv.end:
                await self.hook_calls.when_returned(self._end)

    async def _close(self, stack: AsyncExitStack) -> None:
        with blamed(type(self).__name__, "open_shared, closing", function=self.open_shared):
            await stack.aclose()

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(calls.END_S):
                await self.hook_calls.call(self.end)
        except Exception:
            # The episode's result stands: a sandbox that cannot be left is the provider's to reap.
            log.warning("%s.end failed", type(self).__name__, exc_info=True)


_UNWINDING = frozenset((AgentEnv.astep, AgentEnv.atruncate))


def unwinds(method: Callable[..., Any]) -> bool:
    """Whether a method of an environment is over soon after it is cancelled, so that nobody needs to guard
    against it: ours, where no author replaced it. What an author wrote runs in it through `Calls`."""
    return isinstance(method, MethodType) and method.__func__ in _UNWINDING


def _merged(inherited: tuple[str, ...], members: list[tuple[str, Any]], mark: str) -> tuple[str, ...]:
    """Names of the marked methods, the base classes' first."""
    return tuple(dict.fromkeys((*inherited, *(name for name, value in members if hasattr(value, mark)))))
