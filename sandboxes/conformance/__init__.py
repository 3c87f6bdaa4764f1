"""What every provider of sandboxes promises, as one list that anybody can try on their own provider.

    from rz_agent.sandboxes.conformance import PROMISES, try_all

    async for outcome in try_all(provider, PROMISES):
        print(outcome.status, outcome.promise.name, outcome.detail)

`rz-agent sandbox check --provider NAME` does that. Under pytest parametrise over `PROMISES`, call `attempt`.
"""

from . import files, hostile, life, processes, programs, sessions
from .place import Place
from .promise import BrokenPromise, Promise, Topic
from .trial import Outcome, attempt, try_all

TOPICS = (programs.TOPIC, processes.TOPIC, sessions.TOPIC, files.TOPIC, life.TOPIC, hostile.TOPIC)
PROMISES = tuple(promise for topic in TOPICS for promise in topic.promises)

__all__ = [
    "PROMISES",
    "TOPICS",
    "BrokenPromise",
    "Outcome",
    "Place",
    "Promise",
    "Topic",
    "attempt",
    "try_all",
]
