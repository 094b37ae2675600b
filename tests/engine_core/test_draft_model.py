"""A smaller model drafts on a CPU: answers stay what they are, and its keys and values are where
the blocks are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from headwater.bench.forced_answers import FREE, ForcedAnswers
from headwater.engine_core.config import ConfigError
from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.executors.drafter.computed_positions import CATCH_UP
from headwater.engine_core.request import NewRequest, Speculation
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.model_speculator import (
    PROBE_STEPS,
    ModelSpeculator,
)
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_state import RequestState
from headwater.engine_core.scheduling.table.request_table import RequestTable
from headwater.engine_core.step_output import EngineLoad
from tests.engine_core.fixed_speculator import FixedSpeculator
from tests.engine_core.oracle_speculator import SAMPLINGS, answers_of_a_new_engine
from tests.engine_core.small_models import (
    SHAPE,
    Answer,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.long_values import long_but

LONG = pytest.mark.long
MAX_DRAFTS = 5
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 512, n).tolist() for n in (1, 5, 16, 31, 40, 100)]
COSTS = StepCosts.measured([1, 64], [1.0, 1.0])
LENGTHS = (24, 23, 1, 30, 17, 2)
SHORT_LENGTHS = (12, 11, 1, 16, 9, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    random_checkpoint("qwen3", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of another architecture, which have nothing to do with those of the served model."""
    path = tmp_path_factory.mktemp("other")
    random_checkpoint("llama2", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def twin(folder: Path) -> Iterator[SmallEngine]:
    """An engine whose draft model is the served one."""
    engine = SmallEngine(folder, draft_model=folder, max_draft_tokens=MAX_DRAFTS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def stranger(folder: Path, other: Path) -> Iterator[SmallEngine]:
    engine = SmallEngine(folder, draft_model=other, max_draft_tokens=MAX_DRAFTS)
    yield engine
    engine.close()


class WholeDrafts(FixedSpeculator):
    """Asks the executor for as many drafts as there may be, of rows that run ahead of their results
    or wait for them."""

    def __init__(self, max_drafts: int = MAX_DRAFTS, *, is_ahead: bool = False) -> None:
        super().__init__(max_drafts)
        self._is_ahead = is_ahead

    def seat(self, request: RequestState) -> None:
        self.runs_ahead[request.row] = self._is_ahead
        self.needs_result[request.row] = not self._is_ahead

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        self.runs_ahead[row] = self.needs_result[row] = False

    def settle_drafts(
        self, rows: RowIndices, most: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> None:
        assert (num_drafts == most).all()

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        return most

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, None]:
        return self.lengths(rows, most, total), None


def drafted(
    small: SmallEngine, samplings: list[SamplingParams], *, is_ahead: bool = False
) -> tuple[list[Answer], EngineLoad]:
    speculator = WholeDrafts(is_ahead=is_ahead).beside(small.config)
    return answers_of_a_new_engine(small, PROMPTS, samplings, speculator)


def adaptive(small: SmallEngine, pass_seconds: float = 0.01) -> ModelSpeculator:
    """With a model that drafts beside look-up."""
    num_rows = small.config.max_num_seqs
    passes = StepCosts.measured([1, 64], [pass_seconds, pass_seconds])
    ngram = NGramProposer(num_rows, small.config.max_model_len, MAX_DRAFTS)
    return ModelSpeculator(
        [ngram], COSTS, passes, num_rows=num_rows, max_drafts=MAX_DRAFTS, vocab_size=512
    )


@pytest.mark.parametrize("kind", long_but(SAMPLINGS, "log probabilities"))
def test_answers_and_log_probabilities_are_those_without_a_draft_model(
    twin: SmallEngine, stranger: SmallEngine, kind: str
) -> None:
    samplings = [SamplingParams(max_tokens=n, **SAMPLINGS[kind]) for n in SHORT_LENGTHS]
    plain, _ = answers_of_a_new_engine(twin, PROMPTS, samplings)
    for small in (twin, stranger):
        for is_ahead in (False, True):
            answers, load = drafted(small, samplings, is_ahead=is_ahead)
            assert answers == plain
            assert load.num_draft_tokens > 0
        answers, load = answers_of_a_new_engine(small, PROMPTS, samplings, adaptive(small))
        assert answers == plain
        assert load.num_draft_tokens > 0


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize("kind", [kind for kind in SAMPLINGS if kind != "a stop"])
def test_all_drafts_of_a_model_that_is_the_served_one_are_accepted(
    twin: SmallEngine, kind: str, is_ahead: bool
) -> None:
    """Sampled ones too, under filters and penalties: both draw with the same noise."""
    samplings = [SamplingParams(max_tokens=n, **SAMPLINGS[kind]) for n in LENGTHS]
    _, load = drafted(twin, samplings, is_ahead=is_ahead)
    assert load.num_accepted_tokens == load.num_draft_tokens > 50


def test_few_drafts_of_a_model_of_other_weights_are_accepted(stranger: SmallEngine) -> None:
    _, load = drafted(stranger, [SamplingParams(max_tokens=40, **SAMPLINGS["seeded"])])
    assert load.num_accepted_tokens < 0.2 * load.num_draft_tokens


@pytest.mark.long
def test_a_draft_model_may_have_another_architecture_and_another_type(
    folder: Path, twin: SmallEngine, tmp_path: Path
) -> None:
    random_checkpoint("gemma3", tmp_path / "hf")
    draft = convert(tmp_path / "hf", tmp_path / "ours", dtype="bfloat16")
    samplings = [SamplingParams(max_tokens=n, **SAMPLINGS["filtered"]) for n in LENGTHS]
    small = SmallEngine(folder, draft_model=draft, max_draft_tokens=MAX_DRAFTS)
    plain, _ = answers_of_a_new_engine(twin, PROMPTS, samplings)
    answers, load = drafted(small, samplings)
    small.close()
    assert answers == plain
    assert load.num_draft_tokens > 50


def test_a_cached_prefix_has_the_draft_models_keys_and_values(twin: SmallEngine) -> None:
    prompts = [PROMPTS[-1]]
    samplings = [SamplingParams(max_tokens=40, **SAMPLINGS["seeded"])]
    plain, _ = answers_of_a_new_engine(twin, prompts, samplings, num_rounds=2)
    answers, load = answers_of_a_new_engine(
        twin, prompts, samplings, WholeDrafts().beside(twin.config), num_rounds=2
    )
    assert answers == plain
    assert [answer.cached_tokens for answer in answers] == [0, 96]
    assert load.num_accepted_tokens == load.num_draft_tokens > 50


class PausingSpeculator(WholeDrafts):
    """Asks for no drafts in the first steps, then for whole ones."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_left = num_steps

    def lengths(self, rows: RowIndices, most: Int32Array, total: int) -> Int32Array:
        self.num_left -= 1
        return super().lengths(rows, most, total) if self.num_left < 0 else np.zeros_like(most)


@pytest.mark.parametrize(
    "num_steps", long_but((1, CATCH_UP - 1, CATCH_UP, 2 * CATCH_UP + 3), 1, CATCH_UP)
)
def test_what_was_not_computed_while_nothing_was_drafted_is_caught_up(
    twin: SmallEngine, num_steps: int
) -> None:
    samplings = [greedy(60)]
    speculator = PausingSpeculator(num_steps).beside(twin.config)
    plain, _ = answers_of_a_new_engine(twin, PROMPTS[:3], samplings)
    answers, load = answers_of_a_new_engine(twin, PROMPTS[:3], samplings, speculator)
    assert answers == plain
    assert load.num_accepted_tokens == load.num_draft_tokens > 50


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_behind_a_draft_that_was_wrong_the_model_goes_on_from_what_was_sampled(
    folder: Path, is_ahead: bool
) -> None:
    """Every seventh token of the answer is another than the model's, so that it is drafted wrong;
    all others follow from it, and are drafted right only by a model that has read it."""
    length = 60
    forced = ForcedAnswers(64)
    forced.expect({5: [7 + i if i % 7 == 6 else FREE for i in range(length)]})
    with forced.installed():
        small = SmallEngine(folder, draft_model=folder, max_draft_tokens=MAX_DRAFTS)
    _, load = answers_of_a_new_engine(
        small,
        PROMPTS[2:3],
        [greedy(length, seed=5)],
        WholeDrafts(is_ahead=is_ahead).beside(small.config),
    )
    small.close()
    assert load.num_accepted_tokens == num_acceptable(length)


def num_acceptable(length: int) -> int:
    """Drafted tokens before the next one that is drafted wrong, step by step."""
    position = 1
    num_accepted = 0
    while position < length:
        right = [i for i in range(position, min(position + MAX_DRAFTS, length - 1)) if i % 7 != 6]
        run = next((j for j, i in enumerate(right) if i != position + j), len(right))
        num_accepted += run
        position += run + 1
    return num_accepted


@pytest.mark.long
@pytest.mark.parametrize("kind", ["penalties", "greedy", "seeded"])
def test_requests_that_are_preempted_between_drafts_answer_the_same(
    folder: Path, other: Path, kind: str
) -> None:
    samplings = [SamplingParams(max_tokens=60, **SAMPLINGS[kind])]
    few = {"num_blocks": 16, "max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    for draft in (folder, other):
        narrow = SmallEngine(folder, **few, draft_model=draft, max_draft_tokens=MAX_DRAFTS)
        plain, _ = answers_of_a_new_engine(narrow, PROMPTS, samplings)
        for is_ahead in (False, True):
            crowded, load = drafted(narrow, samplings, is_ahead=is_ahead)
            assert [answer.token_ids for answer in crowded] == [
                answer.token_ids for answer in plain
            ]
            assert load.num_preemptions > 0
            assert load.num_draft_tokens > 50
            assert draft == other or load.num_accepted_tokens > 0.9 * load.num_draft_tokens
        narrow.close()


@pytest.mark.parametrize(
    ("asked", "is_drafted"),
    [
        (Speculation(), True),
        (Speculation(drafter="draft_model", max_tokens=2), True),
        (Speculation(drafter="ngram"), False),
        (Speculation(is_on=False), False),
    ],
    ids=str,
)
def test_requests_are_drafted_as_they_ask(
    twin: SmallEngine, asked: Speculation, is_drafted: bool
) -> None:
    engine = Engine(twin.config, twin.executor, speculator=adaptive(twin))
    new = NewRequest(
        key=1, prompt_ids=PROMPTS[3], output_ids=[], sampling=greedy(30), speculation=asked
    )
    engine.add(new)
    while engine.has_work():
        engine.step()
    load = engine.load()
    # This answer repeats nothing, so that look-up finds nothing.
    assert (load.num_draft_tokens > 0) == is_drafted
    assert (
        not is_drafted
        or load.num_draft_tokens <= (asked.max_tokens or MAX_DRAFTS) * load.num_drafts
    )


@pytest.mark.long
def test_drafts_of_a_model_that_drafts_wrong_are_given_up_and_tried_again(
    stranger: SmallEngine,
) -> None:
    speculator = adaptive(stranger, pass_seconds=0.3)
    length = 8 * PROBE_STEPS
    _, load = answers_of_a_new_engine(
        stranger, PROMPTS[:1], [SamplingParams(max_tokens=length, seed=1)], speculator
    )
    assert 4 < load.num_drafts < length / 8


def folder_of(path: Path, **shape: Any) -> Path:
    config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1, "hidden_size": 64} | shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (
            {"vocab_size": 640},
            "allowed: a model of 512 tokens, as the served one; this one has 640",
        ),
        (
            {"max_position_embeddings": 256},
            r"a model of 1024 positions \(max_model_len\); this one has 256",
        ),
        (
            {"head_dim": 24},
            "a model that is served by itself; of this one head_dim is 24; allowed: multiples of 16",
        ),
    ],
    ids=["vocabulary", "positions", "head size"],
)
def test_a_draft_model_that_does_not_fit_is_refused_by_name(
    folder: Path, tmp_path: Path, shape: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"draft_model is '{tmp_path}/ours'; .*{sentence}"):
        SmallEngine(folder, draft_model=folder_of(tmp_path, **shape), max_draft_tokens=MAX_DRAFTS)


def test_fewer_positions_are_enough_for_an_engine_that_serves_no_more(
    folder: Path, tmp_path: Path
) -> None:
    draft = folder_of(tmp_path, max_position_embeddings=256)
    SmallEngine(folder, draft_model=draft, max_draft_tokens=MAX_DRAFTS, max_model_len=256).close()


def test_an_engine_that_drafts_nothing_takes_no_draft_model(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"draft_model is .*; allowed: none where nothing is drafted"
    ):
        SmallEngine(folder, draft_model=folder)


def test_the_memory_of_a_cache_holds_both_models_planes(folder: Path) -> None:
    sized = {"num_blocks": 0, "kv_cache_memory": 64 << 20}
    alone = SmallEngine(folder, **sized)
    both = SmallEngine(folder, **sized, draft_model=folder, max_draft_tokens=3)
    assert both.config.num_blocks == alone.config.num_blocks // 2
    alone.close()
    both.close()
