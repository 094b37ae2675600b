"""Files and batches as OpenAI's clients see them, and the gateway's own data about them."""

from __future__ import annotations

import secrets
import time

import msgspec

from ...tenancy.tenants import Tenant

OVER = ("completed", "failed", "expired", "cancelled")
"""Statuses that are final."""


def now() -> int:
    return int(time.time())


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


class File(msgspec.Struct, kw_only=True):
    """A file's object; its content lies elsewhere."""

    id: str
    bytes: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int
    object: str = "file"
    status: str = "processed"


class Fault(msgspec.Struct, kw_only=True):
    """Fault for which an input file is refused."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Faults(msgspec.Struct, kw_only=True):
    data: list[Fault]
    object: str = "list"


class Counts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch's object."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: str = "batch"
    status: str = "validating"
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def become(self, status: str) -> None:
        self.status = status
        setattr(self, f"{status}_at", now())


class Kept(msgspec.Struct, kw_only=True):
    """A batch with the data that gateways keep of it."""

    batch: Batch
    tenant: str
    """Key of the tenant, under which the batch and its files are stored."""
    name: str = ""
    """Name of the tenant; empty: its key is its name."""
    weight: float
    tier: int
    key_id: str = ""
    """Id of the key whose limits its lines count against, besides the tenant's."""
    shared_cache: bool = False
    result_bytes: int = 0
    """Number of bytes of the results, until they are gathered into files."""
    is_out_of_room: bool = False
    """Whether the tenant may store no more: lines without a result get none."""
    owner: str = ""
    """Run that works on it; an earlier run finds another's name here and stops."""
    num_errors: int = 0
    """Number of runs that ended by an unforeseen error."""
    range_errors: dict[int, int] = {}
    """Number of deliveries of a range in which lines failed by unforeseen errors, by its first
    line."""

    @classmethod
    def of(cls, batch: Batch, payer: Tenant) -> Kept:
        return cls(
            batch=batch,
            tenant=payer.key,
            name=payer.id,
            weight=payer.weight,
            tier=payer.tier,
            key_id=payer.key_id,
            shared_cache=payer.shared_cache,
        )

    @property
    def is_running(self) -> bool:
        """Whether its lines are to be answered."""
        is_in_time = time.time() < self.batch.expires_at
        return self.batch.status == "in_progress" and is_in_time and not self.is_out_of_room

    @property
    def payer(self) -> Tenant:
        return Tenant(
            id=self.name or self.tenant,
            uid=self.tenant if self.tenant != self.name else "",
            weight=self.weight,
            tier=self.tier,
            key_id=self.key_id,
            shared_cache=self.shared_cache,
        )


class Line(msgspec.Struct, kw_only=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineOptions(msgspec.Struct, kw_only=True):
    """The fields of a line's body that a batch has a say in, as JSON; empty where they are
    missing."""

    stream: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()


class Response(msgspec.Struct, kw_only=True):
    """The answer to a line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, kw_only=True):
    """Reason for which a line was not sent."""

    code: str
    message: str


class Result(msgspec.Struct, kw_only=True):
    """A line of an output file or an error file."""

    id: str
    custom_id: str
    response: Response | None = None
    error: Failure | None = None

    @property
    def is_success(self) -> bool:
        return self.response is not None and self.response.status_code == 200
