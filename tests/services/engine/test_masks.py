"""The thread that follows grammars: it hears the core itself and answers it."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headwater.engine_core.step_output import MasksWanted, StepOutput
from headwater.services.engine.grammars import GrammarCompiler
from headwater.services.engine.masks import MaskWriter
from headwater.services.engine.messages import Command, MasksFilled, Step, encode
from headwater.services.engine.ring import RingReader, RingWriter, create_ring
from headwater.services.runtime import owned_task
from tests.services.grammars.structured_engine import VOCAB_SIZE
from tests.services.grammars.test_structured_answers import schema_grammar


def report(output: StepOutput) -> bytes:
    return encode(Step(output, prefill_tokens=0, decode_rows=0, seconds=0.0))


async def test_masks_come_while_the_event_loop_stands_still(demo_folder: Path) -> None:
    writer_end, reader_end = create_ring()
    reports, said = RingWriter(writer_end), queue.Queue[Command]()
    table = np.zeros((1, 2, VOCAB_SIZE // 32), np.int32)
    compiler, writer = GrammarCompiler(demo_folder), MaskWriter(table, said.put, lambda seconds: None)
    writer.follow(7, *await compiler.member(schema_grammar({"type": "boolean"}).encode()), [])
    async with owned_task(writer.run(RingReader(reader_end))):
        await asyncio.sleep(0)
        reports.write(
            report(StepOutput(step=1, masks_wanted=MasksWanted(keys=[7], rows=[1], tickets=[3], output_indices=[0])))
        )
        # Waits in this thread, so nothing runs in the loop.
        assert said.get(timeout=20) == MasksFilled([1], [3], [0], [1])
        assert table[0, 1].any()
        token_id = int(np.flatnonzero(np.unpackbits(table[0, 1].view(np.uint8), bitorder="little"))[0])
        reports.write(report(StepOutput(step=2, keys=[7], num_tokens=[1], token_ids=[token_id], is_drawn=True)))
        assert said.get(timeout=20) == MasksFilled([1], [3], [1], [1])
    reports.close()
    writer.close()
    compiler.close()


async def test_a_fault_is_heard_by_whoever_waits_and_the_core_goes_on() -> None:
    writer_end, reader_end = create_ring()
    reports = RingWriter(writer_end)
    reports.write(b"no report")
    writer = MaskWriter(np.zeros((1, 1, 1), np.int32), lambda command: None, lambda seconds: None)
    with pytest.raises(msgspec.DecodeError):
        await writer.run(RingReader(reader_end))
    writer.close()
    async with asyncio.timeout(20):
        for _ in range(10):
            # Together more than the ring holds.
            await asyncio.to_thread(reports.write, bytes(1 << 20))
    reports.close()
