"""One episode of an environment, played by an agent that is no model, and recorded.

    recording = await play(env, agent, recorder)
    recording = await play_one(factory, task, new_agent, name="python")

Invariant: `play_one` closes its environment, whatever happened. A bug of the environment is raised, a failure
of its infrastructure is a recording with the fate "masked".
Waits: for the environment, as long as its own deadlines let it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .bug import blamed
from .env import AgentEnv
from .factory import EnvFactory
from .recording import Recorder, Recording
from .script import Agent, NewAgent
from .task import Task


async def play_one(
    factory: EnvFactory, task: Task, new_agent: NewAgent, *, name: str, options: Mapping[str, Any]
) -> Recording:
    """An episode in an environment of its own. `name` and `options` are what made the factory."""
    env = factory.create()
    try:
        return await play(env, new_agent(task), Recorder(name, options, task))
    finally:
        await env.aclose()


async def play(env: AgentEnv, agent: Agent, recorder: Recorder) -> Recording:
    """Reset to the recorder's task, and let the agent act until the episode has ended."""
    task = recorder.task
    observation, info = await env.areset(options={"task": task})
    recorder.began(observation, info)
    turns = 0
    while recorder.recording.fate == "running":
        if turns == env.max_turns:  # an environment with an `astep` of its own may not count
            recorder.ended(await env.atruncate("turns"))
            break
        with blamed(type(env).__name__, f"agent, turn {turns + 1}", task.id):
            text = await agent(observation)
            if not isinstance(text, str):
                raise TypeError(f"it returned {text!r}; an agent returns the text of its turn")
        calls = env.parse(text).calls
        step = await env.astep(text)
        recorder.stepped(text, calls, step)
        observation, turns = step[0], turns + 1
    return recorder.recording
