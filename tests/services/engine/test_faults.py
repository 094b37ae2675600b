"""An engine that has lost a task which others rely on ends, so that another is started, instead of
going on without."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import Finished, StepOutput
from headwater.services.engine.__main__ import serve
from headwater.services.engine.core.messages import Command
from headwater.services.engine.settings import EngineSettings
from headwater.services.engine.stage.grammar_queue import GrammarQueue
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.engine.stage.masks import MaskWriter
from tests.long_values import long_but


@pytest.mark.parametrize(
    "task",
    long_but(
        ("server.EngineServer.sweep", "masks.MaskWriter.run"),
        "server.EngineServer.sweep",
    ),
)
async def test_an_engine_ends_with_the_fault_of_a_task_that_must_not_end(
    monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    async def broken(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(f"headwater.services.engine.stage.{task}", broken)
    with pytest.raises(LookupError, match="a bug"):
        await serve(EngineSettings(executor="simulated", served_model_name="some", metrics_port=-1))


async def test_a_stream_whose_grammar_breaks_the_compiler_ends_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(GrammarCompiler, "_compile", broken)
    written: asyncio.Queue[StepOutput] = asyncio.Queue()
    sent: list[Command] = []
    writer = MaskWriter(np.zeros((1, 1, 1), np.int32), sent.append, lambda _: None)
    compiler = GrammarCompiler(None)
    queue = GrammarQueue(compiler, writer, send=sent.append, deliver=written.put_nowait)
    request = NewRequest(
        key=1, prompt_ids=[1], output_ids=[], sampling=SamplingParams(), has_grammar=True
    )
    queue.enter(request, b"a grammar")
    async with asyncio.timeout(60):
        finishes = (await written.get()).finishes
    error = "the grammar cannot be compiled: LookupError('a bug')"
    assert finishes == [
        Finished(key=1, reason=FinishReason.ERROR, num_output_tokens=0, error=error)
    ]
    assert not queue.has(1)
    assert not sent
    writer.close()
    compiler.close()
