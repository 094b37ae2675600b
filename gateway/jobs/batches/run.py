"""One run of a batch: checks its lines, hands out those without a result, gathers the results into
files.

When a process dies meanwhile, the next run goes on from the results. A run that was overtaken finds
another's name on the batch and stops; nothing that it wrote is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import IO

from headwater.services.runtime.errors import InternalError, NotFound, Unavailable

from ...buckets import FAILURES
from ..retry import retry
from ..tenant_storage import TenantStorage
from ..workers import MAX_ERRORS
from .files import Files
from .hand_out import HandOut
from .ledger import Ledger
from .lines import check_lines
from .output_files import Outcome, gathered
from .ranges import Ranges, cut
from .records import Batch, Counts, Fault, Faults, Kept
from .results import Follower, Results

PROGRESS_SECONDS = 0.5
"""Seconds between two checks whether the batch is to be cancelled, and between two updates of its
progress."""
REPEAT_SECONDS = 10.0
"""Seconds between two times at which unfinished ranges are queued again; the queue ignores those
that it has."""


class NotMine(Exception):
    """Another run has the batch now."""


class Run:
    def __init__(
        self, storage: TenantStorage, tenant: str, batch_id: str, *, max_line_bytes: int
    ) -> None:
        durable = storage.durable
        self._files = Files(durable)
        self._ledger = Ledger(durable)
        self._ranges = Ranges(durable)
        self._results = Results(durable)
        self._tenant = tenant
        self._batch_id = batch_id
        self._max_line_bytes = max_line_bytes
        self._name = secrets.token_hex(8)
        self._counts = Counts()
        self._storage = storage
        self._num_bytes = 0

    async def to_its_end(self) -> Batch:
        """Runs the batch until it is over and returns it. Raises `NotMine`, `NotFound`, and what
        storage raises."""
        kept = await retry(lambda: self._ledger.change(self._tenant, self._batch_id, self._claim))
        if not kept.batch.is_over:
            try:
                async with self._files.opened(kept.tenant, kept.batch.input_file_id) as content:
                    kept = await self._advance(kept, content)
            except NotFound as missing:
                kept = await self._fail(Fault(code="invalid_input_file", message=missing.message))
        await self._drop(kept.batch.id)
        return kept.batch

    async def count_error(self) -> bool:
        """Counts a run that ended by an unexpected error; the last allowed one ends the batch.
        Returns whether it has ended."""

        def count(kept: Kept) -> None:
            kept.num_errors += 1
            if kept.num_errors >= MAX_ERRORS and not kept.batch.is_over:
                # A run that still works on it stops.
                kept.owner = self._name
                message = (
                    f"the batch failed {MAX_ERRORS} times by an internal fault; the log has it"
                )
                kept.batch.errors = Faults(data=[Fault(code=InternalError.code, message=message)])
                kept.batch.become("failed")

        try:
            kept = await retry(lambda: self._ledger.change(self._tenant, self._batch_id, count))
        except NotFound:
            return True
        if kept.num_errors == MAX_ERRORS:
            await self._drop(kept.batch.id)
        return kept.num_errors >= MAX_ERRORS

    async def _drop(self, batch_id: str) -> None:
        """Drops what only a running batch needs."""
        await self._ranges.drop(batch_id)
        await self._results.drop(batch_id)

    async def _advance(self, kept: Kept, content: IO[bytes]) -> Kept:
        is_new = kept.batch.in_progress_at is None
        kept = await self._validate(kept, content)
        if kept.batch.is_over:
            return kept
        if kept.batch.cancelling_at is None:
            await self._hand_out(kept, content, is_new=is_new)
        return await self._finish(kept, content)

    def _claim(self, kept: Kept) -> None:
        kept.owner = self._name

    async def _validate(self, kept: Kept, content: IO[bytes]) -> Kept:
        """Refuses the whole file if a line is invalid, or has the `custom_id` of another line."""
        if kept.batch.in_progress_at is not None:
            return kept
        total, faults = await asyncio.to_thread(
            check_lines, content, kept.batch.endpoint, self._max_line_bytes
        )
        if faults:
            return await self._fail(*faults)

        def begin(kept: Kept) -> None:
            batch = kept.batch
            batch.request_counts.total = total
            if batch.status == "validating":
                batch.become("in_progress")

        return await self._change(begin)

    async def _fail(self, *faults: Fault) -> Kept:
        def fail(kept: Kept) -> None:
            kept.batch.errors = Faults(data=list(faults))
            kept.batch.become("failed")

        return await self._change(fail)

    async def _hand_out(self, kept: Kept, content: IO[bytes], *, is_new: bool) -> None:
        """Hands out lines until every line has a result, the batch is cancelled or another's, or
        its time is over."""
        hand_out = HandOut(self._ranges, cut(content, self._tenant, self._batch_id))
        looked_at = repeated_at = time.monotonic()
        room = await retry(self._room)
        async with self._results.followed(self._batch_id) as follower:
            if not is_new:
                await self._note(hand_out, follower)
            while hand_out.num_done < kept.batch.request_counts.total and kept.is_running:
                await hand_out.top_up()
                await self._note(hand_out, follower)
                if hand_out.num_bytes > room:
                    await self._stop()
                    return
                now = time.monotonic()
                if now - looked_at >= PROGRESS_SECONDS:
                    looked_at, kept = now, await self._look(kept)
                if now - repeated_at >= REPEAT_SECONDS:
                    repeated_at, room = now, await retry(self._room)
                    await hand_out.repeat()

    async def _note(self, hand_out: HandOut, follower: Follower) -> None:
        for number, is_good, num_bytes in await retry(lambda: follower.more(PROGRESS_SECONDS)):
            hand_out.note(number, is_good, num_bytes)
        self._num_bytes = hand_out.num_bytes
        self._counts.completed = hand_out.num_good
        self._counts.failed = hand_out.num_done - hand_out.num_good

    async def _room(self) -> int:
        """Number of bytes that the batch's results may have in all."""
        return await self._storage.left(self._tenant, without=self._batch_id)

    async def _stop(self) -> None:
        def stop(kept: Kept) -> None:
            kept.is_out_of_room = True

        await retry(lambda: self._ledger.change(self._tenant, self._batch_id, self._guarded(stop)))

    async def _look(self, kept: Kept) -> Kept:
        """Writes the progress and checks whether the batch may go on."""
        stored = kept.batch.request_counts
        with contextlib.suppress(*FAILURES, Unavailable):
            if (stored.completed, stored.failed) != (self._counts.completed, self._counts.failed):
                return await self._ledger.change(
                    self._tenant, self._batch_id, self._guarded(self._set_progress)
                )
            kept = await self._ledger.get(self._tenant, self._batch_id)
        if kept.owner != self._name:
            raise NotMine
        return kept

    async def _finish(self, kept: Kept, content: IO[bytes]) -> Kept:
        """Writes the names of the files, as long as this run still has the batch."""

        def finalize(kept: Kept) -> None:
            self._set_progress(kept)
            if kept.batch.status != "cancelling":
                kept.batch.become("finalizing")

        kept = await self._change(finalize)
        is_cancelled = kept.batch.cancelling_at is not None
        outcome = await gathered(self._files, self._results, kept, content)
        has_all = outcome.is_whole or kept.is_out_of_room

        def end(kept: Kept) -> None:
            outcome.set_fields(kept.batch)
            kept.batch.become(
                "cancelled" if is_cancelled else "completed" if has_all else "expired"
            )

        try:
            return await self._change(end)
        except NotMine:
            # Only now is it certain that no client has read them.
            await self._discard(kept, outcome)
            raise

    async def _discard(self, kept: Kept, outcome: Outcome) -> None:
        for file_id in (outcome.output_file_id, outcome.error_file_id):
            if file_id is not None:
                with contextlib.suppress(*FAILURES, Unavailable, NotFound):
                    await self._files.delete(kept.tenant, file_id)

    def _set_progress(self, kept: Kept) -> None:
        counts = kept.batch.request_counts
        kept.result_bytes = self._num_bytes
        counts.completed = self._counts.completed
        counts.failed = self._counts.failed

    async def _change(self, change: Callable[[Kept], None]) -> Kept:
        return await retry(
            lambda: self._ledger.change(self._tenant, self._batch_id, self._guarded(change))
        )

    def _guarded(self, change: Callable[[Kept], None]) -> Callable[[Kept], None]:
        def guarded(kept: Kept) -> None:
            if kept.owner != self._name:
                raise NotMine
            change(kept)

        return guarded
