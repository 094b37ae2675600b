"""POST /v1/chat/completions: a conversation to a job, and its answer to OpenAI's chat JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.gateway.caller import Caller
from headwater.gateway.choice import Choice
from headwater.gateway.line import Line
from headwater.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from headwater.gateway.openai.schema import ChatCompletionRequest
from headwater.gateway.openai.to_pb import check_stream_options, conversation_to_pb, sampling_to_pb
from headwater.gateway.output_sessions import Scores
from headwater.gateway.session import Generation, Job


class ChatShape:
    """Messages and deltas."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    scores_prompt = False

    def __init__(self, asked: ChatCompletionRequest) -> None:
        self._asked = asked
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        # The contract knows one name for the two that clients use.
        self.renamed = {"max_tokens": "max_completion_tokens"} if asked.max_completion_tokens is not None else {}

    def jobs(self, caller: Caller) -> list[Job]:
        """One: a conversation is one prompt. Raises `BadRequest`."""
        asked = self._asked
        check_stream_options(asked.stream, asked.stream_options)
        sampling = sampling_to_pb(asked)
        if asked.max_completion_tokens is not None:
            sampling.max_tokens = asked.max_completion_tokens
        if asked.logprobs is not None:
            sampling.logprobs = asked.logprobs
        if asked.top_logprobs is not None:
            sampling.top_logprobs = asked.top_logprobs
        prompt = conversation_to_pb(asked)
        stream, salt = bool(asked.stream), asked.cache_salt or ""
        return [Job(caller=caller, model=asked.model, prompt=prompt, sampling=sampling, stream=stream, cache_salt=salt)]

    async def prepared(self, line: Line, generations: Sequence[Generation]) -> None:
        """A chat needs nothing more of its prompt."""

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def ending(self) -> dict[str, Any]:
        return {"delta": {}}

    def whole(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def beside(self, generation: Generation) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._asked.return_token_ids:
            fields["prompt_token_ids"] = list(generation.prepared.prompt_ids)
        if self._asked.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs)
        return fields

    def logprobs(self, choice: Choice, tokens: Scores) -> dict[str, Any] | None:
        return chat_logprobs(tokens, as_ids=self._as_ids) if self._asked.logprobs else None
