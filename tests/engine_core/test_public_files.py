"""Checkpoints that public tools wrote (`make_public_files.py`): perplexities of a text, against
those that transformers computed of the same files, and against a plain reading of the files in
float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights import model_file
from tests.engine_core.plain_reading import plain_model
from tests.engine_core.small_models import SmallEngine, convert, greedy
from tests.long_values import long_but

FILES = Path(__file__).parent / "public_files"
EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
NAMES = sorted(EXPECTED["files"])
METHODS = {
    "llmcompressor": "compressed-tensors",
    "auto-round-gptq": "gptq",
    "auto-round-awq": "awq",
    "gptqmodel": "gptq",
}
KINDS = {
    "llmcompressor-w4a16-gptq": {"int4"},
    "llmcompressor-w8a8-smoothquant": {"w8a8"},
    "llmcompressor-w8a16": {"int8"},
    "llmcompressor-mixed": {"int8", "int4"},
    "auto-round-gptq-8": {"int8"},
    "llmcompressor-fp8-block": {"f8a8", "fp8"},
    "llmcompressor-fp8-dynamic": {"f8a8"},
    "llmcompressor-fp8-static-kv": {"f8a8"},
}
"""Kinds of each file's layers: fp8 where a name says so, else four bits. In the file in blocks,
`down` stays `fp8`: its 192 inputs make no whole blocks of 128."""
IN_CI = (
    "auto-round-awq",
    "auto-round-gptq-8",
    "gptqmodel",
    "llmcompressor-fp8-dynamic",
    "llmcompressor-mixed",
    "llmcompressor-w8a8-smoothquant",
)
"""A file of each kind of layers and of each method."""
MOST = 0.003
"""By which a perplexity may differ from an oracle's."""
ROUNDED_BY_OTHERS = {"llmcompressor-fp8-static-kv": 0.005}
"""The same, of files of which transformers rounds activations and the key-value cache to fp8, and
Headwater neither."""


def served(name: str, folder: Path, **options: Any) -> list[float]:
    """Log probabilities of the text's characters."""
    engine = SmallEngine(convert(FILES / name, folder), **options)
    ids = [ord(char) for char in EXPECTED["text"]]
    answer = engine.answer([ids], greedy(1, num_prompt_logprobs=0))[0]
    engine.close()
    return [entry.logprob for entry in answer.prompt_logprobs]


def perplexity(log_probs: list[float]) -> float:
    return math.exp(-sum(log_probs) / len(log_probs))


@torch.no_grad()
def read_plainly(name: str) -> list[float]:
    """As `served`, of the file's weights in float64."""
    ids = torch.tensor([[ord(char) for char in EXPECTED["text"]]])
    scores = plain_model(FILES / name)(ids).logits[0, :-1].log_softmax(-1)
    found: list[float] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize("name", long_but(NAMES, *IN_CI))
def test_a_file_has_the_perplexity_that_others_find(name: str, tmp_path: Path) -> None:
    """Of weights alone: transformers rounds activations where a file says so."""
    ours = served(name, tmp_path / "ours", activation_dtype="model")
    plain = read_plainly(name)
    assert np.abs(np.subtract(ours, plain)).max() < 2e-3
    assert perplexity(ours) == pytest.approx(perplexity(plain), rel=1e-4)
    if EXPECTED["files"][name] is not None:
        assert perplexity(ours) == pytest.approx(
            perplexity(EXPECTED["files"][name]), rel=ROUNDED_BY_OTHERS.get(name, MOST)
        )


@pytest.mark.parametrize(
    "name", long_but(NAMES, *(name for name in IN_CI if name != "llmcompressor-mixed"))
)
def test_a_file_is_served_on_a_cpu_with_about_the_same_perplexity(
    name: str, tmp_path: Path
) -> None:
    """With activations in 8 bits where its weights are integers."""
    ours = served(name, tmp_path / "ours")
    assert perplexity(ours) == pytest.approx(perplexity(read_plainly(name)), rel=MOST)


@pytest.mark.parametrize("name", NAMES)
def test_a_files_layers_are_of_the_kind_that_its_tool_made(name: str, tmp_path: Path) -> None:
    folder = convert(FILES / name, tmp_path / "ours")
    config = registry.read_config(folder)
    assert config.quantization is not None
    method = next((each for start, each in METHODS.items() if name.startswith(start)), "auto-round")
    assert config.quantization.method == method
    tensors = model_file.load(folder, torch.device("cpu"), keeps_packed=True)
    linears = load_weights(model_class(config).layout(config), tensors, torch.float32).linears
    kinds = {linear.kind for layer, linear in linears.items() if layer != "lm_head"}
    assert kinds == KINDS.get(name, {"fp8"} if "fp8" in name else {"int4"})
