"""What a client asks of the line, whichever way it came in. Knows nothing about how it is answered."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.proto import common_pb2, processor_pb2

from ..stages.stream_context import StreamContext
from ..tenancy.caller import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks, in the line's words, unchecked."""

    caller: Caller
    model: str
    prompt: processor_pb2.Prompt
    sampling: common_pb2.Sampling
    stream: bool
    cache_salt: str = ""
    first_index: int = 0
    """Of its choices among those of the whole request."""
    pooling: common_pb2.Pooling.ValueType = common_pb2.POOLING_UNSPECIFIED
    """Given: the prompt is embedded, not answered."""
    context: StreamContext | None = None
    """Given: its stream can be resumed."""
