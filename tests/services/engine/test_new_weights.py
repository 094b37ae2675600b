"""Weights of an engine service that take the place of others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headwater.services.stack import engine_calls
from tests.chatting_model import make_chatting_model
from tests.services.engine.engine_process import add, client_of, engine_process
from tests.services.engine.test_ranks import SMALL


async def test_an_idle_engine_takes_weights_without_another_call(tmp_path: Path) -> None:
    """Nothing calls it once it has paused."""
    first = make_chatting_model(tmp_path / "first")
    second = make_chatting_model(tmp_path / "second")
    with engine_process(f"--model-folder={first}", *SMALL) as engine:
        loaded = await engine_calls.load_weights(engine.address, second)
        async with asyncio.timeout(60):
            await engine_calls.replace_weights(engine.address, loaded.number, ends_requests=False)
        async with client_of(engine) as client:
            await client.send(add(1, range(20, 40), 8))
            await client.read_until_finished(1)
            assert len(client.tokens[1]) == 8
