"""The outcome of a batch: its results as an output file and an error file, one line a request."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from headwater.services.runtime.errors import StorageLimitExceeded

from .files import IN_MEMORY_BYTES, Files
from .lines import numbered, read_line
from .records import Batch, Failure, Kept, Result, new_id
from .results import Results

_CANCELLED = Failure(
    code="batch_cancelled", message="the batch was cancelled before this request was answered"
)
_EXPIRED = Failure(
    code="batch_expired", message="the completion window closed before this request was answered"
)
_OUT_OF_ROOM = Failure(
    code=StorageLimitExceeded.code, message="the tenant has no room for more results (file_bytes)"
)


def _reason(kept: Kept) -> Failure:
    """Reason for which lines have no result."""
    if kept.batch.cancelling_at is not None:
        return _CANCELLED
    return _OUT_OF_ROOM if kept.is_out_of_room else _EXPIRED


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Files of a batch. `None` for a file that would be empty."""

    output_file_id: str | None
    error_file_id: str | None
    num_good: int
    num_bad: int
    is_whole: bool
    """Whether every line was answered, well or not."""

    def set_fields(self, batch: Batch) -> None:
        batch.output_file_id = self.output_file_id
        batch.error_file_id = self.error_file_id
        batch.request_counts.completed = self.num_good
        batch.request_counts.failed = self.num_bad


class _Pages:
    """A file that is being written."""

    def __init__(self, file: Any) -> None:
        self.file: IO[bytes] = file
        self.num_lines = self.num_bytes = 0

    def add(self, line: bytes) -> None:
        self.file.write(line + b"\n")
        self.num_lines += 1
        self.num_bytes += len(line) + 1

    async def put(self, files: Files, kept: Kept, name: str) -> str | None:
        if not self.num_lines:
            return None
        filename = f"{kept.batch.id}_{name}.jsonl"
        return (
            await files.add(kept.tenant, filename, "batch_output", self.file, self.num_bytes)
        ).id


async def gathered(files: Files, results: Results, kept: Kept, content: IO[bytes]) -> Outcome:
    """Writes the files. Lines without a result go to the error file, with the reason."""
    with (
        tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as one,
        tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as other,
    ):
        good = _Pages(one)
        bad = _Pages(other)
        done = set()
        async for number, line, is_success in results.all(kept.batch.id):
            done.add(number)
            (good if is_success else bad).add(line)
        for number, text in numbered(content):
            if number not in done:
                result = Result(
                    id=new_id("batch_req_"),
                    custom_id=read_line(text).custom_id,
                    error=_reason(kept),
                )
                bad.add(msgspec.json.encode(result))
        return Outcome(
            output_file_id=await good.put(files, kept, "output"),
            error_file_id=await bad.put(files, kept, "error"),
            num_good=good.num_lines,
            num_bad=bad.num_lines,
            is_whole=len(done) == kept.batch.request_counts.total,
        )
