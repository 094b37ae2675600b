"""A pair of texts that a model scores: its token ids, and how its second text is cut. Knows no
network."""

from __future__ import annotations

from headwater.proto import common_pb2, processor_pb2

from ..runtime.errors import BadRequest
from ..runtime.request_limits import WHAT_FITS
from ..runtime.served_model import CLASSIFY
from ..text.model import TextModel
from ..text.pair_template import PairTemplate


def pair_ids(
    checked: common_pb2.Sampling, model: TextModel, prompt: processor_pb2.Prompt
) -> tuple[list[int], int]:
    """Token ids of a pair of texts, and where those of the second type begin; 0: there are none.
    Where the client has a pair cut, the end of its second text goes, and nothing else. Raises
    `BadRequest` where the first text alone leaves no room."""
    if model.task != CLASSIFY:
        allowed = "one text, or a model that classifies pairs"
        raise BadRequest("pair", f"the model {model.name!r} reads no pairs; allowed: {allowed}")
    if model.pair_template is not None:
        return _templated_ids(checked, model, model.pair_template, prompt), 0
    if prompt.instruction:
        allowed = "none with a model whose pairs have no template"
        raise BadRequest.of("instruction", prompt.instruction, allowed)
    first, second = (
        model.tokenizer.encode(text, add_special_tokens=False)
        for text in (prompt.text, prompt.pair)
    )
    before, between, behind = model.tokenizer.around_pair
    start = len(before) + len(first) + len(between)
    room = _room(checked, model, start + len(behind), len(first))
    ids = [*before, *first, *between, *second[:room], *behind]
    return ids, start if model.tokenizer.types_pairs else 0


def _templated_ids(
    checked: common_pb2.Sampling,
    model: TextModel,
    template: PairTemplate,
    prompt: processor_pb2.Prompt,
) -> list[int]:
    """Special tokens in the two texts are text: a document does not end its own turn."""
    tokenizer = model.tokenizer
    default = model.prompts.get(model.default_prompt, "")
    before, between, behind = template.around(prompt.instruction or default)
    head = before + tokenizer.guarded(prompt.text) + between
    start = len(tokenizer.encode_guarded(head, add_special_tokens=False))
    body = tokenizer.encode_guarded(head + tokenizer.guarded(prompt.pair), add_special_tokens=False)
    tail = tokenizer.encode(behind, add_special_tokens=False)
    num_first = len(tokenizer.encode(prompt.text, add_special_tokens=False))
    room = _room(checked, model, start + len(tail), num_first)
    return [*(body if room is None else body[: start + room]), *tail]


def _room(
    checked: common_pb2.Sampling, model: TextModel, num_others: int, num_first: int
) -> int | None:
    """Number of tokens of a second text that stay beside the others; None: it is not cut.
    `num_first`: tokens of the first text, for errors."""
    if not checked.HasField("truncate_prompt_tokens"):
        return None
    asked = checked.truncate_prompt_tokens
    checked.ClearField("truncate_prompt_tokens")
    most = model.limits.max_model_len
    room = min(most, most if asked == WHAT_FITS else asked) - num_others
    if room < 1:
        raise BadRequest.of(
            "query", f"{num_first} tokens", f"at most {num_first + room - 1} beside a document"
        )
    return room
