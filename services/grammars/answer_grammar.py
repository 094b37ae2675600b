"""The grammar of a whole answer: the client's constraint, enforced calls, and reasoning before
either."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headwater.engine_core.capabilities import (
    BEAMS,
    IGNORE_EOS,
    TOOLS,
    Asked,
    refusals_of_request,
)
from headwater.proto.common_pb2 import AnswerFormat, CustomInput, Sampling, StructuredOutput, Tool
from headwater.proto.processor_pb2 import Conversation, PrepareReply, PrepareRequest

from ..answers.format import ENFORCING, may_call, named_tool
from ..answers.forms import ANY_ARGUMENTS, NO_ARGUMENTS, Form, OfferedTool
from ..answers.reasoning_parser import REASONING_FORMATS
from ..answers.tool_formats import TOOL_FORMATS
from ..runtime.errors import BadRequest
from ..text.model import TextModel
from .ascii_escapes import ascii_grammar, ascii_regex
from .closed_schema import closed
from .counted_text import counted_up_to
from .json_schema import check_schema, parse_json
from .lark import ANY_TEXT, expression, literal, quoted, refuse_endless_rule
from .prepared_schema import refuse_endless
from .quoted import quoted_grammar, quoted_regex
from .spelling import check_spelling
from .structural_tag import structural_tag_grammar
from .structured_output import grammar_of, param_of

Grammars = list[dict[str, Any]]
_ANSWER = "answer"
_CONTENT = "content"
_FRAMED = "framed"
_SPACE = r"/[ \t\r\n]{0,8}/"
_UNLIMITED = -1


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
    if not grammars and sampling.HasField("thinking_token_budget"):
        grammars = _calls_or_text(model, conversation, tool_format)
    grammars = _behind_thoughts(model, reply.answer_format, sampling, grammars)
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
    if may_call(conversation) and (form.frame or form.opening in special):
        calls = form.free(_all_offered(conversation), _is_single(conversation))
        return structural_tag_grammar("tools", {"format": calls}, special)
    if not form.frame:
        return []
    return _framed([{"lark_grammar": f"start: {ANY_TEXT}"}], tool_format, special)


def _framed(content: Grammars, tool_format: str, special: Mapping[str, int]) -> Grammars:
    """Grammar of content behind the text that its format has before it."""
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
    asked = {TOOLS: Asked("tool_choice" if _is_due(conversation) else "tools", True)}
    if sampling.use_beam_search:
        asked[BEAMS] = Asked("use_beam_search", True)
    if sampling.ignore_eos:
        asked[IGNORE_EOS] = Asked("ignore_eos", True)
    for name, sentence in refusals_of_request(asked):
        raise BadRequest(name, sentence)


def _or_calls(content: Grammars, calls: Grammars) -> Grammars:
    """Grammar of an answer of calls alone, or of content that matches its grammar, where there is
    one."""
    if not content:
        return calls
    content[0]["name"] = _CONTENT
    return [
        {"name": _ANSWER, "lark_grammar": f"start: @{_CONTENT} | @{calls[0]['name']}"},
        *content,
        *calls,
    ]


def calls_due(conversation: Conversation, tool_format: str) -> Form | None:
    """Grammar of an answer that has to call, or whose calls must match strict schemas; None: it is
    free."""
    if not tool_format or not may_call(conversation):
        return None
    chosen = named_tool(conversation)
    form = TOOL_FORMATS[tool_format]
    is_due = _is_due(conversation)
    if not (is_due or conversation.allowed_tools or any(map(_is_held, conversation.tools))):
        return None
    tools = _all_offered(conversation)
    if chosen is not None:
        return form.calls([tool for tool in tools if tool.name == chosen], True)
    return (
        form.calls(tools, _is_single(conversation))
        if is_due
        else form.free(tools, _is_single(conversation))
    )


def calls_win(conversation: Conversation, tool_format: str) -> bool:
    """Whether an enforced `tool_choice` makes the answer a call, whatever the constraint on its
    content.

    OpenAI and vLLM answer so, and clients send such requests by themselves.
    """
    return bool(tool_format) and may_call(conversation) and _is_due(conversation)


def calls_instead(conversation: Conversation, tool_format: str) -> Form | None:
    """Calls that an answer may have in place of constrained content; None: it may not call."""
    if not tool_format or not may_call(conversation):
        return None
    return TOOL_FORMATS[tool_format].instead(_all_offered(conversation), _is_single(conversation))


def _is_due(conversation: Conversation) -> bool:
    """Whether the answer has to call."""
    return named_tool(conversation) is not None or conversation.tool_choice == ENFORCING


def _is_single(conversation: Conversation) -> bool:
    return conversation.HasField("parallel_tool_calls") and not conversation.parallel_tool_calls


def _all_offered(conversation: Conversation) -> list[OfferedTool]:
    """Offered tools, in the order of the client."""
    chosen = named_tool(conversation)
    is_due = _is_due(conversation)
    allowed = conversation.allowed_tools or [tool.name for tool in conversation.tools]
    offered = [(i, tool) for i, tool in enumerate(conversation.tools) if tool.name in allowed]
    return [_offered(tool, i, is_due=is_due and chosen in (None, tool.name)) for i, tool in offered]


def _is_held(tool: Tool) -> bool:
    """Whether calls are constrained beyond their form, also where the answer need not call."""
    return tool.strict or tool.custom_input.WhichOneof("format") is not None


def _offered(tool: Tool, i: int, *, is_due: bool) -> OfferedTool:
    """An offered tool. Where calls are optional and not strict, only their form is constrained."""
    if not (is_due or _is_held(tool)):
        return OfferedTool(name=tool.name, parameters=ANY_ARGUMENTS)
    if tool.HasField("custom_input"):
        return OfferedTool(
            name=tool.name,
            parameters=ANY_ARGUMENTS,
            input=_text_input(tool.custom_input, i),
            text=_bare_text(tool.custom_input),
        )
    param = f"tools[{i}].function.parameters"
    # A function without parameters takes none.
    parameters = parse_json(param, tool.parameters_json) if tool.parameters_json else NO_ARGUMENTS
    check_schema(param, parameters)
    refuse_endless(param, parameters)
    if not isinstance(parameters.get("properties", {}), dict) or not isinstance(
        parameters.get("required", []), list
    ):
        raise BadRequest.of(param, parameters, "a JSON Schema of an object")
    # Arguments are an object whether or not the schema says so, or names other types besides, and
    # have no names but those that the function gives.
    return OfferedTool(name=tool.name, parameters=closed(parameters) | {"type": "object"})


def _text_input(asked: CustomInput, i: int) -> Form:
    """JSON string of a custom tool's text, as models write it."""
    param = format_param(i)
    text: Form
    match asked.WhichOneof("format"):
        case "lark":
            refuse_endless_rule(param, asked.lark)
            text = {
                "type": "grammar",
                "grammar": quoted_grammar(param, ascii_grammar(asked.lark, {})),
            }
        case "regex":
            text = {"type": "regex", "pattern": quoted_regex(param, ascii_regex(asked.regex))}
        case _:
            return {"type": "json_schema", "json_schema": {"type": "string"}}
    quote = {"type": "const_string", "value": '"'}
    return {"type": "sequence", "elements": [quote, text, quote]}


def _bare_text(asked: CustomInput) -> Form | None:
    """A custom tool's text without quotes; None: it is any text."""
    match asked.WhichOneof("format"):
        case "lark":
            return {"type": "grammar", "grammar": ascii_grammar(asked.lark, {})}
        case "regex":
            return {"type": "regex", "pattern": ascii_regex(asked.regex)}
    return None


def custom_grammars(conversation: Conversation) -> Iterator[tuple[int, str]]:
    """Grammars of the texts of custom tools, each alone, by the tool's position."""
    for i, tool in enumerate(conversation.tools):
        match tool.custom_input.WhichOneof("format"):
            case "lark":
                yield (
                    i,
                    json.dumps(
                        {"grammars": [{"lark_grammar": ascii_grammar(tool.custom_input.lark, {})}]}
                    ),
                )
            case "regex":
                pattern = expression(format_param(i), tool.custom_input.regex)
                yield i, json.dumps({"grammars": [{"lark_grammar": f"start: {pattern}"}]})


def format_param(i: int) -> str:
    """Client's name of the field with the format of a tool's text."""
    return f"tools[{i}].custom.format.grammar.definition"


def _behind_thoughts(
    model: TextModel, form: AnswerFormat, sampling: Sampling, grammars: Grammars
) -> Grammars:
    """Grammar of an answer after reasoning: the answer's own grammar begins where reasoning ends; a
    budget ends it."""
    has_budget = sampling.HasField("thinking_token_budget")
    if has_budget and not model.reasoning_format:
        raise BadRequest(
            "thinking_token_budget",
            f"thinking_token_budget is not supported: the model {model.name!r} writes no "
            "thoughts that could be told",
            code="unsupported_parameter",
        )
    if not form.reasoning_parser or not (grammars or has_budget):
        return grammars
    answer = ANY_TEXT
    if grammars:
        grammars[0]["name"] = grammars[0].get("name", _ANSWER)
        answer = f"@{grammars[0]['name']}"
    # Larger counts than those of any context are none that llguidance reads.
    budget = (
        min(sampling.thinking_token_budget, model.limits.max_model_len)
        if has_budget
        else _UNLIMITED
    )
    rules = _thoughts(model, form, budget)
    special = model.tokenizer.special_texts
    # White space belongs to neither, and so stands only behind thoughts.
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
