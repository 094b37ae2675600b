"""Context that a gateway stores with a resumable request, so that any gateway can continue it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from headwater.services.runtime import errors


class StreamKind(StrEnum):
    """Endpoint that the client called, which determines the form of the answer."""

    CHAT = "chatcmpl"
    COMPLETION = "cmpl"
    RESPONSE = "resp"
    GRPC_CHAT = "ChatStream"
    GRPC_COMPLETE = "CompleteStream"


class StreamContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The client's request, with the additions of the first gateway."""

    kind: StreamKind
    body: bytes
    """Request as it came: JSON, or its message."""
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    client_request_id: str = ""
    wants_receipt: bool = False
    seed: int = 0
    adapter: bytes = b""
    """Hash of the adapter's content with which it was admitted; empty: none."""

    def encode(self, seed: int, adapter: bytes = b"") -> bytes:
        return msgspec.msgpack.encode(msgspec.structs.replace(self, seed=seed, adapter=adapter))


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A resumable request, as its output processor knows it."""

    address: str
    """Address of the output processor."""
    request_id: str
    context: StreamContext
    granted: Sequence[int]
    """Output index, for each choice, up to which it may go without more credit."""
    num_tokens: Sequence[int]
    has_ended: bool
    prompt_tokens: int
    """Number of prompt tokens that earlier gateways have charged."""
    output_tokens: int
    """Number of output tokens that earlier gateways have charged."""
    num_readers: int
    attempt: int

    @property
    def is_charged(self) -> bool:
        """Whether every token is charged."""
        return (
            self.has_ended
            and bool(self.prompt_tokens)
            and self.output_tokens >= sum(self.num_tokens)
        )

    @property
    def num_outstanding(self) -> int:
        """Number of tokens that may still come without more credit."""
        pairs = zip(self.granted, self.num_tokens, strict=True)
        return (
            0
            if self.has_ended
            else sum(max(0, granted - delivered) for granted, delivered in pairs)
        )


class StreamNotKept(errors.NotFound):
    """Raised where no stream with that id is kept: it does not exist, belongs to another tenant, or
    has expired."""

    def __init__(self, request_id: str) -> None:
        super().__init__("stream", request_id)
        self.args = (
            f"the stream {request_id!r} is not kept: it was not asked to be resumable, or its "
            "time is over",
        )


contexts = msgspec.msgpack.Decoder(StreamContext)
