"""What a user may choose about training; everything else follows from the model and the batch.

The table is frozen, refuses unknown keys, takes finite numbers only and does not convert: "3e-4" is not 3e-4.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import ConfigError

MOST = 10**9  # of anything counted; more is a slip of the keyboard
Decay = Annotated[float, Field(ge=0, lt=1)]


class LearnerConfig(BaseModel):
    """The `[learner]` table of a recipe.

    dtype                   of the weights that are trained and served; bfloat16 keeps float32 masters
    tensor_parallel, pipeline_parallel
                            ranks a layer is split over and stages the layers are split into; what is left
                            of the world size is data parallel
    micro_batch_tokens      packed tokens that run through the model at once
    recompute               layers keep their input alone and are computed again in the backward pass: the
                            same bits, more time, and memory for long micro-batches
    lr, min_lr, schedule, warmup_updates, decay_updates
                            the rate rises linearly over the warm-up, then stays ("constant") or falls to
                            `min_lr` at update `decay_updates`; update u uses the rate of step u + 1, so no
                            update has rate 0
    betas, eps, weight_decay
                            AdamW; norms are not decayed
    clip_grad               largest gradient norm, None for no clipping; the norm before is always reported
    importance_sampling     False trains as if the tokens were on policy (a baseline, biased at any lag)
    seed                    of Megatron's generators; nothing here draws from them today
    kernels                 the operations that compute the model
    threads                 of torch in this process; None leaves them alone
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    dtype: Literal["float32", "bfloat16"] = "float32"
    tensor_parallel: int = Field(default=1, ge=1, le=MOST)
    pipeline_parallel: int = Field(default=1, ge=1, le=MOST)
    micro_batch_tokens: int = Field(default=4096, ge=1, le=MOST)
    recompute: bool = False
    lr: float = Field(default=1e-6, gt=0, le=10)
    min_lr: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_updates: int = Field(default=0, ge=0, le=MOST)
    decay_updates: int | None = Field(default=None, ge=1, le=MOST)
    # A TOML array is a list, so the pair alone may be converted.
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95), strict=False, description="AdamW's two decay rates, each at least 0 and below 1"
    )
    eps: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    clip_grad: float | None = Field(
        default=None, gt=0, le=MOST, description="largest gradient norm; left out: no clipping"
    )
    importance_sampling: bool = True
    seed: int = Field(default=0, ge=0, lt=2**31)
    kernels: Literal["aligned", "standard", "reference"] = "aligned"
    threads: int | None = Field(default=None, ge=1, le=1024)

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> Self:
        if self.min_lr > self.lr:
            raise self._refuse("min_lr", self.min_lr, f"is above lr = {self.lr}", "Lower min_lr or raise lr.")
        if self.schedule != "constant" and self.decay_updates is None:
            raise self._refuse(
                "decay_updates", None, f"but schedule = {self.schedule!r}", "Set it to the number of updates."
            )
        if self.decay_updates is not None and self.decay_updates <= self.warmup_updates:
            raise self._refuse(
                "decay_updates",
                self.decay_updates,
                f"ends within the warm-up of {self.warmup_updates}",
                "Raise it.",
            )
        return self

    @staticmethod
    def _refuse(key: str, value: object, why: str, remedy: str) -> ConfigError:
        return ConfigError(source="recipe", key=f"learner.{key}", value=value, why=why, remedy=remedy)
