"""Many who follow one grammar: they are spread over families, which threads follow beside one
another."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.services.engine.stage import grammars, masks
from headwater.services.engine.stage.grammars import GrammarCompiler
from tests.services.grammars.structured_engine import ASKER, Ask, answers, config, sampling
from tests.services.grammars.test_structured_answers import PERSON, schema_grammar

GRAMMAR = schema_grammar(PERSON)


def sizes(members: Sequence[tuple[object, masks.Family]]) -> list[int]:
    return sorted(Counter(id(family) for _, family in members).values())


@pytest.mark.parametrize(("patience", "expected"), [(10.0, [6, 7, 7]), (0.0, [20])])
async def test_a_family_grows_only_while_there_is_no_other_one(
    patience: float, expected: list[int], demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "num_mask_threads", lambda: 3)
    monkeypatch.setattr(grammars, "PATIENCE_SECONDS", patience)
    compiler = GrammarCompiler(demo_folder)
    members = await asyncio.gather(*(compiler.member(GRAMMAR.encode(), ASKER) for _ in range(20)))
    # Without patience nobody waits for the second one, which is there for those who come later.
    assert sizes(members) == expected
    families = {id(family): family for _, family in members}
    for _, family in members:
        family.num_members -= 1
    assert {family.num_members for family in families.values()} == {0}
    more = [await compiler.member(GRAMMAR.encode(), ASKER) for _ in range(4)]
    assert all(id(family) in families for _, family in more[:1])
    compiler.close()


@pytest.mark.long
async def test_answers_do_not_depend_on_how_many_threads_follow_them(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[list[list[int]]] = []
    for num_threads in (1, 3):
        for module in (grammars, masks):
            monkeypatch.setattr(module, "num_mask_threads", lambda count=num_threads: count)
        asks = [
            Ask(GRAMMAR if i % 7 else "", [300 + i] * 5, sampling(seed=i, max_tokens=60))
            for i in range(20)
        ]
        with contextlib.closing(GrammarCompiler(demo_folder)) as compiler:
            each, _ = await answers(compiler, config(), asks)
        reported.append([one.token_ids for one in each])
    assert reported[0] == reported[1]
