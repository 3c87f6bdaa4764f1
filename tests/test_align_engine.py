"""`rz-agent align` on the engine's side: a wrong bit of any module of vLLM's model is named.

Runs on a GPU too, where the modules are the aligned kernels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rz_agent.errors import ConfigError
from rz_agent.recipes.align.capture import Capture, Operation, Prefix, compare
from rz_agent.recipes.align.conditions import EngineRun, Plan
from rz_agent.recipes.align.engine_capture import Called, note_calls
from rz_agent.recipes.align.forward_pass import EMBEDDING, FINAL_NORM, LAYER, operations
from rz_agent.recipes.align.threshold import threshold
from rz_agent.rollout import vllm_device
from rz_agent.rollout.engine_config import EngineConfig
from tiny_learner import VOCABULARY, build_model

LAYERS, CONTEXT = 2, 512
NAMES = operations(LAYERS, qk_norm=True)
MODULES = {
    "embedding": EMBEDDING.module,
    **{f"layer 1 {part.name}": f"model.layers.1.{part.module}" for part in LAYER if part.kind != "rotary"},
    # One module of vLLM's that all layers share.
    "layer 0 rotary": "model.layers.0.self_attn.rotary_emb",
    "final_norm": FINAL_NORM.module,
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("align_engine") / "model"
    build_model(folder, layers=LAYERS)
    return Plan.drawn(
        folder, dtype="float32" if vllm_device.device() == "cpu" else "bfloat16", kernels="aligned",
        vocabulary=VOCABULARY, context=CONTEXT, requests=3, new_tokens=3, temperature=1.0, seed=0,
    )  # fmt: skip


def flip(output: Any) -> Any:
    """The output with one bit of its first element turned."""
    first = (output[0] if isinstance(output, tuple) else output).clone()
    first.view(torch.int16).view(-1)[0] ^= 1
    return (first, *output[1:]) if isinstance(output, tuple) else first


def planted(module: str, few: int) -> Callable[[Any], Any]:
    """Makes a worker's module wrong in steps of more than `few` tokens; returns how to mend it."""

    def plant(worker: Any) -> Any:
        def wrong(held: Any, args: Any, output: Any) -> Any:
            rows = len(output[0] if isinstance(output, tuple) else output)
            return flip(output) if rows > few else None

        return (
            worker.model_runner.get_model().get_submodule(module).register_forward_hook(wrong, prepend=True)
        )

    return plant


@pytest.mark.slow
def test_a_module_that_is_wrong_in_a_crowd_alone_is_named(plan: Plan) -> None:
    few = max(map(len, plan.prompts))  # no request by itself is longer

    async def named() -> dict[str, str]:
        found = {}
        async with EngineRun.of(plan, plan.step_tokens) as run:
            alone, _ = await run.sampled(1)
            for name, module in MODULES.items():
                fault = await run.engine.on_worker(planted(module, few))
                crowd, _ = await run.sampled(len(plan.prompts))
                fault.remove()
                results = list(compare(alone, crowd, NAMES))
                first = next(r for r in results if r.differing)
                assert first.differing == 1 or "rotary" in name, name
                found[name] = str(first.operation)
            mended, _ = await run.sampled(len(plan.prompts))
            assert not any(r.differing for r in compare(alone, mended, NAMES))
        return found

    assert asyncio.run(named()) == {name: name for name in MODULES}


class SteppedRun:
    """Stands where an engine would: an operation whose bits change with the number of tokens of a step."""

    def __init__(self, changes_at: int | None) -> None:
        self.changes_at, self.steps = changes_at, 0
        self.calls = {"post_norm": ("fused_add_rms_norm",)}

    async def __aenter__(self) -> SteppedRun:
        return self

    async def __aexit__(self, *unused: object) -> None: ...

    async def prefix(self, ids: list[int]) -> Capture:
        self.steps += 1
        other = self.changes_at is not None and len(ids) >= self.changes_at
        capture = Capture()
        capture.add(OPERATION, Prefix().extend(ids), torch.full((len(ids), 1), float(other)))
        return capture


OPERATION = Operation(0, "post_norm")


@pytest.mark.parametrize(("changes_at", "tokens"), [(3, 6), (7, 7), (256, 256), (509, 509), (None, None)])
def test_the_number_of_tokens_that_changes_an_operation_is_found(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, changes_at: int | None, tokens: int | None
) -> None:
    run, ids, alone = SteppedRun(changes_at), [1, 2, 3, 4, 5, 6], Capture()
    alone.add(OPERATION, Prefix().extend(ids), torch.zeros(len(ids), 1))
    monkeypatch.setattr(EngineRun, "of", lambda *unused: run)
    found = asyncio.run(threshold(plan, OPERATION, alone, ids, VOCABULARY))
    assert found.tokens == tokens
    assert run.steps < 13
    assert "fused_add_rms_norm" in str(found)


def test_the_compiled_operations_of_a_module_are_noted_once() -> None:
    module, seen = torch.nn.Linear(2, 2), list[tuple[str, ...]]()
    note_calls(module, seen.append)
    for _ in range(2):
        module(torch.zeros(1, 2))
    assert seen == [()]  # torch's own operations are not an engine's

    @torch.library.custom_op("rz_noted::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with Called() as called:
        assert twice(torch.ones(1)).item() == 2
    assert called.names == ["twice"]


@pytest.mark.skipif(vllm_device.device() == "cuda", reason="a mode of vLLM on GPUs")
def test_a_mode_of_gpus_is_refused_on_a_cpu(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="batch_invariant"):
        vllm_device.contract_of(EngineConfig(model=plan.model, kernels="batch_invariant"))
