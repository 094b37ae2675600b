"""A prompt as a processor prepared it, and its tokens' log probabilities as they come in."""

from __future__ import annotations

import msgspec

from headwater.proto import common_pb2, processor_pb2


class PreparedPrompt(msgspec.Struct, eq=False):
    """A prepared prompt, shared by its choices. Knows none of them."""

    prepared: processor_pb2.PrepareReply = msgspec.field(default_factory=processor_pb2.PrepareReply)
    logprobs: list[common_pb2.TokenLogprob] = msgspec.field(default_factory=list)
    """Log probabilities of the prompt's tokens from the second on, where they were requested."""
    is_scored: bool = False
    """Whether the last of `logprobs` has come."""

    @property
    def awaits_scores(self) -> bool:
        """Whether log probabilities were requested and have not all come."""
        return not self.is_scored and self.prepared.sampling.HasField("prompt_logprobs")
