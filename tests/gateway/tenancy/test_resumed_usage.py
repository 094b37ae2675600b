"""What a resumed stream costs: one record, whether or not the gateway that died at its end had written it."""

from __future__ import annotations

import asyncio
import datetime
import os

import pytest

from headwater.services.runtime.bus import Bus
from headwater.services.runtime.usage_log import UsageLog
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, completion_body
from tests.gateway.request.test_resumed import RESUMABLE, blocks, id_of, resumed


def records_of(tenant: str, nats_url: str) -> list[tuple[int, int]]:
    """Prompts and tokens of answers."""

    async def read() -> list[tuple[int, int]]:
        async with Bus.open(nats_url) as bus:
            since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
            records = [record async for _, record in UsageLog(bus).read(tenant, since)]
            return [(record.prompts, record.output_tokens) for record in records]

    return asyncio.run(read())


@pytest.mark.slow
def test_a_gateway_that_dies_at_the_last_event_leaves_the_record_to_the_next_and_it_counts_once(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str
) -> None:
    """One without NATS writes no record, as one that dies too soon; the other one writes it, and dies then."""
    nats = f"--nats-url={nats_url}"
    with start_gateway(behind) as silent, start_gateway(behind, nats) as prompt, start_gateway(behind, nats) as other:
        for dying, has_written in ((silent, False), (prompt, True)):
            tenant = f"ada-{os.urandom(4).hex()}"
            headers = {"x-tenant": tenant}
            body = completion_body(max_tokens=40) | RESUMABLE
            with dying.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                told = blocks(reply.iter_lines())
            if has_written:
                other.wait_until(lambda tenant=tenant: len(records_of(tenant, nats_url)) == 1)  # type: ignore[misc]
            dying.stage.kill()
            for after in (len(told) - 1, 0):
                assert resumed(other, id_of(told[0]), after, **headers) == told[after:]
            # Written last, so that whatever else there is was written before.
            other.client.post("/v1/completions", json=completion_body(max_tokens=4), headers=headers)
            other.wait_until(lambda tenant=tenant: (1, 4) in records_of(tenant, nats_url))  # type: ignore[misc]
            assert records_of(tenant, nats_url) == [(1, 40), (1, 4)]
