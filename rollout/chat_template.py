"""A model folder's chat template: messages in, text out, as Hugging Face defines it.

Text only: which parts of the result become special tokens is the renderer's business. The
template is compiled once; rendering waits for nothing and keeps no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError

Message = Mapping[str, object]
"""{"role": ..., "content": str or list of parts, ...}; an `envs` message is one."""
Tool = Mapping[str, object]
"""A function's JSON schema in the form that chat templates read."""


class ChatTemplate:
    """Renders conversations with one Jinja template.

    special    names that templates read, such as {"bos_token": "<s>"}
    arguments  the template's own switches, such as {"enable_thinking": False}
    source     the file, for errors
    """

    def __init__(
        self,
        text: str,
        *,
        special: Mapping[str, str] | None = None,
        arguments: Mapping[str, object] | None = None,
        source: str = "chat template",
    ) -> None:
        self.text, self._source = text, source
        self._names: dict[str, object] = {**(special or {}), **(arguments or {})}
        self._template = _compile(text, source)

    @classmethod
    def load(cls, folder: Path, *, arguments: Mapping[str, object] | None = None) -> ChatTemplate:
        """The template of a Hugging Face folder; ConfigError where it has none."""
        config = read_json(folder / "tokenizer_config.json")
        text = _find_text(folder, config)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: token for name in names if (token := token_text(config.get(name))) is not None}
        return cls(text, special=special, arguments=arguments, source=str(folder))

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, generate: bool = True
    ) -> str:
        """The conversation as text.

        generate  end with the header after which the policy speaks
        Raises ConfigError where the template refuses the conversation, with its reason.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=generate, **self._names
            )
        except TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise ConfigError(
                source=self._source,
                key="chat_template(roles)",
                value=roles,
                why=f"is refused by the template: {error}",
                remedy="Give the environment's messages in an order and with roles that this model knows.",
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ConfigError(
            source=str(path), key="top level", value=type(content).__name__, remedy="It must be an object."
        )
    return content


def token_text(entry: object) -> str | None:
    """A token of `tokenizer_config.json`, which is written as text or as {"content": text}."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def _find_text(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    entry = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, list):
        entry = {named["name"]: named["template"] for named in entry}.get("default")
    if not isinstance(entry, str):
        raise ConfigError(
            source=str(folder),
            key="chat_template",
            value=None,
            why="is needed to turn messages into tokens",
            remedy="Use an instruction-tuned model, or put its chat_template.jinja into that folder.",
        )
    return entry


class _Generation(Extension):
    """`{% generation %}` marks assistant text for trainers that re-render; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _public(kind: type, *without: str) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if not name.startswith("_") and name not in without)


_DICT_ATTRIBUTES = frozenset(dir(dict))
# Harmless on objects of exactly this type; `format` is not, the sandbox has its own.
_HARMLESS = {str: _public(str, "format", "format_map"), LoopContext: _public(LoopContext)}


class _InlineItems(CodeGenerator):
    """Writes `message.role` so that a dictionary's item costs no call of the sandbox's `getattr`."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        if not isinstance(node.node, nodes.Name) or node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        held, item = frame.symbols.ref(node.node.name), repr(node.attr)
        self.write(f"({held}[{item}] if type({held}) is dict and {item} in {held} else ")
        super().visit_Getattr(node, frame)
        self.write(")")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates come with weights, so they run sandboxed; what they do most is looked up at once.

    `message.role` of a dictionary is its item: trying it as an attribute first, and checking
    `loop.first` and `text.strip` anew each time, was nine tenths of the cost of a long conversation.
    """

    code_generator_class = _InlineItems

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _compile(text: str, source: str) -> Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    # One clock reading a template: a date in the prompt must not change in the middle of an episode.
    now = datetime.now()

    def tojson(value: object, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    try:
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            source=source,
            key="chat_template",
            value=f"line {error.lineno}",
            why=f"is not valid Jinja: {error.message}",
            remedy="Restore the template that the model was published with.",
        ) from error
    # Jinja keeps the globals as a chain of maps, which each rendering would walk in Python.
    template.globals = dict(template.globals)
    return template
