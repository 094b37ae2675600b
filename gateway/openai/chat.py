"""POST /v1/chat/completions: a conversation to a generation request, and its answer to OpenAI's
chat JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.services.runtime.errors import BadRequest

from ..request.choice import Choice
from ..request.choice_count import check_num_choices
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest
from ..request.prepared_prompt import PreparedPrompt
from ..request.sinks import CallPiece, Piece
from ..stages.output_session import Scores
from ..tenancy.caller import Caller
from .legacy_functions import is_legacy, legacy_call, legacy_finish_reason, old_names, with_tools
from .logprobs import chat_logprobs, prompt_logprobs
from .schema import ChatCompletionRequest, ToolChoice
from .structured_output import put_structured_output
from .to_pb import check_stream_options, conversation_to_pb, sampling_to_pb


class ChatRenderer:
    """Renders messages and deltas."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    scores_prompt = False

    def __init__(self, asked: ChatCompletionRequest) -> None:
        self._asked = with_tools(asked)
        self._is_legacy = is_legacy(asked)
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        # The contract knows one name for the two that clients use.
        self.renamed = (
            {"max_tokens": "max_completion_tokens"}
            if asked.max_completion_tokens is not None
            else {}
        )
        self.renamed |= old_names(asked)

    def generation_requests(self, caller: Caller, max_choices: int) -> list[GenerationRequest]:
        """One prompt: the conversation. Raises `BadRequest`."""
        asked = self._asked
        check_stream_options(asked.stream, asked.stream_options)
        sampling = sampling_to_pb(asked)
        if asked.max_completion_tokens is not None:
            sampling.max_tokens = asked.max_completion_tokens
        if asked.logprobs is not None:
            sampling.logprobs = asked.logprobs
        if asked.top_logprobs is not None:
            sampling.top_logprobs = asked.top_logprobs
        self.renamed |= put_structured_output(asked, sampling)
        check_num_choices("messages", 1, sampling, max_choices)
        try:
            prompt = conversation_to_pb(asked)
        except BadRequest as error:
            raise error.in_words_of(self.renamed) from None
        stream = bool(asked.stream)
        salt = asked.cache_salt or ""
        return [
            GenerationRequest(
                caller=caller,
                model=asked.model,
                prompt=prompt,
                sampling=sampling,
                stream=stream,
                endpoint="chat",
                cache_salt=salt,
            )
        ]

    async def prepared(self, cluster: Cluster, generations: Sequence[Generation]) -> None:
        """Does nothing: a chat needs nothing more of its prompt."""

    def first_fields(self, choice: Choice) -> dict[str, Any] | None:
        # OpenAI does so, too: clients show a part of the message for an empty text, and none for
        # null.
        return {
            "delta": {
                "role": "assistant",
                "content": self._echoed or (None if self._must_call else ""),
            }
        }

    @property
    def _must_call(self) -> bool:
        choice = self._asked.tool_choice
        if isinstance(choice, ToolChoice):
            return choice.allowed_tools is None or choice.allowed_tools.mode == "required"
        return choice == "required"

    @property
    def _echoed(self) -> str:
        """Text of the last message, where the answer goes on with it and is to repeat it."""
        final = self._asked.messages[-1]
        if not (self._asked.echo and final.role == "assistant"):
            return ""
        content = final.content or ""
        return (
            content if isinstance(content, str) else "\n".join(part.text or "" for part in content)
        )

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def delta_of(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if reasoning := piece.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        if text := piece.text:
            delta["content"] = text
        if piece.calls and self._is_legacy:
            delta["function_call"] = legacy_call(piece.calls)
        elif piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return {"delta": delta} if delta else {}

    def ending(self) -> dict[str, Any]:
        return {"delta": {}}

    def finish_reason(self, choice: Choice) -> str | None:
        return (
            legacy_finish_reason(choice.finish_reason) if self._is_legacy else choice.finish_reason
        )

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._echoed + piece.text,
            "refusal": None,
        }
        if choice.prompt.prepared.answer_format.reasoning_parser:
            message["reasoning_content"] = message["reasoning"] = piece.reasoning or None
        if piece.calls:
            message["content"] = message["content"] or None
            if self._is_legacy:
                message["function_call"] = legacy_call(piece.calls)
            else:
                message["tool_calls"] = [_whole_call(call) for call in piece.calls]
        return {"message": message}

    def beside(self, prompt: PreparedPrompt) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._asked.return_token_ids:
            fields["prompt_token_ids"] = list(prompt.prepared.prompt_ids)
        if self._asked.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
        return fields

    def logprobs(self, choice: Choice, tokens: Scores) -> dict[str, Any] | None:
        return chat_logprobs(tokens, as_ids=self._as_ids) if self._asked.logprobs else None


def _whole_call(call: CallPiece) -> dict[str, Any]:
    kind, field = ("custom", "input") if call.is_text else ("function", "arguments")
    return {"id": call.id, "type": kind, kind: {"name": call.name, field: "".join(call.arguments)}}


def _call_delta(call: CallPiece) -> dict[str, Any]:
    """A call's first delta names it, the others have arguments only."""
    if call.name:
        return {"index": call.index, **_whole_call(call)}
    kind, field = ("custom", "input") if call.is_text else ("function", "arguments")
    return {"index": call.index, kind: {field: "".join(call.arguments)}}
