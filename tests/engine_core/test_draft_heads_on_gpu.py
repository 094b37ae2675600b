"""Draft heads on a GPU: they draft what their published definition drafts, and answers stay what
they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.bench.forced_answers import ForcedAnswers
from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.drafter.cuda_drafter import CudaDrafter
from headwater.engine_core.executors.entry.cuda_entry import SentStep
from headwater.engine_core.executors.step_executor import StepExecutor
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.heads_twin import HeadsTwin
from tests.engine_core.many_requests import check_equality
from tests.engine_core.oracle_speculator import answers_of_a_new_engine
from tests.engine_core.published_heads import CONFIGS, publish, random_heads
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.engine_core.test_draft_heads import half_right
from tests.engine_core.test_draft_model import MAX_DRAFTS, WholeDrafts
from tests.engine_core.test_draft_model_on_gpu import SEEDED, check_drafts
from tests.engine_core.test_drafts_on_gpu import EVERY_SAMPLING, prompts_of

pytestmark = pytest.mark.gpu
EngineOf = Callable[..., SmallEngine]
KINDS = ("medusa", "eagle", "eagle3")
SIZES = {
    "device": "cuda",
    "block_size": 16,
    "num_blocks": 300,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
}


class Recorder:
    """Stands before the drafter of an executor and notes what it drafts behind which tokens."""

    def __init__(self, small: SmallEngine) -> None:
        assert isinstance(small.executor, StepExecutor)
        self._drafter: CudaDrafter = small.executor._drafter
        self._tokens = small.executor._entry._table.token_ids
        self.noted: list[tuple[list[int], list[int]]] = []
        small.executor._drafter = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, sent: SentStep) -> None:
        plan = sent.plan
        self._drafter.draft(sent)
        if plan.num_drafts is None:
            return
        assert plan.follows is None
        ends = plan.starts + plan.counts - plan.num_drafts
        for row, end, count in zip(
            plan.rows.tolist(), ends.tolist(), plan.num_drafts.tolist(), strict=True
        ):
            tokens = self._tokens[row, : end + count].tolist()
            if count:
                self.noted.append((tokens[:end], tokens[end:]))


def num_equal(drafts: list[int], expected: list[int]) -> int:
    """Drafts before the first that differs, from which the others follow."""
    return next((i for i in range(len(drafts)) if drafts[i] != expected[i]), len(drafts))


@pytest.mark.parametrize("kind", [*KINDS, "medusa of two blocks", "eagle3 over all tokens"])
def test_drafts_are_those_of_a_twin_behind_chunks_drafts_and_cached_prefixes(
    tmp_path: Path, kind: str
) -> None:
    """Half of what is drafted is sampled; with fewer bits a draft may be another of two that are
    nearly equal."""
    model = random_checkpoint("qwen3", tmp_path / "hf").bfloat16().float()
    config = CONFIGS[kind]
    length = 40
    tensors = {
        name: each.bfloat16().float() if each.dtype == torch.float else each
        for name, each in random_heads(kind).items()
    }
    twin = HeadsTwin(model, config, tensors)
    forced = ForcedAnswers(64)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 512, n).tolist() for n in (5, 31, 40)]
    answers = [half_right(twin, prompt, length) for prompt in prompts]
    forced.expect(dict(enumerate(answers, start=1)))
    heads = publish(tmp_path / "heads", config, tensors)
    with forced.installed():
        folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
        small = SmallEngine(folder, **SIZES, draft_heads=heads, max_draft_tokens=MAX_DRAFTS)
    samplings = [greedy(length, seed=seed) for seed in (1, 2, 3)]
    ahead = WholeDrafts(is_ahead=True).beside(small.config)
    reported, load_ahead = answers_of_a_new_engine(small, prompts, samplings, ahead, num_rounds=2)
    assert [answer.token_ids for answer in reported] == answers * 2
    recorder = Recorder(small)
    reported, load = answers_of_a_new_engine(
        small, prompts, samplings, WholeDrafts().beside(small.config), num_rounds=2
    )
    small.close()
    assert [answer.token_ids for answer in reported] == answers * 2
    assert [answer.cached_tokens for answer in reported[3:]] == [0, 16, 32]
    noted = [(known, drafts) for known, drafts in recorder.noted if len(drafts) == MAX_DRAFTS]
    right = [num_equal(drafts, twin.drafts(known, MAX_DRAFTS)) for known, drafts in noted]
    assert len(right) > 20
    assert sum(right) > 0.75 * MAX_DRAFTS * len(right)
    for each in (load, load_ahead):
        assert 0.3 * each.num_draft_tokens < each.num_accepted_tokens < 0.9 * each.num_draft_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["random", "broken"])
def test_rows_of_every_sampling_are_drafted_beside_each_other(
    kind: str, state: str, engine_of: EngineOf, tmp_path: Path
) -> None:
    tensors = random_heads(kind)
    if state == "broken":
        tensors = {
            name: each * torch.nan if each.is_floating_point() else each
            for name, each in tensors.items()
        }
    heads = publish(tmp_path / "heads", CONFIGS[kind], tensors)
    check_drafts(engine_of(draft_heads=heads), lengths(40), EVERY_SAMPLING)


OPTIONS: list[dict[str, Any]] = [
    {"async_depth": 4},
    {"max_num_batched_tokens": 260, "num_blocks": 100},
    {"async_depth": 1},
    {"kv_cache_dtype": "fp8"},
    {"num_blocks": 40, "kv_swap_memory": 64 << 20},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle", each) for each in OPTIONS]
    + [(kind, each) for kind in ("medusa", "eagle3") for each in OPTIONS[:2]],
    ids=str,
)
def test_however_an_engine_is_set(
    kind: str, options: dict[str, Any], engine_of: EngineOf, tmp_path: Path
) -> None:
    """Few blocks preempt; a prefix is there when the prompts come again."""
    heads = publish(tmp_path / "heads", CONFIGS[kind], random_heads(kind))
    loads = check_drafts(
        engine_of(draft_heads=heads, **options), lengths(60, shared=130), SEEDED, num_rounds=2
    )
    assert all(load.prefix_hits > 0 for load in loads)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_and_no_log_probability_of_many_requests_differs(
    kind: str, engine_of: EngineOf, tmp_path: Path
) -> None:
    heads = publish(tmp_path / "heads", CONFIGS[kind], random_heads(kind))
    crowded = engine_of(
        draft_heads=heads,
        block_size=16,
        num_blocks=30,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=64,
    )
    load = check_equality(engine_of(max_num_seqs=128), crowded, 200, has_draft_model=True)
    assert load.num_draft_tokens > 200
    assert load.num_preemptions > 0


def test_heads_of_another_number_of_queries_a_key_are_refused_by_name(
    engine_of: EngineOf, tmp_path: Path
) -> None:
    heads = publish(
        tmp_path / "heads", CONFIGS["eagle with biases"], random_heads("eagle with biases")
    )
    with pytest.raises(
        ConfigError, match=r"draft_heads is .*; allowed: heads with 2 query heads a key head"
    ):
        engine_of(draft_heads=heads)


def lengths(count: int, shared: int = 0) -> Sequence[list[int]]:
    return prompts_of([1 + i * 37 % 200 for i in range(count)], shared=shared)


def test_an_answer_of_one_row_is_drafted_to_its_end(engine_of: EngineOf, tmp_path: Path) -> None:
    heads = publish(tmp_path / "heads", CONFIGS["eagle3"], random_heads("eagle3"))
    check_drafts(
        engine_of(draft_heads=heads),
        lengths(1),
        [SamplingParams(temperature=0.8, seed=3, max_tokens=97)],
    )
