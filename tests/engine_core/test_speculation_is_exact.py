"""Speculation against no speculation on a CPU: the same answers request by request, the same
distribution over seeds, and as many accepted drafts as rejection sampling would accept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import Int32Array
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_table import RequestTable
from headwater.engine_core.step_output import EngineLoad
from tests.engine_core.fixed_speculator import FixedSpeculator
from tests.engine_core.many_requests import check_equality
from tests.engine_core.oracle_speculator import VOCAB_SIZE, answers_of_a_new_engine, new_engine
from tests.engine_core.published_heads import CONFIGS, publish, random_heads
from tests.engine_core.small_models import Answer, SmallEngine, convert, greedy, random_checkpoint
from tests.long_values import long_but

MAX_DRAFTS = 7
MAX_SEQS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact")
    random_checkpoint("qwen3", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Iterator[SmallEngine]:
    engine = SmallEngine(folder, max_draft_tokens=MAX_DRAFTS)
    yield engine
    engine.close()


@pytest.fixture
def crowded(folder: Path) -> Iterator[SmallEngine]:
    options = {
        "num_blocks": 20,
        "max_model_len": 256,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": 64,
    }
    engine = SmallEngine(folder, max_draft_tokens=MAX_DRAFTS, **options)
    yield engine
    engine.close()


@pytest.fixture
def modelled(folder: Path, tmp_path: Path) -> Iterator[SmallEngine]:
    """As `crowded`, with a draft model that is the served one, rounded: it drafts right more often
    than not."""
    options = {
        "num_blocks": 20,
        "max_model_len": 256,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": 64,
    }
    draft = convert(folder.parent / "hf", tmp_path / "draft", dtype="bfloat16")
    engine = SmallEngine(folder, draft_model=draft, max_draft_tokens=MAX_DRAFTS, **options)
    yield engine
    engine.close()


@pytest.mark.long
def test_a_draft_model_changes_none_of_many_requests(
    roomy: SmallEngine, modelled: SmallEngine
) -> None:
    load = check_equality(roomy, modelled, 40, has_draft_model=True)
    assert 200 < load.num_accepted_tokens < load.num_draft_tokens
    assert load.num_preemptions > 0
    assert load.prefix_hits > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_draft_heads_change_none_of_many_requests(
    folder: Path, roomy: SmallEngine, tmp_path: Path, kind: str
) -> None:
    heads = publish(tmp_path / "heads", CONFIGS[kind], random_heads(kind))
    options = {
        "num_blocks": 20,
        "max_model_len": 256,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": 64,
    }
    headed = SmallEngine(folder, draft_heads=heads, max_draft_tokens=MAX_DRAFTS, **options)
    load = check_equality(roomy, headed, 50, has_draft_model=True, name="draft_heads")
    headed.close()
    assert load.num_draft_tokens > 200
    assert load.num_preemptions > 0
    assert load.prefix_hits > 0


@pytest.mark.slow
@pytest.mark.long
def test_no_token_and_no_log_probability_of_many_requests_differs(
    roomy: SmallEngine, crowded: SmallEngine
) -> None:
    load = check_equality(roomy, crowded, 100)
    assert load.num_accepted_tokens > 200
    assert load.num_preemptions > 0
    assert load.prefix_hits > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_token_and_no_log_probability_of_ten_thousand_requests_differs(
    roomy: SmallEngine, crowded: SmallEngine
) -> None:
    load = check_equality(roomy, crowded, 10_000)
    assert load.num_accepted_tokens > 20_000
    assert load.num_preemptions > 100


PROMPT = list(range(20, 32))
NUM_SEEDS = 1800
AT_ONCE = 30


class OneTokenSpeculator(FixedSpeculator):
    """Drafts the second token of each answer by its first."""

    def __init__(self, drafts: dict[int, int]) -> None:
        super().__init__(max_drafts=1)
        self._drafts = drafts

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        is_second = (table.num_known[rows] == len(PROMPT) + 1) & (most > 0)
        last = table.token_ids[rows, table.num_known[rows] - 1].tolist()
        return is_second.astype(np.int32), np.array(
            [[self._drafts[token]] for token in last], np.int32
        )


@dataclass
class Acceptances:
    """Answers of three tokens to one prompt, one a seed, whose second one was drafted."""

    answers: list[Answer]
    load: EngineLoad
    probabilities: list[float]
    """Of each draft, by the model."""


@pytest.fixture(
    scope="module",
    params=long_but(("likeliest token", "third likeliest token"), "third likeliest token"),
)
def drafted(request: pytest.FixtureRequest, roomy: SmallEngine) -> Acceptances:
    place = {"likeliest token": 0, "third likeliest token": 2}[request.param]
    after, _ = answers_of_a_new_engine(
        roomy, [[*PROMPT, token] for token in range(VOCAB_SIZE)], [greedy(1, num_logprobs=3)]
    )
    entries = [answer.logprobs[0] for answer in after]
    drafts = {token: entry.top_ids[place] for token, entry in enumerate(entries)}
    speculator = OneTokenSpeculator(drafts).beside(roomy.config)
    drafting = new_engine(roomy, speculator)
    samplings = of_seeds(0)
    answers = []
    # With all seats taken a step has no room for a draft of each row.
    for first in range(0, NUM_SEEDS, AT_ONCE):
        answers += drafting.answer([PROMPT] * AT_ONCE, *samplings[first : first + AT_ONCE])
    probabilities = [
        math.exp(entries[answer.token_ids[0]].top_logprobs[place]) for answer in answers
    ]
    return Acceptances(answers, drafting.engine.load(), probabilities)


@pytest.fixture(scope="module")
def plain(roomy: SmallEngine) -> list[Answer]:
    """Answers of other seeds, without drafts."""
    return answers_of_a_new_engine(roomy, [PROMPT] * NUM_SEEDS, of_seeds(NUM_SEEDS))[0]


def of_seeds(first: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=3)
        for seed in range(first, first + NUM_SEEDS)
    ]


@pytest.mark.long
def test_a_draft_is_accepted_as_often_as_rejection_sampling_accepts_it(
    drafted: Acceptances,
) -> None:
    """That rule takes a draft with the probability that the model gives it (Leviathan et al. 2023,
    a draft's distribution being one token)."""
    chances = np.array(drafted.probabilities)
    error = math.sqrt(float((chances * (1 - chances)).sum()))
    assert drafted.load.num_drafts == NUM_SEEDS
    assert 50 < chances.sum() < NUM_SEEDS - 50
    assert drafted.load.num_accepted_tokens == pytest.approx(chances.sum(), abs=3 * error)


@pytest.mark.long
def test_tokens_of_other_seeds_come_as_often_with_drafts_as_without(
    drafted: Acceptances, plain: list[Answer]
) -> None:
    for index in range(3):
        ours, theirs = (
            [answer.token_ids[index] for answer in answers] for answers in (drafted.answers, plain)
        )
        assert equality_of_distributions(ours, theirs) > 1e-4, index
    # The test tells distributions apart: of the second token from the third one's, say.
    second, third = ([answer.token_ids[index] for answer in plain] for index in (0, 1))
    assert equality_of_distributions(second, third) < 1e-4


def equality_of_distributions(ours: Sequence[int], theirs: Sequence[int], least: int = 20) -> float:
    """The p-value of Pearson's chi-square test; tokens that came fewer than `least` times count as
    one."""
    together = Counter([*ours, *theirs])
    kinds = [token for token, count in together.items() if count >= least]
    tables = []
    for tokens in (ours, theirs):
        counts = Counter(tokens)
        known = [counts[token] for token in kinds]
        tables.append([*known, len(tokens) - sum(known)])
    table = np.array(tables, np.float64)
    table = table[:, table.sum(axis=0) > 0]
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    freedom = table.shape[1] - 1
    return float(
        torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0))
    )
