"""The logs of one output processor, by request: bounded in memory."""

from __future__ import annotations

from collections import Counter

from headwater.proto.output_processor_pb2 import Open

from ..runtime.bus import Bus
from . import metrics as output_metrics
from .pending_usage import PendingUsage
from .stream_log import Reader, StreamLog

MAX_BYTES = 64 * 1024 * 1024
"""Largest number of bytes of all requests together."""


class StreamLogs:
    """Logs by request id."""

    def __init__(self, usage: PendingUsage | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.usage = usage if usage is not None else PendingUsage(Bus(None))
        self._max_bytes = max_bytes
        self._logs: dict[str, StreamLog] = {}
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        """Number of bytes by tenant, of tenants that have some."""

    def begin(self, reader: Reader, opening: Open, context: bytes) -> StreamLog | None:
        """Log of a request that is to be resumable. None where its earlier output is not known
        here."""
        add = opening.add
        log = self._logs.get(add.request_id)
        if log is not None and log.tenant != add.tenant:
            return None
        if log is None:
            if add.num_output_tokens or len(add.stream_ids) != max(add.sampling.n, 1):
                return None
            log = StreamLog(self, self.usage, add.request_id, add.tenant, len(add.stream_ids))
            self._logs[add.request_id] = log
            output_metrics.LOGS.inc()
        log.begin(reader, opening, context)
        return log

    def find(self, request_id: str, tenant: str) -> StreamLog | None:
        """Log of a request; None also for another tenant's."""
        log = self._logs.get(request_id)
        return log if log is not None and log.tenant == tenant and log.is_wanted else None

    def grow(self, log: StreamLog, num_bytes: int) -> None:
        """Counts bytes of a log. Past the bound it drops logs of the tenant that has the most
        bytes, so that no tenant takes the room of others: the oldest that has ended, or else the
        oldest."""
        self._count(log.tenant, num_bytes)
        while self._num_bytes > self._max_bytes and self._logs:
            [(tenant, _)] = self._bytes_of.most_common(1)
            logs = [each for each in self._logs.values() if each.tenant == tenant]
            self.drop(next((each for each in logs if each.has_ended), logs[0]))

    def drop(self, log: StreamLog) -> None:
        """Drops a log: its request cannot be resumed any more."""
        if self._logs.get(log.request_id) is log:
            del self._logs[log.request_id]
            self._count(log.tenant, -log.num_bytes)
            output_metrics.LOGS.dec()
            log.close()

    def _count(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bytes_of[tenant] += num_bytes
        if not self._bytes_of[tenant]:
            del self._bytes_of[tenant]
        output_metrics.LOG_BYTES.set(self._num_bytes)
