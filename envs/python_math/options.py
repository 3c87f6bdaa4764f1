"""What a recipe may set on `rz/PythonMath-v0`."""

from __future__ import annotations

from pydantic import Field

from ..options import EnvOptions


class PythonMathOptions(EnvOptions):
    """The defaults fit the shipped tiny policy; others want `tools_in_prompt` and a `system_prompt`.

    taskset             "arithmetic", "reasoning-gym:NAME", or a `.jsonl` file of {prompt, answer}
    difficulty          arithmetic: each number has `difficulty - 1` digits more than at 1
    calls_per_episode   python calls; a further one is answered with a message
    tool_timeout_s      wall seconds of one call
    output_chars        characters of a call's output that the policy sees: head and tail
    system_prompt       a first message that describes the task and the tool; None: no such message
    tools_in_prompt     whether the chat template is given the tool's schema
    """

    taskset: str | None = "arithmetic"
    difficulty: int = Field(default=1, ge=1, le=12)
    calls_per_episode: int = Field(default=3, ge=1)
    tool_timeout_s: float = Field(default=10.0, gt=0)
    output_chars: int = Field(default=4096, ge=64)
    system_prompt: str | None = None
    tools_in_prompt: bool = False
