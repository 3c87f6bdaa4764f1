"""Recipes: what is accepted is run as written, what is refused is refused in words that help."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from rz_agent.errors import ConfigError
from rz_agent.recipes import preflight, recipe_file
from rz_agent.recipes.recipe import Recipe, parse, warnings


def refusal(*overrides: str, name: str = "python") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        recipe_file.load(name, overrides)
    return caught.value


@pytest.mark.parametrize("name", recipe_file.shipped())
def test_a_shipped_recipe_loads_without_a_warning_and_is_named_after_its_file(name: str) -> None:
    recipe = recipe_file.load(name)
    assert recipe.name == name
    assert warnings(recipe) == []


@pytest.mark.parametrize("name", recipe_file.shipped())
def test_the_resolved_toml_gives_the_same_recipe(name: str) -> None:
    recipe = recipe_file.load(name)
    assert parse(tomllib.loads(recipe.toml()), "again") == recipe


@given(
    max_lag=st.integers(0, 64),
    lr=st.floats(1e-8, 1e-2),
    share=st.floats(0, 1),
    clip=st.none() | st.floats(0.01, 10),
    options=st.dictionaries(st.text("abc_", min_size=1), st.integers() | st.booleans() | st.text(max_size=5)),
)
def test_any_recipe_survives_being_written_and_read(
    max_lag: int, lr: float, share: float, clip: float | None, options: dict[str, Any]
) -> None:
    learner = {"lr": lr} | ({} if clip is None else {"clip_grad": clip})
    tables = {
        "lag": {"max_lag": max_lag},
        "learner": learner,
        "audit": {"share": share},
        "env": {"id": "x", "options": options},
    }
    recipe = parse(tables, "made")
    assert parse(tomllib.loads(recipe.toml()), "again") == recipe


def test_the_quickstart_is_the_run_that_the_readme_promises() -> None:
    recipe = recipe_file.for_environment("python")
    assert (recipe.lag.max_lag, recipe.model.path, recipe.audit.share) == (8, "tiny", 1.0)
    assert (recipe.groups_per_batch, recipe.rollout.group_size) == (12, 8)


def test_an_environment_without_a_recipe_of_its_own_gets_the_default_one() -> None:
    recipe = recipe_file.for_environment("me/Guess-v0")
    assert recipe.env.id == "me/Guess-v0"
    assert recipe.name == "me-Guess-v0"
    assert recipe.learner == recipe_file.load("default").learner


def test_an_override_is_typed_as_toml_and_a_bare_word_is_a_string() -> None:
    recipe = recipe_file.load(
        "python",
        [
            "lag.max_lag=3",
            "learner.lr=1e-5",
            "rollout.seeded=false",
            "model.path=models/mine",
            "env.options={n = 2}",
        ],
    )
    assert recipe.lag.max_lag == 3
    assert recipe.learner.lr == 1e-5
    assert recipe.rollout.seeded is False
    assert recipe.model.path == "models/mine"
    assert recipe.env.options == {"n": 2}


@pytest.mark.parametrize("override", ["lag.max_lag", "=3", "a b=3", "lag..max_lag=3", "seed.x=1", "name=[1,"])
def test_an_override_that_cannot_be_read_is_refused(override: str) -> None:
    assert refusal(override).source == "--set"


@pytest.mark.parametrize("override", ["updates", "updates:3", "updates 3"])
def test_an_override_without_an_equals_sign_is_shown_one_with_it(override: str) -> None:
    error = refusal(override)
    assert "is not KEY=VALUE" in str(error)
    assert "--set updates=3" in error.remedy


def test_a_misspelt_key_is_refused_with_the_one_that_was_meant() -> None:
    error = refusal("lag.max_lagg=3")
    assert (error.key, error.value) == ("lag.max_lagg", 3)
    assert "Did you mean lag.max_lag?" in error.remedy


def test_a_key_in_the_wrong_table_is_refused_with_the_right_one() -> None:
    assert "Did you mean lag.max_lag?" in refusal("max_lag=3").remedy
    assert "Did you mean learner.lr?" in refusal("lag.lr=3").remedy


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("lag.max_lag=65", "lag.max_lag", "0 (synchronous) to 64"),
        ("lag.max_lag=-1", "lag.max_lag", "0 (synchronous) to 64"),
        ('lag.max_lag="8"', "lag.max_lag", "is not a whole number"),
        ("lag.max_lag=8.5", "lag.max_lag", "is not a whole number"),
        ("audit.share=1.5", "audit.share", "0 to 1"),
        ("rollout.group_size=1", "rollout.group_size", "at least 2"),
        ("rollout.temperature=0", "rollout.temperature", "at least 0.01 and at most 100."),
        ("rollout.temperature=1e-30", "rollout.temperature", "at least 0.01 and at most 100."),
        ("rollout.temperature=1e30", "rollout.temperature", "at least 0.01 and at most 100."),
        ("eval.temperature=0.001", "eval.temperature", "at least 0.01 and at most 100."),
        ("rollout.top_p=0.9", "rollout.top_p", "no probability under the sampler"),
        ("rollout.top_k=40", "rollout.top_k", "no probability under the sampler"),
        ("rollout.top_k=1", "rollout.top_k", "every advantage is 0"),
        ("kernels=fast", "kernels", "aligned"),
        ("learner.lr=0", "learner.lr", "Allowed: above 0 and at most 10."),
        ("learner.lr=-1e-4", "learner.lr", "Allowed: above 0 and at most 10."),
        ("learner.lr=1e39", "learner.lr", "Allowed: above 0 and at most 10."),
        ('learner.lr="3e-4"', "learner.lr", "is not a number"),
        ("learner.threads=true", "learner.threads", "is not a whole number"),
        ("learner.importance_sampling=1", "learner.importance_sampling", "is not true or false"),
        ("learner.clip_grad=-1.0", "learner.clip_grad", "left out: no clipping. Allowed: above 0"),
        ("learner.betas=[2.0, -1.0]", "learner.betas.0", "each at least 0 and below 1"),
        ("learner.betas=[0.9, 1.0]", "learner.betas.1", "each at least 0 and below 1"),
        ("learner.betas=[0.9, nan]", "learner.betas.1", "is not a finite number"),
        ("learner.betas=[0.9]", "learner.betas.1", "each at least 0 and below 1"),
        ("learner.betas=0.9", "learner.betas", "is not an [array]"),
        ("rollout.top_p=2.0", "rollout.top_p", "Allowed: above 0 and at most 1."),
        ("updates=0", "updates", "updates of the learner. Allowed: at least 1 and at most 1000000000."),
        (f"updates={10**20}", "updates", "Allowed: at least 1 and at most 1000000000."),
        (f"rollout.group_size={10**20}", "rollout.group_size", "Allowed: at least 2 and at most 1000000000."),
        ("learner.dtype=bfloat16", "learner.dtype", "Set model.dtype instead"),
        ("name=a/b", "name", "letters, digits"),
        ("lag=3", "lag", "is not a [table]"),
        ("sandbox.limits.memory_mb=99999", "sandbox", "total.memory_mb"),
        ("tracking.wandb={}", "tracking.wandb.project", "the project to log to"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_its_key_and_what_to_write(
    override: str, key: str, says: str
) -> None:
    error = refusal(override)
    assert error.key == key
    assert says in str(error)


def numbers(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Keys of a recipe that take a number."""
    for name, field in model.model_fields.items():
        table = next((a for a in (field.annotation, *get_args(field.annotation)) if is_table(a)), None)
        if table is not None:
            yield from numbers(table, f"{prefix}{name}.")
        elif {int, float} & {field.annotation, *get_args(field.annotation)}:
            yield f"{prefix}{name}"


def is_table(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


@pytest.mark.parametrize("key", sorted(numbers(Recipe)))
@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_no_key_takes_a_number_that_is_not_finite(key: str, number: str) -> None:
    error = refusal(f"{key}={number}")
    assert error.key == key
    assert error.remedy


def test_a_pair_of_decay_rates_is_written_as_an_array() -> None:
    recipe = recipe_file.load("python", ["learner.betas=[0.8, 0]"])
    assert recipe.learner.betas == (0.8, 0.0)
    assert parse(tomllib.loads(recipe.toml()), "again") == recipe


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["lag.schedule=constant", "lag.max_lag=0"], "lag.schedule"),
        (["rollout.max_tokens=256", "rollout.context_len=256"], "rollout.max_tokens"),
        (["rollout.step_deadline_s=400", "rollout.episode_deadline_s=300"], "rollout.step_deadline_s"),
        (["sandbox.limits.timeout_s=90"], "sandbox.limits.timeout_s"),
        (["rollout.engine.max_num_seqs=4096"], "rollout.engine.max_num_batched_tokens"),
        (["ray.address=auto"], "ray.address"),
        (["rollout.engine.replicas=2"], "rollout.engine.replicas"),
        (["learner.schedule=cosine"], "learner.decay_updates"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_the_reason(overrides: list[str], key: str) -> None:
    error = refusal(*overrides)
    assert error.key == key
    assert error.why
    assert error.remedy
    assert error.source == "recipe python with --set"


OWN = {"swebench-pro": 180 + 2 * 120 + 600 + 2 * 300, "osworld": 301 + 60 + 900 + 2 * 60}


@pytest.mark.parametrize(("name", "longest"), list(OWN.items()))
def test_a_step_has_longer_than_the_environments_own_deadlines(name: str, longest: int) -> None:
    preflight.check(recipe_file.load(name, [f"rollout.step_deadline_s={longest + 1}"]))
    with pytest.raises(ConfigError, match=rf"(?s)= {longest}.*Use more than {longest}") as e:
        preflight.check(recipe_file.load(name, [f"rollout.step_deadline_s={longest}"]))
    assert e.value.key == "rollout.step_deadline_s"


def test_an_error_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("updates = 0\n")
    assert str(refusal(name=str(file))).startswith(f"{file}: updates = 0 is refused")
    file.write_text("updates = \n")
    assert refusal(name=str(file)).source == str(file)


def test_a_recipe_that_does_not_exist_is_refused_with_the_shipped_names() -> None:
    assert "Did you mean python?" in refusal(name="pyton").remedy


def test_the_sandbox_file_replaces_the_recipes_table(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.toml"
    for text in ("[sandbox]\nshared = 3\n", "shared = 3\n"):
        file.write_text(text)
        assert recipe_file.load("python", sandbox=file).sandbox.shared == 3


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["lag.max_lag=64"], "the rate must fall as the lag grows"),
        (
            ["lag.max_lag=64", "lag.schedule=constant", "updates=60", "learner.lr=1e-4"],
            "never reaches a lag of 64",
        ),
        (["lag.max_lag=0", "rollout.episodes_in_flight=1000"], "is never reached"),
        (["kernels=standard"], "the audit will stop the run"),
    ],
)
def test_what_is_known_to_go_wrong_is_warned_about(overrides: list[str], says: str) -> None:
    (warning,) = warnings(recipe_file.load("python", overrides))
    assert says in warning


def test_a_lower_rate_at_lag_64_and_an_audit_that_warns_are_no_cause_for_warning() -> None:
    assert warnings(recipe_file.load("python", ["lag.max_lag=64", "learner.lr=1e-4"])) == []
    assert warnings(recipe_file.load("python", ["kernels=standard", "audit.on_mismatch=warn"])) == []


def test_a_recipe_cannot_be_changed() -> None:
    recipe = Recipe()
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 1  # type: ignore[misc]


def test_what_both_sides_share_is_said_once() -> None:
    recipe = recipe_file.load(
        "python", ["model.dtype=bfloat16", "kernels=standard", "audit.share=0", "seed=7"]
    )
    learner = recipe.learner_config()
    assert (learner.dtype, learner.kernels, learner.seed) == ("bfloat16", "standard", 7)
