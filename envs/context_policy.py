"""Which part of an episode's history the policy is shown at its next turn.

    ContextPolicy.shown(history) -> what is shown        both are observations: messages and their images
    AppendOnly()         the whole history
    SlidingImages(3)     all of its words, and its newest three images

A history is everything since the reset, the policy's own turns included. What is shown at one turn need not
begin with what was shown at the turn before: such a turn is a training sample of its own (a new segment), and
the rollout finds that out by comparing.
Invariants: pure functions; images stand in the order of their image parts. Nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .message import Message, Observation, Part, TextPart, count_images


@runtime_checkable
class ContextPolicy(Protocol):
    """See the module. An environment names one as its class attribute `context`."""

    def shown(self, history: Observation) -> Observation: ...


@dataclass(frozen=True, slots=True)
class AppendOnly:
    """Everything, always: each turn extends the one before, and an episode is one training sample."""

    def shown(self, history: Observation) -> Observation:
        return history


@dataclass(frozen=True, slots=True)
class SlidingImages:
    """The newest images only; of an older one there is left the text `instead`, or nothing where it is "".

    >>> from .message import joined, pictured
    >>> seen = joined(pictured("user", f"screen {n}", b"%d" % n) for n in range(3))
    >>> SlidingImages(1).shown(seen)["images"]
    (b'2',)
    """

    keep: int = 3
    instead: str = "[an earlier screenshot]"

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ValueError(f"SlidingImages(keep={self.keep}): a count of images is at least 0")

    def shown(self, history: Observation) -> Observation:
        dropped = max(0, len(history["images"]) - self.keep)
        messages, left = [], dropped
        for message in history["messages"]:
            here = min(left, count_images([message]))
            messages.append(self._without_first(message, here) if here else message)
            left -= here
        return Observation(messages=tuple(messages), images=history["images"][dropped:])

    def _without_first(self, message: Message, count: int) -> Message:
        """The message without its first `count` images; one that has none left is plain text."""
        parts: list[Part] = []
        assert not isinstance(message["content"], str)
        for part in message["content"]:
            if part["type"] == "image" and count:
                count -= 1
                if self.instead:
                    parts.append(TextPart(type="text", text=self.instead))
            else:
                parts.append(part)
        shown = message.copy()
        words = [part["text"] for part in parts if part["type"] == "text"]
        shown["content"] = "\n".join(words) if len(words) == len(parts) else parts
        return shown
