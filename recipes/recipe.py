"""A recipe: everything that a run is made of, in one frozen object that a TOML file spells out.

    Recipe               the model; its defaults are the schema's, the shipped files are what was tried
    parse(data, source)  from plain tables; every fault is a ConfigError naming file, key, value, remedy
    warnings(recipe)     what can be run but is known to go wrong

Two kinds of faults: a value that is wrong by itself is refused by its field (`sections.py`), a
combination that cannot work is refused here, with the reason. A Recipe that exists can be run as
far as can be told without starting anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import tomli_w
from pydantic import Field, ValidationError, model_validator

from ..errors import ConfigError
from ..learner.learner_config import MOST, LearnerConfig
from ..sandboxes.config import START_S, SandboxConfig
from .recipe_faults import first_fault
from .sections import (
    AuditSection,
    CheckpointSection,
    EnvSection,
    EvalSection,
    LagSection,
    ModelSection,
    RaySection,
    RolloutSection,
    Section,
    TrackingSection,
    WeightsSection,
)

# The rate that trained the tiny model without harm at a lag of 8; at 64 it degraded and 1e-4 did not.
SAFE_LR, SAFE_LAG = 3e-4, 8

# What the learner shares with the engine is said once, at the top of the recipe.
LEARNER_FROM = {"dtype": "model.dtype", "seed": "seed", "kernels": "kernels"}

Fault = tuple[str, object, str, str]  # key, value, why, remedy


class Recipe(Section):
    """Everything that a run is made of.

    >>> Recipe(seed=1).lag.max_lag
    8
    """

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="letters, digits, . _ -")
    seed: int = Field(0, ge=0, lt=2**31, description="seeds the order of tasks and the sampling")
    runtime: Literal["local", "ray"] = Field("local", description='"local" (one machine) or "ray"')
    kernels: Literal["aligned", "standard"] = Field(
        "aligned",
        description='"aligned" (learner and engine equal in every bit) or "standard" (the baseline)',
    )
    updates: int = Field(150, ge=1, le=MOST, description="updates of the learner")
    groups_per_batch: int = Field(16, ge=1, le=MOST, description="groups that one update trains on")
    model: ModelSection = ModelSection()
    env: EnvSection = EnvSection()
    rollout: RolloutSection = RolloutSection()
    lag: LagSection = LagSection()
    learner: LearnerConfig = LearnerConfig()
    audit: AuditSection = AuditSection()
    checkpoint: CheckpointSection = CheckpointSection()
    weights: WeightsSection = WeightsSection()
    sandbox: SandboxConfig = SandboxConfig()
    eval: EvalSection = EvalSection()
    tracking: TrackingSection = TrackingSection()
    ray: RaySection = RaySection()

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        checks = (
            self._learner_fault,
            self._sampling_fault,
            self._length_fault,
            self._time_fault,
            self._runtime_fault,
        )
        for fault in checks:
            if found := fault():
                key, value, why, remedy = found
                raise ConfigError(source="recipe", key=key, value=value, why=why, remedy=remedy)
        return self

    def _sampling_fault(self) -> Fault | None:
        rollout, lag = self.rollout, self.lag
        if rollout.top_p != 1.0:
            return (
                "rollout.top_p",
                rollout.top_p,
                "cannot be trained on: the tokens it cuts off have no "
                "probability under the sampler but some under the learner.",
                "Use 1.",
            )
        if rollout.top_k not in (0, 1):
            return (
                "rollout.top_k",
                rollout.top_k,
                "cannot be trained on: the tokens it cuts off have no "
                "probability under the sampler but some under the learner.",
                "Use 0 (off).",
            )
        if rollout.top_k == 1:
            return (
                "rollout.top_k",
                1,
                "draws the same episode for a whole group: every advantage is 0.",
                "Use 0 (off).",
            )
        if lag.schedule == "constant" and lag.max_lag == 0:
            return (
                "lag.schedule",
                "constant",
                "says nothing at max_lag = 0.",
                'Use "bounded", or a max_lag of at least 1.',
            )
        return None

    def _length_fault(self) -> Fault | None:
        rollout = self.rollout
        if rollout.max_tokens >= rollout.context_len:
            return (
                "rollout.max_tokens",
                rollout.max_tokens,
                f"leaves no room for a prompt in rollout.context_len = {rollout.context_len}.",
                f"Use less than {rollout.context_len}, or a longer context.",
            )
        engine = rollout.engine
        if engine.max_num_batched_tokens < engine.max_num_seqs:
            return (
                "rollout.engine.max_num_batched_tokens",
                engine.max_num_batched_tokens,
                f"is smaller than rollout.engine.max_num_seqs = {engine.max_num_seqs}: a step could not "
                "decode every running request.",
                f"Use at least {engine.max_num_seqs}.",
            )
        return None

    def _time_fault(self) -> Fault | None:
        rollout, sandbox = self.rollout, self.sandbox
        if rollout.step_deadline_s > rollout.episode_deadline_s:
            return (
                "rollout.step_deadline_s",
                rollout.step_deadline_s,
                f"is longer than rollout.episode_deadline_s = {rollout.episode_deadline_s:g}.",
                f"Use at most {rollout.episode_deadline_s:g}.",
            )
        if sandbox.limits.timeout_s > rollout.step_deadline_s:
            return (
                "sandbox.limits.timeout_s",
                sandbox.limits.timeout_s,
                f"is longer than rollout.step_deadline_s = {rollout.step_deadline_s:g}: a slow program would "
                "end the step instead of being told to the policy.",
                f"Use at most {rollout.step_deadline_s:g}, or a longer rollout.step_deadline_s.",
            )
        needed = rollout.episode_deadline_s + sandbox.needed_s
        if sandbox.lifetime_s < needed:
            return (
                "sandbox.lifetime_s",
                sandbox.lifetime_s,
                f"is shorter than rollout.episode_deadline_s + sandbox.scoring_buffer_s + {START_S:g} s to "
                f"start = {needed:g}: a sandbox that is not renewed would end before its episode is scored.",
                f"Use at least {needed:g}, or a shorter rollout.episode_deadline_s.",
            )
        return None

    def _runtime_fault(self) -> Fault | None:
        if self.runtime == "local" and self.ray.address is not None:
            return (
                "ray.address",
                self.ray.address,
                'is used by runtime = "ray" only.',
                'Set runtime = "ray", or leave ray.address out.',
            )
        if self.runtime == "local" and self.rollout.engine.replicas > 1:
            return (
                "rollout.engine.replicas",
                self.rollout.engine.replicas,
                'needs runtime = "ray".',
                'Set runtime = "ray", or use 1.',
            )
        return None

    def _learner_fault(self) -> Fault | None:
        for name, owner in LEARNER_FROM.items():
            if name in self.learner.model_fields_set:
                return (
                    f"learner.{name}",
                    getattr(self.learner, name),
                    f"is set by {owner} for both sides.",
                    f"Set {owner} instead.",
                )
        return None

    def learner_config(self) -> LearnerConfig:
        """The learner's table with what the whole run shares filled in."""
        shared = {"dtype": self.model.dtype, "seed": self.seed, "kernels": self.kernels}
        return self.learner.model_copy(update=shared)

    def toml(self) -> str:
        """The whole recipe as TOML, defaults written out; parsing it gives an equal recipe."""
        tables = self.model_dump(mode="json", exclude_none=True, exclude={"learner": set(LEARNER_FROM)})
        return tomli_w.dumps(tables)


def parse(data: Mapping[str, Any], source: str) -> Recipe:
    """The recipe that these tables describe; raises ConfigError naming `source` and the first fault."""
    try:
        return Recipe.model_validate(dict(data))
    except ValidationError as error:
        raise first_fault(error, Recipe, source) from None
    except ConfigError as error:
        raise ConfigError(
            source=source, key=error.key, value=error.value, why=error.why, remedy=error.remedy
        ) from None


def warnings(recipe: Recipe) -> list[str]:
    """What can be run but is known, or certain, not to do what it says."""
    said, lag, rollout = [], recipe.lag, recipe.rollout
    safe = SAFE_LR * min(1.0, math.sqrt(SAFE_LAG / max(lag.max_lag, 1)))
    if recipe.learner.lr > safe * 1.001:
        said.append(
            f"learner.lr = {recipe.learner.lr:g} is above {safe:.2g}, the highest that was seen to work at "
            f"max_lag = {lag.max_lag} (on the tiny model): the rate must fall as the lag grows."
        )
    if lag.schedule == "constant" and recipe.updates <= lag.max_lag:
        said.append(
            f"updates = {recipe.updates} never reaches a lag of {lag.max_lag}: use more than {lag.max_lag}."
        )
    reachable = (lag.max_lag + 1) * recipe.groups_per_batch * rollout.group_size
    if rollout.episodes_in_flight > reachable:
        said.append(
            f"rollout.episodes_in_flight = {rollout.episodes_in_flight} is never reached: max_lag, "
            f"groups_per_batch and group_size admit {reachable} episodes at most."
        )
    sandbox = recipe.sandbox
    alone = sandbox.provider == "local" and sandbox.local.isolation == "none"
    if alone and rollout.episodes_in_flight > sandbox.max_live:
        said.append(
            'sandbox.local.isolation = "none" gives each episode a sandbox of its own, so '
            f"rollout.episodes_in_flight = {rollout.episodes_in_flight} will wait for each other: "
            f"sandbox.max_live = {sandbox.max_live}."
        )
    if recipe.kernels == "standard" and recipe.audit.share > 0 and recipe.audit.on_mismatch == "stop":
        said.append(
            'kernels = "standard" differs from the engine by design, so the audit will stop the run: '
            'set audit.on_mismatch = "warn" to measure by how much.'
        )
    return said
