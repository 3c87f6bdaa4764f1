"""Tokens in, tokens out: from an environment's messages to the ids that the engine is given.

    first(messages, tools)   ids of a prompt
    decode(ids)              what the policy said, for the environment
    reads_images             whether the template has a place for them; else an image is the word "[image]"
    stop_token_ids           what ends a turn
    Conversation             (conversation.py) the ids that follow a sampled turn

Invariants
  - Sampled ids are kept as sampled: nothing here encodes them again. Text of a sampled turn is
    used to ask the template what comes after it.
  - No tool, user or dataset text becomes a special token, whatever it spells. In an author's or
    the policy's own text only tokens that do not delimit turns may (`<tool_call>`, `<think>`).
  - Text that spells no special token gets the ids that the model's own tokenizer gives it; the
    constructor checks that, and refuses a tokenizer for which it does not hold.

A renderer holds no conversation, waits for nothing and may be shared by every episode of a process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from ..envs.message import text_of
from ..errors import ConfigError
from ..trajectory import Int32
from .chat_template import ChatTemplate, Message, Tool, read_json, token_text
from .special_tokens import CUT, AddedToken, SpecialTokens

OnRewrite = Literal["new_segment", "keep"]
"""What to do where the template rewrites an earlier turn, such as one without its `<think>` part:
do as the template says and open a new segment, or keep the ids as they were seen and sampled."""

AUTHORED = frozenset({"assistant", "system", "developer"})
"""Roles whose text the policy or the task's author wrote; every other role carries found text."""

_CACHED_CHARACTERS = 256


class Renderer:
    """Encodes conversations for one model folder.

    >>> renderer = Renderer(Path("models/tiny"))                                    # doctest: +SKIP
    >>> renderer.first([{"role": "user", "content": "What is 2 plus 3?"}])          # doctest: +SKIP
    array([1, 261, ...], dtype=int32)

    folder        a Hugging Face folder: tokenizer.json and a chat template
    on_rewrite    see `OnRewrite`
    arguments     the template's own switches, such as {"enable_thinking": False}
    """

    def __init__(
        self,
        folder: Path,
        *,
        on_rewrite: OnRewrite = "new_segment",
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        self.folder, self.on_rewrite = Path(folder), on_rewrite
        self.template = ChatTemplate.load(self.folder, arguments=arguments)
        self._tokenizer, self._plain, self.special = _load_tokenizer(self.folder)
        self._short: Callable[[str], tuple[int, ...]] = lru_cache(maxsize=8192)(self._encode_piece)
        self.longest_token = max(map(len, self._tokenizer.get_vocab()))  # characters, and no fewer
        self.reads_images = self._finds_images()
        self.close = self._find_close()
        self.stop_token_ids = self._find_stop_tokens()
        self._telling = self.special.ids.union(self.stop_token_ids)  # ids that are more than their text
        self._check_plain_text()

    def first(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Int32:
        """int32[T] ids of a prompt that ends where the policy speaks.

        Raises ConfigError where the template refuses the messages.
        """
        return self.encode(self.template.render(self.guard(messages), tools=self.guard_tools(tools)))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a sampled turn: special tokens spelled out, a final stop token dropped."""
        kept, _ = self.split_stop(ids)
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def encode(self, text: str) -> Int32:
        """int32[T] ids of trusted or guarded text: what spells a special token becomes one."""
        ids: list[int] = []
        for token, piece in self.special.split(text):
            if token is not None:
                ids.append(token)
            else:
                ids += self._short(piece) if len(piece) <= _CACHED_CHARACTERS else self._encode_piece(piece)
        return np.array(ids, dtype=np.int32)

    def guard(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with every text marked (`SpecialTokens.guard`), ready for the template."""
        return [self._guard_message(message) for message in messages]

    def guard_tools(self, tools: Sequence[Tool] | None) -> list[Tool]:
        return [self._guard_value(tool, authored=True) for tool in tools or ()]

    def spell(self, ids: Sequence[int]) -> str:
        """Guarded text of sampled ids: a special token is spelled out, text that spells one is marked."""
        parts: list[str] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token is not None and token not in self.special.ids:
                run.append(token)
                continue
            if run:
                parts.append(self.special.guard(str(self._tokenizer.decode(run, skip_special_tokens=False))))
                run = []
            if token is not None:
                parts.append(str(self._tokenizer.id_to_token(token)))
        return "".join(parts)

    def heard(self, sampled: Iterable[int]) -> tuple[str, str, str]:
        """A sampled turn: its text (`decode`), its guarded text (`spell`), its stop token's spelling."""
        kept, stop = self.split_stop(sampled)
        text = str(self._tokenizer.decode(kept, skip_special_tokens=False))
        plain = self._telling.isdisjoint(kept)
        return text, self.special.guard(text) if plain else self.spell(kept), stop

    def split_stop(self, ids: Iterable[int]) -> tuple[list[int], str]:
        """Sampled ids without a final stop token, and that token's spelling ("" where none ended it)."""
        kept = list(map(int, ids))
        if kept and kept[-1] in self.stop_token_ids:
            return kept[:-1], str(self._tokenizer.id_to_token(kept[-1]))
        return kept, ""

    def _guard_message(self, message: Message) -> Message:
        content = message.get("content")
        if not self.reads_images and isinstance(content, (list, tuple)):
            message = {**message, "content": text_of(content)}
        guarded: Message = self._guard_value(message, authored=message.get("role") in AUTHORED)
        return guarded

    def _guard_value(self, value: Any, *, authored: bool) -> Any:
        if isinstance(value, str):
            return self.special.guard(value, authored=authored)
        if isinstance(value, (dict, Mapping)):
            return {key: self._guard_value(entry, authored=authored) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._guard_value(entry, authored=authored) for entry in value]
        return value

    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(self.special.unguard(piece), add_special_tokens=False).ids)

    def _finds_images(self) -> bool:
        """Whether an image in a message leaves a special token of its own."""
        text = {"type": "text", "text": "a"}
        try:
            tokens = [
                sum(token is not None for token, _ in self.special.split(self.template.render([message])))
                for message in (
                    {"role": "user", "content": [{"type": "image"}, text]},
                    {"role": "user", "content": [text]},
                )
            ]
        except (ConfigError, TypeError):  # a template that takes texts only may add them to a text
            return False
        return tokens[0] > tokens[1]

    def _find_close(self) -> str:
        """The text with which the template closes a turn, found by rendering one that ends in a mark."""
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" + CUT}]
        before, mark, close = self.template.render(turn, generate=False).partition(CUT)
        if not mark or CUT in close:
            raise ConfigError(
                source=str(self.folder),
                key="chat_template(assistant content)",
                value=before + close,
                why="does not hold the content exactly once",
                remedy="Token-exact rollouts need a template that writes what the assistant said, once.",
            )
        return close

    def _find_stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a turn: the template's end marker, then the model's own end tokens."""
        marker = next((token for token, _ in self.special.split(self.close) if token is not None), None)
        eos = read_json(self.folder / "generation_config.json").get("eos_token_id")
        spelled = token_text(read_json(self.folder / "tokenizer_config.json").get("eos_token"))
        named = self.special.tokens.get(spelled or "")
        own = [*(eos if isinstance(eos, list) else [eos]), named.id if named else None]
        stops = tuple(dict.fromkeys(int(token) for token in [marker, *own] if token is not None))
        if not stops:
            raise ConfigError(
                source=str(self.folder),
                key="eos_token_id",
                value=eos,
                why="leaves no token that ends a turn",
                remedy="Write generation_config.json with the model's eos_token_id.",
            )
        return stops

    def _check_plain_text(self) -> None:
        """Refuse a tokenizer that encodes pieces otherwise than a whole, or spells tokens from text."""
        probe = self.template.render([{"role": "user", "content": "What is 12 plus 34?\n\n  Say it."}])
        whole = self._tokenizer.encode(probe, add_special_tokens=False).ids
        if self.encode(probe).tolist() != whole:
            raise ConfigError(
                source=str(self.folder / "tokenizer.json"),
                key="pre_tokenizer",
                value=json.loads(self._tokenizer.to_str())["pre_tokenizer"],
                why="gives a piece between special tokens other ids than it has in the whole text",
                remedy="Use a byte-level tokenizer without a prefix space.",
            )
        for spelling in self.special.tokens:
            if not self.special.ids.isdisjoint(self._encode_piece(spelling)):
                raise ConfigError(
                    source=str(self.folder / "tokenizer.json"),
                    key="model.vocab",
                    value=spelling,
                    why="is an ordinary entry too, so that found text could become the special token",
                    remedy="Remove it from the vocabulary of the model; it stays in added_tokens.",
                )


def _load_tokenizer(folder: Path) -> tuple[Any, Any, SpecialTokens]:
    """The tokenizer, its twin that knows no special token, and the table of the special tokens."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ConfigError(
            source=str(folder),
            key="tokenizer.json",
            value=None,
            why="is missing",
            remedy="Save the fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(DIR).",
        )
    description = json.loads(file.read_text(encoding="utf-8"))
    special = {
        entry["content"]: AddedToken(
            id=entry["id"],
            content=entry["content"],
            control=entry["special"],
            lstrip=entry["lstrip"],
            rstrip=entry["rstrip"],
        )
        for entry in description["added_tokens"]
        if _structural(entry["content"])
    }
    kept = [entry for entry in description["added_tokens"] if entry["content"] not in special]
    # Templates write special tokens themselves: nothing is cut, padded or added around a text.
    description |= {"truncation": None, "padding": None}
    tokenizer = Tokenizer.from_str(json.dumps(description))
    plain = Tokenizer.from_str(json.dumps(description | {"added_tokens": kept, "post_processor": None}))
    return tokenizer, plain, SpecialTokens(special)


def _structural(spelling: str) -> bool:
    """Whether an added token means more than its text; runs of white space and single characters do not."""
    return len(spelling) > 1 and bool(spelling.replace("\u2581", " ").strip())
