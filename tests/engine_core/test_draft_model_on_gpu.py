"""A smaller model drafts on a GPU: answers stay what they are, with steps launched ahead of results
or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import EngineLoad
from tests.engine_core.many_requests import check_equality
from tests.engine_core.oracle_speculator import answers_of_a_new_engine
from tests.engine_core.small_models import SmallEngine, greedy
from tests.engine_core.test_draft_model import MAX_DRAFTS, WholeDrafts
from tests.engine_core.test_drafts_on_gpu import EVERY_SAMPLING, NEAR_PAGES, NEAR_SPLITS, prompts_of

pytestmark = pytest.mark.gpu
EngineOf = Callable[..., SmallEngine]
FolderOf = Callable[[str], Path]
SEEDED = [SamplingParams(temperature=0.2 * i, seed=i, max_tokens=60) for i in range(5)]


def check_drafts(
    small: SmallEngine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    *,
    num_rounds: int = 1,
) -> list[EngineLoad]:
    """Holds answers with drafts to those without, of rows that wait for results and of rows that
    run ahead."""
    each = [samplings[i % len(samplings)] for i in range(len(prompts))]
    plain, load = answers_of_a_new_engine(small, prompts, each)
    assert load.num_draft_tokens == 0
    loads = []
    for is_ahead in (False, True):
        speculator = WholeDrafts(
            min(MAX_DRAFTS, small.config.max_draft_tokens), is_ahead=is_ahead
        ).beside(small.config)
        received, load = answers_of_a_new_engine(
            small, prompts, each, speculator, num_rounds=num_rounds
        )
        for i, answer in enumerate(received):
            expected = plain[i % len(plain)]
            assert answer.token_ids == expected.token_ids, (is_ahead, i)
            assert answer.logprobs == expected.logprobs, (is_ahead, i)
        assert load.num_draft_tokens > 0
        loads.append(load)
    return loads


def check_accepted(loads: Sequence[EngineLoad]) -> None:
    """Holds for a draft model that is the served one, but for the last bits of what it computes."""
    for load in loads:
        assert load.num_accepted_tokens > 0.9 * load.num_draft_tokens


@pytest.mark.parametrize("num_rows", [1, 2, 7, 40, 130])
def test_drafts_of_the_served_model_itself_are_accepted(
    num_rows: int, engine_of: EngineOf, folder_of: FolderOf
) -> None:
    small = engine_of(draft_model=folder_of("qwen3"), max_num_batched_tokens=512)
    check_accepted(
        check_drafts(small, prompts_of([1 + i * 37 % 200 for i in range(num_rows)]), SEEDED)
    )


@pytest.mark.parametrize("family", ["qwen3", "llama2", "gemma3"])
def test_rows_of_every_sampling_are_drafted_beside_each_other(
    family: str, engine_of: EngineOf, folder_of: FolderOf
) -> None:
    loads = check_drafts(
        engine_of(draft_model=folder_of(family)),
        prompts_of([1 + i * 37 % 200 for i in range(40)]),
        EVERY_SAMPLING,
    )
    if family == "qwen3":
        check_accepted(loads)


def test_ends_of_pages_and_of_splits_are_crossed(engine_of: EngineOf, folder_of: FolderOf) -> None:
    small = engine_of(draft_model=folder_of("qwen3"))
    check_accepted(check_drafts(small, prompts_of(NEAR_PAGES + NEAR_SPLITS), SEEDED))


@pytest.mark.parametrize(
    "options",
    [
        {"async_depth": 1},
        {"async_depth": 4},
        {"block_size": 16, "num_blocks": 2800},
        {"max_num_batched_tokens": 260, "num_blocks": 100},
        {"kv_cache_dtype": "fp8"},
        {"max_draft_tokens": 1},
        {"num_blocks": 40, "kv_swap_memory": 64 << 20},
    ],
    ids=str,
)
def test_however_an_engine_is_set(
    options: dict[str, Any], engine_of: EngineOf, folder_of: FolderOf
) -> None:
    """Few blocks preempt; a prefix is there when the prompts come again, with the draft model's
    keys and values."""
    prompts = prompts_of([1 + i * 37 % 200 for i in range(60)], shared=130)
    loads = check_drafts(
        engine_of(draft_model=folder_of("qwen3"), **options), prompts, SEEDED, num_rounds=2
    )
    if options.get("kv_cache_dtype") != "fp8":
        check_accepted(loads)
    assert all(load.prefix_hits > 0 for load in loads)
    assert "kv_swap_memory" not in options or loads[0].num_swapped_in > 0


def test_a_row_alone_is_drafted_to_the_end_of_its_answer(
    engine_of: EngineOf, folder_of: FolderOf
) -> None:
    small = engine_of(draft_model=folder_of("qwen3"))
    (waiting, ahead) = check_drafts(small, prompts_of([20]), [greedy(97)])
    # A token of each step is sampled behind its drafts.
    assert waiting.num_accepted_tokens == ahead.num_accepted_tokens == 80


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_no_token_and_no_log_probability_of_many_requests_differs(
    kv_cache_dtype: str, engine_of: EngineOf, folder_of: FolderOf
) -> None:
    roomy = engine_of(kv_cache_dtype=kv_cache_dtype, max_num_seqs=128)
    crowded = engine_of(
        kv_cache_dtype=kv_cache_dtype,
        draft_model=folder_of("qwen3"),
        block_size=16,
        num_blocks=30,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=64,
    )
    load = check_equality(roomy, crowded, 300, has_draft_model=True)
    assert load.num_accepted_tokens > 300
    assert load.num_preemptions > 0
