"""The thread that follows grammars: it hears the core itself and answers it."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headwater.engine_core.step_output import MaskReport, MasksWanted
from headwater.engine_core.system.ring import RingReader, RingWriter, create_ring
from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.engine.core.messages import Command, Forced, MasksFilled, encode
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.engine.stage.masks import MaskWriter
from headwater.services.grammars.grammars import fill
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.runtime.tasks import owned_task
from headwater.services.text.model import TextModel
from tests.services.grammars.structured_engine import ASKER, EOS, VOCAB_SIZE
from tests.services.grammars.test_structured_answers import schema_grammar


async def test_masks_come_while_the_event_loop_stands_still(demo_folder: Path) -> None:
    writer_end, reader_end = create_ring()
    reports = RingWriter(writer_end)
    sent = queue.Queue[Command]()
    table = np.zeros((1, 2, VOCAB_SIZE // 32), np.int32)
    compiler, writer = (
        GrammarCompiler(demo_folder),
        MaskWriter(table, sent.put, lambda seconds: None),
    )
    writer.follow(
        7, *await compiler.member(schema_grammar({"type": "boolean"}).encode(), ASKER), []
    )
    async with owned_task(writer.run(RingReader(reader_end))):
        await asyncio.sleep(0)
        reports.write(
            encode(
                MaskReport(wanted=MasksWanted(keys=[7], rows=[1], tickets=[3], output_indices=[0]))
            )
        )
        # Waits in this thread, so nothing runs in the loop.
        assert sent.get(timeout=60) == MasksFilled([1], [3], [0], [1])
        assert table[0, 1].any()
        token_id = int(
            np.flatnonzero(np.unpackbits(table[0, 1].view(np.uint8), bitorder="little"))[0]
        )
        reports.write(encode(MaskReport(keys=[7], num_tokens=[1], token_ids=[token_id])))
        assert sent.get(timeout=60) == MasksFilled([1], [3], [1], [1])
    reports.close()
    writer.close()
    compiler.close()


async def test_each_draft_up_to_one_that_is_forbidden_gets_the_mask_that_follows_it(
    demo_folder: Path, demo_model: TextModel
) -> None:
    sent: list[Command] = []
    table = np.zeros((6, 2, VOCAB_SIZE // 32), np.int32)
    compiler, writer = (
        GrammarCompiler(demo_folder),
        MaskWriter(table, sent.append, lambda seconds: None),
    )
    grammar = grammar_of(
        StructuredOutput(choice=StructuredOutput.Choices(choices=["yes sir", "yes"])), ()
    )
    yes, sir, no = (
        demo_model.tokenizer.encode(text, add_special_tokens=False)[0]
        for text in ("yes", " sir", "no")
    )
    masks, matcher = [], (await compiler.member(grammar.encode(), ASKER))[0]
    for token_id in (yes, sir, EOS[0], EOS[0]):
        mask = np.zeros(VOCAB_SIZE // 32, np.int32)
        fill(matcher, mask)
        masks.append(mask.tolist())
        matcher.consume_token(token_id)
    everything = [-1] * (VOCAB_SIZE // 32)

    def ask(key: int, ticket: int, draft_ids: list[int]) -> list[list[int]]:
        wanted = MasksWanted(
            keys=[key], rows=[1], tickets=[ticket], output_indices=[0], draft_ids=[draft_ids]
        )
        writer.on_reports(MaskReport(wanted=wanted))
        assert sent == [
            MasksFilled([1], [ticket], [0], [len(draft_ids) + 1]),
            Forced([1], [ticket], [0], [[yes]]),
        ]
        sent.clear()
        filled: list[list[int]] = table[: len(draft_ids) + 1, 1].tolist()
        return filled

    writer.follow(7, *await compiler.member(grammar.encode(), ASKER), [])
    assert ask(7, 1, [yes, sir, EOS[0], EOS[0], yes]) == [*masks, masks[3], everything]
    assert ask(7, 1, [yes, no, sir]) == [masks[0], masks[1], everything, everything]
    assert ask(7, 1, [no]) == [masks[0], everything]
    # None of that was the answer.
    writer.on_reports(MaskReport(keys=[7], num_tokens=[2], token_ids=[yes, sir]))
    assert sent == [MasksFilled([1], [1], [2], [1])]
    assert table[0, 1].tolist() == masks[2]
    writer.close()
    compiler.close()


async def test_masks_of_drafts_behind_drawn_tokens_are_reported_with_the_masks_of_these_tokens(
    demo_folder: Path, demo_model: TextModel
) -> None:
    sent: list[Command] = []
    compiler = GrammarCompiler(demo_folder)
    table = np.zeros((2, 2, VOCAB_SIZE // 32), np.int32)
    writer = MaskWriter(table, sent.append, lambda seconds: None)
    grammar = grammar_of(
        StructuredOutput(choice=StructuredOutput.Choices(choices=["yes sir", "yes"])), ()
    )
    yes, sir = (
        demo_model.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("yes", " sir")
    )
    for key in (7, 8):
        writer.follow(key, *await compiler.member(grammar.encode(), ASKER), [], is_drafted=False)
    writer.on_reports(
        MaskReport(
            wanted=MasksWanted(keys=[7, 8], rows=[0, 1], tickets=[3, 4], output_indices=[0, 0])
        )
    )
    drafts = MasksWanted(keys=[8], rows=[1], tickets=[4], output_indices=[1], draft_ids=[[sir]])
    drawn = MaskReport(keys=[7, 8], num_tokens=[1, 1], token_ids=[yes, yes])
    writer.on_reports(drawn, following=lambda: [MaskReport(wanted=drafts)])
    assert sent == [
        MasksFilled([0, 1], [3, 4], [0, 0], [1, 1]),
        MasksFilled([0, 1], [3, 4], [1, 1], [1, 2]),
    ]
    assert table[0, 0].tolist() == table[0, 1].tolist() != table[1, 1].tolist()
    writer.close()
    compiler.close()


async def test_forced_tokens_are_reported_behind_the_mask_of_the_first(
    demo_folder: Path, demo_model: TextModel
) -> None:
    sent: list[Command] = []
    compiler = GrammarCompiler(demo_folder)
    num_words = VOCAB_SIZE // 32
    text = "the longest night of the year"
    grammar = grammar_of(
        StructuredOutput(
            choice=StructuredOutput.Choices(choices=[f"{text}: {end}" for end in "ab"])
        ),
        (),
    )
    run = demo_model.tokenizer.encode(f"{text}:", add_special_tokens=False)
    wanted = MasksWanted(keys=[7], rows=[1], tickets=[3], output_indices=[0])

    async def reported_by(
        num_positions: int, *, is_drafted: bool = True, tokens: list[int]
    ) -> list[list[list[int]]]:
        """What is forced, at first and after each token, where anything is."""
        writer = MaskWriter(
            np.zeros((num_positions, 2, num_words), np.int32), sent.append, lambda seconds: None
        )
        writer.follow(7, *await compiler.member(grammar.encode(), ASKER), [], is_drafted=is_drafted)
        writer.on_reports(MaskReport(wanted=wanted))
        for token_id in tokens:
            writer.on_reports(MaskReport(keys=[7], num_tokens=[1], token_ids=[token_id]))
        writer.close()
        assert isinstance(sent[0], MasksFilled)
        forced = [command.forced_ids for command in sent if isinstance(command, Forced)]
        sent.clear()
        return forced

    assert await reported_by(16, tokens=run) == [[run[i:]] for i in range(len(run))]
    # What the longest draft takes, and the longest draft behind it.
    assert await reported_by(2, tokens=[]) == [[run[:3]]]
    assert (
        await reported_by(1, tokens=[]) == await reported_by(16, is_drafted=False, tokens=[]) == []
    )
    compiler.close()


async def test_a_fault_of_the_thread_is_raised_and_the_core_never_waits_for_room() -> None:
    writer_end, reader_end = create_ring()
    reports = RingWriter(writer_end)
    reports.write(b"no report")
    writer = MaskWriter(np.zeros((1, 1, 1), np.int32), lambda command: None, lambda seconds: None)
    with pytest.raises(msgspec.DecodeError):
        await writer.run(RingReader(reader_end))
    writer.close()
    async with asyncio.timeout(60):
        for _ in range(10):
            # Together more than the ring holds.
            await asyncio.to_thread(reports.write, bytes(1 << 20))
    reports.close()
