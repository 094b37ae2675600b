"""The grammar of a whole answer: the client's constraint, enforced calls, and reasoning before
either."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headwater.engine_core.capabilities import (
    BEAMS,
    IGNORE_EOS,
    TOOLS,
    Asked,
    refusals_of_request,
)
from headwater.proto.common_pb2 import AnswerFormat, Sampling, StructuredOutput
from headwater.proto.processor_pb2 import Conversation, PrepareReply, PrepareRequest

from ..answers.format import may_call
from ..answers.reasoning_parser import REASONING_FORMATS
from ..answers.tool_formats import TOOL_FORMATS
from ..runtime.errors import BadRequest
from ..text.model import TextModel
from .enforced_calls import calls_due, calls_instead, calls_win
from .lark import ANY_TEXT, literal
from .offered_tools import all_offered, is_due_to_call, makes_one_call
from .spelling import check_spelling
from .structural_tag import structural_tag_grammar
from .structured_output import grammar_of, param_of
from .thoughts_grammar import ANSWER, Grammars, behind_thoughts

_CONTENT = "content"
_FRAMED = "framed"


def answer_grammar(model: TextModel, request: PrepareRequest, reply: PrepareReply) -> str:
    """Grammar of the answer in llguidance's format; empty where the answer is free. Raises
    `BadRequest`."""
    sampling = request.sampling
    special = model.tokenizer.special_texts
    conversation = request.prompt.conversation
    tool_format = reply.answer_format.tool_parser
    grammars: Grammars = []
    # Checked also where an enforced call takes its place.
    content = (
        content_grammar(model, sampling.structured_output)
        if sampling.HasField("structured_output")
        else ""
    )
    if content:
        _refuse_choices_read_as_thoughts(sampling.structured_output, reply.answer_format)
    if content and not calls_win(conversation, tool_format):
        grammars = _framed(json.loads(content)["grammars"], tool_format, special)
        # Structural tags define the places of calls themselves.
        if sampling.structured_output.WhichOneof("kind") != "structural_tag":
            calls = calls_instead(conversation, tool_format)
        elif (calls := calls_due(conversation, tool_format)) is not None:
            raise BadRequest(
                "tools", "tools are held to schemas beside structured output; allowed: one of them"
            )
    else:
        calls = calls_due(conversation, tool_format)
    if calls is not None:
        _check_calls(conversation, sampling)
        grammars = _or_calls(grammars, structural_tag_grammar("tools", {"format": calls}, special))
    has_budget = bool(model.reasoning_format) and sampling.HasField("thinking_token_budget")
    if not grammars and has_budget:
        grammars = _calls_or_text(model, conversation, tool_format)
    grammars = behind_thoughts(model, reply.answer_format, request, grammars)
    if not grammars:
        return ""
    text = json.dumps({"grammars": grammars}, ensure_ascii=False)
    # Of the calls: content has been checked.
    check_spelling("tools", text, model.tokenizer.missing_bytes)
    return text


def content_grammar(model: TextModel, asked: StructuredOutput) -> str:
    """Grammar of the answer's content, in llguidance's format. Raises `BadRequest`."""
    tokenizer = model.tokenizer
    grammar = grammar_of(
        asked,
        tokenizer.special_texts,
        closes_schemas=model.closes_schemas,
        missing_bytes=tokenizer.missing_bytes,
    )
    check_spelling(param_of(asked), grammar, tokenizer.missing_bytes)
    return grammar


def _calls_or_text(model: TextModel, conversation: Conversation, tool_format: str) -> Grammars:
    """Grammar of an answer that may call, where a budget of thoughts alone asks for a grammar and
    calls begin with a token that is no text; otherwise any text may be a call."""
    if not tool_format:
        return []
    special = model.tokenizer.special_texts
    form = TOOL_FORMATS[tool_format]
    is_token = any(token in form.opening for token in special)
    if may_call(conversation) and (form.frame or is_token):
        calls = form.free(all_offered(conversation), makes_one_call(conversation))
        return structural_tag_grammar("tools", {"format": calls}, special)
    if not form.frame:
        return []
    return _framed([{"lark_grammar": f"start: {ANY_TEXT}"}], tool_format, special)


def _framed(content: Grammars, tool_format: str, special: Mapping[str, int]) -> Grammars:
    """Grammar of content after the text with which its format begins."""
    frame = TOOL_FORMATS[tool_format].frame if tool_format else ""
    if not frame:
        return content
    content[0]["name"] = _FRAMED
    return [{"lark_grammar": f"start: {literal(frame, special)} @{_FRAMED}"}, *content]


def _refuse_choices_read_as_thoughts(asked: StructuredOutput, form: AnswerFormat) -> None:
    """Raises `BadRequest` for a choice whose beginning the reasoning parser would take away: white
    space behind thoughts, or a tag of thoughts."""
    if not form.reasoning_parser or asked.WhichOneof("kind") != "choice":
        return
    opening = REASONING_FORMATS[form.reasoning_parser].start
    for choice in asked.choice.choices:
        if choice.lstrip() != choice or choice.startswith(opening):
            raise BadRequest.of(
                param_of(asked),
                choice,
                f"choices that begin neither with white space nor with {opening}, since the "
                "model's thoughts may come before them",
            )


def _check_calls(conversation: Conversation, sampling: Sampling) -> None:
    """Raises `BadRequest` for what enforced calls, or calls that are held to schemas, exclude."""
    asked = {TOOLS: Asked("tool_choice" if is_due_to_call(conversation) else "tools", True)}
    if sampling.use_beam_search:
        asked[BEAMS] = Asked("use_beam_search", True)
    if sampling.ignore_eos:
        asked[IGNORE_EOS] = Asked("ignore_eos", True)
    for name, sentence in refusals_of_request(asked):
        raise BadRequest(name, sentence)


def _or_calls(content: Grammars, calls: Grammars) -> Grammars:
    """Grammar of an answer that is either calls only, or content that matches its grammar."""
    if not content:
        return calls
    content[0]["name"] = _CONTENT
    return [
        {"name": ANSWER, "lark_grammar": f"start: @{_CONTENT} | @{calls[0]['name']}"},
        *content,
        *calls,
    ]
