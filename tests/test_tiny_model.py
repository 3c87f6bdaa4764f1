"""The tiny model: reproducible, readable by everybody, trained on what rollouts produce."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rz_agent.envs.python_math.tasks import ArithmeticTaskset
from rz_agent.errors import ConfigError, Interrupted
from rz_agent.recipes.model_source import model_folder
from rz_agent.recipes.models import tiny
from rz_agent.recipes.models.qwen3_torch import Qwen3, Qwen3Shape
from rz_agent.recipes.models.sampled_reward import called_code, sampled_reward
from rz_agent.recipes.models.sft import WarmStart, encode_trace, warm_start
from rz_agent.recipes.models.tiny import TinyReport, build_tiny, ensure_tiny
from rz_agent.recipes.models.tokenizer import CONTROL, END_ID, WRITTEN, build_tokenizer
from rz_agent.recipes.models.traces import KINDS, Problem, Teacher, draw_problem, run_code, teach
from rz_agent.recipes.sections import ModelSection
from rz_agent.rollout.conversation import Conversation
from rz_agent.rollout.renderer import Renderer
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SURE = Teacher(guess=0, wrong=0, slip=0, broken=0)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return Renderer(folder)


@pytest.fixture(scope="module")
def barely_trained(tmp_path_factory: pytest.TempPathFactory) -> TinyReport:
    out = tmp_path_factory.mktemp("tiny") / "model"
    return build_tiny(out, steps=40, batch=8, threads=1, episodes=8)


# --- traces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "operands", "question", "answer"),
    [
        ("times", (12, 34), "What is 12 times 34?", "408"),
        ("plus", (12, 34), "What is 12 plus 34?", "46"),
        ("minus", (12, 34), "What is 12 minus 34?", "-22"),
        ("rem", (345, 67), "What is the remainder of 345 by 67?", "10"),
        ("digits", (1234,), "What is the digit sum of 1234?", "10"),
        ("max", (12, 99, 34), "What is the largest of 12, 99, 34?", "99"),
    ],
)
def test_the_six_kinds_of_problem(kind: str, operands: tuple[int, ...], question: str, answer: str) -> None:
    problem = Problem(kind=kind, operands=operands)
    assert problem.question == question
    assert problem.answer == answer
    assert run_code(KINDS[kind].wrong_code.format(*operands)) != answer


def test_the_problems_are_those_of_the_python_environment() -> None:
    tasks = ArithmeticTaskset(difficulty=1).order(seed=0)
    for position in range(60):
        task = tasks[position]
        _, kind, operands = task.id.split(":")
        problem = Problem(kind=kind, operands=tuple(map(int, operands.split(","))))
        assert problem.question == task.prompt[0]["content"]
        assert problem.answer == task.answer


def test_a_faultless_teacher_is_always_right() -> None:
    rng = Random(0)
    for _ in range(200):
        problem = draw_problem(rng)
        last = teach(problem, rng, SURE).steps[-1]
        assert last.said == f"\\boxed{{{problem.answer}}}"


def test_the_noisy_teacher_is_right_a_fifth_of_the_time() -> None:
    rng = Random(0)
    problems = [draw_problem(rng) for _ in range(4000)]
    right = sum(teach(p, rng).steps[-1].said == f"\\boxed{{{p.answer}}}" for p in problems)
    assert 0.19 < right / 4000 < 0.25


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(7//2)", "3"),
        ("print(-7%3)", "2"),
        ("print(min(5,3))", "3"),
        ("print(len(str(123)))", "3"),
        ("print(7*", "SyntaxError"),
        ("print(7%0)", "ZeroDivisionError"),
        ("import os", "SyntaxError"),
        ("print(2**99)", "Error"),
        ("print(str(5)*99999999)", "Error"),
        ("print(open('x'))", "Error"),
        ("exit()", "Error"),
    ],
)
def test_the_tool_of_the_traces_computes_and_nothing_else(code: str, output: str) -> None:
    assert run_code(code) == output


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60))
def test_any_text_may_be_given_to_the_tool(code: str) -> None:
    assert len(run_code(f"print({code})")) <= 24


# --- tokens ----------------------------------------------------------------------------------------------


def test_an_encoded_trace_is_the_whole_conversation_encoded_at_once(renderer: Renderer) -> None:
    """So prompt, turn and observation, which a rollout encodes one by one, join without a seam."""
    reference = AutoTokenizer.from_pretrained(renderer.folder)
    rng = Random(1)
    for _ in range(200):
        trace = teach(draw_problem(rng), rng)
        messages = [{"role": "user", "content": trace.question}]
        for step in trace.steps:
            messages.append({"role": "assistant", "content": step.said})
            if step.heard is not None:
                messages.append({"role": "tool", "content": step.heard})
        text = reference.apply_chat_template(messages, tokenize=False).removesuffix("\n")
        assert encode_trace(renderer, trace).ids == reference(text, add_special_tokens=False)["input_ids"]


def test_what_is_learned_is_what_the_policy_says(renderer: Renderer) -> None:
    trace = teach(Problem(kind="rem", operands=(345, 67)), Random(0), SURE)
    example = encode_trace(renderer, trace)
    learned = [token for token, mine in zip(example.ids, example.learned, strict=True) if mine]
    expected = "".join(f"{step.said}<|im_end|>" for step in trace.steps)
    assert learned == renderer.encode(expected).tolist()


def test_a_rollout_that_says_what_the_trace_says_has_its_ids(renderer: Renderer) -> None:
    trace = teach(Problem(kind="max", operands=(12, 99, 34)), Random(0), SURE)
    talk = Conversation(renderer, [{"role": "user", "content": trace.question}])
    ids = talk.prompt.tolist()
    for step in trace.steps:
        sampled = [*renderer.encode(step.said).tolist(), END_ID]
        ids += sampled
        code = called_code(talk.act(sampled))
        if code is not None:
            ids += talk.observe([{"role": "tool", "content": run_code(code)}]).token_ids.tolist()
    assert ids == encode_trace(renderer, trace).ids


def test_merges_cross_no_header_marker_or_generation_boundary(renderer: Renderer) -> None:
    rng = Random(2)
    for _ in range(100):
        question = draw_problem(rng).question
        apart = [*renderer.encode("user\n"), *renderer.encode(question)]
        assert renderer.encode("user\n" + question).tolist() == apart
    assert len(renderer.encode("assistant\n")) == 1


def test_an_episode_is_some_forty_tokens(renderer: Renderer) -> None:
    trace = teach(Problem(kind="rem", operands=(345, 67)), Random(0), SURE)
    assert len(encode_trace(renderer, trace).ids) < 70


def test_markers_are_control_tokens_or_written_by_the_policy_as_in_qwen3(renderer: Renderer) -> None:
    reference = AutoTokenizer.from_pretrained(renderer.folder)
    for control, spellings in ((True, CONTROL), (False, WRITTEN)):
        for spelling in spellings:
            token = renderer.special.tokens[spelling]
            assert token.control is control
            assert reference.convert_tokens_to_ids(spelling) == token.id


# --- model -----------------------------------------------------------------------------------------------


def test_transformers_gives_the_same_logits_bit_for_bit(barely_trained: TinyReport) -> None:
    model = Qwen3(Qwen3Shape())
    model.load_state_dict(load_file(barely_trained.path / "model.safetensors"))
    reference = AutoModelForCausalLM.from_pretrained(barely_trained.path, dtype=torch.float32)
    ids = torch.randint(7, 384, (4, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids), reference(ids).logits)


def test_stepping_through_a_sequence_gives_the_logits_of_the_whole() -> None:
    model, ids = Qwen3(Qwen3Shape(layers=2), seed=1), torch.arange(24).view(2, 12)
    cache = model.new_cache(2, 12)
    steps = torch.stack([model.step(ids[:, t], t, cache) for t in range(12)], 1)
    with torch.no_grad():
        torch.testing.assert_close(steps, model(ids), atol=2e-5, rtol=1e-4)


def test_the_folder_is_a_hugging_face_model(barely_trained: TinyReport) -> None:
    config = AutoConfig.from_pretrained(barely_trained.path)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.max_position_embeddings >= 1024
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(barely_trained.path)) == 384
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.eos_token_id == END_ID
    assert Renderer(barely_trained.path).stop_token_ids == (END_ID,)
    tensors = load_file(barely_trained.path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert "lm_head.weight" not in tensors


def test_the_same_seed_gives_the_same_bits(barely_trained: TinyReport, tmp_path: Path) -> None:
    again = build_tiny(tmp_path / "model", steps=40, batch=8, threads=1, episodes=8)
    assert again.sha256 == barely_trained.sha256
    assert again.sampled_reward == barely_trained.sampled_reward


def test_another_seed_gives_another_model(barely_trained: TinyReport, tmp_path: Path) -> None:
    other = build_tiny(tmp_path / "model", seed=1, steps=1, batch=2, threads=1, episodes=0)
    assert other.sha256["tokenizer.json"] != barely_trained.sha256["tokenizer.json"]


def test_the_warm_start_learns(renderer: Renderer) -> None:
    losses = warm_start(Qwen3(Qwen3Shape()), renderer, WarmStart(steps=20, batch=8, threads=1), seed=0)
    assert losses[0] > 4
    assert losses[-1] < losses[0] - 1


def test_building_leaves_torch_and_random_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    threads, state, mine = torch.get_num_threads(), torch.get_rng_state(), random.getstate()
    build_tiny(tmp_path / "model", steps=1, batch=2, threads=threads + 1, episodes=2)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == mine


def test_progress_is_told_after_every_step(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_tiny(
        tmp_path / "model",
        steps=3,
        batch=2,
        threads=1,
        episodes=0,
        progress=lambda done, steps, loss: seen.append((done, steps)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        build_tiny(tmp_path, steps=1)


def test_a_cached_model_is_built_once_a_seed(tmp_path: Path) -> None:
    first = ensure_tiny(tmp_path, seed=3, steps=1, threads=1)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert ensure_tiny(tmp_path, seed=3, steps=1, threads=1) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert ensure_tiny(tmp_path, seed=4, steps=1, threads=1) != first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_build_says_how_far_it_is_and_a_cached_model_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "ensure_tiny", partial(ensure_tiny, steps=2, threads=1))
    section, said = ModelSection(cache=str(tmp_path)), list[str]()
    folder = model_folder(section, said.append)
    assert said == ["the tiny model: 1 of 2 steps (built once, then cached)"]
    assert model_folder(section, said.append, lambda: True) == folder
    assert len(said) == 1


def test_a_build_that_is_stopped_ends_after_its_step_and_leaves_nothing(tmp_path: Path) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 2

    with pytest.raises(Interrupted, match="was stopped after 2 of 800 steps") as stopped:
        model_folder(ModelSection(cache=str(tmp_path)), stop=stop)
    assert stopped.value.exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_sampled_reward_counts_right_answers(renderer: Renderer) -> None:
    """An untrained policy answers nothing; the count follows from the seed."""
    model = Qwen3(Qwen3Shape())
    assert sampled_reward(model, renderer, episodes=4, seed=0, max_tokens=40) == 0.0


@pytest.mark.slow
@pytest.mark.long
def test_the_warm_policy_is_right_a_fifth_of_the_time(tmp_path: Path) -> None:
    report = build_tiny(tmp_path / "model", seed=0, threads=1)  # two would fight with the test beside it
    assert report.sampled_reward is not None
    assert 0.12 <= report.sampled_reward <= 0.30
