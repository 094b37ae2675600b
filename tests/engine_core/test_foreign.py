"""Architectures whose modelling code is that of transformers, through the real engine: tokens and
log probabilities of transformers, equal bits whatever happens around a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.models import registry
from headwater.engine_core.weights.json_object import read_object
from tests.engine_core.foreign_models import ALL, FOREIGN, convert_foreign
from tests.engine_core.small_models import (
    FAMILIES,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.engine_core.test_model_suite import PROMPTS, SCORED, engine_of, exact
from tests.long_values import long_but

ONE_OF_EACH_MECHANISM = ("cohere", "apertus", "vaultgemma")
"""A scaled head, norms of heads and parallel layers; activations that no platform has, and layers
that hand no keywords on; windows and caps."""
Made = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The model of transformers and the converted folder of an architecture."""

    @cache
    def of(family: str) -> tuple[Any, Path]:
        base = tmp_path_factory.mktemp("foreign")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, family, ALL[family])
            model = random_checkpoint(family, base / "hf")
        # Some releases choose torch's own attention for models whose caps it leaves out.
        model.set_attn_implementation("eager")
        return model, convert_foreign(base / "hf", base / "ours")

    return of


@pytest.mark.parametrize("family", long_but(ALL, *ONE_OF_EACH_MECHANISM))
def test_tokens_and_logprobs_are_those_of_transformers(family: str, made: Made) -> None:
    model, folder = made(family)
    with engine_of(folder) as engine:
        answers = engine.answer(PROMPTS, greedy(8, num_logprobs=3, num_prompt_logprobs=0))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
        after = expected[len(prompt) - 1 : -1]
        assert answer.token_ids == after.argmax(-1).tolist()
        assert [entry.top_ids for entry in answer.logprobs] == after.topk(3).indices.tolist()
        chosen = [after[i, token].item() for i, token in enumerate(answer.token_ids)]
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(chosen, abs=1e-3)
        scored = [expected[i, token].item() for i, token in enumerate(prompt[1:])]
        found = [entry.logprob for entry in answer.prompt_logprobs]
        assert found == pytest.approx(scored, abs=1e-3)


@pytest.mark.parametrize("family", long_but(ALL, "apertus"))
def test_an_answer_has_the_same_bits_whatever_happens_around_it(family: str, made: Made) -> None:
    _, folder = made(family)
    with engine_of(folder, num_threads=2) as engine:
        together = exact(engine.answer(PROMPTS, SCORED))
        again = engine.answer(PROMPTS, SCORED)
        assert exact(again) == together
        assert again[1].cached_tokens == 80
        begun = [tokens[:3] for tokens, _ in together]
        resumed = engine.answer(PROMPTS, SCORED, begun=begun)
        assert [each.token_ids for each in resumed] == [tokens[3:] for tokens, _ in together]
    with engine_of(folder, num_threads=2) as engine:
        assert exact([engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]) == together
    with engine_of(folder, num_threads=2, num_blocks=34, max_num_batched_tokens=65) as engine:
        preempting = greedy(48, num_logprobs=1)
        found = exact(engine.answer([*PROMPTS, *PROMPTS[::-1]], preempting))
        assert engine.engine.load().num_preemptions > 0
    assert [(tokens[:8], scores[:8]) for tokens, scores in found[:5]] == together


def test_code_of_transformers_answers_as_ours(made: Made, tmp_path: Path) -> None:
    _, folder = made("llama3 with scaled rope")
    with engine_of(folder) as engine:
        theirs = engine.answer(PROMPTS, SCORED)
        their_id = engine.numerics_id
    random_checkpoint("llama3 with scaled rope", tmp_path / "hf")
    with engine_of(convert(tmp_path / "hf", tmp_path / "own")) as engine:
        own = engine.answer(PROMPTS, SCORED)
        assert engine.numerics_id != their_id
    assert [each.token_ids for each in own] == [each.token_ids for each in theirs]
    for ours, answer in zip(own, theirs, strict=True):
        scores = [entry.logprob for entry in answer.logprobs]
        assert [entry.logprob for entry in ours.logprobs] == pytest.approx(scores, abs=1e-4)


def test_architectures_without_a_file_of_ours_are_served_without_being_asked(
    made: Made, tmp_path: Path
) -> None:
    random_checkpoint_of("arcee", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    config = registry.read_config(folder)
    assert config.architecture == "ArceeForCausalLM"
    assert config.foreign is not None
    assert registry.MODEL_CODE not in read_object(folder / "config.json")


def random_checkpoint_of(family: str, folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, FOREIGN[family])
        return random_checkpoint(family, folder)


@pytest.mark.parametrize("kind", long_but(("int8", "int4"), "int4"))
def test_rounded_weights_answer_alone_as_in_company(kind: str, tmp_path: Path) -> None:
    random_checkpoint_of("cohere", tmp_path / "hf")
    folder = convert_foreign(tmp_path / "hf", tmp_path / "ours", quantization=kind)
    with engine_of(folder) as engine:
        together = exact(engine.answer(PROMPTS, SCORED))
    with engine_of(folder) as engine:
        assert exact([engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]) == together


def test_another_release_of_transformers_changes_the_id(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = made("cohere")
    ids = []
    for version in ("5.23.0", "5.24.0"):
        monkeypatch.setattr(
            "headwater.engine_core.executors.build.numerics.transformers_version",
            lambda v=version: v,
        )
        engine = SmallEngine(folder, max_model_len=512)
        ids.append(engine.numerics_id)
        engine.close()
    assert ids[0] != ids[1]
