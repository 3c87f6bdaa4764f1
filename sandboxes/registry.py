"""From the name in a recipe to a provider: built in, installed as a plug-in, or "package.module:Class".

A plug-in declares an entry point in the group `rz_agent.sandbox_providers`. What is loaded is called with
the `SandboxConfig` and returns a `Provider`; nothing is imported before its name is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from ..errors import ConfigError
from .config import SandboxConfig
from .provider import Provider

GROUP = "rz_agent.sandbox_providers"
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


def make_provider(config: SandboxConfig, *, source: str = "sandbox") -> Provider:
    """The provider that `config.provider` names. ConfigError when there is none."""
    return _find(config.provider, source)(config)


def _find(name: str, source: str) -> Factory:
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in entry_points(group=GROUP):
        if point.name == name:
            return _loaded(point.load, name, source)
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _loaded(lambda: getattr(importlib.import_module(module), attribute), name, source)
    raise ConfigError(
        source=source,
        key="sandbox.provider",
        value=name,
        remedy=f"Use one of {', '.join(provider_names())}, or write package.module:Class.",
    )


def _loaded(load: Callable[[], Any], name: str, source: str) -> Factory:
    try:
        factory: Factory = load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            source=source,
            key="sandbox.provider",
            value=name,
            remedy=f"It cannot be imported: {error}. Write package.module:Class of an installed package.",
        ) from error
    return factory
