"""How an environment is found by name: on top of Gymnasium's registry, with short names and plug-ins.

    register("me/Guess-v0", entry_point="guess:GuessEnv", short_name="guess")
    load("guess", hints=False) -> EnvFactory        for rollouts
    make("guess", hints=False) -> gymnasium.Env     for Gymnasium's tools; gymnasium.make on its id

A name is a short name, an id, or `pkg.mod:Class`. A package that is only installed is found through the
entry-point group `rz_agent.envs`: `guess = "guess:GuessEnv"` (the class), or `guess = "guess"` (a module that
calls `register`). Invariant: whatever `load` finds, `gymnasium.make` of its id finds too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from ..errors import ConfigError, RzError
from ..sandboxes.pool import SandboxPool
from .bug import located, users_place
from .env import AgentEnv
from .factory import EnvFactory
from .options import suggestion
from .rubric import Rubric
from .task import Taskset

GROUP = "rz_agent.envs"
# Beside Gymnasium's own registry, which is process-wide too and knows no short names.
_SHORT_NAMES: dict[str, str] = {}


def register(
    id: str,
    *,
    entry_point: str | type[AgentEnv],
    taskset: Taskset | str | None = None,
    rubric: Rubric | None = None,
    short_name: str | None = None,
    nondeterministic: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> EnvSpec:
    """Register an environment with Gymnasium, and its short name here. Returns the spec.

    entry_point   the class, or `pkg.mod:Class`, imported when it is first made
    taskset       replaces the class's; rubric: likewise
    kwargs        options that differ from their defaults
    """
    given: dict[str, Any] = dict(kwargs or {})
    if taskset is not None:
        given["taskset"] = taskset
    if rubric is not None:
        given["rubric"] = rubric
    if short_name is not None and (taken := _SHORT_NAMES.get(short_name, id)) != id:
        raise ConfigError(
            source="register", key="short_name", value=short_name, why=f"is {taken}", remedy="Choose another."
        )
    gymnasium.register(id, entry_point=entry_point, nondeterministic=nondeterministic, kwargs=given)
    if short_name is not None:
        _SHORT_NAMES[short_name] = id
    return gymnasium.registry[id]


def names() -> dict[str, str]:
    """Short name -> id, or what an installed package offers under that name (without importing it)."""
    offered = {point.name: point.value for point in entry_points(group=GROUP)}
    return dict(sorted({**offered, **_SHORT_NAMES}.items()))


def listed() -> dict[str, str]:
    """`names`, with a mark on what an installed package offers and cannot be imported."""
    found = names()
    for point in entry_points(group=GROUP):
        try:
            _plug_in(point)
        except ConfigError as error:
            found[point.name] += f"  (broken: {error.why})"
    return dict(sorted({**found, **_SHORT_NAMES}.items()))  # a module that registers has said its ids by now


def resolve(name: str) -> EnvSpec:
    """The spec a name stands for; raises `ConfigError` with near misses."""
    if spec := _registered(name):
        return spec
    if ":" in name and (spec := _from_path(name)):
        return spec
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name in points and (offered := _plug_in(points[name])):
        return _registered(name) or offered
    # Any other plug-in may register the id. One that is broken is not what was asked for.
    for point in points.values():
        with suppress(ConfigError):
            _plug_in(point)
        if found := _registered(name):
            return found
    raise ConfigError(
        source="environment",
        key="env.id",
        value=name,
        why="is not known",
        remedy=suggestion(name, {*_SHORT_NAMES, *_SHORT_NAMES.values(), *points}, "environments")
        + " Or write pkg.mod:Class.",
    )


def load(name: str, *, sandboxes: SandboxPool | None = None, **options: Any) -> EnvFactory:
    """The factory of a run's environments. `sandboxes` is the run's pool, which the run closes.

    Raises `ConfigError` for whatever is wrong with the class, its tools, its taskset or the options.
    """
    spec = resolve(name)
    arguments = {**spec.kwargs, **options}
    rubric = arguments.pop("rubric", None)
    env_class = _class_of(spec)
    try:
        return EnvFactory(env_class, arguments, rubric=rubric, sandboxes=sandboxes)
    except RzError:
        raise
    except Exception as error:
        raise ConfigError(
            source=f"environment {env_class.__name__}",
            key="env.id",
            value=name,
            why=f"cannot be made ({located(error)})",
            remedy="Mend that class.",
        ) from error


def make(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """`gymnasium.make` by any of the names."""
    env: gymnasium.Env[Any, Any] = gymnasium.make(resolve(name).id, **kwargs)
    return env


def _registered(name: str) -> EnvSpec | None:
    return gymnasium.registry.get(_SHORT_NAMES.get(name, name))


def _class_of(spec: EnvSpec) -> type[AgentEnv]:
    entry_point: str | Callable[..., Any] | None = spec.entry_point
    found = _attribute(entry_point, spec.id) if isinstance(entry_point, str) else entry_point
    if not (isinstance(found, type) and issubclass(found, AgentEnv)):
        raise ConfigError(
            source=f"environment {spec.id}",
            key="env.id",
            value=entry_point,
            why="is no environment.",
            remedy="It must be a subclass of rz_agent.AgentEnv.",
        )
    return found


def _attribute(path: str, name: str) -> Any:
    module, _, attribute = path.partition(":")
    found = _module(module, path, name)
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise ConfigError(
            source=f"environment {name}",
            key="env.id",
            value=path,
            why=f"has no {attribute} in {getattr(found, '__file__', module)}.",
            remedy=suggestion(attribute, _classes_in(found), "environments in it"),
        ) from error


def _module(module: str, path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            source=f"environment {name}",
            key="env.id",
            value=path,
            why=f"cannot be imported ({located(error)})",
            remedy="Mend that line."
            if users_place(error)
            else "Write pkg.mod:Class of an importable module (the folder must be on the path).",
        ) from error


def _classes_in(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, AgentEnv) and value.__module__ == module.__name__
    ]


def _from_path(path: str) -> EnvSpec | None:
    """`pkg.mod:Class` registers itself; `pkg.mod:id`, Gymnasium's own form, is registered by the import."""
    module, _, attribute = path.partition(":")
    if "/" in attribute:
        _module(module, path, path)
        return _registered(attribute)
    found = _attribute(path, path)
    id = f"{module.replace('.', '_')}/{attribute}-v0"
    spec = EnvSpec(id, entry_point=found)
    _class_of(spec)
    return _registered(id) or register(id, entry_point=path)


def _plug_in(point: EntryPoint) -> EnvSpec | None:
    """Import what an entry point offers; a class is registered under `rz_plugin/<name>-v0`."""
    try:
        loaded = point.load()
    except Exception as error:
        raise ConfigError(
            source=f"entry point {point.name} of {point.dist.name if point.dist else 'an unknown package'}",
            key=GROUP,
            value=point.value,
            why=f"cannot be imported ({located(error)})",
            remedy="Repair or uninstall that package.",
        ) from error
    if not isinstance(loaded, type):
        return _registered(point.name)
    id = f"rz_plugin/{point.name}-v0"
    return _registered(id) or register(id, entry_point=point.value, short_name=point.name)
