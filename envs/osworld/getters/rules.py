"""What the task itself says is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .registry import GETTERS, Place


@GETTERS.add("rule")
async def rule(place: Place, config: Mapping[str, Any]) -> Any:
    """The rule as it stands in the task."""
    return config["rules"]
