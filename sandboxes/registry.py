"""From the name in a recipe to a provider: built in, installed as a plug-in, or "package.module:Class".

A plug-in declares an entry point in the group `rz_agent.sandbox_providers`. What is loaded is called with
the `SandboxConfig` and returns a `Provider`; nothing is imported before its name is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

from ..errors import ConfigError, RzError
from .config import SandboxConfig
from .provider import Provider

GROUP = "rz_agent.sandbox_providers"
_METHODS = ("create", "live", "kill", "reap", "check", "capabilities", "aclose")
_CALLED = "It is called with a SandboxConfig and returns a Provider: see docs/sandboxes.md, Another provider."
Factory = Callable[[SandboxConfig], Provider]


def _local(config: SandboxConfig) -> Provider:
    from .local.provider import LocalProvider

    return LocalProvider(config.local)


def _docker(config: SandboxConfig) -> Provider:
    from .docker.provider import DockerProvider

    return DockerProvider(config.docker)


def _e2b(config: SandboxConfig) -> Provider:
    from .e2b.provider import E2bProvider

    return E2bProvider(config.e2b)


def _desktop(config: SandboxConfig) -> Provider:
    from .desktop.provider import DesktopProvider

    return DesktopProvider(config.desktop, _find(config.desktop.over, "sandbox")(config))


BUILT_IN: dict[str, Factory] = {"local": _local, "docker": _docker, "e2b": _e2b, "desktop": _desktop}


def provider_names() -> list[str]:
    """Names that a recipe can use on this machine."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def require_provider(name: str, *, source: str) -> None:
    """ConfigError when nothing has this name, or it cannot be imported."""
    _find(name, source)


def make_provider(config: SandboxConfig, *, source: str = "sandbox") -> Provider:
    """The provider that `config.provider` names. ConfigError when there is none, or it is no provider."""
    factory = _find(config.provider, source)
    try:
        provider = factory(config)
    except RzError:
        raise
    except Exception as error:
        raise _not_usable(config.provider, source, f"cannot be made: {_told(error)}", _CALLED) from error
    if missing := [name for name in _METHODS if not callable(getattr(provider, name, None))]:
        why = f"gives a {type(provider).__name__} that has no {', '.join(missing)}."
        raise _not_usable(config.provider, source, why, _CALLED)
    return provider


def _find(name: str, source: str) -> Factory:
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in entry_points(group=GROUP):
        if point.name == name:
            return _loaded(point.load, point.value, name, source)
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _loaded(lambda: getattr(importlib.import_module(module), attribute), name, name, source)
    raise ConfigError(
        source=source,
        key="sandbox.provider",
        value=name,
        remedy=f"Use one of {', '.join(provider_names())}, or write package.module:Class.",
    )


def _loaded(load: Callable[[], Any], target: str, name: str, source: str) -> Factory:
    try:
        factory = load()
    except Exception as error:  # the module's own code runs here
        why = f"cannot be imported from {target}: {_told(error)}"
        remedy = "Mend that module, install what it needs, or name another provider."
        raise _not_usable(name, source, why, remedy) from error
    if not callable(factory):
        raise _not_usable(name, source, f"is a {type(factory).__name__} in {target}.", _CALLED)
    return cast(Factory, factory)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _not_usable(name: str, source: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(source=source, key="sandbox.provider", value=name, why=why, remedy=remedy)
