"""The two halves of an environment: what Gymnasium's tools call, and its async twins.

A class that overrides only the synchronous half gets the other half as threads: two halves that disagree
would be a trap. All three of them, because what one event loop opened another must not close.

Waits: a twin for its thread, as long as `Calls` lets it.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent import futures
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .env import AgentEnv

_HALVES = {plain: f"a{plain}" for plain in ("reset", "step", "close")}
_MARK = "__rz_twin__"


def add_twins(cls: type[AgentEnv]) -> None:
    """Give a class that overrides a synchronous method, and not its async one, the async ones as threads."""
    if any(plain in vars(cls) and twin not in vars(cls) for plain, twin in _HALVES.items()):
        for plain, twin in _HALVES.items():
            if twin not in vars(cls):
                made = _closing() if plain == "close" else _threaded(plain)
                vars(made)["__wrapped__"] = getattr(cls, plain)  # whose line an error names
                setattr(cls, twin, made)


def own(env: AgentEnv, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The nearest async method that is not itself a thread around the synchronous one."""
    found = (vars(cls)[name] for cls in type(env).__mro__ if name in vars(cls))
    method = next(function for function in found if not hasattr(function, _MARK))
    bound: Callable[..., Coroutine[Any, Any, Any]] = method.__get__(env)
    return bound


def _threaded(plain: str) -> Callable[..., Awaitable[Any]]:
    async def twin(self: AgentEnv, *args: Any, **kwargs: Any) -> Any:
        return await self.hook_calls.in_thread(getattr(self, plain), *args, **kwargs)

    return _marked(twin, f"a{plain}")


def _closing() -> Callable[..., Awaitable[Any]]:
    async def twin(self: AgentEnv) -> None:
        if strays := self.hook_calls.strays:  # an abandoned step still uses what would be closed

            def close_later() -> None:
                futures.wait(strays)
                self.close()

            threading.Thread(target=close_later, name="rz-close-later", daemon=True).start()
        else:
            await self.hook_calls.in_thread(self.close)

    return _marked(twin, "aclose")


def _marked(twin: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
    twin.__name__ = name
    setattr(twin, _MARK, True)
    return twin
