"""Answers that a grammar holds, beside lists of allowed tokens, bad words and a minimum of
tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.step_output import MaskReport, MasksWanted
from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.engine.core.messages import Add, Command
from headwater.services.engine.stage.grammar_queue import GrammarQueue
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.engine.stage.masks import MaskWriter
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.text.model import TextModel
from tests.services.grammars.structured_engine import (
    ASKER,
    EOS,
    VOCAB_SIZE,
    Ask,
    Told,
    answers,
    config,
    sampling,
)


@pytest.fixture
def compiler(demo_folder: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(demo_folder)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def words(demo_model: TextModel) -> dict[str, int]:
    """Tokens of one word."""
    return {
        word: demo_model.tokenizer.encode(word, add_special_tokens=False)[0]
        for word in ("yes", "no", " sir", " man")
    }


def choices(*texts: str) -> str:
    return grammar_of(StructuredOutput(choice=StructuredOutput.Choices(choices=texts)), {})


async def reported(
    compiler: GrammarCompiler, grammar: str, output_ids: tuple[int, ...] = (), **bounds: object
) -> list[Told]:
    """Answers to eight prompts."""
    asks = [Ask(grammar, [300 + i], sampling(i, **bounds), list(output_ids)) for i in range(8)]
    return (await answers(compiler, config(), asks))[0]


async def texts(
    model: TextModel,
    compiler: GrammarCompiler,
    grammar: str,
    output_ids: tuple[int, ...] = (),
    **bounds: object,
) -> set[str]:
    found = await reported(compiler, grammar, output_ids, **bounds)
    assert {each.finished and each.finished.reason for each in found} == {FinishReason.STOP}
    return {model.tokenizer.decode(each.token_ids[:-1]) for each in found}


async def test_an_answer_has_allowed_tokens_alone_and_may_end_where_none_of_them_is_left(
    demo_model: TextModel, compiler: GrammarCompiler, words: dict[str, int]
) -> None:
    yes = words["yes"]
    assert await texts(demo_model, compiler, choices("yes", "no"), allowed_token_ids=(yes,)) == {
        "yes"
    }
    assert await texts(
        demo_model, compiler, choices("yes", "yes sir"), allowed_token_ids=(yes,)
    ) == {"yes"}


async def test_an_answer_has_no_bad_word(
    demo_model: TextModel, compiler: GrammarCompiler, words: dict[str, int]
) -> None:
    yes = words["yes"]
    sir = words[" sir"]
    man = words[" man"]
    # Other tokens spell the bad word too, and those are not bad.
    bounds = {"bad_words": ((yes, sir),), "allowed_token_ids": (yes, sir, man)}
    for output_ids in ((), (yes,)):
        assert await texts(
            demo_model, compiler, choices("yes sir", "yes man"), output_ids, **bounds
        ) == {"yes man"}
    single = {
        letter
        for text in ("y", "ye")
        for letter in demo_model.tokenizer.encode(text, add_special_tokens=False)
    }
    bad = tuple((token,) for token in {yes, *single})
    assert await texts(demo_model, compiler, choices("yes", "no"), bad_words=bad) == {"no"}


async def test_an_answer_goes_on_to_its_least_tokens_as_far_as_its_grammar_does(
    demo_model: TextModel, compiler: GrammarCompiler
) -> None:
    grammar = choices("yes", "yes sir")
    for least, expected in ((0, {"yes", "yes sir"}), (2, {"yes sir"}), (50, {"yes sir"})):
        found = await texts(
            demo_model, compiler, grammar, min_tokens=least, min_tokens_blocked_ids=EOS
        )
        assert found == expected, least


async def test_an_answer_that_bounds_and_grammar_leave_no_token_ends_with_an_error(
    compiler: GrammarCompiler, words: dict[str, int]
) -> None:
    yes = words["yes"]
    sir = words[" sir"]
    for grammar, bounds, num_tokens in (
        (choices("yes", "no"), {"allowed_token_ids": (sir,)}, 0),
        (choices("yes sir"), {"allowed_token_ids": (yes,)}, 1),
        (choices("yes sir"), {"bad_words": ((yes, sir),)}, 1),
    ):
        for each in await reported(compiler, grammar, **bounds):
            assert each.finished is not None
            assert (each.finished.reason, len(each.token_ids)) == (
                FinishReason.UNFOLLOWABLE,
                num_tokens,
            )
            assert each.finished.error == (
                "nothing that allowed_token_ids and bad_words leave matches the grammar "
                "from here on"
            )


async def test_masks_behind_drafts_hold_to_the_bounds(
    compiler: GrammarCompiler, words: dict[str, int]
) -> None:
    yes = words["yes"]
    sir = words[" sir"]
    man = words[" man"]
    table = np.zeros((3, 1, VOCAB_SIZE // 32), np.int32)
    writer = MaskWriter(table, lambda command: None, lambda seconds: None)
    member = await compiler.member(choices("yes sir", "yes man", "yes").encode(), ASKER)
    bounds = sampling(bad_words=((yes, sir),), min_tokens=3, min_tokens_blocked_ids=EOS)
    writer.follow(1, *member, [], sampling=bounds)
    wanted = MasksWanted(
        keys=[1], rows=[0], tickets=[1], output_indices=[0], draft_ids=[[yes, man]]
    )
    writer.on_reports(MaskReport(wanted=wanted))
    allowed = [
        set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")))
        for row in table[:, 0]
    ]
    assert (man in allowed[1], sir in allowed[1], allowed[1] & {*EOS}) == (True, False, set())
    # Two of three tokens, but the grammar has no third.
    assert allowed[2] == {*EOS}
    writer.close()


async def test_the_core_leaves_the_bounds_to_the_masks(
    compiler: GrammarCompiler, words: dict[str, int]
) -> None:
    sent: asyncio.Queue[Command] = asyncio.Queue()
    writer = MaskWriter(
        np.zeros((1, 1, VOCAB_SIZE // 32), np.int32), lambda command: None, lambda seconds: None
    )
    queue = GrammarQueue(compiler, writer, send=sent.put_nowait, deliver=lambda output: None)
    bounds = sampling(
        bad_words=((5,),), allowed_token_ids=(6, 2), min_tokens=3, min_tokens_blocked_ids=EOS
    )
    request = NewRequest(key=1, prompt_ids=[1], output_ids=[], sampling=bounds, has_grammar=True)
    queue.enter(request, choices("yes").encode())
    async with asyncio.timeout(60):
        command = await sent.get()
    assert isinstance(command, Add)
    assert command.request.sampling == sampling(min_tokens=3)
    writer.close()
