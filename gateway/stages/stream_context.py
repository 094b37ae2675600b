"""What a gateway leaves with a resumable request, so that any other can go on with it. Knows nothing about how."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from headwater.services.runtime import errors


class StreamKind(StrEnum):
    """How the client asked, and so how it is answered."""

    CHAT = "chatcmpl"
    COMPLETION = "cmpl"
    RESPONSE = "resp"
    GRPC_CHAT = "ChatStream"
    GRPC_COMPLETE = "CompleteStream"


class StreamContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the client sent, and what the first gateway made up for it."""

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
    """Of each choice the output index up to which it may go without more credit."""
    num_tokens: Sequence[int]
    has_ended: bool
    prompt_tokens: int
    """That gateways before have charged, as with the next."""
    output_tokens: int
    num_readers: int
    attempt: int

    @property
    def is_charged(self) -> bool:
        """To its last token."""
        return self.has_ended and bool(self.prompt_tokens) and self.output_tokens >= sum(self.num_tokens)

    @property
    def num_outstanding(self) -> int:
        """Tokens that may still come without more credit."""
        pairs = zip(self.granted, self.num_tokens, strict=True)
        return 0 if self.has_ended else sum(max(0, granted - told) for granted, told in pairs)


class StreamNotKept(errors.NotFound):
    """No stream of that id, or not the caller's, or not any longer."""

    def __init__(self, request_id: str) -> None:
        super().__init__("stream", request_id)
        self.args = (f"the stream {request_id!r} is not kept: it was not asked to be resumable, or its time is over",)


contexts = msgspec.msgpack.Decoder(StreamContext)
