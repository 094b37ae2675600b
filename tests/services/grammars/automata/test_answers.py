"""Answers whose masks come from the automaton of their grammar, with llguidance one step behind."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.step_output import MaskReport, MasksWanted
from headwater.services.engine.core.messages import Command, Fail, MasksFilled
from headwater.services.engine.stage import masks
from headwater.services.engine.stage.grammars import ANSWERS_PER_AUTOMATON, GrammarCompiler
from headwater.services.engine.stage.masks import Family, MaskWriter
from headwater.services.grammars.automata.token_automaton import TokenAutomaton
from headwater.services.text.model import TextModel
from tests.services.grammars.structured_engine import (
    ASKER,
    VOCAB_SIZE,
    Ask,
    answers,
    config,
    sampling,
)
from tests.services.grammars.test_structured_answers import PERSON, prompt, schema_grammar

GRAMMAR = schema_grammar(PERSON, whitespace="").encode()
LETTER = schema_grammar({"type": "array", "items": {"enum": ["a", "b"]}}, whitespace="").encode()
DIGIT = schema_grammar({"type": "array", "items": {"enum": [1, 2]}}, whitespace="").encode()


async def with_automaton(compiler: GrammarCompiler, grammar: bytes) -> tuple[Any, Family]:
    """A member of the grammar once its automaton is built."""
    async with asyncio.timeout(60):
        while True:
            matcher, family = await compiler.member(grammar, ASKER)
            if family.automaton is not None:
                return matcher, family
            await asyncio.sleep(0.01)


async def test_an_automaton_is_built_for_a_grammar_that_is_asked_for_often(
    compiler: GrammarCompiler,
) -> None:
    for _ in range(ANSWERS_PER_AUTOMATON):
        _, family = await compiler.member(GRAMMAR, ASKER)
        assert family.automaton is None
    before = next(iter(compiler._kept._entries.values()))[1].num_bytes
    _, family = await with_automaton(compiler, GRAMMAR)
    assert family.automaton is not None
    after = next(iter(compiler._kept._entries.values()))[1].num_bytes
    assert after >= before + family.automaton.num_bytes > before + (1 << 16)


async def test_answers_are_the_same_whoever_makes_their_masks(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = [Ask(GRAMMAR.decode(), prompt(i), sampling(seed=i, max_tokens=60)) for i in range(3)]
    plain, _ = await answers(compiler, config(), asks)
    await with_automaton(compiler, GRAMMAR)
    monkeypatch.setattr(masks, "MASKS_PER_CHECK", 1)
    written = list[bool]()
    write = TokenAutomaton.write_mask

    def noted(self: TokenAutomaton, state: int, last_token: int, out: Any) -> bool:
        written.append(write(self, state, last_token, out))
        assert not self.is_off
        return written[-1]

    monkeypatch.setattr(TokenAutomaton, "write_mask", noted)
    assert (await answers(compiler, config(), asks))[0] == plain
    assert all(written)


async def test_an_automaton_that_llguidance_disagrees_with_is_turned_off_and_its_answer_ends(
    compiler: GrammarCompiler, demo_model: TextModel
) -> None:
    said = list[Command]()
    refused = list[None]()
    table = np.zeros((1, 2, VOCAB_SIZE // 32), np.int32)
    writer = MaskWriter(table, said.append, lambda seconds: None, lambda: refused.append(None))
    _, wrong = await with_automaton(compiler, LETTER)
    matcher, family = await compiler.member(DIGIT, ASKER)
    family.automaton = wrong.automaton
    assert wrong.automaton is not None
    wanted = MasksWanted(keys=[7], rows=[1], tickets=[3], output_indices=[0])
    opening, letter, comma = (
        demo_model.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("[", '"', "a")
    )
    writer.follow(7, matcher, family, [])
    writer.on_reports(MaskReport(wanted=wanted))
    writer.on_reports(MaskReport(keys=[7], num_tokens=[1], token_ids=[opening]))
    assert not refused, "llguidance has read the bracket, which both allow"
    writer.on_reports(MaskReport(keys=[7], num_tokens=[1], token_ids=[letter]))
    assert (len(refused), wrong.automaton.is_off) == (1, True)
    writer.on_reports(MaskReport(keys=[7], num_tokens=[1], token_ids=[comma]))
    assert [type(each) for each in said] == [*[MasksFilled] * 3, Fail]
    assert len(refused) == 1
    writer.close()


async def test_a_mask_that_llguidance_disagrees_with_turns_the_automaton_off(
    compiler: GrammarCompiler, demo_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MASKS_PER_CHECK", 1)
    refused = list[None]()
    table = np.zeros((1, 1, VOCAB_SIZE // 32), np.int32)
    writer = MaskWriter(
        table, lambda command: None, lambda seconds: None, lambda: refused.append(None)
    )
    _, wrong = await with_automaton(compiler, LETTER)
    matcher, family = await compiler.member(DIGIT, ASKER)
    family.automaton = wrong.automaton
    [opening] = demo_model.tokenizer.encode("[", add_special_tokens=False)
    writer.follow(7, matcher, family, [opening])
    writer.on_reports(
        MaskReport(wanted=MasksWanted(keys=[7], rows=[0], tickets=[1], output_indices=[1]))
    )
    assert len(refused) == 1
    writer.close()
