"""Separates reasoning from the answer that follows it. Models differ in their tags and in who
writes the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import harmony_parser as harmony
from .parts import Margin, Parts, PartsParser, split_at


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Tags by which a family of models marks its reasoning."""

    start: str = "<think>"
    end: str = "</think>"
    is_implied: bool = False
    """Whether reasoning comes first even where no tag opens it."""
    behind: str = ""
    """Text that models write between reasoning and what follows it."""
    read_by: tuple[str, ...] = ()
    """Formats of calls whose parsers read the reasoning, too."""


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(),
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(is_implied=True),
    "magistral": ReasoningFormat(start="[THINK]", end="[/THINK]"),
    "seed_oss": ReasoningFormat(start="<seed:think>", end="</seed:think>"),
    "command": ReasoningFormat(start="<|START_THINKING|>", end="<|END_THINKING|>"),
    "granite": ReasoningFormat(start="Here is my thought process:", end="Here is my response:"),
    "gemma4": ReasoningFormat(start="<|channel>thought", end="<channel|>"),
    "gpt_oss": ReasoningFormat(
        start=harmony.THOUGHTS, end=harmony.END, behind=harmony.NEXT, read_by=("gpt_oss",)
    ),
}


class ReasoningParser(PartsParser):
    """Reads the reasoning at the beginning of an answer; a tag later on is content."""

    def __init__(self, marks: ReasoningFormat, *, starts_inside: bool) -> None:
        super().__init__(self._in_thoughts if starts_inside else self._before)
        self._marks = marks
        self._margin = Margin(is_beside=True)
        self._is_first = True

    @property
    def is_inside(self) -> bool:
        return self._read == self._in_thoughts

    @property
    def is_over(self) -> bool:
        """Whether everything that follows is content."""
        return self._read == self._in_content

    def flush(self) -> Parts:
        if self._read == self._in_thoughts:
            return Parts(reasoning=self._margin.push(self._held) + self._margin.flush())
        return Parts(content=self._held)

    def _before(self, text: str, parts: Parts) -> str:
        body = text.lstrip()
        if body.startswith(self._marks.start):
            self._read = self._in_thoughts
        elif self._marks.start.startswith(body):
            return self._wait(text)
        else:
            self._read = self._in_content
        return text

    def _in_thoughts(self, text: str, parts: Parts) -> str:
        if self._is_first:
            # Whether or not the prompt has opened the thoughts, a model may write the tag itself.
            body = text.lstrip()
            if self._marks.start.startswith(body):
                return self._wait(text)
            self._is_first = False
            text = body.removeprefix(self._marks.start)
        before, marker, rest = split_at(text, (self._marks.end,))
        parts.reasoning += self._margin.push(before)
        if not marker:
            return self._wait(rest)
        self._margin.cut()
        self._read = self._at_answer
        return rest

    def _at_answer(self, text: str, parts: Parts) -> str:
        """Skips the white space between reasoning and answer, which belongs to neither."""
        body = text.lstrip()
        if body:
            self._read = self._in_content
        return body
