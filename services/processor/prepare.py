"""Converts a client's request to an engine's. Pure work on one request: no network, no clock."""

from __future__ import annotations

from headwater.engine_core.kv.prefix_hash import HASH_LEN, block_hashes
from headwater.proto import common_pb2, processor_pb2
from headwater.proto.common_pb2 import AnswerFormat

from ..answers.format import answer_format
from ..runtime.errors import BadRequest
from ..runtime.served_model import GENERATE
from ..runtime.slices import slices
from ..text.model import TextModel
from . import conversation
from .allowed_tokens import check_allowed_tokens
from .embedded_text import (
    check_answers,
    expanded,
    fit_text,
    optional_name,
    pooling_of,
    uncounted_ids,
    with_prompt,
)
from .front import front_of
from .pairs import pair_ids
from .parameters import bad_word_sequences, check_sampling, check_vocabulary, fit_context
from .request_template import with_template_of


def prepare(model: TextModel, request: processor_pb2.PrepareRequest) -> processor_pb2.PrepareReply:
    """Prepares a request. Raises `BadRequest` for values that the contract refuses."""
    if len(request.cache_namespace) != HASH_LEN:
        raise BadRequest.of("cache_namespace", request.cache_namespace.hex(), f"{HASH_LEN} bytes")
    is_chat = request.prompt.WhichOneof("kind") == "conversation"
    model = with_template_of(model, request.prompt.conversation)
    sampling = check_sampling(
        request.sampling, model.limits, stream=request.stream, is_chat=is_chat
    )
    prompt = request.prompt
    name: str | None = None
    pooling = pooling_of(model, request.pooling)
    if request.pooling:
        sampling.max_tokens = 0
        name = optional_name(model, request, pooling)
        if not prompt.HasField("pair"):
            prompt = with_prompt(model, prompt, name)
    else:
        check_answers(model)
    form: AnswerFormat | None = None
    second_start = attended_len = 0
    if prompt.HasField("pair"):
        token_ids, second_start = pair_ids(sampling, model, prompt)
    else:
        token_ids, form = _tokens_and_format(model, prompt, escapes=_escapes(model, request))
    if model.task == GENERATE:
        token_ids = fit_context(sampling, token_ids, model.limits, prompt_name=prompt_name(prompt))
    else:
        token_ids = fit_text(sampling, token_ids, model, prompt_name=prompt_name(prompt))
        token_ids, attended_len = expanded(model, token_ids, name)
    bad_words = _bad_words(model, sampling)
    end_ids = _end_ids(model, request.prompt)
    check_allowed_tokens(sampling, end_ids, bad_words)
    # Structured output is passed on as a grammar.
    sampling.ClearField("structured_output")
    block_size = model.served.block_size
    front = None
    if is_chat and request.front_namespace:
        front = front_of(model, request, token_ids, escapes=_escapes(model, request))
    hashes = block_hashes(request.cache_namespace, token_ids, block_size, front)
    return processor_pb2.PrepareReply(
        prompt_ids=token_ids,
        sampling=sampling,
        eos_token_ids=end_ids,
        bad_word_ids=[common_pb2.TokenSequence(token_ids=ids) for ids in bad_words],
        block_hashes=b"".join(hashes),
        num_front_blocks=front.num_blocks if front is not None else 0,
        block_size=block_size,
        answer_format=form,
        pooling=pooling,
        second_start=second_start,
        attended_len=attended_len,
        uncounted_ids=uncounted_ids(model, pooling, name),
        labels=model.labels,
    )


def _tokens_and_format(
    model: TextModel, prompt: processor_pb2.Prompt, *, escapes: bool
) -> tuple[list[int], AnswerFormat | None]:
    """The prompt as tokens, and the format by which its answer is read."""
    if prompt.WhichOneof("kind") != "conversation":
        return _ids(model, prompt, escapes=escapes), None
    text = _rendered(model, prompt.conversation, escapes=escapes)
    form = answer_format(
        prompt.conversation,
        text,
        tool_format=model.tool_format,
        reasoning_format=model.reasoning_format,
    )
    return _conversation_ids(model, prompt, text, escapes=escapes), form


def prompt_name(prompt: processor_pb2.Prompt) -> str:
    """Name of the field in which the client gave the prompt."""
    return "messages" if prompt.WhichOneof("kind") == "conversation" else "prompt"


def prompt_ids(model: TextModel, request: processor_pb2.ProcessorTokenizeRequest) -> list[int]:
    """Token ids of a prompt, as `prepare` makes them."""
    model = with_template_of(model, request.prompt.conversation)
    return _ids(model, request.prompt, escapes=_escapes(model, request))


def _escapes(
    model: TextModel, request: processor_pb2.PrepareRequest | processor_pb2.ProcessorTokenizeRequest
) -> bool:
    """Whether special tokens in the client's text are text. The model's own setting holds for
    everyone; a request may only turn it on."""
    return model.escapes_special_tokens or request.escape_special_tokens


def _ids(model: TextModel, prompt: processor_pb2.Prompt, *, escapes: bool) -> list[int]:
    """The prompt as tokens, in whichever form it was given."""
    kind = prompt.WhichOneof("kind")
    if prompt.HasField("suffix") and kind != "text":
        raise BadRequest("suffix", "suffix has no text before it; allowed: beside a prompt of text")
    match kind:
        case "text" if prompt.HasField("suffix"):
            return _gap_ids(model, prompt)
        case "text":
            return model.tokenizer.encode(
                prompt.text, add_special_tokens=_adds_special_tokens(prompt, default=True)
            )
        case "token_ids":
            check_vocabulary("prompt", prompt.token_ids.ids, model.limits.vocab_size)
            return [token_id for part in slices(prompt.token_ids.ids) for token_id in part]
        case "conversation":
            text = _rendered(model, prompt.conversation, escapes=escapes)
            return _conversation_ids(model, prompt, text, escapes=escapes)
        case _:
            raise BadRequest(
                "prompt", "prompt is missing; allowed: text, token ids or a conversation"
            )


def _gap_ids(model: TextModel, prompt: processor_pb2.Prompt) -> list[int]:
    """A prompt of the texts around a gap. Special tokens in them are text: code may name them."""
    if model.gap_marks is None:
        raise BadRequest(
            "suffix", f"suffix: the model {model.name!r} has no tokens to fill a gap; allowed: none"
        )
    guard = model.tokenizer.guarded
    text = model.gap_marks.prompt(guard(prompt.text), guard(prompt.suffix))
    adds = _adds_special_tokens(prompt, default=True)
    return model.tokenizer.encode_guarded(text, add_special_tokens=adds)


def _end_ids(model: TextModel, prompt: processor_pb2.Prompt) -> list[int]:
    """Ids that end the answer."""
    if not prompt.HasField("suffix") or model.gap_marks is None:
        return list(model.eos_token_ids)
    ends = [model.tokenizer.id_of(text) for text in model.gap_marks.ends]
    return [*model.eos_token_ids, *(token_id for token_id in ends if token_id is not None)]


def _rendered(model: TextModel, asked: processor_pb2.Conversation, *, escapes: bool) -> str:
    if model.chat_template is None:
        raise BadRequest(
            "messages", f"the model {model.name!r} has no chat template; give one to the processor"
        )
    guard = model.tokenizer.guarded if escapes else None
    return conversation.render(model.chat_template, asked, guard)


def _conversation_ids(
    model: TextModel, prompt: processor_pb2.Prompt, rendered: str, *, escapes: bool
) -> list[int]:
    encode = model.tokenizer.encode_guarded if escapes else model.tokenizer.encode
    return encode(rendered, add_special_tokens=_adds_special_tokens(prompt, default=False))


def _adds_special_tokens(prompt: processor_pb2.Prompt, *, default: bool) -> bool:
    return prompt.add_special_tokens if prompt.HasField("add_special_tokens") else default


def _bad_words(model: TextModel, sampling: common_pb2.Sampling) -> list[list[int]]:
    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=False)

    return bad_word_sequences(sampling.bad_words, encode)
