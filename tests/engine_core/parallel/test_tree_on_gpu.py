"""Engines of 1, 2 and 4 GPUs with `numerics` tree: their answers have the same bits. Where GPUs are
too few, the ranks of an engine take turns on one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.bench.workloads import MODELS
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core import test_int4_weights
from tests.engine_core.many_requests import tell
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.parallel.test_leaves import SCORED, bits_of
from tests.engine_core.parallel.test_ranks_on_gpu import SMALL
from tests.engine_core.parallel.test_stages_on_gpu import share_unless
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS, SAMPLED, SAMPLINGS
from tests.engine_core.small_models import SmallEngine, convert, greedy
from tests.engine_core.test_cuda_engine import behind_the_likeliest

pytestmark = pytest.mark.gpu

ROOMY = SMALL | {"num_blocks": 120, "max_num_batched_tokens": 1024, "max_num_seqs": 32}
LONG = [np.random.default_rng(n).integers(3, 500, n).tolist() for n in (3, 40, 200, 640, 1100)]
"""Of one split of attention and of several."""
Bits = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"), "bfloat16")


@contextmanager
def sharing(num_ranks: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_unless(num_ranks, patch)
        yield


@contextmanager
def engine(folder: Path, size: int, **options: Any) -> Iterator[SmallEngine]:
    given = ROOMY | {"numerics": "tree", "tensor_parallel_size": size} | options
    with sharing(size * options.get("pipeline_parallel_size", 1)):
        one = SmallEngine(folder, **given)
        try:
            yield one
        finally:
            one.close()


def answered(
    folder: Path, size: int, prompts: list[list[int]], *samplings: SamplingParams, **options: Any
) -> Bits:
    with engine(folder, size, **options) as one:
        return bits_of(one.answer(prompts, *samplings))


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks_gives_the_same_bits_alone_and_in_batches(
    size: int, qwen3: tuple[Any, Path]
) -> None:
    folder = qwen3[1]
    with engine(folder, 1) as one, engine(folder, size) as many:
        expected = bits_of(one.answer(PROMPTS, *SCORED))
        assert bits_of(many.answer(PROMPTS, *SCORED)) == expected
        # Again, now that all graphs are there, and one by one.
        for each in (one, many):
            assert bits_of(each.answer(PROMPTS, *SCORED)) == expected
            alone = [
                each.answer([prompt], asked)[0]
                for prompt, asked in zip(PROMPTS, SCORED, strict=True)
            ]
            assert bits_of(alone) == expected


@pytest.mark.parametrize("size", [1, 2])
def test_stages_give_the_same_bits_too(size: int, qwen3: tuple[Any, Path]) -> None:
    one = answered(qwen3[1], 1, PROMPTS, *SCORED)
    assert answered(qwen3[1], size, PROMPTS, *SCORED, pipeline_parallel_size=2) == one


def test_answers_are_likely(qwen3: tuple[Any, Path]) -> None:
    model, folder = qwen3
    model = model.bfloat16().float().cuda()
    with engine(folder, 2) as two:
        answers = two.tokens(PROMPTS, greedy(12))
    gaps = [behind_the_likeliest(model, *each) for each in zip(PROMPTS, answers, strict=True)]
    # bf16 may choose another of two tokens that are nearly equal.
    assert torch.cat(gaps).max() < 0.3


def test_without_it_two_ranks_have_bits_of_their_own(qwen3: tuple[Any, Path]) -> None:
    """What the other tests compare does depend on the order of sums."""
    asked = greedy(16, num_logprobs=3, num_prompt_logprobs=1)
    one, two = (answered(qwen3[1], size, PROMPTS[2:], asked, numerics="default") for size in (1, 2))
    assert one != two


@pytest.mark.parametrize("size", [2, 4, 8])
def test_shapes_of_a_real_model_give_the_same_bits(size: int, tmp_path: Path) -> None:
    """Weights of Qwen3-0.6B's shapes: narrow and wide products, gates, prompts of several steps,
    rows by the dozen."""
    shape = MODELS["qwen3-0.6b"] | {"num_hidden_layers": 3, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "num_blocks": 200,
    }
    prompts = [*LONG, *(LONG[2][: 5 + n] for n in range(20))]
    asked = [
        replace(SAMPLED, seed=n, max_tokens=6, num_logprobs=2, num_prompt_logprobs=0)
        for n in range(25)
    ]
    plain = [replace(SAMPLED, seed=n, max_tokens=6) for n in range(25)]
    with engine(tmp_path, 1, **options) as one, engine(tmp_path, size, **options) as many:
        for samplings in (asked, plain):
            assert bits_of(many.answer(prompts, *samplings)) == bits_of(
                one.answer(prompts, *samplings)
            )
        assert bits_of(many.answer(prompts[:1], asked[0])) == bits_of(
            one.answer(prompts[:1], asked[0])
        )


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"},
        {"async_depth": 3},
        {"max_num_batched_tokens": 67},
    ],
    ids=str,
)
def test_other_settings_beside_it_change_no_bit_either(
    options: dict[str, Any], qwen3: tuple[Any, Path]
) -> None:
    asked = [replace(each, num_logprobs=3) for each in SAMPLINGS]
    one, two = (answered(qwen3[1], size, PROMPTS, *asked, **options) for size in (1, 2))
    assert one == two


def test_windows_and_norms_before_the_sum(tmp_path: Path) -> None:
    _, folder = folder_of("gemma3 of 4 and 2 heads", tmp_path, "bfloat16")
    one, two = (answered(folder, size, PROMPTS, *SCORED) for size in (1, 2))
    assert one == two


def test_a_vocabulary_that_ranks_divide_unevenly(tmp_path: Path) -> None:
    """Rows of joined logits end in the middle of a rank's."""
    shape = MODELS["qwen3-0.6b"] | {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 1003}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 1024}
    one, two = (answered(tmp_path, size, PROMPTS, *SCORED, **options) for size in (1, 2))
    assert one == two


def test_packed_weights_are_expanded(tmp_path: Path) -> None:
    test_int4_weights.write(tmp_path, "gptq", "bfloat16")
    folder = convert(tmp_path / "packed", tmp_path / "ours", "bfloat16")
    one, two = (answered(folder, size, PROMPTS, *SCORED) for size in (1, 2))
    assert one == two


def test_an_answer_goes_on_at_an_engine_of_another_size(qwen3: tuple[Any, Path]) -> None:
    asked = [
        NewRequest(key=i, prompt_ids=prompt, output_ids=[], sampling=sampling)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SCORED, strict=True))
    ]
    with engine(qwen3[1], 1) as one, engine(qwen3[1], 2) as two:
        whole = tell(one.engine, asked)
        for there, num_known in ((two, 5), (one, 2)):
            resumed = [
                replace(
                    new, key=new.key + 10 * num_known, output_ids=reported.token_ids[:num_known]
                )
                for new, reported in zip(asked, whole, strict=True)
            ]
            for reported, right, new in zip(
                tell(there.engine, resumed), whole, resumed, strict=True
            ):
                assert reported.token_ids == right.token_ids
                assert reported.logprobs == right.logprobs[len(new.output_ids) :]


def test_the_numerics_id_leaves_the_number_of_gpus_out(qwen3: tuple[Any, Path]) -> None:
    ids = {}
    for size, numerics in ((1, "tree"), (2, "tree"), (1, "default"), (2, "default")):
        options = ExecutorOptions(
            model_folder=qwen3[1],
            tensor_parallel_size=size,
            numerics=numerics,
            **SMALL,  # type: ignore[arg-type]  # of several types
        )
        with sharing(size):
            executor, _, facts = build_executor(options, lambda phase, done, total: None)
            executor.close()
        ids[size, numerics] = facts.numerics_id
    assert ids[1, "tree"] == ids[2, "tree"]
    assert len(set(ids.values())) == 3
