"""Transformers' modelling code on a GPU, recorded in graphs: equal bits alone and in company,
tokens of transformers in float32; heads that are padded there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.engine_core.foreign_models import ALL, convert_foreign
from tests.engine_core.small_models import (
    FAMILIES,
    SHAPE,
    SmallEngine,
    check_rounded,
    convert,
    greedy,
    random_checkpoint,
)
from tests.engine_core.test_model_suite import PROMPTS, SCORED, exact

pytestmark = pytest.mark.gpu
SHOWN = ("cohere", "nemotron", "apertus", "vaultgemma", "phi", "llama3 with scaled rope")
PHI3_HEADS = SHAPE | {"head_dim": 96}


def engine_of(folder: Path, **options: Any) -> SmallEngine:
    return SmallEngine(folder, device="cuda", max_model_len=512, **options)


def check(model: Any, folder: Path) -> None:
    """Answers of the folder's model: their bits in several companies, and their tokens, which are
    the most likely ones of transformers but for what rounding changes."""
    engine = engine_of(folder)
    together = exact(engine.answer(PROMPTS, SCORED))
    assert exact(engine.answer(PROMPTS, SCORED)) == together
    assert exact([engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]) == together
    engine.close()
    engine = engine_of(folder, max_num_batched_tokens=65)
    assert exact(engine.answer(PROMPTS, greedy(8, num_logprobs=1))) == together
    engine.close()
    for prompt, (token_ids, scores) in zip(PROMPTS, together, strict=True):
        check_rounded(model, prompt, token_ids, scores)


@pytest.mark.parametrize("family", SHOWN)
def test_answers_have_the_bits_of_any_company(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family, ALL[family])
    model = random_checkpoint(family, tmp_path / "hf")
    # Some releases choose torch's own attention for models whose caps it leaves out.
    model.set_attn_implementation("eager")
    check(model, convert_foreign(tmp_path / "hf", tmp_path / "ours"))


@pytest.mark.parametrize("is_foreign", [False, True], ids=["own", "transformers"])
def test_heads_of_96_are_padded(
    is_foreign: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "heads of 96", lambda: transformers.LlamaConfig(**PHI3_HEADS))
    model = random_checkpoint("heads of 96", tmp_path / "hf")
    make = convert_foreign if is_foreign else convert
    check(model, make(tmp_path / "hf", tmp_path / "ours"))
