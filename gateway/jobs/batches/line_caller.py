"""Computes the result of a batch's line through the gateway's own REST surface, behind the requests
of clients."""

from __future__ import annotations

import asyncio

import msgspec
from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp

from ...tenancy.tenants import Tenant
from .. import in_process
from ..busy import MAX_FAULTS, PAUSES, Busy, is_busy
from .lines import read_line, read_options
from .records import Failure, Response, Result, new_id

LOWEST_PRIORITY = 1000
"""Value of `x-priority` for lines."""


class LineCaller:
    """Computes up to `concurrency` lines at once, over all batches."""

    def __init__(self, app: ASGIApp, *, concurrency: int, registry: CollectorRegistry) -> None:
        self.concurrency = concurrency
        self._app = app
        self._turns = asyncio.Semaphore(concurrency)
        self._lines = Counter(
            "headwater_batch_lines",
            "Lines of batches answered, by status",
            ["status"],
            registry=registry,
        )

    async def answer(self, payer: Tenant, text: bytes, *, patience: int) -> Result:
        """Result of a line. Raises `Busy` for one that cannot be served now, after `patience`
        tries."""
        line = read_line(text)
        result = Result(id=new_id("batch_req_"), custom_id=line.custom_id)
        options = read_options(line)
        for name, value in (("stream", options.stream), ("background", options.background)):
            if bytes(value) == b"true":
                result.error = Failure(
                    code="invalid_value", message=f"{name} is true; allowed: false, in a batch"
                )
                return result
        reply = await self._retry(line.url, bytes(line.body), payer, patience)
        self._lines.labels(reply.status).inc()
        if not reply.body:
            result.error = Failure(
                code="no_answer", message=f"the answer with status {reply.status} was empty"
            )
            return result
        result.response = Response(
            status_code=reply.status, request_id=reply.request_id, body=msgspec.Raw(reply.body)
        )
        return result

    async def _retry(
        self, path: str, body: bytes, payer: Tenant, patience: int
    ) -> in_process.Reply:
        num_refusals = num_faults = 0
        while True:
            async with self._turns:
                reply = await in_process.call(self._app, path, body, payer, LOWEST_PRIORITY)
            if not is_busy(reply):
                num_faults += reply.status >= 500
                if reply.status < 500 or num_faults == MAX_FAULTS:
                    return reply
            elif (num_refusals := num_refusals + 1) == patience:
                raise Busy
            await asyncio.sleep(PAUSES[min(num_refusals + num_faults, len(PAUSES)) - 1])
