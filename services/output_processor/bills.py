"""What requests used for which no usage record is stored yet: written here when the gateway that should is dead.

A gateway that is back before its time is over writes its own. Bounded in memory; knows nothing about limits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence

import structlog

from headwater.proto.output_processor_pb2 import Open
from headwater.services.bus import Bus
from headwater.services.gateway_identity import NOBODY, Gateway
from headwater.services.output_processor.bill import Bill
from headwater.services.output_processor.stream import OutputStream
from headwater.services.runtime import log_failure
from headwater.services.usage_log import UsageLog, UsageRecord

RETURN_SECONDS = 3.0
"""In which a gateway whose session broke begins another, if it lives: it tries five times a second."""
MAX_BILLS = 32_768


class Bills:
    """Of one output processor. Nothing is kept where there is no NATS for it."""

    def __init__(self, bus: Bus) -> None:
        self.log = UsageLog(bus)
        self._bills: dict[tuple[Gateway, str], Bill] = {}
        """By who shall write its record, the oldest first."""
        self._num_sessions: Counter[Gateway] = Counter()
        self._gone: dict[Gateway, asyncio.TimerHandle] = {}
        """Gateways that may come back."""
        self._telling: set[asyncio.Task[None]] = set()
        self._is_leaving = False

    # Gateways.

    def joined(self, gateway: Gateway) -> None:
        """Who does not say who it is has no bills."""
        if gateway == NOBODY:
            return
        self._num_sessions[gateway] += 1
        if (timer := self._gone.pop(gateway, None)) is not None:
            timer.cancel()

    def parted(self, gateway: Gateway) -> None:
        """Its session broke. One that is cut off because this process leaves goes on elsewhere."""
        if gateway == NOBODY:
            return
        self._num_sessions[gateway] -= 1
        if not self._num_sessions[gateway]:
            del self._num_sessions[gateway]
            if not self._is_leaving:
                loop = asyncio.get_running_loop()
                self._gone[gateway] = loop.call_later(RETURN_SECONDS, self._write_all, gateway)

    def recorded(self, gateway: Gateway, record_ids: Iterable[str]) -> None:
        for record_id in record_ids:
            self._bills.pop((gateway, record_id), None)

    def leave(self) -> None:
        """Nobody comes any longer for what waits."""
        self._is_leaving = True
        self._write_all(NOBODY)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Bills]:
        """What the dead have left is written before it ends, as far as there is time."""
        async with self.log.running():
            yield self
            for gateway, timer in list(self._gone.items()):
                timer.cancel()
                self._write_all(gateway)

    # Their requests.

    def opened(self, gateway: Gateway, opening: Open, streams: Sequence[OutputStream]) -> Bill | None:
        """The bill that these choices go on. None where nobody keeps one."""
        if gateway == NOBODY or not opening.HasField("charge") or not self.log.is_kept:
            return None
        charge, add = opening.charge, opening.add
        bill = self._bills.get((gateway, charge.record_id))
        if bill is None:
            bill = Bill(charge.record_id, add.tenant, opening.model, charge.key_id)
            self.give(bill, gateway)
        bill.add(opening, streams)
        return bill

    def give(self, bill: Bill, gateway: Gateway) -> None:
        """Has another gateway write it, or nobody for now."""
        self.drop(bill)
        bill.holder, bill.gateway = gateway, gateway.name or bill.gateway
        self._bills[gateway, bill.record_id] = bill
        if len(self._bills) > MAX_BILLS:
            oldest = next(iter(self._bills.values()))
            structlog.get_logger().error("usage of a request is left to its gateway alone", record=oldest.record_id)
            self.drop(oldest)

    def drop(self, bill: Bill) -> None:
        if self._has(bill):
            del self._bills[bill.holder, bill.record_id]

    def _has(self, bill: Bill) -> bool:
        return self._bills.get((bill.holder, bill.record_id)) is bill

    def hold(self, bill: Bill) -> None:
        """Its gateway is gone without a word: it waits for the next one."""
        if self._is_leaving:
            self.drop(bill)
        elif self._has(bill):
            self.give(bill, NOBODY)

    def superseded(self, bill: Bill) -> None:
        """Another one tells the same, if this one waits."""
        if bill.holder == NOBODY:
            self.drop(bill)

    def write_held(self, bill: Bill) -> None:
        """Nobody came."""
        if bill.holder == NOBODY and self._has(bill):
            self._write(bill)

    def _write(self, bill: Bill) -> None:
        """Its record, as of now."""
        self.drop(bill)
        record = bill.record()
        self.log.add(record, lambda seq: self._stored(record, seq))

    def _write_all(self, gateway: Gateway) -> None:
        self._gone.pop(gateway, None)
        bills = [bill for (holder, _), bill in self._bills.items() if holder == gateway]
        if bills:
            structlog.get_logger().warning("usage that a gateway left behind", gateway=gateway.name, records=len(bills))
        for bill in bills:
            self._write(bill)

    def _stored(self, record: UsageRecord, seq: int) -> None:
        task = asyncio.create_task(self.log.tell_left(record, seq))
        task.add_done_callback(log_failure)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
