from __future__ import annotations

import asyncio

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.usage_log import UsageLog, UsageRecord


async def test_a_report_that_is_not_understood_keeps_no_later_one_from_its_reader(nats_url: str) -> None:
    record = UsageRecord(request_id="r", tenant="ada", model="m", at=0.0, prompt_tokens=3, output_tokens=4)
    async with Bus.open(nats_url, wait_seconds=30) as bus:
        log = UsageLog(bus)
        reports = log.left()
        first = asyncio.ensure_future(anext(reports))
        # A subscription is known to the server when a later request of its connection is answered.
        await asyncio.sleep(0)
        await bus.request("unserved.subject", b"", seconds=0.05)
        await bus.publish(subjects.USAGE_LEFT, b"{")
        await bus.publish(subjects.USAGE_LEFT, b'{"request_id": 1}')
        await log.publish_left(record, 5)
        async with asyncio.timeout(30):
            left = await first
        assert (left.request_id, left.tenant, left.used, left.seq) == ("r", "ada", 7, 5)
        await reports.aclose()
