"""`rz_agent.evaluate`: a recipe is all that it needs."""

from __future__ import annotations

from typing import Any

import pytest
import rz_agent
from conftest import recipe_of
from rz_agent.errors import ConfigError

Tables = dict[str, Any]


def test_a_recipe_alone_is_evaluated_with_its_own_model_and_number_of_episodes(small: Tables) -> None:
    recipe = recipe_of(small, **{"rollout.engine.mode": "inprocess", "eval.episodes": 3})
    figures = rz_agent.evaluate(recipe)
    assert figures["episodes"] == 3
    assert 0 <= figures["pass@1"] <= 1


@pytest.mark.parametrize(("key", "value"), [("model.path", "/nowhere"), ("eval.split", "nosuch")])
def test_what_cannot_be_evaluated_is_refused_before_an_engine_starts(
    small: Tables, key: str, value: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        rz_agent.evaluate(recipe_of(small, **{key: value}))
    assert (refused.value.key, refused.value.value) == (key, value)
