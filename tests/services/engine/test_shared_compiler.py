"""Tenants at the compiler of one engine: turns, what is kept for whom, and what a full queue
answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import StepOutput
from headwater.services.engine.stage import grammars
from headwater.services.engine.stage.grammar_queue import GrammarQueue
from headwater.services.engine.stage.grammars import GROWTH_BYTES, GrammarCompiler
from headwater.services.engine.stage.masks import MaskWriter
from headwater.services.grammars.asker import Asker
from headwater.services.runtime.fair_queue import QueueLimits
from tests.services.grammars.structured_engine import (
    ASKER,
    VOCAB_SIZE,
    Ask,
    answers,
    config,
    sampling,
)
from tests.services.grammars.test_structured_answers import PERSON, schema_grammar

GRAMMAR = schema_grammar(PERSON).encode()
FLOOD = Asker("flood", b"f" * 16)
NEIGHBOUR = Asker("neighbour", b"n" * 16)
GROWING = json.dumps(
    {"grammars": [{"lark_grammar": "start: /(.*a.{14}|.*b.{13}|.*c.{12}|.*e.{11}|.*t.{15})z/"}]}
)
"""Reaches the limit on states within a few tokens."""


def slow(number: int) -> bytes:
    """A grammar that takes a second or so to compile."""
    patterns = {f"^[a-z]{{{i},{i + 1}}}x{i}.*y{number}$": {} for i in range(100)}
    return schema_grammar({"patternProperties": patterns}).encode()


@pytest.fixture
async def compiler(demo_folder: Path) -> AsyncIterator[GrammarCompiler]:
    with contextlib.closing(GrammarCompiler(demo_folder)) as compiler:
        await compiler.read()
        yield compiler


@contextlib.asynccontextmanager
async def busy(compiler: GrammarCompiler) -> AsyncIterator[Callable[[], None]]:
    """All threads of the compiler are busy until the function is called."""
    may_end = threading.Event()
    tenants = range(3)
    held = [
        asyncio.create_task(compiler._threads.run(f"t{i}", 1, lambda: may_end.wait(60)))
        for i in tenants
    ]
    await asyncio.sleep(0)
    try:
        yield may_end.set
    finally:
        may_end.set()
        await asyncio.gather(*held)


async def test_a_grammar_is_compiled_beside_a_flood_of_slow_ones_of_another_tenant(
    compiler: GrammarCompiler,
) -> None:
    flood = [asyncio.create_task(compiler.member(slow(i), FLOOD)) for i in range(8)]
    await asyncio.sleep(0.05)
    for i in range(3):
        await compiler.member(GRAMMAR + b" " * i, NEIGHBOUR)
    # In the order of arrival all of them were compiled before.
    assert not all(each.done() for each in flood)
    for each in flood:
        each.cancel()


async def test_the_wait_for_a_thread_is_no_part_of_a_compilations_time(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 1.0)
    async with busy(compiler) as release:
        member = asyncio.create_task(compiler.member(GRAMMAR, NEIGHBOUR))
        await asyncio.sleep(1.2)
        assert not member.done()
        release()
        await member


async def test_a_request_whose_grammar_gets_no_turn_ends_as_busy_and_the_next_one_is_served(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "LIMITS", QueueLimits(num_waiting=1, wait_seconds=0.1))
    outputs: list[StepOutput] = []
    sent: list[object] = []
    with contextlib.closing(GrammarCompiler(demo_folder)) as compiler:
        await compiler.read()
        masks = np.zeros((1, 4, VOCAB_SIZE // 32), np.int32)
        writer = MaskWriter(masks, sent.append, lambda seconds: None)
        queue = GrammarQueue(compiler, writer, send=sent.append, deliver=outputs.append)

        def enter(key: int, grammar: bytes) -> None:
            request = NewRequest(
                key=key,
                prompt_ids=[1],
                output_ids=[],
                sampling=SamplingParams(max_tokens=4),
                has_grammar=True,
            )
            queue.enter(request, grammar)

        async with busy(compiler):
            enter(1, GRAMMAR)
            await asyncio.sleep(0)
            enter(2, GRAMMAR + b" ")
            async with asyncio.timeout(60):
                while len(outputs) < 2:  # noqa: ASYNC110 (a callback)
                    await asyncio.sleep(0.01)
        ends = {end.key: end for output in outputs for end in output.finishes}
        assert {end.reason for end in ends.values()} == {FinishReason.BUSY}
        assert "no turn for the compilation of its grammar came within 0.1 s" in ends[1].error
        assert "1 requests of the tenant wait for the compilation" in ends[2].error
        enter(3, GRAMMAR)
        async with asyncio.timeout(60):
            while not sent:  # noqa: ASYNC110 (a callback)
                await asyncio.sleep(0.01)
        writer.close()


async def test_a_compiled_grammar_is_one_namespaces(compiler: GrammarCompiler) -> None:
    _, ours = await compiler.member(GRAMMAR, NEIGHBOUR)
    _, theirs = await compiler.member(GRAMMAR, FLOOD)
    _, again = await compiler.member(GRAMMAR, NEIGHBOUR)
    assert ours is again
    assert ours is not theirs


async def test_compiled_grammars_of_a_flood_drive_out_none_of_another_tenant(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 10 * GROWTH_BYTES)
    monkeypatch.setattr(grammars, "heap_bytes", lambda: 0)
    with contextlib.closing(GrammarCompiler(demo_folder)) as compiler:
        _, ours = await compiler.member(GRAMMAR, NEIGHBOUR)
        for i in range(20):
            await compiler.member(GRAMMAR + b" " * i, FLOOD)
        assert (len(compiler._kept), compiler._kept.num_bytes <= 10 * GROWTH_BYTES) == (9, True)
        assert (await compiler.member(GRAMMAR, NEIGHBOUR))[1] is ours


async def test_few_grammars_are_kept_where_the_process_has_allocated_too_much(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MIN_KEPT", 2)
    for i in range(5):
        await compiler.member(GRAMMAR + b" " * i, FLOOD)
    assert len(compiler._kept) == 5
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 32 << 20)
    what_grammars_grew_by = np.ones(64 << 20, np.uint8)
    await compiler.member(GRAMMAR, NEIGHBOUR)
    assert len(compiler._kept) == 2
    assert what_grammars_grew_by.all()


async def test_a_grammar_whose_limits_are_used_up_is_compiled_again(
    compiler: GrammarCompiler,
) -> None:
    matcher, _ = await compiler.member(GROWING.encode(), ASKER)
    mask = np.zeros(VOCAB_SIZE // 32, np.int32)
    random = np.random.default_rng(0)
    while not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        matcher.consume_token(int(random.choice(allowed)))
    reasons = []
    for _ in range(2):
        (reported,), _ = await answers(
            compiler, config(), [Ask(GROWING, [300] * 5, sampling(seed=1, max_tokens=10))]
        )
        assert reported.finished is not None
        reasons.append(reported.finished.reason)
    # The answer that finds them used up fails; the one behind it does not.
    assert reasons == [FinishReason.UNFOLLOWABLE, FinishReason.LENGTH]
