"""Usage records that are not stored yet. This stage writes a record when the gateway that should
write it is dead.

A gateway that is back in time writes its own records. Bounded in memory; knows nothing about
limits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence

import structlog

from headwater.proto.output_processor_pb2 import Open

from ..runtime.bus import Bus
from ..runtime.gateway_identity import NOBODY, Gateway
from ..runtime.tasks import start_in
from ..runtime.usage_log import UsageLog, UsageRecord
from .pending_record import ChoiceUsage, PendingRecord

RETURN_SECONDS = 3.0
"""Seconds within which a living gateway reopens a broken session: it tries five times a second."""
MAX_RECORDS = 32_768


class PendingUsage:
    """Pending records of one output processor. Without NATS it keeps none."""

    def __init__(self, bus: Bus) -> None:
        self.log = UsageLog(bus)
        self._records: dict[tuple[Gateway, str], PendingRecord] = {}
        """Records by holder and record id, the oldest first."""
        self._num_sessions: Counter[Gateway] = Counter()
        self._gone: dict[Gateway, asyncio.TimerHandle] = {}
        """Gateways whose session closed and that may come back."""
        self._announcing: set[asyncio.Task[None]] = set()
        self._is_leaving = False

    def on_session_opened(self, gateway: Gateway) -> None:
        """Notes that a gateway opened a session. A gateway without an identity has no records."""
        if gateway == NOBODY:
            return
        self._num_sessions[gateway] += 1
        if (timer := self._gone.pop(gateway, None)) is not None:
            timer.cancel()

    def on_session_closed(self, gateway: Gateway) -> None:
        """Starts the gateway's time to return, unless this process stops: then the gateway goes on
        elsewhere."""
        if gateway == NOBODY:
            return
        self._num_sessions[gateway] -= 1
        if not self._num_sessions[gateway]:
            del self._num_sessions[gateway]
            if not self._is_leaving:
                loop = asyncio.get_running_loop()
                self._gone[gateway] = loop.call_later(RETURN_SECONDS, self._write_all, gateway)

    def on_recorded(self, gateway: Gateway, record_ids: Iterable[str]) -> None:
        """Drops records that the gateway has stored itself."""
        for record_id in record_ids:
            self._records.pop((gateway, record_id), None)

    def leave(self) -> None:
        """Writes the records that wait for a next gateway: none comes any longer."""
        self._is_leaving = True
        self._write_all(NOBODY)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[PendingUsage]:
        """Scope at whose end the records of dead gateways are written, as far as there is time."""
        async with self.log.running():
            yield self
            for gateway, timer in list(self._gone.items()):
                timer.cancel()
                self._write_all(gateway)

    def open(
        self, gateway: Gateway, opening: Open, choices: Sequence[ChoiceUsage]
    ) -> PendingRecord | None:
        """The record that these choices add to. None where no record is kept."""
        if gateway == NOBODY or not opening.HasField("charge") or not self.log.is_kept:
            return None
        charge = opening.charge
        add = opening.add
        record = self._records.get((gateway, charge.record_id))
        if record is None:
            record = PendingRecord(charge.record_id, add.tenant, opening.model, charge.key_id)
            self.assign(record, gateway)
        record.add(opening, choices)
        return record

    def assign(self, record: PendingRecord, gateway: Gateway) -> None:
        """Makes a gateway the holder of the record; NOBODY: the record waits for the next one."""
        self._drop(record)
        record.holder = gateway
        record.gateway = gateway.name or record.gateway
        self._records[gateway, record.record_id] = record
        if len(self._records) > MAX_RECORDS:
            oldest = next(iter(self._records.values()))
            structlog.get_logger().error(
                "usage of a request is left to its gateway alone", record=oldest.record_id
            )
            self._drop(oldest)

    def release(self, record: PendingRecord) -> None:
        """Leaves the record for the next gateway: its gateway left the request without settling
        it."""
        if self._is_leaving:
            self._drop(record)
        elif self._has(record):
            self.assign(record, NOBODY)

    def supersede(self, record: PendingRecord) -> None:
        """Drops a waiting record: the next gateway's record covers it."""
        if record.holder == NOBODY:
            self._drop(record)

    def write_released(self, record: PendingRecord) -> None:
        """Writes a record for which no next gateway came."""
        if record.holder == NOBODY and self._has(record):
            self._write(record)

    def _has(self, record: PendingRecord) -> bool:
        return self._records.get((record.holder, record.record_id)) is record

    def _drop(self, record: PendingRecord) -> None:
        if self._has(record):
            del self._records[record.holder, record.record_id]

    def _write(self, pending: PendingRecord) -> None:
        self._drop(pending)
        record = pending.to_record()
        self.log.add(record, lambda seq: self._on_stored(record, seq))

    def _write_all(self, gateway: Gateway) -> None:
        self._gone.pop(gateway, None)
        records = [record for (holder, _), record in self._records.items() if holder == gateway]
        if records:
            structlog.get_logger().warning(
                "usage that a gateway left behind", gateway=gateway.name, records=len(records)
            )
        for record in records:
            self._write(record)

    def _on_stored(self, record: UsageRecord, seq: int) -> None:
        start_in(self._announcing, self.log.publish_left(record, seq))
