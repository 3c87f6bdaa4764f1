"""What an environment promises about itself, as episodes with a known outcome.

    class MyEnv(AgentEnv):
        @classmethod
        def self_test(cls, tasks, scratch):
            task = tasks.load("test")[0]
            return [
                Case(name="the scripted solution scores 1", task=task, agent=scripted(solve), reward=1.0),
                Case(name="doing nothing scores 0", task=task, agent=silent, reward=0.0),
            ]

`rz-agent env check` plays them (`check.py`) and so do the tests. Nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from .script import NewAgent
from .task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One episode and what must come of it.

    name     a promise: "the gold patch resolves", "doing nothing scores 0"
    agent    who plays: `scripted(solve)`, `silent`, `replayed([...])`; any function of the task that
             returns an agent
    reward   what the episode must be worth, to within 1e-6
    skip     why this machine cannot play it, such as "no docker daemon"; it is then reported, not played
    """

    name: str
    task: Task
    agent: NewAgent
    reward: float
    skip: str = ""
