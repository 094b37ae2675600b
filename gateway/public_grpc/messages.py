"""Messages of the public gRPC surface: prompts to the stages' contract, answers to the client's
messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from headwater.proto import common_pb2, inference_pb2, processor_pb2
from headwater.services.runtime import errors

from ..request.choice import Choice
from ..request.choice_stream import FINISH_REASONS
from ..request.generation import Generation
from ..request.sinks import CallPiece, Piece

Asked = inference_pb2.ChatRequest | inference_pb2.CompleteRequest
SCORES_PER_CHUNK = 256
"""Number of prompt tokens with their alternatives in one chunk: a few hundred kilobytes at most."""
_FINISH = {word: number for number, word in FINISH_REASONS.items()}


def prompt_of(request: Asked) -> processor_pb2.Prompt:
    """Prompt of a request. Raises `BadRequest`."""
    adds_special_tokens: bool | None = optional(request, "add_special_tokens")
    if isinstance(request, inference_pb2.ChatRequest):
        return processor_pb2.Prompt(
            conversation=request.conversation, add_special_tokens=adds_special_tokens
        )
    suffix: str | None = optional(request, "suffix") or None
    if suffix is not None and request.sampling.echo:
        raise errors.BadRequest("suffix", "suffix together with echo; allowed: one of them")
    if request.WhichOneof("prompt") == "token_ids":
        return processor_pb2.Prompt(token_ids=request.token_ids, suffix=suffix)
    if not request.text and suffix is None:
        raise errors.BadRequest.of("prompt", request.text, "text or token ids, not empty")
    return processor_pb2.Prompt(
        text=request.text, add_special_tokens=adds_special_tokens, suffix=suffix
    )


def optional(request: Message, field: str) -> Any:
    """Value of a field; None where it is not set."""
    return getattr(request, field) if request.HasField(field) else None


def reply_head(generation: Generation, request: Asked) -> dict[str, Any]:
    return {
        "request_id": generation.request.caller.request_id,
        "client_request_id": generation.request.caller.client_request_id,
        "model": request.model,
        "usage": _usage(generation),
        "prompt_token_ids": generation.prepared.prompt_ids if request.return_token_ids else (),
        "receipt_json": _receipt(generation, request),
    }


class StreamUsage:
    """Usage of a stream up to a chunk's end, as that chunk's reader sees it, however much has come
    since."""

    def __init__(self) -> None:
        self._num_tokens: Counter[int] = Counter()
        self._num_reasoning_tokens = 0

    def behind(self, generation: Generation, news: Piece | Choice) -> common_pb2.Usage:
        if isinstance(news, Piece):
            self._num_tokens[news.choice.index] += len(news.token_ids)
        else:
            # The engine's own count replaces the sum of what was sent.
            self._num_tokens[news.index] = news.num_output_tokens
            self._num_reasoning_tokens += news.num_reasoning_tokens
        return common_pb2.Usage(
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=self._num_tokens.total(),
            cached_tokens=generation.cached_tokens,
            reasoning_tokens=self._num_reasoning_tokens,
        )


def chunk_fields(
    generation: Generation,
    news: Piece | Choice | None,
    request: Asked,
    usage: StreamUsage,
    *,
    is_first: bool,
) -> dict[str, Any]:
    """The fields that both kinds of chunks share."""
    fields: dict[str, Any] = {"request_id": generation.request.caller.request_id}
    if request.continuous_usage and news is not None:
        fields["usage"] = usage.behind(generation, news)
    if is_first:
        fields |= {
            "client_request_id": generation.request.caller.client_request_id,
            "model": request.model,
        }
        if request.return_token_ids:
            fields["prompt_token_ids"] = generation.prepared.prompt_ids
    if isinstance(news, Piece):
        fields |= {"index": news.choice.index, "logprobs": news.logprobs}
        fields["token_ids"] = news.token_ids if request.return_token_ids else ()
    elif news is not None:
        fields |= {"index": news.index, "finish_reason": _FINISH[str(news.finish_reason)]}
        fields["stop_reason"] = _stop_reason(news)
    else:
        fields |= {"usage": _usage(generation), "receipt_json": _receipt(generation, request)}
    return fields


def score_chunks(
    generation: Generation, first: inference_pb2.CompleteChunk
) -> Iterator[inference_pb2.CompleteChunk]:
    """Chunks before a choice's first one: the prompt's log probabilities, in parts that any client
    takes."""
    scores = generation.prompt_logprobs
    for start in range(0, len(scores), SCORES_PER_CHUNK):
        chunk = inference_pb2.CompleteChunk(request_id=first.request_id, index=first.index)
        chunk.prompt_logprobs.extend(scores[start : start + SCORES_PER_CHUNK])
        if not start:
            chunk.client_request_id = first.client_request_id
            chunk.model = first.model
            chunk.prompt_token_ids.extend(first.prompt_token_ids)
        yield chunk


def chat_choice(
    index: int, choice: Choice, piece: Piece, request: Asked
) -> inference_pb2.ChatChoice:
    message = common_pb2.ChatMessage(role="assistant", content=piece.text)
    if reasoning := piece.reasoning:
        message.reasoning_content = reasoning
    for call in piece.calls:
        message.tool_calls.add(id=call.id, name=call.name, **_content_of(call))
    return inference_pb2.ChatChoice(
        message=message, **_choice_fields(index, choice, piece, request)
    )


def call_delta(call: CallPiece) -> common_pb2.ToolCallDelta:
    return common_pb2.ToolCallDelta(
        index=call.index, id=call.id, name=call.name, **_content_of(call)
    )


def _content_of(call: CallPiece) -> dict[str, str]:
    return {"input" if call.is_text else "arguments": "".join(call.arguments)}


def complete_choice(
    index: int, choice: Choice, piece: Piece, request: Asked, echo: str
) -> inference_pb2.CompleteChoice:
    return inference_pb2.CompleteChoice(
        text=echo + piece.text,
        prompt_logprobs=choice.prompt.logprobs,
        **_choice_fields(index, choice, piece, request),
    )


def _choice_fields(index: int, choice: Choice, piece: Piece, request: Asked) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": _FINISH[str(choice.finish_reason)],
        "stop_reason": _stop_reason(choice),
        "logprobs": piece.logprobs if request.sampling.logprobs else (),
        "token_ids": piece.token_ids if request.return_token_ids else (),
    }


def _stop_reason(choice: Choice) -> inference_pb2.StopReason | None:
    if choice.stop_reason is None:
        return None
    if isinstance(choice.stop_reason, str):
        return inference_pb2.StopReason(text=choice.stop_reason)
    return inference_pb2.StopReason(token_id=choice.stop_reason)


def _usage(generation: Generation) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_output_tokens,
        cached_tokens=generation.cached_tokens,
        reasoning_tokens=generation.num_reasoning_tokens,
    )


def _receipt(generation: Generation, request: Asked) -> str:
    wanted = request.return_receipt or generation.request.caller.wants_receipt
    return json.dumps(generation.receipt()) if wanted else ""
