"""One episode's conversation with the policy: which ids follow a sampled turn.

    talk = Conversation(renderer, messages, tools)
    talk.prompt                       ids of the first prompt
    talk.act(ids)                     what the engine sampled, its stop token included
    talk.observe(new) -> Turn         what to append, or the prompt of a new segment
    talk.see(history) -> Turn         the same, from all that the policy shall see now

After a turn the template is asked for the whole conversation with a mark where the sampled text
ends. What stands behind the mark follows the sampled ids: the close of the turn (without the
stop token if the policy sampled it, with it if the turn was cut by length), the new messages and the
header of the next turn. What stands before the mark must be what the previous prompt was rendered
as, followed by what was said. If it is not, the template has rewritten history (a `<think>` part
removed, an old message dropped), no append can express that, and the result opens a new segment: the
whole conversation as the template writes it, the policy's earlier turns given by their text.
White space that the template adds to or takes from a turn does not count: the ids stay as sampled.

Invariants: `Turn.extends` means that sampled ids stay where they are and only ids behind them are
added. Generation may be retried at will: nothing changes until `act`. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..trajectory import Int32
from .chat_template import Message, Tool
from .renderer import Renderer
from .special_tokens import CUT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """What the policy sees next.

    extends    True: append `token_ids` to the segment; False: they are the prompt of a new segment
    token_ids  int32[n], none of them an action
    """

    extends: bool
    token_ids: Int32


class Conversation:
    """The messages of one episode and the text of its current segment.

    Raises ConfigError where the template refuses the messages.
    """

    def __init__(
        self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> None:
        self._renderer, self._tools = renderer, renderer.guard_tools(tools)
        self._public: list[Message] = []
        self._guarded: list[Message] = []
        self._text = ""  # the current segment as the template writes it, up to the last prompt
        self._said: str | None = None  # the turn that was sampled since then
        self._stop = ""  # and the stop token that ended it
        self.prompt: Int32 = self.restart(messages).token_ids

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far as a client knows it, the policy's turns included."""
        return tuple(self._public)

    def act(self, sampled: Iterable[int], *, reply: Message | None = None) -> str:
        """Record a sampled turn; returns its text, for the environment.

        sampled  the engine's ids, with the stop token if it sampled one
        reply    the message as a client was given it, where that is more than role and text
        """
        if self._said is not None:
            raise ValueError("the policy has spoken already: observe() something before it speaks again")
        text, self._said, self._stop = self._renderer.heard(sampled)
        self._public.append(reply or {"role": "assistant", "content": text})
        return text

    def observe(self, new: Sequence[Message]) -> Turn:
        """Add the environment's answer to the turn recorded by `act`."""
        if self._said is None:
            raise ValueError("nothing was sampled since the last prompt: act() comes before observe()")
        added = self._renderer.guard(new)
        marked = self._render([*self._guarded, _turn(self._said + CUT), *added])
        before, mark, after = marked.partition(CUT)
        keeps = _same(before, self._text + self._said) or self._renderer.on_rewrite == "keep"
        self._guarded += [_turn(self._said), *added]
        self._public += new
        self._said = None
        if mark and keeps:
            self._text = before + after
            return Turn(extends=True, token_ids=self._renderer.encode(_after_stop(after, self._stop)))
        self._text = self._render(self._guarded)
        return Turn(extends=False, token_ids=self._renderer.encode(self._text))

    def turn(self, sampled: Iterable[int], new: Sequence[Message]) -> Turn:
        """`act`, then `observe`."""
        self.act(sampled)
        return self.observe(new)

    def see(self, history: Sequence[Message]) -> Turn:
        """The whole conversation as the policy shall see it after its turn: what does not begin with all that
        it knows is a new segment."""
        known = len(self._public)
        if self._said is not None and list(history[:known]) == self._public:
            return self.observe(history[known:])
        return self.restart(history)

    def restart(self, messages: Sequence[Message]) -> Turn:
        """Replace the history, for example by a summary of it: always a new segment."""
        self._public, self._guarded = list(messages), self._renderer.guard(messages)
        self._said = None
        self._text = self._render(self._guarded)
        return Turn(extends=False, token_ids=self._renderer.encode(self._text))

    def follow(self, messages: Sequence[Message]) -> Turn | None:
        """A client's whole history: a continuation of ours extends it, any other one restarts.

        Returns None where nothing is new, as after a failed generation: sample the same prompt again.
        Ask `answered` first: a client may repeat a request whose reply it never received.
        """
        known = len(self._public)
        if list(messages[:known]) != self._public:
            return self.restart(messages)
        if len(messages) > known:
            return self.observe(messages[known:]) if self._said is not None else self.restart(messages)
        return self.restart(messages) if self._said is not None else None

    def answered(self, messages: Sequence[Message]) -> Message | None:
        """The reply that was given to exactly this history; None where it is not the last one answered."""
        given = self._said is not None and list(messages) == self._public[:-1]
        return self._public[-1] if given else None

    def _render(self, messages: Sequence[Message]) -> str:
        return self._renderer.template.render(messages, tools=self._tools)


def room(prompt_tokens: int, *, context: int, cap: int | None = None) -> int:
    """Tokens that may be sampled after a prompt; 0 ends the episode as truncated, without a call.

    >>> room(4, context=10), room(4, context=10, cap=3), room(10, context=10)
    (6, 3, 0)
    """
    left = max(0, context - prompt_tokens)
    return left if cap is None else min(left, cap)


def _turn(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _after_stop(close: str, stop: str) -> str:
    """What follows a turn that ended in `stop`: the template's own marker is not written twice.

    Another stop token than the template's marker leaves the turn open, so it is closed in full.
    """
    bare = close.lstrip()
    return bare.removeprefix(stop) if stop and bare.startswith(stop) else close


def _same(rendered: str, seen: str) -> bool:
    return rendered == seen or "".join(rendered.split()) == "".join(seen.split())
