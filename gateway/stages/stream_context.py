"""The context that a gateway leaves with a resumable request, so that any gateway can go on with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from headwater.services.runtime import errors


class StreamKind(StrEnum):
    """The endpoint that the client called, and so the form of the answer."""

    CHAT = "chatcmpl"
    COMPLETION = "cmpl"
    RESPONSE = "resp"
    GRPC_CHAT = "ChatStream"
    GRPC_COMPLETE = "CompleteStream"


class StreamContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The client's request, and what the first gateway added to it."""

    kind: StreamKind
    body: bytes
    """The request as it came: JSON, or its message."""
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    client_request_id: str = ""
    wants_receipt: bool = False
    seed: int = 0

    def encode(self, seed: int) -> bytes:
        return msgspec.msgpack.encode(msgspec.structs.replace(self, seed=seed))


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be resumed, as its output processor knows it."""

    address: str
    """The output processor's."""
    request_id: str
    context: StreamContext
    granted: Sequence[int]
    """Output index of each choice up to which it may go without more credit."""
    num_tokens: Sequence[int]
    has_ended: bool
    prompt_tokens: int
    """Prompt tokens that earlier gateways have charged."""
    output_tokens: int
    """Output tokens that earlier gateways have charged."""
    num_readers: int
    attempt: int

    @property
    def is_charged(self) -> bool:
        """Every token is charged."""
        return self.has_ended and bool(self.prompt_tokens) and self.output_tokens >= sum(self.num_tokens)

    @property
    def num_outstanding(self) -> int:
        """Tokens that may still come without more credit."""
        pairs = zip(self.granted, self.num_tokens, strict=True)
        return 0 if self.has_ended else sum(max(0, granted - told) for granted, told in pairs)


class StreamNotKept(errors.NotFound):
    """There is no stream of that id, it is another tenant's, or it is kept no longer."""

    def __init__(self, request_id: str) -> None:
        super().__init__("stream", request_id)
        self.args = (f"the stream {request_id!r} is not kept: it was not asked to be resumable, or its time is over",)


contexts = msgspec.msgpack.Decoder(StreamContext)
