"""The tiny model's tokenizer and chat template: a folder that `Renderer` and transformers load.

Byte-level BPE of 384 entries, trained on the traces. Every digit is one token and a line of JSON
is a few, which keeps an episode near forty tokens. Merges never cross a role header, a marker or
the place where the policy begins to speak, so a prompt, a turn and an observation encoded one by
one are the whole encoded at once. Special as in Qwen3: markers that delimit turns are control
tokens, `<tool_call>` and its kin are written by the policy itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .traces import draw_problem, teach

VOCABULARY = 384
TRACES = 4000
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (PAD, START, END)
WRITTEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PAD_ID, END_ID = CONTROL.index(PAD), CONTROL.index(END)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(folder: Path, *, seed: int = 0, context: int = 1024) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

    The same seed gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    description = json.loads(_train(seed).to_str())
    for entry in description["added_tokens"]:
        entry["special"] = entry["content"] in CONTROL
    write_json(folder / "tokenizer.json", description)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": END_ID, "pad_token_id": PAD_ID})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _train(seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*CONTROL, *WRITTEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(Random(seed)), trainer)
    return tokenizer


def _pieces(rng: Random) -> Iterator[str]:
    """The traces in pieces that no merge may join."""
    marker = re.compile("|".join(map(re.escape, WRITTEN)))
    for _ in range(TRACES):
        trace = teach(draw_problem(rng), rng)
        yield from ("user\n", trace.question, "\n", "assistant\n")
        for step in trace.steps:
            yield from (piece for piece in marker.split(step.said) if piece)
            if step.heard is not None:
                yield from ("\n", "user\n", step.heard, "\n", "assistant\n")
