"""Runs a file of requests against a deployment: many at once, results as they come. Knows nothing
about how the deployment was started."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx

from ..runtime.progress import Report
from .batch_lines import ANSWERED, Line, keep_results, read_lines, result_of

BUSY = (429, 503)
"""Statuses of a deployment that may answer later."""
MAX_ATTEMPTS = 8
LONGEST_PAUSE_SECONDS = 30.0


class BatchRun:
    """Requests of `source` whose answers are not in `output` yet."""

    def __init__(self, source: Path, output: Path) -> None:
        """Raises `BatchFileError` and `OSError`."""
        lines = read_lines(source)
        # Only once the file of requests is known to be one.
        done = keep_results(output)
        self.lines = [line for line in lines if line.custom_id not in done]
        self.num_kept = len(lines) - len(self.lines)
        self.statuses: Counter[int] = Counter()
        """Number of results of this run by status."""
        self._output = output

    @property
    def num_failed(self) -> int:
        return self.statuses.total() - self.statuses[ANSWERED]

    async def run(
        self,
        gateway: str,
        headers: dict[str, str],
        *,
        model: str,
        num_at_once: int,
        report: Report,
    ) -> None:
        """Sends the requests, `num_at_once` at a time; those without a model are for `model`.
        Raises `httpx.TransportError` for a deployment that is out of reach; results so far
        stay."""
        client = httpx.AsyncClient(
            base_url=gateway,
            headers=headers,
            timeout=httpx.Timeout(10, read=None, pool=None),
            limits=httpx.Limits(max_connections=num_at_once),
        )
        waiting = iter(self.lines)

        async def work(file: TextIO) -> None:
            for line in waiting:
                reply = await _answer(client, line, {"model": model, **line.body})
                request_id = reply.headers.get("x-request-id", "")
                body = _body_of(reply)
                file.write(result_of(line, reply.status_code, request_id, body) + "\n")
                file.flush()
                self.statuses[reply.status_code] += 1
                report("requests", self.statuses.total(), len(self.lines))

        async with client:
            with self._output.open("a") as file:
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(num_at_once, len(self.lines))):
                            group.create_task(work(file))
                except BaseExceptionGroup as failures:
                    raise failures.exceptions[0] from None


async def _answer(client: httpx.AsyncClient, line: Line, body: dict[str, Any]) -> httpx.Response:
    """Sends a request and returns its reply. If the deployment is busy or a limit is reached, waits
    for the reply's `retry-after` and sends again."""
    for pause in _pauses():
        reply = await client.post(line.url, json=body)
        if reply.status_code not in BUSY or not reply.headers.get("retry-after"):
            break
        asked = float(reply.headers["retry-after"])
        await asyncio.sleep(min(max(asked, pause), LONGEST_PAUSE_SECONDS))
    return reply


def _pauses() -> Iterator[float]:
    """Shortest pauses, in seconds, after each failed attempt."""
    for attempt in range(MAX_ATTEMPTS):
        yield 0.25 * 2**attempt


def _body_of(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return reply.text
