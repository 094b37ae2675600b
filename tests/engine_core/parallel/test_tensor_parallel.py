"""Engines whose layers several processes divide, beside transformers and beside one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.sampling_params import SamplingParams
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.text.model import ServingChoices, load_text_model
from tests.engine_core import test_block_weights, test_int4_weights
from tests.engine_core.demo_reference import demo_reference
from tests.engine_core.parallel.parallel_models import QWEN3, engine_of, folder_of
from tests.engine_core.small_models import check_scores, convert, greedy, reference_greedy
from tests.engine_core.test_demo_model import TEXTS
from tests.long_values import long_but
from tests.polling import holds_within

PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 2, 17, 64, 300)]
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=16)
SAMPLINGS = [
    SAMPLED,
    replace(SAMPLED, seed=12, top_p=0.9, top_k=40, min_p=0.01),
    replace(
        SAMPLED,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={7: 3.0},
    ),
    replace(SAMPLED, num_logprobs=4, min_tokens=3, stop_token_ids=(9,), bad_words=((11,), (3, 4))),
    greedy(16),
]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("size", long_but((2, 4), 4))
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(
    size: int, qwen3: tuple[Any, Path]
) -> None:
    model, folder = qwen3
    with engine_of(folder, tensor_parallel_size=size) as engine:
        answers = engine.answer(PROMPTS, greedy(12, num_logprobs=3, num_prompt_logprobs=0))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check_scores(model, prompt, answer, 12)


def test_sampled_tokens_are_those_of_one_process(qwen3: tuple[Any, Path]) -> None:
    with engine_of(qwen3[1]) as one, engine_of(qwen3[1], tensor_parallel_size=2) as two:
        alone = one.answer(PROMPTS, *SAMPLINGS)
        divided = two.answer(PROMPTS, *SAMPLINGS)
    assert [each.token_ids for each in divided] == [each.token_ids for each in alone]
    for ours, theirs in zip(divided, alone, strict=True):
        assert [e.logprob for e in ours.logprobs] == pytest.approx(
            [e.logprob for e in theirs.logprobs], abs=1e-3
        )


def test_an_answer_has_the_same_bits_whatever_is_computed_beside_it(
    qwen3: tuple[Any, Path],
) -> None:
    asked = replace(SAMPLED, num_logprobs=2, num_prompt_logprobs=0)
    with engine_of(qwen3[1], tensor_parallel_size=2) as engine:
        [alone] = engine.answer([PROMPTS[3]], asked)
        for others in (PROMPTS[:3], PROMPTS[:2] + [PROMPTS[4]] * 6):
            *_, beside = engine.answer([*others, PROMPTS[3]], *[greedy(20)] * len(others), asked)
            assert beside.token_ids == alone.token_ids
            assert beside.logprobs == alone.logprobs


@pytest.mark.long
@pytest.mark.parametrize(
    "family", long_but(("qwen2", "smollm2", "gemma3 of 4 and 2 heads"), "gemma3 of 4 and 2 heads")
)
def test_every_family_answers_as_transformers(family: str, tmp_path: Path) -> None:
    model, folder = folder_of(family, tmp_path)
    with engine_of(folder, tensor_parallel_size=2) as engine:
        answers = engine.answer(PROMPTS, greedy(12, num_logprobs=3, num_prompt_logprobs=0))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check_scores(model, prompt, answer, 12)


@pytest.mark.long
@pytest.mark.parametrize("packed", long_but(("Q8_0", "gptq"), "gptq"))
@pytest.mark.parametrize("dtype", long_but(("float32", "bfloat16"), "float32"))
def test_packed_weights_answer_nearly_as_in_one_process(
    dtype: str, packed: str, tmp_path: Path
) -> None:
    """Activations are rounded to eight bits beside block formats: log probabilities are near, not
    equal."""
    if packed == "Q8_0":
        folder = test_block_weights.write(tmp_path, packed, dtype)
    else:
        test_int4_weights.write(tmp_path, packed, dtype)
        folder = convert(tmp_path / "packed", tmp_path / "ours", dtype)
    scored = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=0)
    with engine_of(folder) as one, engine_of(folder, tensor_parallel_size=2) as two:
        alone = one.answer(PROMPTS[2:], scored)
        divided = two.answer(PROMPTS[2:], scored)
    for ours, theirs in zip(divided, alone, strict=True):
        a, b = ([entry.logprob for entry in each.prompt_logprobs] for each in (ours, theirs))
        assert np.abs(np.array(a) - np.array(b)).mean() < (0.02 if dtype == "float32" else 0.2)


@pytest.mark.long
def test_the_demo_model_answers_in_three_ranks_as_transformers() -> None:
    folder = pull(
        DEMO_NAME, cache_dir=default_cache_dir(), progress=silent, dtype="float32", device="cpu"
    )
    tokenizer = load_text_model(folder, DEMO_NAME, ServingChoices()).tokenizer
    reference = demo_reference()
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS[1:4]]
    options = {"max_model_len": 512, "num_blocks": 100, "activation_dtype": "model"}
    with engine_of(folder, tensor_parallel_size=3, **options) as three:
        assert three.tokens(prompts, greedy(16)) == [
            reference_greedy(reference, prompt, 16) for prompt in prompts
        ]
        assert isinstance(three.executor, MultiExecutor)
        figures = three.executor.rank_figures
        assert holds_within(lambda: len({each.num_plans for each in figures()}) == 1, 60)
        assert figures()[0].num_plans >= 16


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_executor(
            ExecutorOptions(model_folder=folder, **options), lambda phase, done, total: None
        )
    return str(caught.value)


def test_what_ranks_cannot_be_is_refused_by_name(qwen3: tuple[Any, Path]) -> None:
    folder = qwen3[1]
    assert refused(folder, tensor_parallel_size=3, num_threads=3).startswith(
        "tensor_parallel_size is 3; allowed: 1 or 2 or 4 or 8, which divide 8 query heads, "
        "4 KV heads (or are multiples)"
    )
    assert (
        refused(folder, tensor_parallel_size=2, peer_access="on")
        == "peer_access is 'on'; allowed: auto or off"
    )


def test_more_ranks_than_cores_are_refused_unless_threads_are_asked_for(
    qwen3: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert refused(qwen3[1], tensor_parallel_size=4) == (
        "tensor_parallel_size is 4; allowed: at most 2 ranks on this machine, on the platform cpu"
    )


def test_numerics_ids_differ_by_layout(qwen3: tuple[Any, Path]) -> None:
    ids = set()
    for size in (1, 2):
        options = ExecutorOptions(
            model_folder=qwen3[1], tensor_parallel_size=size, num_threads=2, num_blocks=70
        )
        executor, _, facts = build_executor(options, lambda phase, done, total: None)
        executor.close()
        ids.add(facts.numerics_id)
    assert len(ids) == 2
