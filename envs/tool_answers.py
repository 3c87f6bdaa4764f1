"""What a turn's tool calls are answered with: one observation, whatever the policy wrote.

Invariants: a call that is malformed, names no tool, has wrong arguments or runs out of time is answered in
words and hides none of the others; a bug in a tool is raised, never answered. Calls of one turn run in order,
and one that ends the episode is the last.
Waits: a turn for its tools, at most `task.deadlines.tool_s` for all of them: else a policy could make a step
so long, call by call, that the step's own deadline masks the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..sandboxes.errors import FileError
from .bug import blamed
from .message import Observation, joined, observation
from .options import suggestion
from .tool import ToolError, ToolSpec
from .tool_call import ToolCall

if TYPE_CHECKING:
    from .env import AgentEnv


async def answer(env: AgentEnv, calls: Sequence[ToolCall]) -> Observation:
    """The answers to the calls of one turn."""
    answers: list[Observation] = []
    limit = env.task.deadlines.tool_s
    try:
        async with env.clock(limit):
            for call in calls:
                answers.append(await _answer(env, call))
                if env.finished:
                    break
    except TimeoutError:
        late, *rest = calls[len(answers) :]
        answers.append(_error(late, f"{late.name} did not finish within {limit:g} s"))
        answers += [_error(call, f"not run: the turn's {limit:g} s were over") for call in rest]
    return joined(answers)


def _error(call: ToolCall, what: object) -> Observation:
    return observation(f"Error: {what}", "tool", name=call.name or None)


async def _answer(env: AgentEnv, call: ToolCall) -> Observation:
    try:
        if call.status != "ok":
            raise ToolError(f"the tool call was not understood: {call.error}")
        specs = {spec.name: spec for spec in env.tool_specs}
        if call.name not in specs:
            raise ToolError(f"there is no tool {call.name!r}. {suggestion(call.name, specs, 'tools')}")
        return await _run(env, specs[call.name], call)
    except ToolError as error:
        return _error(call, error)


async def _run(env: AgentEnv, spec: ToolSpec, call: ToolCall) -> Observation:
    function = getattr(env, spec.method) if spec.method else spec.function
    try:
        # A bug is no mask: a policy could get rid of its bad episodes by provoking it.
        with blamed(type(env).__name__, f"tool {spec.name}", env.task.id, function, passing=(ToolError,)):
            shown = await env.hook_calls.call(function, **spec.arguments(call.arguments))
            return observation(shown, "tool", name=spec.name)
    except FileError as error:  # of a file of the policy's own
        raise ToolError(str(error)) from error
