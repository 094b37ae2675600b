"""Rights of roles in a real NATS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from headwater.proto import events_pb2
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.stack.access import NATS_FILE, Passwords
from headwater.services.stack.embedded import start_nats
from headwater.services.stack.model_turns import ModelTurns
from headwater.services.stack.roles import Role


async def test_the_supervisor_receives_the_loads_of_engines(
    free_dir: Path, kept: dict[str, Any]
) -> None:
    passwords = Passwords.new()
    passwords.write_servers(free_dir)
    server = await start_nats(free_dir, config=free_dir / NATS_FILE, **kept)
    received = asyncio.Event()
    turns = ModelTurns(1, lambda _: None)
    turns.on_change = received.set
    load = events_pb2.Load(num_running=1).SerializeToString()
    try:
        async with (
            asyncio.timeout(60),
            Bus.open(passwords.url(Role.OPERATOR, server.url), wait_seconds=10) as operator,
            Bus.open(passwords.url(Role.ENGINE, server.url), wait_seconds=10) as engine,
            operator.subscribe(subjects.EVERY_LOAD) as loads,
        ):
            following = asyncio.ensure_future(turns.follow(loads))
            # The subscription may not be there yet.
            while not received.is_set():
                await engine.publish(subjects.load("m", "m-0"), load)
                await asyncio.sleep(0.05)
            following.cancel()
            await asyncio.wait((following,))
    finally:
        await server.stop()
