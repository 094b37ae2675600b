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
    other_start: str = ""
    """Another spelling of `start`, which readers accept."""
    other_end: str = ""
    answer: tuple[str, str] = ("", "")
    """Tags around the answer, of models that mark it too; they are no content."""
    is_implied: bool = False
    """Whether reasoning comes first even where no tag opens it."""
    behind: str = ""
    """Text that models write between reasoning and content."""
    read_by: tuple[str, ...] = ()
    """Formats of calls whose parsers read the reasoning, too."""

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.start, self.other_start)))

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.end, self.other_end)))

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format, any of which may be a token."""
        return tuple(filter(None, (*self.starts, *self.ends, *self.answer)))


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(),
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(is_implied=True),
    "magistral": ReasoningFormat(start="[THINK]", end="[/THINK]"),
    "seed_oss": ReasoningFormat(start="<seed:think>", end="</seed:think>"),
    "command": ReasoningFormat(start="<|START_THINKING|>", end="<|END_THINKING|>"),
    "granite": ReasoningFormat(
        start="Here is my thought process:",
        end="Here is my response:",
        other_start="Here's my thought process:",
        other_end="Here's my response:",
    ),
    "granite33": ReasoningFormat(answer=("<response>", "</response>")),
    "hy_v3": ReasoningFormat(start="<think:opensource>", end="</think:opensource>"),
    "hunyuan_a13b": ReasoningFormat(answer=("<answer>", "</answer>")),
    "apertus": ReasoningFormat(start="<|inner_prefix|>", end="<|inner_suffix|>"),
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

    def flush(self) -> Parts:
        if self._read == self._in_thoughts:
            return Parts(reasoning=self._margin.push(self._held) + self._margin.flush())
        if self._read == self._in_answer:
            return Parts(content=self._margin.push(self._held) + self._margin.flush())
        return Parts(content=self._held)

    def _before(self, text: str, parts: Parts) -> str:
        body = text.lstrip()
        if body.startswith(self._marks.starts):
            self._read = self._in_thoughts
        elif any(start.startswith(body) for start in self._marks.starts):
            return self._wait(text)
        else:
            self._read = self._in_content
        return text

    def _in_thoughts(self, text: str, parts: Parts) -> str:
        if self._is_first:
            # Whether or not the prompt has opened the thoughts, a model may write the tag itself.
            body = text.lstrip()
            if any(start.startswith(body) for start in self._marks.starts):
                return self._wait(text)
            self._is_first = False
            text = body
            for start in self._marks.starts:
                text = text.removeprefix(start)
        before, marker, rest = split_at(text, self._marks.ends)
        parts.reasoning += self._margin.push(before)
        if not marker:
            return self._wait(rest)
        self._margin.cut()
        self._read = self._at_answer
        return rest

    def _at_answer(self, text: str, parts: Parts) -> str:
        """Skips the white space between reasoning and answer, which belongs to neither, and the tag
        before the answer."""
        body = text.lstrip()
        tag, _ = self._marks.answer
        if tag and body.startswith(tag):
            self._margin = Margin(is_beside=True)
            self._read = self._in_answer
            return body[len(tag) :]
        if tag and tag.startswith(body):
            return self._wait(body)
        if body:
            self._read = self._in_content
        return body

    def _in_answer(self, text: str, parts: Parts) -> str:
        """Passes content on, without the tag behind the answer."""
        written, marker, rest = split_at(text, self._marks.answer[1:])
        parts.content += self._margin.push(written)
        if not marker:
            return self._wait(rest)
        self._margin.cut()
        return rest
