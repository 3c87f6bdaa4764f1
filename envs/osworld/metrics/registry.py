"""What a metric is, and who the metrics are.

    @METRICS.add("exact_match")
    def exact_match(result: Any, rules: Mapping[str, Any]) -> float: ...

Called as `metric(result, **options)` or, where the task expects something, `metric(result, expected,
**options)`; returns 0.0 to 1.0. Invariants: it computes from what the getters have fetched and nothing else;
it never runs a file as code; what the agent left unreadable scores 0 (`reading.py`), what the task's author
wrote wrongly is a `ConfigError`. It may take a second: the evaluator calls it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....errors import ConfigError
from ...options import suggestion
from ..registry import Registry

Metric = Callable[..., float]
METRICS = Registry[Metric]("metric")


def chosen(key: str, value: str, known: Iterable[str]) -> str:
    """The value, where it is one of those known; else a `ConfigError` that lists them."""
    names = list(known)
    if value in names:
        return value
    remedy = suggestion(str(value), names, "values")
    raise ConfigError(source="OSWorld task", key=key, value=value, why="is not known.", remedy=remedy)
