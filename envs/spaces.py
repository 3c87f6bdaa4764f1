"""Gymnasium spaces of what an agent reads and writes.

Gymnasium's own `Text` refuses the empty string, newlines and every letter outside its charset, so a chat
needs spaces of its own. They are compared by type, flatten to nothing, and sample plausible values: the
environment checker sends samples as actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium

from .message import Message, Observation, count_images, is_message

_PLAIN = ("", " ", "\n", "42", "é", "中", "🙂")
_WORDS = (*_PLAIN, "\\boxed{4}", "<tool_call>", "</tool_call>", '{"name": "python"}')


class ActionSpace(gymnasium.Space[str]):
    """Any text."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        count = int(self.np_random.integers(0, 6))
        return "".join(_WORDS[i] for i in self.np_random.integers(0, len(_WORDS), count))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "ActionSpace()"

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        return [str(sample) for sample in sample_n]


class ChatSpace(gymnasium.Space[Observation]):
    """Observations: a tuple of new messages and a tuple of PNG images."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    def sample(self, mask: Any = None, probability: Any = None) -> Observation:
        words = self.np_random.integers(0, len(_WORDS), int(self.np_random.integers(0, 3)))
        messages = tuple(Message(role="user", content=_WORDS[i]) for i in words)
        return Observation(messages=messages, images=())

    def contains(self, x: Any) -> bool:
        return (
            isinstance(x, dict)
            and set(x) == {"messages", "images"}
            and isinstance(x["messages"], tuple)
            and isinstance(x["images"], tuple)
            and all(is_message(message) for message in x["messages"])
            and all(isinstance(image, bytes) for image in x["images"])
            and count_images(x["messages"]) == len(x["images"])
        )

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "ChatSpace()"
