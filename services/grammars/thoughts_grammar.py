"""Grammar of reasoning before an answer, with its budget of tokens."""

from __future__ import annotations

from typing import Any

from headwater.proto.common_pb2 import AnswerFormat
from headwater.proto.processor_pb2 import PrepareRequest

from ..answers.reasoning_parser import REASONING_FORMATS
from ..runtime.errors import BadRequest
from ..text.model import TextModel
from .counted_text import counted_up_to
from .lark import ANY_TEXT, literal, quoted

Grammars = list[dict[str, Any]]
ANSWER = "answer"
"""Name of the answer's own grammar."""
_SPACE = r"/[ \t\r\n]{0,8}/"
_UNLIMITED = -1


def behind_thoughts(
    model: TextModel, form: AnswerFormat, request: PrepareRequest, grammars: Grammars
) -> Grammars:
    """Grammar of an answer after reasoning: the answer's own grammar begins where reasoning ends; a
    budget ends it. Raises `BadRequest` for a budget where the model writes no reasoning, unless the
    request says that it needs none."""
    sampling = request.sampling
    has_budget = sampling.HasField("thinking_token_budget")
    may_lack_thoughts = request.prompt.conversation.thoughts_are_optional
    if has_budget and not model.reasoning_format and not may_lack_thoughts:
        raise BadRequest(
            "thinking_token_budget",
            f"thinking_token_budget is not supported: the model {model.name!r} writes no "
            "thoughts with marks that Headwater knows",
            code="unsupported_parameter",
        )
    if not form.reasoning_parser or not (grammars or has_budget):
        return grammars
    answer = ANY_TEXT
    if grammars:
        grammars[0]["name"] = grammars[0].get("name", ANSWER)
        answer = f"@{grammars[0]['name']}"
    # llguidance does not read counts that are larger than any context.
    budget = (
        min(sampling.thinking_token_budget, model.limits.max_model_len)
        if has_budget
        else _UNLIMITED
    )
    rules = _thoughts(model, form, budget)
    special = model.tokenizer.special_texts
    # White space is part of neither, so the grammar allows it only behind the reasoning.
    behind = REASONING_FORMATS[form.reasoning_parser].behind
    between = literal(behind, special) if behind else ""
    start = f"start: thoughts {between} {_SPACE} {answer}"
    if not form.starts_in_reasoning:
        start = f"start: opened thoughts {between} {_SPACE} {answer} | {answer}"
    return [{"lark_grammar": "\n".join((start, *rules))}, *grammars]


def _thoughts(model: TextModel, form: AnswerFormat, budget: int) -> list[str]:
    """Rules for the reasoning, its end included, as `thoughts`, and for reasoning that the prompt
    opened, as `opened`."""
    marks = REASONING_FORMATS[form.reasoning_parser]
    special = model.tokenizer.special_texts
    opened = f"opened: {_token(model, marks.start) or literal(marks.start, special)}"
    end = model.tokenizer.id_of(marks.end)
    if end is not None:
        # The rule is over tokens, not text, so that they can be counted and end with the first
        # closing one.
        kept = ",".join(map(str, sorted({end, *model.eos_token_ids})))
        inner = {_UNLIMITED: f"<[^{kept}]>*", 0: ""}.get(budget, f"<[^{kept}]>{{0,{budget}}}")
        return [f"thoughts: {inner} <[{end}]>", opened]
    if budget != _UNLIMITED:
        counted = counted_up_to(
            marks.end.encode(), model.tokenizer.table, model.eos_token_ids, budget
        )
        return ["thoughts: counted", *counted, opened]
    return [f"thoughts[suffix={quoted(marks.end)}]: {ANY_TEXT}", opened]


def _token(model: TextModel, text: str) -> str | None:
    token_id = model.tokenizer.id_of(text)
    return None if token_id is None else f"<[{token_id}]>"
