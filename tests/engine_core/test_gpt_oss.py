"""gpt-oss as it is published, in MXFP4, and its windows and sinks. `test_families.py` and
`test_model_suite.py` have its family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from tests.engine_core.mxfp4_checkpoint import write_mxfp4
from tests.engine_core.small_models import (
    SmallEngine,
    check_scores,
    convert,
    greedy,
    random_checkpoint,
)

WINDOW = 40
PROMPTS = [[5, 6, 7], *([i * 7 % 500 + 3 for i in range(n)] for n in (39, 40, 41, 300))]
SCORED = greedy(8, num_logprobs=3, num_prompt_logprobs=3)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the same one as transformers expands it."""
    base = tmp_path_factory.mktemp("gpt-oss")
    random_checkpoint("gpt-oss", base / "source")
    write_mxfp4(base / "source", base / "packed", base / "expanded")
    return base / "packed", base / "expanded"


def answers(folder: Path, **options: Any) -> list[tuple[list[int], list[Any]]]:
    """Tokens, and log probabilities of prompts and tokens."""
    engine = SmallEngine(folder, **options)
    found = engine.answer(PROMPTS, SCORED)
    engine.close()
    return [(each.token_ids, each.logprobs + each.prompt_logprobs) for each in found]


def test_a_checkpoint_in_mxfp4_answers_as_transformers_with_what_it_expands(
    published: tuple[Path, Path], tmp_path: Path
) -> None:
    packed, expanded = published
    model = transformers.AutoModelForCausalLM.from_pretrained(expanded, dtype=torch.float32).eval()
    engine = SmallEngine(convert(packed, tmp_path / "ours"))
    found = engine.answer(PROMPTS, greedy(12, num_logprobs=3, num_prompt_logprobs=0))
    engine.close()
    for prompt, answer in zip(PROMPTS, found, strict=True):
        check_scores(model, prompt, answer, 12)


def test_experts_stay_packed_from_the_checkpoint_to_the_model(
    published: tuple[Path, Path], tmp_path: Path
) -> None:
    packed, expanded = (convert(each, tmp_path / each.name) for each in published)
    config = registry.read_config(packed)
    layout = model_class(config).layout(config)
    weights = {
        each: load_weights(layout, model_file.load(each, torch.device("cpu"), **how), torch.float32)
        for each, how in ((packed, {"keeps_packed": True}), (expanded, {}))
    }
    for name, stack in weights[packed].experts.items():
        assert stack.kind == "mxfp4"
        dense = weights[expanded].experts[name]
        assert dense.kind == "dense"
        assert torch.equal(stack.linear.expanded(), dense.linear.weight)
    sizes = [(each / "weights.safetensors").stat().st_size for each in (packed, expanded)]
    assert sizes[0] < 0.6 * sizes[1]
    # What multiplies matrices has the same bits from either.
    assert answers(packed, activation_dtype="model") == answers(expanded)


def test_packed_experts_answer_alone_as_together_to_the_bit(
    published: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = convert(published[0], tmp_path / "ours")
    together = answers(folder)
    assert answers(folder, max_num_batched_tokens=65) == together
    engine = SmallEngine(folder)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        [alone] = engine.answer([prompt], SCORED)
        assert (alone.token_ids, alone.logprobs + alone.prompt_logprobs) == expected
    engine.close()


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("swiglu_limit", 5.0, "swiglu_limit is 5.0; allowed: 7.0"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; allowed: silu"),
        ("num_experts_per_tok", 9, "num_experts_per_tok is 9; allowed: a whole number, 1…8"),
        ("layer_types", ["chunked_attention"] * 3, "layer_types"),
    ],
)
def test_what_no_published_checkpoint_has_is_refused_by_the_field(
    field: str, value: Any, refused: str, published: tuple[Path, Path], tmp_path: Path
) -> None:
    config = json.loads((published[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ConfigError, match=refused):
        registry.read_config(tmp_path)


@pytest.mark.parametrize(
    ("lacking", "refused"),
    [
        ("sinks", "attention sinks is True; allowed: no sinks on the platform toy"),
        ("expert_biases", "biases of experts is True; allowed: experts without biases on the"),
    ],
)
def test_a_platform_without_sinks_or_biases_of_experts_refuses_the_model(
    lacking: str, refused: str, published: tuple[Path, Path], tmp_path: Path
) -> None:
    options = ExecutorOptions(model_folder=convert(published[0], tmp_path / "ours"))
    checked(options, "toy", cpu.capabilities)
    with pytest.raises(ConfigError, match=refused):
        checked(options, "toy", replace(cpu.capabilities, **{lacking: False}))
