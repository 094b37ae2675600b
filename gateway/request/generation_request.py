"""One prompt as a client asked for it, over REST or gRPC. Knows nothing about how it is
answered."""

from __future__ import annotations

import msgspec

from headwater.proto import common_pb2, processor_pb2

from ..stages.stream_context import StreamContext
from ..tenancy.caller import Caller


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with its sampling, in the words of the stages' contract, unchecked."""

    caller: Caller
    model: str
    prompt: processor_pb2.Prompt
    sampling: common_pb2.Sampling
    stream: bool
    endpoint: str
    """API of the request. Each API has a distribution of answer lengths, by which lengths are
    predicted."""
    cache_salt: str = ""
    first_index: int = 0
    """Index of its first choice among those of the whole request."""
    pooling: common_pb2.Pooling.ValueType = common_pb2.POOLING_UNSPECIFIED
    prompt_name: str | None = None
    """Name of the model's text that goes before an embedded one; None: the model's default."""
    """Set for a prompt that is embedded, not answered."""
    context: StreamContext | None = None
    """Set for a stream that can be resumed."""


def score_echo(sampling: common_pb2.Sampling, *, stream: bool) -> bool:
    """Requests log probabilities for an echoed prompt, if its answer has them. Returns whether the
    rules for streams apply: the rule against `prompt_logprobs` is about a field that chunks cannot
    have, and here they do."""
    if not (sampling.echo and sampling.logprobs) or sampling.HasField("prompt_logprobs"):
        return stream
    sampling.prompt_logprobs = sampling.top_logprobs
    return stream and sampling.best_of > max(sampling.n, 1)
