"""Each family of models against transformers, in float32, through the real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.models.registry import ARCHITECTURES, OTHER_NAMES
from tests.docs.models import PAGE, rendered
from tests.engine_core.small_encoders import CLASSIFIERS, ENCODERS
from tests.engine_core.small_models import (
    FAMILIES,
    SmallEngine,
    architecture_of,
    check_scores,
    convert,
    greedy,
    random_checkpoint,
)
from tests.engine_core.small_rerankers import DECODING_CLASSIFIERS
from tests.long_values import long_but

PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 2, 17, 64, 300)]

SAME_AS_LLAMA = {"InternLM3ForCausalLM"}
"""Architectures of which transformers makes Llama's model."""
A_FAMILY_OF_EACH_MECHANISM = (
    *("llama3 with scaled rope", "smollm2", "qwen2", "qwen3", "gemma3"),
    *("qwen3-moe", "glm4-moe", "qwen3.5", "lfm2", "nemotron3"),
    *("gemma4 whose keys are values", "deepseek-v2", "minicpm3", "deepseek-v3.2"),
)
"""Scaled positions, a head that is the embedding, biases, norms of queries and keys, windows,
experts, experts that are chosen by groups beside shared ones, states, short convolutions,
layers of one mixer each with experts without gates, layers of several shapes, latents, latents of
halves that rotate, and latents that are chosen."""


def test_every_architecture_has_a_family_and_is_documented() -> None:
    names = {architecture_of(make()) for make in FAMILIES.values()}
    tested = {OTHER_NAMES.get(name, name) for name in names} | SAME_AS_LLAMA
    small = (*ENCODERS.values(), *CLASSIFIERS.values(), *DECODING_CLASSIFIERS.values())
    tested |= {make().architectures[0] for make in small}
    assert tested == ARCHITECTURES.keys(), (
        "add a small config to FAMILIES of tests/engine_core/small_models.py"
    )
    text = PAGE.read_text()
    assert rendered(text) == text, "run `python -m tests.docs.models`"


@pytest.mark.parametrize("family", long_but(FAMILIES, *A_FAMILY_OF_EACH_MECHANISM))
def test_greedy_tokens_and_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_checkpoint(family, tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    answers = engine.answer(PROMPTS, greedy(12, num_logprobs=3, num_prompt_logprobs=0))
    engine.close()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check_scores(model, prompt, answer, 12)


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    random_checkpoint("qwen2", tmp_path / "one")
    random_checkpoint("qwen2", tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one = convert(tmp_path / "one", tmp_path / "a")
    many = convert(tmp_path / "many", tmp_path / "b")
    assert (one / "weights.safetensors").read_bytes() == (many / "weights.safetensors").read_bytes()
