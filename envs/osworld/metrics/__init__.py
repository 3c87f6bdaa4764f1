"""The functions that judge, by the names that published tasks use (`registry.py`).

What they need is the extra `osworld`.
"""

from importlib import import_module

from ....errors import ConfigError
from .registry import METRICS, Metric, metric_score

__all__ = ["METRICS", "Metric", "metric_score"]

_MODULES = "browser desktop documents images json_values pdf plain settings slide_comparison slides table"
try:
    for _module in _MODULES.split():
        import_module(f".{_module}", __name__)
except ModuleNotFoundError as error:
    raise ConfigError(
        source="environment osworld",
        key="python package",
        value=error.name,
        why="is not installed.",
        remedy='Run pip install "rz-agent[osworld]", or requirements/install.sh cpu --with osworld.',
    ) from error
