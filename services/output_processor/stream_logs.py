"""The logs of one output processor, by request: bounded in memory."""

from __future__ import annotations

from headwater.proto.output_processor_pb2 import Open

from ..runtime.bus import Bus
from ..runtime.tenant_cache import TenantCache
from . import metrics as output_metrics
from .pending_usage import PendingUsage
from .stream_log import Reader, StreamLog

MAX_BYTES = 64 * 1024 * 1024
"""Largest number of bytes of all requests together."""


class StreamLogs:
    """Logs by request id. Beyond the bound, logs of the tenant with the most bytes are dropped,
    ended ones first, so that no tenant takes the room of others."""

    def __init__(self, usage: PendingUsage | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.usage = usage if usage is not None else PendingUsage(Bus(None))
        self._logs = TenantCache[str, StreamLog](
            max_bytes, goes_first=lambda log: log.has_ended, on_drop=self._close
        )

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
            self._logs.put(add.tenant, add.request_id, log, 0)
            output_metrics.LOGS.inc()
        log.begin(reader, opening, context)
        return log

    def find(self, request_id: str, tenant: str) -> StreamLog | None:
        """Log of a request; None also for another tenant's."""
        log = self._logs.get(request_id)
        return log if log is not None and log.tenant == tenant and log.is_wanted else None

    def resize(self, log: StreamLog, num_bytes: int) -> None:
        """Notes that a log has so many bytes now."""
        self._logs.resize(log.request_id, num_bytes)
        output_metrics.LOG_BYTES.set(self._logs.num_bytes)

    def drop(self, log: StreamLog) -> None:
        """Drops a log: its request cannot be resumed any more."""
        if self._logs.get(log.request_id) is log:
            self._logs.drop(log.request_id)

    def _close(self, log: StreamLog) -> None:
        output_metrics.LOGS.dec()
        output_metrics.LOG_BYTES.set(self._logs.num_bytes)
        log.close()
