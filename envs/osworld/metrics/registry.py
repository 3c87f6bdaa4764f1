"""What a metric is, and who the metrics are.

    @METRICS.add("exact_match")
    def exact_match(result: Any, rules: Mapping[str, Any]) -> float: ...

Called as `metric(result, **options)` or, where the task expects something, `metric(result, expected,
**options)`; returns 0.0 to 1.0. Invariants: it computes from what the getters have fetched and nothing else;
it never runs a file as code; what the agent left unreadable scores 0 (`reading.py`), what the task's author
wrote wrongly is a `ConfigError`. It runs in a process of its own (`judge.py`), so importing the module that
defines it must be what adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from ....errors import ConfigError
from ...options import suggestion
from ..registry import Registry

Metric = Callable[..., float]
METRICS = Registry[Metric]("metric")


def metric_score(module: str, name: str, values: Sequence[Any], options: Mapping[str, Any]) -> float:
    """What a metric gives, wherever it is asked: `module` is the one that adds it."""
    try:
        import_module(module)
    except Exception as error:
        raise ConfigError(
            source="OSWorld metrics",
            key=name,
            value=module,
            why=f"cannot be imported where metrics run ({type(error).__name__}: {error}).",
            remedy="Define the metric in a module that can be imported by itself.",
        ) from error
    return float(METRICS[name](*values, **options))


def chosen(key: str, value: str, known: Iterable[str]) -> str:
    """The value, where it is one of those known; else a `ConfigError` that lists them."""
    names = list(known)
    if value in names:
        return value
    remedy = suggestion(str(value), names, "values")
    raise ConfigError(source="OSWorld task", key=key, value=value, why="is not known.", remedy=remedy)
