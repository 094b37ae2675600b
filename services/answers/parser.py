"""Separates the text of one answer into reasoning, calls and content, by the format that the
processor chose for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import ClassVar, Protocol

from headwater.proto.common_pb2 import AnswerFormat

from .argument_types import types_by_tool
from .gemma_formats import GEMMA_FORMATS
from .gemma_parser import GemmaParser
from .glm4_parser import Glm4Parser
from .harmony_parser import HarmonyParser
from .list_formats import LIST_FORMATS
from .list_parser import ListParser
from .llama_parser import LlamaJsonParser, XlamParser
from .marked_formats import MARKED_FORMATS
from .marked_parser import MarkedParser
from .object_formats import OBJECT_FORMATS
from .object_parser import ObjectParser
from .parts import CallDelta, Parts
from .pythonic_formats import PYTHONIC_FORMATS
from .pythonic_parser import PythonicParser
from .reasoning_parser import REASONING_FORMATS, ReasoningParser
from .section_parser import SectionParser
from .text_input import TextInputReader


class ToolParser(Protocol):
    """Reads the calls of one answer: a `PartsParser` that knows calls."""

    @property
    def num_done(self) -> int:
        """Number of calls that are complete."""

    @property
    def is_call_open(self) -> bool:
        """Whether the arguments of the last call have not ended."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes now is reasoning, of a format that has it beside calls."""

    def push(self, text: str) -> Parts: ...
    def flush(self) -> Parts: ...


class Row(Protocol):
    """Texts of a format that is a row of a table."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens, or texts of several tokens, that must become text for the parser, also where
        special tokens are skipped."""


class NamedParser(ToolParser, Protocol):
    """Parser of a format that has a class of its own."""

    markers: ClassVar[tuple[str, ...]]
    """Tokens that must become text for the parser, also where special tokens are skipped."""

    def __init__(self, tool_names: Collection[str]) -> None: ...


TOOL_PARSERS: Mapping[str, type[NamedParser]] = {
    "glm4": Glm4Parser,
    "gpt_oss": HarmonyParser,
    "llama3_json": LlamaJsonParser,
    "pythonic": PythonicParser,
    "xlam": XlamParser,
}
"""Parsers of the formats that are rows of no table."""
LISTS = {**LIST_FORMATS, "mistral_tekken": LIST_FORMATS["mistral"]}
"""Formats that `ListParser` reads."""
ROWS: Mapping[str, Row] = {
    **MARKED_FORMATS,
    **OBJECT_FORMATS,
    **LISTS,
    **GEMMA_FORMATS,
    **PYTHONIC_FORMATS,
}
"""Formats that are rows of a table."""
TOOL_PARSER_NAMES = frozenset({*TOOL_PARSERS, *ROWS})
"""Names of all formats of calls, as in `tool_formats`."""


class AnswerParser:
    """Parser of one answer. Reasoning comes before calls, and calls are looked for behind it
    only."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        form = answer_format
        self._omits_reasoning = form.omit_reasoning
        self._is_single = form.single_call
        self._reasoning = _reasoning_parser(form)
        self._tools = _tool_parser(form)
        self._custom_names = frozenset(form.custom_names)
        self._inputs: dict[int, TextInputReader] = {}
        """Readers of the arguments of calls of custom tools."""
        self.has_called = False

    @property
    def is_reasoning(self) -> bool:
        if self._reasoning is not None:
            return self._reasoning.is_inside
        return self._tools is not None and self._tools.is_reasoning

    @property
    def is_over(self) -> bool:
        """Whether the one call that was allowed is complete."""
        return self._is_single and self._tools is not None and self._tools.num_done > 0

    @property
    def is_call_open(self) -> bool:
        """Whether the last call is not whole: its arguments have not ended."""
        return self._tools is not None and self._tools.is_call_open

    def push(self, text: str) -> Parts:
        if not self._is_single or self._tools is None:
            return self._push(text)
        parts = Parts()
        for char in text:
            # Text behind the call is ignored, however the text was cut into pieces.
            if self.is_over:
                break
            parts.add(self._push(char))
        return parts

    def _push(self, text: str) -> Parts:
        return self._with_calls(
            self._reasoning.push(text) if self._reasoning is not None else Parts(text)
        )

    def flush(self) -> Parts:
        if self.is_over:
            return Parts()
        parts = self._with_calls(
            self._reasoning.flush() if self._reasoning is not None else Parts()
        )
        if self._tools is not None:
            rest = self._tools.flush()
            reasoning = "" if self._omits_reasoning else rest.reasoning
            parts.add(Parts(rest.content, reasoning, self._with_inputs_as_text(rest.calls)))
        return parts

    def _with_calls(self, parts: Parts) -> Parts:
        reasoning = "" if self._omits_reasoning else parts.reasoning
        if self._tools is None or not parts.content:
            return Parts(parts.content, reasoning)
        read = self._tools.push(parts.content)
        self.has_called = self.has_called or bool(read.calls)
        if not self._omits_reasoning:
            reasoning += read.reasoning
        return Parts(read.content, reasoning, self._with_inputs_as_text(read.calls))

    def _with_inputs_as_text(self, calls: list[CallDelta]) -> list[CallDelta]:
        """Calls for the client: a call of a custom tool has its text in place of the JSON around
        it."""
        if not self._custom_names:
            return calls
        shown = [self._as_text(call) for call in calls]
        return [call for call in shown if call.name or call.arguments]

    def _as_text(self, call: CallDelta) -> CallDelta:
        if call.name in self._custom_names:
            self._inputs[call.index] = TextInputReader()
        if (reader := self._inputs.get(call.index)) is None:
            return call
        return CallDelta(call.index, call.name, reader.push(call.arguments), is_text=True)


def _reasoning_parser(form: AnswerFormat) -> ReasoningParser | None:
    """Parser of reasoning before all else; None where there is none, or where the parser of calls
    reads it."""
    if not form.reasoning_parser:
        return None
    marks = REASONING_FORMATS[form.reasoning_parser]
    if form.tool_parser in marks.read_by:
        return None
    return ReasoningParser(marks, starts_inside=form.starts_in_reasoning)


def _tool_parser(form: AnswerFormat) -> ToolParser | None:
    name = form.tool_parser
    names = frozenset(form.tool_names)
    if (marked := MARKED_FORMATS.get(name)) is not None:
        return MarkedParser(marked, names, types_by_tool(form))
    if (objects := OBJECT_FORMATS.get(name)) is not None:
        return ObjectParser(objects)
    if (listed := LISTS.get(name)) is not None:
        return ListParser(listed)
    if (gemma := GEMMA_FORMATS.get(name)) is not None:
        return GemmaParser(gemma)
    if (pythonic := PYTHONIC_FORMATS.get(name)) is not None:
        return SectionParser(pythonic, names)
    make = TOOL_PARSERS.get(name)
    return make(names) if make is not None else None


def unknown_parser(answer_format: AnswerFormat) -> str | None:
    """Name of a requested parser that does not exist; None where all exist."""
    for name, known in (
        (answer_format.tool_parser, TOOL_PARSER_NAMES),
        (answer_format.reasoning_parser, REASONING_FORMATS),
    ):
        if name and name not in known:
            return name
    return None


def markers_of(answer_format: AnswerFormat) -> tuple[str, ...]:
    """Tokens that must become text for the parsers, also where special tokens are skipped."""
    tools = _tool_markers(answer_format.tool_parser)
    if not answer_format.reasoning_parser:
        return tools
    return (*tools, *REASONING_FORMATS[answer_format.reasoning_parser].markers)


def _tool_markers(name: str) -> tuple[str, ...]:
    if (row := ROWS.get(name)) is not None:
        return row.markers
    return TOOL_PARSERS[name].markers if name in TOOL_PARSERS else ()


def call_id(
    answer_format: AnswerFormat, request_id: str, choice_index: int, call_index: int
) -> str:
    """Id of a call, the same on every attempt of a request, so that a resumed answer does not
    rename its calls."""
    digest = blake2b(
        f"{request_id}|{choice_index}|{call_index}".encode(), digest_size=12
    ).hexdigest()
    # Mistral's template takes ids of nine letters and digits only.
    is_mistral = answer_format.tool_parser in ("mistral", "mistral_tekken")
    return digest[:9] if is_mistral else f"call_{digest}"
