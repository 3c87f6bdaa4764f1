"""Which request and position each row of an engine's step is: read from vLLM's two model runners.

    CPU engines have the first runner, CUDA engines of ours the second one
    step_of(runner) -> Step       Step.parts(): one for each request, in the order of their rows

Invariant: what is read is as the step found it: a step's rows are known before its forward pass begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One request's rows of a step.

    first, end  its rows
    computed    tokens of it that the engine holds already, in cache or from earlier steps
    """

    request: str
    first: int
    end: int
    computed: int


class Step(Protocol):
    """The step that a runner is about to run."""

    def parts(self) -> list[Part]:
        """Every request of the step."""

    def computed_ids(self, index: int, count: int) -> Sequence[int]:
        """The first `count` token ids of the step's request number `index`."""


def step_of(runner: Any) -> Step:
    """A view of the steps of one runner, for as long as the runner lives."""
    return SecondRunner(runner) if runner.vllm_config.use_v2_model_runner else FirstRunner(runner)


class FirstRunner:
    """vllm.v1.worker.gpu_model_runner, which keeps one batch and changes it from step to step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def parts(self) -> list[Part]:
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np
        return _parts(batch.req_ids[: batch.num_reqs], starts, batch.num_computed_tokens_cpu)

    def computed_ids(self, index: int, count: int) -> Sequence[int]:
        ids: list[int] = self._runner.input_batch.token_ids_cpu[index, :count].tolist()
        return ids


class SecondRunner:
    """vllm.v1.worker.gpu.model_runner, which makes a batch for each step."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._batch = runner, None
        self._prepare = runner.prepare_inputs
        runner.prepare_inputs = self._prepared

    def _prepared(self, *args: Any, **kwargs: Any) -> Any:
        self._batch = self._prepare(*args, **kwargs)
        return self._batch

    def parts(self) -> list[Part]:
        batch: Any = self._batch
        return _parts(batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np)

    def computed_ids(self, index: int, count: int) -> Sequence[int]:
        batch: Any = self._batch
        held = self._runner.req_states.all_token_ids.gpu[int(batch.idx_mapping_np[index])]
        ids: list[int] = held[:count].tolist()
        return ids


def _parts(requests: Sequence[str], starts: Sequence[int], computed: Sequence[int]) -> list[Part]:
    return [
        Part(request=name, first=int(starts[i]), end=int(starts[i + 1]), computed=int(computed[i]))
        for i, name in enumerate(requests)
    ]
