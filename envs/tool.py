"""A tool: a function the policy may call, described by the JSON schema of its own signature.

    @tool
    async def add(a: int, b: int = 0) -> str:
        '''Add two numbers.

        Args:
            a: the first one
        '''

Invariant: whatever the policy sends, `ToolSpec.arguments` returns arguments that fit the signature or raises
`ToolError` with words for the policy; the function itself never sees a value of the wrong type.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__rz_tool__"
_ARGUMENT = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


class ToolError(Exception):
    """The policy used a tool wrongly. Its text is what the policy reads; the episode goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What the policy is told about a tool, and the function behind it.

    parameters   JSON schema of the arguments, an object
    method       name of the method of the environment, or None where `function` is called as it is
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    model: type[BaseModel] = field(repr=False)
    function: Callable[..., Any] = field(repr=False)
    method: str | None = None

    def openai(self) -> dict[str, Any]:
        """The dictionary chat templates take as one entry of `tools`."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the function; raises `ToolError` naming each argument that does not fit."""
        try:
            model = self.model.model_validate(dict(given))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'arguments'}: {fault['msg']}"
                for fault in error.errors(include_url=False, include_context=False, include_input=False)
            )
            raise ToolError(f"the arguments of {self.name} do not fit: {faults}") from error
        return {name: getattr(model, name) for name in type(model).model_fields}


def tool(function: Function) -> Function:
    """Mark a function or a method of an environment as a tool. Plain or async; it returns the text to show.

    Raises TypeError where a parameter has no annotation, or the function no docstring: the policy reads both.
    """
    setattr(function, MARK, True)
    tool_spec(function)
    return function


@functools.cache  # every episode makes its environment, and a schema costs more than an episode's turn
def tool_spec(function: Callable[..., Any], *, method: str | None = None) -> ToolSpec:
    """The spec of a marked function. A parameter called `self` is the environment's, not the policy's."""
    name = function.__name__
    summary, details = _docstring(function)
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"tool {name}: {error}; import it where the tool's module is loaded") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != "self":
            fields[parameter.name] = _field(name, parameter, hints, details.get(parameter.name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nobody uses the methods that `copy` or `json` hide
        model = create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
    schema = model.model_json_schema()
    for entry in (schema, *schema.get("properties", {}).values()):
        entry.pop("title", None)
    return ToolSpec(
        name=name, description=summary, parameters=schema, model=model, function=function, method=method
    )


def _field(
    tool: str, parameter: inspect.Parameter, hints: Mapping[str, Any], description: str | None
) -> tuple[Any, Any]:
    """What pydantic makes a field of. TypeError for what a policy could not give, or not be told."""
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"tool {tool}: a policy cannot give {parameter} by name; name each parameter")
    if name not in hints:
        raise TypeError(f"tool {tool}: parameter {name} has no type; annotate it")
    if name.startswith("_") or name == "model_config":
        raise TypeError(f"tool {tool}: a parameter cannot be called {name}; rename it")
    try:
        TypeAdapter(hints[name]).json_schema()
    except PydanticUserError as error:
        remedy = "use int, str, list[...], Literal[...], a pydantic.BaseModel or a dataclass"
        raise TypeError(f"tool {tool}: a policy cannot write {name}: {hints[name]!r}; {remedy}") from error
    default = parameter.default
    try:
        if default is not parameter.empty:
            json.dumps(to_jsonable_python(default), allow_nan=False)
    except (PydanticSerializationError, ValueError) as error:
        remedy = "give one that JSON can say, for the policy reads it in the schema"
        raise TypeError(
            f"tool {tool}: the default {default!r} of {name} is no JSON value; {remedy}"
        ) from error
    return hints[name], Field(default=... if default is parameter.empty else default, description=description)


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description, and the text of each argument listed under `Args:`."""
    doc = inspect.getdoc(function)
    if not doc:
        raise TypeError(f"tool {function.__name__} has no docstring; the policy reads it as the description")
    summary, _, rest = doc.partition("\nArgs:\n")
    matches = (_ARGUMENT.match(line) for line in rest.splitlines())
    return summary.strip(), {m[1]: m[2].strip() for m in matches if m}
