"""Decoders that score texts, through the real engine, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import registry
from tests.engine_core.small_encoders import embed
from tests.engine_core.small_models import SmallEngine, convert
from tests.engine_core.small_rerankers import (
    DECODING_CLASSIFIERS,
    random_decoding_classifier,
    random_judge,
    write_logit_score,
)
from tests.long_values import long_but

TEXTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 2, 17, 64, 150, 300)]
YES, NO = 7, 11


def logits_of(model: torch.nn.Module, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text])).logits[0]
    return logits


@pytest.mark.parametrize("family", long_but(DECODING_CLASSIFIERS, "gemma2", "qwen3"))
def test_scores_are_those_of_the_head_behind_the_last_token(family: str, tmp_path: Path) -> None:
    model = random_decoding_classifier(family, tmp_path / "hf")
    engine = SmallEngine(
        convert(tmp_path / "hf", tmp_path / "ours"), max_num_batched_tokens=128, max_num_seqs=8
    )
    together = embed(engine, TEXTS, "last")
    alone = [embed(engine, [text], "last")[0] for text in TEXTS]
    engine.close()
    for text, scores, same in zip(TEXTS, together, alone, strict=True):
        assert scores == pytest.approx(logits_of(model, text).numpy(), abs=1e-4)
        assert scores.tobytes() == same.tobytes()


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_score_is_the_difference_of_the_logits_of_yes_and_no(
    is_tied: bool, tmp_path: Path
) -> None:
    model = random_judge(tmp_path / "hf", is_tied=is_tied)
    write_logit_score(tmp_path / "hf", YES, NO)
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    config = registry.read_config(folder)
    assert (config.task, config.labels) == ("classify", ("yes",))
    engine = SmallEngine(folder)
    scores = embed(engine, TEXTS, "last")
    engine.close()
    for text, [score] in zip(TEXTS, scores, strict=True):
        last = logits_of(model, text)[-1]
        assert score == pytest.approx((last[YES] - last[NO]).item(), abs=1e-4)


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    random_judge(tmp_path / "hf")
    write_logit_score(tmp_path / "hf", 512, None)
    with pytest.raises(ConfigError, match="true_token_id and false_token_id is 512"):
        convert(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
)
def test_ranks_score_as_one_process_does(layout: dict[str, int], tmp_path: Path) -> None:
    model = random_decoding_classifier("qwen3", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"), **layout)
    found = embed(engine, TEXTS, "last")
    engine.close()
    for text, scores in zip(TEXTS, found, strict=True):
        assert scores == pytest.approx(logits_of(model, text).numpy(), abs=1e-4)
