"""The same answer whatever else is in the batch: every request alone, then in company, in each
served dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.sampling_params import SamplingParams
from headwater.kernels.cpu.packed_linear import can_pack
from headwater.kernels.cpu.row_stable_linear import (
    MAX_ROWS,
    ONE_SIZE,
    PACKED,
    PLAIN,
    Library,
    RowRule,
    cancelling_matrices,
    row_rule,
    row_stable_linear,
)
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.long_values import long_but

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(3, 512, int(n)).tolist() for n in RNG.integers(1, 400, 64)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3", "float32"), marks=pytest.mark.long),
        pytest.param(("qwen3", "bfloat16"), marks=pytest.mark.long),
        ("gemma3 whose last layer has a window", "bfloat16"),
        pytest.param(("qwen3-moe", "bfloat16"), marks=pytest.mark.long),
        pytest.param(("glm4-moe", "bfloat16"), marks=pytest.mark.long),
    ],
    ids=["qwen3-float32", "qwen3-bfloat16", "gemma3-bfloat16", "qwen3-moe", "glm4-moe"],
)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
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
    chosen: dict[str, Any] = {"temperature": 0.9, "seed": i, "max_tokens": 8} | kinds[
        i % len(kinds)
    ]
    return SamplingParams(**chosen)


@pytest.mark.parametrize(
    "step", [pytest.param(1, id="all", marks=pytest.mark.long), pytest.param(8, id="every eighth")]
)
def test_64_streams_at_once_are_each_what_they_are_alone(folder: Path, step: int) -> None:
    """Every eighth has a row of every kind among it, and prompts of all lengths."""
    samplings = [any_kind(i) for i in range(len(PROMPTS))]
    together = SmallEngine(folder, num_blocks=4000)
    alone = SmallEngine(folder)
    batched = together.tokens(PROMPTS, *samplings)
    for i in range(0, len(PROMPTS), step):
        assert alone.tokens([PROMPTS[i]], samplings[i]) == [batched[i]], i


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[list[int]]:
    """Answers to the first prompts, each of which was computed in a single piece."""
    return SmallEngine(folder, num_blocks=4000, max_num_batched_tokens=2048).tokens(
        PROMPTS[:16], greedy(8)
    )


@pytest.mark.parametrize("chunk", long_but((64, 65, 91), 65))
def test_chunks_change_nothing(folder: Path, whole: list[list[int]], chunk: int) -> None:
    assert (
        SmallEngine(folder, max_num_batched_tokens=chunk).tokens(PROMPTS[:16], greedy(8)) == whole
    )


@pytest.mark.long
def test_preemption_changes_nothing(folder: Path) -> None:
    calm = SmallEngine(folder, num_blocks=4000).tokens(PROMPTS[:12], greedy(24))
    tight = SmallEngine(folder, num_blocks=40, max_model_len=512)
    assert tight.tokens(PROMPTS[:12], greedy(24)) == calm
    assert tight.engine.load().num_preemptions > 0


def test_cached_prefixes_change_nothing(folder: Path) -> None:
    engine = SmallEngine(folder, num_blocks=4000)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 40][:12]
    first = engine.answer(prompts, greedy(12))
    second = engine.answer(prompts, greedy(12))
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in second]
    assert [answer.cached_tokens for answer in second] == [
        (len(prompt) - 1) // 16 * 16 for prompt in prompts
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", long_but(((96, 64), (512, 1536), (1000, 576)), (96, 64), (1000, 576)), ids=str
)
@pytest.mark.parametrize("library", [PLAIN, PACKED], ids=["plain", "packed"])
def test_a_product_gives_a_row_the_same_bits_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype, library: Library
) -> None:
    if library is PACKED and not can_pack(dtype):
        pytest.skip("not on this CPU")
    random = torch.randn(300, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    for x, weight in random, cancelling_matrices(300, *shape, dtype):
        prepared = library.prepare(weight)
        for rule in row_rule(*shape, dtype, library), ONE_SIZE:
            expected = row_stable_linear(x, prepared, rule, library)
            for num_rows in (1, 2, 3, 5, 11, 16, 33, 100, 255):
                for start in range(0, 300 - num_rows, 37):
                    rows = slice(start, start + num_rows)
                    assert torch.equal(
                        row_stable_linear(x[rows], prepared, rule, library), expected[rows]
                    )


def moody(is_other: Callable[[int], bool], sizes: set[int]) -> Library:
    """A library that sums products of some numbers of rows backwards; it notes all numbers of rows
    in `sizes`."""

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sizes.add(len(x))
        inputs = range(x.shape[1])
        out = torch.zeros(len(x), len(weight))
        for i in reversed(inputs) if is_other(len(x)) else inputs:
            out += x[:, i].float()[:, None] * weight[:, i].float()
        return out.bfloat16()

    return Library(multiply, lambda weight: weight)


@pytest.mark.parametrize(
    ("is_other", "rule"),
    [
        (lambda num_rows: False, RowRule(1)),
        (lambda num_rows: num_rows == 1, RowRule(2)),
        (lambda num_rows: num_rows < 5, RowRule(8)),
        (lambda num_rows: num_rows == 31, RowRule(32)),
        (lambda num_rows: num_rows < 40, ONE_SIZE),
        (lambda num_rows: num_rows % 2 == 1, ONE_SIZE),
        (lambda num_rows: num_rows > 128, RowRule(1)),
    ],
    ids=["none", "one", "few", "31", "up to 39", "odd", "more than are probed"],
)
def test_a_rule_allows_no_number_of_rows_that_has_other_bits(
    is_other: Callable[[int], bool], rule: RowRule
) -> None:
    sizes: set[int] = set()
    library = moody(is_other, sizes)
    assert row_rule(64, 96, torch.bfloat16, library) == rule
    sizes.clear()
    x = torch.randn(700, 96).bfloat16()
    weight = torch.randn(64, 96).bfloat16()
    for num_rows in (1, 2, 31, 32, 33, 129, 255, 256, 257, 700):
        assert row_stable_linear(x[:num_rows], weight, rule, library).shape == (num_rows, 64)
    assert all(rule.min_rows <= size <= rule.max_rows <= MAX_ROWS for size in sizes)
    assert len({is_other(size) for size in sizes}) == 1
