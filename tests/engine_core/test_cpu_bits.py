"""The same answer whatever else is in the batch: every request alone, then in company, in each served dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.sampling_params import SamplingParams
from headwater.kernels.packed_linear import can_pack
from headwater.kernels.row_stable_linear import PACKED, PLAIN, Library, RowRule, row_rule, row_stable_linear
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(3, 512, int(n)).tolist() for n in RNG.integers(1, 400, 64)]


@pytest.fixture(
    scope="module",
    params=[("qwen3", "float32"), ("qwen3", "bfloat16"), ("gemma3 whose last layer has a window", "bfloat16")],
    ids=["qwen3-float32", "qwen3-bfloat16", "gemma3-bfloat16"],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    family, dtype = request.param
    home = tmp_path_factory.mktemp(dtype)
    random_checkpoint(family, home / "hf")
    return convert(home / "hf", home / "ours", dtype)


def any_kind(i: int) -> SamplingParams:
    """Rows of every kind side by side."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.8},
        {"top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    ]
    chosen: dict[str, Any] = {"temperature": 0.9, "seed": i, "max_tokens": 8} | kinds[i % len(kinds)]
    return SamplingParams(**chosen)


@pytest.mark.parametrize(
    "step", [pytest.param(1, id="all", marks=pytest.mark.long), pytest.param(4, id="every fourth")]
)
def test_64_streams_at_once_are_each_what_they_are_alone(folder: Path, step: int) -> None:
    """Every fourth has a row of every kind among it, and prompts of all lengths."""
    samplings = [any_kind(i) for i in range(len(PROMPTS))]
    together, alone = SmallEngine(folder, num_blocks=4000), SmallEngine(folder)
    batched = together.tokens(PROMPTS, *samplings)
    for i in range(0, len(PROMPTS), step):
        assert alone.tokens([PROMPTS[i]], samplings[i]) == [batched[i]], i


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[list[int]]:
    """Answers to the first prompts, each of which was computed in a single piece."""
    return SmallEngine(folder, num_blocks=4000, max_num_batched_tokens=2048).tokens(PROMPTS[:16], greedy(8))


@pytest.mark.parametrize("chunk", [64, 65, pytest.param(91, marks=pytest.mark.long)])
def test_chunks_change_nothing(folder: Path, whole: list[list[int]], chunk: int) -> None:
    assert SmallEngine(folder, max_num_batched_tokens=chunk).tokens(PROMPTS[:16], greedy(8)) == whole


def test_preemption_changes_nothing(folder: Path) -> None:
    calm = SmallEngine(folder, num_blocks=4000).tokens(PROMPTS[:12], greedy(24))
    tight = SmallEngine(folder, num_blocks=40, max_model_len=512)
    assert tight.tokens(PROMPTS[:12], greedy(24)) == calm
    assert tight.engine.load().num_preemptions > 0


def test_cached_prefixes_change_nothing(folder: Path) -> None:
    engine = SmallEngine(folder, num_blocks=4000)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 40][:12]
    first, second = engine.answer(prompts, greedy(12)), engine.answer(prompts, greedy(12))
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in second]
    assert [answer.cached_tokens for answer in second] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (512, 1536), (1000, 576)], ids=str)
@pytest.mark.parametrize("library", [PLAIN, PACKED], ids=["plain", "packed"])
def test_a_product_gives_a_row_the_same_bits_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype, library: Library
) -> None:
    if library is PACKED and not can_pack(dtype):
        pytest.skip("not on this CPU")
    weight, x = library.prepare(torch.randn(shape).to(dtype)), torch.randn(300, shape[1]).to(dtype)
    for rule in (row_rule(*shape, dtype, library), RowRule(32, is_exact=True)):
        expected = row_stable_linear(x, weight, rule, library)
        for num_rows in (1, 2, 3, 5, 11, 16, 33, 100, 255):
            for start in range(0, 300 - num_rows, 37):
                rows = slice(start, start + num_rows)
                assert torch.equal(row_stable_linear(x[rows], weight, rule, library), expected[rows])
