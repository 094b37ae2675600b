"""A text that is embedded: the model's own pooling, the text that goes before it, and how it is
cut. Knows no network."""

from __future__ import annotations

from headwater.proto import common_pb2, processor_pb2

from ..runtime.errors import BadRequest
from ..runtime.request_limits import WHAT_FITS
from ..runtime.served_model import CLASSIFY, EMBED, GENERATE
from ..text.model import TextModel
from .parameters import fit_context

POOLINGS = {
    "": common_pb2.POOLING_LAST,
    "last": common_pb2.POOLING_LAST,
    "mean": common_pb2.POOLING_MEAN,
    "cls": common_pb2.POOLING_CLS,
    "token": common_pb2.POOLING_TOKEN,
}
"""Poolings by the words of a manifest."""
UNWEIGHTED = ("cls", "bos", "eos", "sep", "pad", "unk")
"""Special tokens that have no weight."""
REMEDIES = {
    EMBED: ("embeds", "/v1/embeddings"),
    CLASSIFY: ("classifies", "/classify, /score and /rerank"),
}
"""Keyed by task, the verb of an error and the endpoints that serve such a model."""


def check_answers(model: TextModel) -> None:
    """Raises `BadRequest` for a model that generates no text: one that embeds or classifies."""
    if model.task != GENERATE:
        verb, endpoints = REMEDIES[model.task]
        raise BadRequest(
            "model",
            f"the model {model.name!r} {verb} texts and answers none; allowed: {endpoints} with "
            "it, or a model that generates text",
        )


def pooling_of(
    model: TextModel, asked: common_pb2.Pooling.ValueType
) -> common_pb2.Pooling.ValueType:
    """The pooling of a request, or the model's own default. Raises `BadRequest` for pooling by
    token with a model that has none."""
    if asked == common_pb2.POOLING_MODEL:
        return POOLINGS[model.pooling]
    if asked == common_pb2.POOLING_TOKEN and model.task != EMBED:
        allowed = f"last, mean or cls: the model {model.name!r} has no vectors of tokens"
        raise BadRequest.of("pooling", "token", allowed)
    if asked == common_pb2.POOLING_SPARSE and not model.has_token_weights:
        allowed = f"another pooling: the model {model.name!r} makes no weights of tokens"
        raise BadRequest.of("pooling", "sparse", allowed)
    return asked


def optional_name(
    model: TextModel,
    request: processor_pb2.PrepareRequest,
    pooling: common_pb2.Pooling.ValueType,
) -> str | None:
    """Name of the model's prompt that precedes an embedded text; None: its default one."""
    if request.HasField("prompt_name"):
        return request.prompt_name
    is_marked = model.late_interaction is not None and pooling == common_pb2.POOLING_TOKEN
    return request.prompt.side or None if is_marked else None


def expanded(model: TextModel, token_ids: list[int], name: str | None) -> tuple[list[int], int]:
    """Token ids of an embedded text, and the number of the first ones that its tokens attend to; 0:
    all. A query of a model that compares tokens is filled up with mask tokens."""
    late = model.late_interaction
    if late is None or name != "query" or len(token_ids) >= late.query_len:
        return token_ids, 0
    mask = model.tokenizer.id_of(model.tokenizer.special_token("mask_token") or "")
    assert mask is not None
    added = [mask] * (late.query_len - len(token_ids))
    return token_ids + added, 0 if late.attends_to_expansion else len(token_ids)


def uncounted_ids(
    model: TextModel, pooling: common_pb2.Pooling.ValueType, name: str | None
) -> list[int]:
    """Ids of tokens whose vectors or weights count for nothing: skipped words of a document, and
    special tokens among weights."""
    tokenizer = model.tokenizer
    words: list[str | None] = []
    if pooling == common_pb2.POOLING_SPARSE:
        words = [tokenizer.special_token(f"{kind}_token") for kind in UNWEIGHTED]
    elif model.late_interaction is not None and name == "document":
        words = [*model.late_interaction.skipped_words]
    ids = (tokenizer.id_of(word) for word in words if word)
    return sorted({token_id for token_id in ids if token_id is not None})


def with_prompt(
    model: TextModel, prompt: processor_pb2.Prompt, name: str | None
) -> processor_pb2.Prompt:
    """The prompt after the model's prompt of that name, or after its default one. Raises
    `BadRequest` for an unknown name, and for a name with token ids."""
    if name is not None and name not in model.prompts:
        allowed = ", ".join(model.prompts) or f"none: the model {model.name!r} has no prompts"
        raise BadRequest.of("prompt_name", name, allowed)
    before = model.prompts.get(model.default_prompt if name is None else name, "")
    if prompt.WhichOneof("kind") == "text":
        named = processor_pb2.Prompt()
        named.CopyFrom(prompt)
        named.text = before + prompt.text
        return named
    if name is not None:
        raise BadRequest("prompt_name", "prompt_name without a text; allowed: with inputs of text")
    return prompt


def fit_text(
    checked: common_pb2.Sampling, token_ids: list[int], model: TextModel, *, prompt_name: str
) -> list[int]:
    """Like `fit_context`, for a model that reads texts whole. A text that is cut keeps the special
    tokens around it, and its beginning unless the client says otherwise."""
    if not checked.HasField("truncate_prompt_tokens"):
        return fit_context(checked, token_ids, model.limits, prompt_name=prompt_name)
    most = model.limits.max_model_len
    asked = checked.truncate_prompt_tokens
    checked.ClearField("truncate_prompt_tokens")
    num_tokens = most if asked == WHAT_FITS else asked
    if num_tokens > most:
        raise BadRequest.of("truncate_prompt_tokens", num_tokens, f"1…{most}")
    first, last = model.tokenizer.around
    is_framed = token_ids[: len(first)] == first and token_ids[-len(last) :] == last
    if not (is_framed and first and last and num_tokens > len(first) + len(last)):
        first, last = [], []
    inner = token_ids[len(first) : len(token_ids) - len(last)]
    room = num_tokens - len(first) - len(last)
    if len(inner) > room:
        inner = inner[-room:] if checked.truncation_side == "left" else inner[:room]
    return fit_context(checked, [*first, *inner, *last], model.limits, prompt_name=prompt_name)
