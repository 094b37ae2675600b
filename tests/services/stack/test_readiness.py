"""What is said of a line that does not get ready."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from headwater.services.runtime.tasks import owned_task
from headwater.services.stack.readiness import until_ready
from tests.gateway.processes import gateway_stage, started


@pytest.mark.parametrize("is_nats_there", [False, True])
async def test_who_waits_for_a_line_is_told_for_what(is_nats_there: bool, nats_url: str) -> None:
    gone = "nats://me:secret@127.0.0.1:1"
    servers = {"NATS": f"{gone},{nats_url}" if is_nats_there else gone, "Redis": None}
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stage = gateway_stage()
    with started(stage):
        async with (
            httpx.AsyncClient(base_url=f"http://{stage.addresses['rest']}", timeout=60) as gateway,
            owned_task(until_ready(gateway, servers, told.set_result, late_seconds=0.0)),
        ):
            said = await told
    if is_nats_there:
        assert said == "still waiting for: processor, output processor, engine"
    else:
        assert said == "still waiting: nobody answers at 127.0.0.1:1 (NATS)"
