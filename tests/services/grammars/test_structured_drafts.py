"""Drafts under grammars: right, wrong, forbidden, behind an answer's end. None changes a token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.request import FinishReason
from headwater.engine_core.scheduling.speculation.model_speculator import ModelSpeculator
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_table import RequestTable
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.text.model import TextModel
from tests.engine_core.fixed_speculator import FixedSpeculator
from tests.long_values import long_but
from tests.services.grammars.structured_engine import (
    VOCAB_SIZE,
    Ask,
    Told,
    answers,
    config,
    sampling,
    simulated,
)
from tests.services.grammars.test_structured_answers import (
    PERSON,
    check,
    prompt,
    schema_grammar,
    text_of,
)

MAX_DRAFTS = 6


class Drafter(FixedSpeculator):
    """Drafts answers that it knows, and what would stand behind their ends; a share of its tokens
    are any."""

    def __init__(self, known: Sequence[Told], wrong: float) -> None:
        super().__init__(MAX_DRAFTS)
        self._answers = [reported.token_ids for reported in known]
        self._wrong = wrong
        self._rng = np.random.default_rng(0)

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        draft_ids = self._rng.integers(0, VOCAB_SIZE, (len(rows), self.max_drafts)).astype(np.int32)
        for i, row in enumerate(rows.tolist()):
            request = table.requests[row]
            assert request is not None
            at = int(table.num_known[row]) - request.num_prompt_tokens
            right = self._answers[request.key][at : at + self.max_drafts]
            is_right = self._rng.random(len(right)) >= self._wrong
            draft_ids[i, : len(right)][is_right] = np.array(right, np.int32)[is_right]
        return most, draft_ids


@pytest.fixture
def compiler(demo_model: TextModel) -> Iterator[GrammarCompiler]:
    with contextlib.closing(GrammarCompiler(demo_model.folder)) as compiler:
        yield compiler


def drafting(**more: object) -> EngineConfig:
    return config(max_draft_tokens=MAX_DRAFTS, **more)


@pytest.mark.parametrize("depth", long_but((1, 2, 4), 4))
@pytest.mark.parametrize("wrong", long_but((0.0, 0.3, 1.0), 0.3))
async def test_answers_are_those_without_drafts(
    demo_model: TextModel, compiler: GrammarCompiler, wrong: float, depth: int
) -> None:
    grammar = schema_grammar(PERSON)
    asks = [
        Ask(grammar if i % 4 else "", prompt(i), sampling(seed=i, max_tokens=90)) for i in range(12)
    ]
    plain, _ = await answers(compiler, config(), asks)
    settings = drafting(async_depth=depth)
    drafted, engine = await answers(
        compiler, settings, asks, speculator=Drafter(plain, wrong).beside(settings)
    )
    assert drafted == plain
    ended = [
        i
        for i, reported in enumerate(drafted)
        if reported.finished and reported.finished.reason is FinishReason.STOP
    ]
    # Each of these ended inside a draft when all were right.
    assert len(ended) > 3
    for i in ended:
        check(PERSON, text_of(drafted[i], demo_model))
    load = engine.load()
    assert load.num_draft_tokens > 200
    if wrong < 1:
        assert load.num_accepted_tokens > (0.3 if wrong else 0.7) * load.num_draft_tokens


async def test_neither_preemption_nor_a_resumed_beginning_change_them(
    compiler: GrammarCompiler,
) -> None:
    grammar = schema_grammar(PERSON)
    asks = [
        Ask(grammar if i % 3 else "", prompt(i), sampling(seed=i, max_tokens=90)) for i in range(12)
    ]
    plain, _ = await answers(compiler, config(), asks)
    tight = drafting(num_blocks=34, max_model_len=512, max_num_seqs=12)
    crowded, engine = await answers(
        compiler, tight, asks, speculator=Drafter(plain, 0.3).beside(tight)
    )
    assert engine.load().num_preemptions > 0
    assert crowded == plain
    again = [
        Ask(ask.grammar, ask.prompt_ids, ask.sampling, reported.token_ids[: 5 + i])
        for i, (ask, reported) in enumerate(zip(asks, plain, strict=True))
    ]
    wide = drafting()
    resumed, _ = await answers(compiler, wide, again, speculator=Drafter(plain, 0.3).beside(wide))
    assert [reported.token_ids for reported in resumed] == [
        reported.token_ids for reported in plain
    ]


@pytest.mark.parametrize("depth", [1, 3])
async def test_a_draft_model_drafts_for_rows_without_a_grammar_beside_rows_with_one(
    compiler: GrammarCompiler, depth: int
) -> None:
    grammar = schema_grammar(PERSON)
    asks = [
        Ask(grammar if i % 2 else "", prompt(i), sampling(seed=i, max_tokens=90)) for i in range(12)
    ]
    plain, _ = await answers(compiler, config(), asks)
    settings = drafting(async_depth=depth)
    flat = StepCosts.measured([1, 64], [1.0, 1.0])
    sizes = {"num_rows": settings.max_num_seqs, "max_drafts": MAX_DRAFTS, "vocab_size": VOCAB_SIZE}
    speculator = ModelSpeculator([], flat, StepCosts.measured([1], [0.01]), **sizes)
    drafted, engine = await answers(compiler, settings, asks, simulated(settings, 0.8), speculator)
    assert drafted == plain
    load = engine.load()
    assert 100 < load.num_accepted_tokens < load.num_draft_tokens


async def test_a_stop_and_the_longest_length_hold_inside_a_draft(compiler: GrammarCompiler) -> None:
    grammar = schema_grammar(PERSON)
    [whole], _ = await answers(compiler, config(), [Ask(grammar, prompt(1), sampling(seed=5))])
    stop = whole.token_ids[9]
    asks = [
        Ask(grammar, prompt(1), sampling(seed=5, max_tokens=8)),
        Ask(grammar, prompt(1), replace(sampling(seed=5), stop_token_ids=(stop,))),
    ]
    plain, _ = await answers(compiler, config(), asks)
    settings = drafting()
    drafted, _ = await answers(
        compiler, settings, asks, speculator=Drafter([whole, whole], 0.0).beside(settings)
    )
    assert drafted == plain
    assert drafted[0].token_ids == whole.token_ids[:8]
    assert drafted[1].token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
