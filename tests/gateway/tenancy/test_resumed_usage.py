"""What a resumed stream costs: one record, whether or not the gateway that died at its end had
written it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
from pathlib import Path

import pytest

from headwater.services.runtime.bus import Bus
from headwater.services.runtime.usage_log import UsageLog
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, completion_body, output_processor_stage, started
from tests.gateway.request.test_resumed import RESUMABLE, blocks, id_of, resumed
from tests.long_values import long_but


def records_of(tenant: str, nats_url: str) -> list[tuple[int, int]]:
    """Prompts and tokens of answers."""

    async def read() -> list[tuple[int, int]]:
        async with Bus.open(nats_url) as bus:
            since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
            records = [record async for _, record in UsageLog(bus).read(tenant, since)]
            return [(record.prompts, record.output_tokens) for record in records]

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", long_but(["records nothing", "records", "is noticed late"], "records nothing")
)
def test_a_gateway_that_dies_at_the_last_event_leaves_the_record_to_others_and_it_counts_once(
    case: str, behind: Behind, text_folder: Path, start_gateway: GatewayStarter, nats_url: str
) -> None:
    """A gateway without NATS writes no record, like one that dies too soon. The next gateway writes
    it, or the output processor does if the next gateway came before the death was noticed."""
    nats = f"--nats-url={nats_url}"
    tenant = f"ada-{os.urandom(4).hex()}"
    headers = {"x-tenant": tenant}
    output_processor = output_processor_stage(text_folder, nats)
    with contextlib.ExitStack() as stack:
        stack.enter_context(started(output_processor))
        stages = Behind(behind.processor, output_processor.address, behind.replicas)
        dying = stack.enter_context(start_gateway(stages, *[nats] * (case == "records")))
        other = stack.enter_context(start_gateway(stages, nats))
        body = completion_body(max_tokens=40) | RESUMABLE
        with dying.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            reported = blocks(reply.iter_lines())
        if case == "records":
            other.wait_until(lambda: len(records_of(tenant, nats_url)) == 1)
        if case == "is noticed late":
            dying.stage.process.send_signal(signal.SIGSTOP)
        else:
            dying.stage.kill()
        for after in (len(reported) - 1, 0):
            assert resumed(other, id_of(reported[0]), after, **headers) == reported[after:]
        dying.stage.kill()
        other.wait_until(lambda: (1, 40) in records_of(tenant, nats_url))
        # Both processes write their remaining records before they end.
        other.stage.terminate()
        output_processor.terminate()
    assert records_of(tenant, nats_url) == [(1, 40)]
