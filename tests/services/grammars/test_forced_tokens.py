"""Forced tokens as drafts under real grammars: the same answers in fewer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import FinishReason
from headwater.engine_core.scheduling.speculation.grammar_drafts import GrammarDrafts
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.text.model import TextModel
from tests.engine_core.fixed_speculator import Undrafted
from tests.long_values import long_but
from tests.services.grammars.structured_engine import (
    VOCAB_SIZE,
    Ask,
    Told,
    answers,
    config,
    sampling,
)
from tests.services.grammars.test_structured_answers import check, prompt, schema_grammar, text_of

MAX_DRAFTS = 15
WEATHER = {
    "type": "object",
    "properties": {
        "temperature_celsius": {"type": "integer", "minimum": -40, "maximum": 50},
        "precipitation_probability": {"type": "integer", "minimum": 0, "maximum": 100},
        "condition": {"enum": ["sunny", "cloudy", "rainy", "stormy"]},
    },
    "required": ["temperature_celsius", "precipitation_probability", "condition"],
    "additionalProperties": False,
}


class CountedExecutor(SimulatedExecutor):
    """Counts steps; draws are none."""

    num_steps = 0

    def submit(self, plan: StepPlan) -> int:
        self.num_steps += 1
        return super().submit(plan)


@pytest.fixture
def compiler(demo_model: TextModel) -> Iterator[GrammarCompiler]:
    with contextlib.closing(GrammarCompiler(demo_model.folder)) as compiler:
        yield compiler


def beside(settings: EngineConfig) -> GrammarDrafts:
    return GrammarDrafts(
        Undrafted(settings.max_draft_tokens).beside(settings),
        num_rows=settings.max_num_seqs,
        vocab_size=VOCAB_SIZE,
    )


def asks(count: int) -> list[Ask]:
    """Every fourth has no grammar."""
    grammar = schema_grammar(WEATHER)
    return [
        Ask(grammar if i % 4 else "", prompt(i), sampling(seed=i, max_tokens=90))
        for i in range(count)
    ]


def num_tokens(reported: list[Told]) -> int:
    return sum(len(each.token_ids) for each in reported)


@pytest.mark.parametrize("depth", long_but((1, 2, 4), 4))
async def test_answers_are_those_without_drafts_and_every_draft_is_accepted(
    demo_model: TextModel, compiler: GrammarCompiler, depth: int
) -> None:
    plain, _ = await answers(compiler, config(), asks(12))
    settings = config(max_draft_tokens=MAX_DRAFTS, async_depth=depth)
    forced, engine = await answers(compiler, settings, asks(12), speculator=beside(settings))
    assert forced == plain
    ended = [
        reported
        for reported in forced
        if reported.finished and reported.finished.reason is FinishReason.STOP
    ]
    assert len(ended) > 6
    for reported in ended:
        check(WEATHER, text_of(reported, demo_model))
    load = engine.load()
    assert load.num_accepted_tokens == load.num_draft_tokens > num_tokens(forced[1::4]) / 3


async def test_preemption_and_a_resumed_beginning_change_none(compiler: GrammarCompiler) -> None:
    plain, _ = await answers(compiler, config(), asks(12))
    tight = config(max_draft_tokens=MAX_DRAFTS, num_blocks=34, max_model_len=512, max_num_seqs=12)
    crowded, engine = await answers(compiler, tight, asks(12), speculator=beside(tight))
    assert engine.load().num_preemptions > 0
    assert crowded == plain
    again = [
        Ask(ask.grammar, ask.prompt_ids, ask.sampling, reported.token_ids[: 2 + i])
        for i, (ask, reported) in enumerate(zip(asks(12), plain, strict=True))
    ]
    wide = config(max_draft_tokens=MAX_DRAFTS)
    resumed, _ = await answers(compiler, wide, again, speculator=beside(wide))
    assert [reported.token_ids for reported in resumed] == [
        reported.token_ids for reported in plain
    ]


async def test_an_answer_under_a_schema_takes_half_the_steps(compiler: GrammarCompiler) -> None:
    async def num_steps(max_drafts: int) -> int:
        settings = config(max_draft_tokens=max_drafts)
        executor = CountedExecutor(
            settings, SimulatedModel(vocab_size=VOCAB_SIZE, first_token_id=256)
        )
        ask = Ask(schema_grammar(WEATHER, whitespace=""), prompt(1), sampling(seed=1))
        [reported], _ = await answers(
            compiler, settings, [ask], executor, beside(settings) if max_drafts else None
        )
        assert reported.finished is not None
        return executor.num_steps

    assert await num_steps(MAX_DRAFTS) <= await num_steps(0) / 2
