"""Parser of calls in the formats of `marked_formats`, from text as it comes. Text outside of calls
is content."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from .argument_types import ANY, TEXT, Types, value_as_json
from .json_arguments import ArgumentPieces, ArgumentsReader
from .marked_formats import MarkedFormat, Parameters
from .parts import CallDelta, Margin, Parts, PartsParser, split_at

_LONGEST_MARK = 64
_MAX_NAME = 1024
"""Most characters of a name and of the text up to its end mark."""


class MarkedParser(PartsParser):
    """Reads calls of one format; `types` are those of arguments, by tool. Where a name has no mark
    of its own, only one of `tool_names` is a name."""

    def __init__(
        self,
        form: MarkedFormat,
        tool_names: Collection[str],
        types: Mapping[str, Mapping[str, Types]],
    ) -> None:
        super().__init__(self._in_text)
        self._form = form
        self._tool_names = tool_names
        self._types = types
        self._begin = form.begin.strip()
        self._name_end = form.name_end.strip()
        self._section, self._section_end = (mark.strip() for mark in form.section)
        self._openings = tuple(filter(None, (self._section, self._begin)))
        self._marks = tuple(
            filter(None, (self._begin, self._section_end, form.end.strip(), self._section))
        )
        """Marks that may stand between calls."""
        self._id = re.compile(form.id_pattern)
        self._margin = Margin()
        self._opened = ""
        """Text since the opening of a section, while no call of it is known."""
        self._is_called = False
        """Whether the section has a call."""
        self._num_begun = 0
        self._name = ""
        self._arguments = ArgumentsReader()
        self._parameters: _ParameterReader | None = None
        self.num_done = 0
        """Number of calls that are complete."""

    @property
    def is_call_open(self) -> bool:
        return self._num_begun > self.num_done

    def flush(self) -> Parts:
        held = self._opened + self._held
        is_in_call = self._read in (self._in_arguments, self._in_parameters)
        if is_in_call or (self._num_begun and self._read != self._in_text):
            # A call that the end of the answer cut off: its beginning is no content.
            return Parts()
        return Parts(self._margin.push(held) + self._margin.flush())

    def _in_text(self, text: str, parts: Parts) -> str:
        before, marker, rest = split_at(text, self._openings)
        parts.content += self._margin.push(before)
        if not marker:
            return self._wait(rest)
        self._opened = marker
        self._is_called = False
        self._read = self._in_section if marker == self._section else self._in_head
        return rest

    def _in_section(self, text: str, parts: Parts) -> str:
        """Reads between the calls of a section: what says nothing, the next call, the end."""
        body = text.lstrip()
        self._opened += text[: len(text) - len(body)]
        if not body:
            return ""
        for mark in self._marks:
            if body.startswith(mark):
                return self._pass(mark, body)
        if any(mark.startswith(body) for mark in self._marks):
            return self._wait(body)
        return self._leave(body, parts)

    def _pass(self, mark: str, body: str) -> str:
        self._opened += mark
        if mark == self._begin:
            self._read = self._in_head
        elif mark == self._section_end:
            if self._is_called:
                self._opened = ""
            self._read = self._in_text if self._is_called else self._in_section
        return body[len(mark) :]

    def _leave(self, text: str, parts: Parts) -> str:
        """Goes on with content: the section has no call here."""
        self._read = self._in_text
        skipped = self._opened
        if self._is_called:
            skipped = skipped[len(skipped.rstrip()) :]
        self._opened = ""
        parts.content += self._margin.push(skipped)
        return text

    def _in_head(self, text: str, parts: Parts) -> str:
        """Reads the name and the text up to the arguments."""
        body = text.lstrip()
        if not self._form.is_name_bare:
            end = body.find(self._name_end)
            behind = end + len(self._name_end)
        else:
            end = behind = self._bare_end(body)
        if end < 0 and len(body) < _MAX_NAME + _LONGEST_MARK:
            return self._wait(text)
        name = self._name_in(body[:end]) if 0 <= end <= _MAX_NAME else ""
        if not name:
            return self._leave(text, parts)
        self._begin_call(name, parts)
        return body[behind:]

    def _bare_end(self, body: str) -> int:
        """Position at which a name without a mark of its own ends; -1 where more text decides."""
        assert self._form.parameters is not None
        space = re.search(r"\s", body)
        before, marker, _ = split_at(body, (self._form.parameters.begin, self._form.end.strip()))
        if space is not None and space.start() <= len(before):
            return space.start()
        return len(before) if marker else -1

    def _name_in(self, head: str) -> str:
        """Name in the text before its end mark; empty where it is none."""
        name = head.strip().removeprefix(self._form.name_prefix)
        if self._form.id_pattern:
            cut = next((i for i in range(1, len(name)) if self._id.fullmatch(name, i)), len(name))
            name = name[:cut]
        if self._form.is_name_bare and name not in self._tool_names:
            return ""
        return "" if re.search(r"[\s<>]", name) else name

    def _begin_call(self, name: str, parts: Parts) -> None:
        self._margin.cut()
        self._opened = ""
        self._is_called = True
        self._name = name
        parts.add_call(CallDelta(self._num_begun, name))
        self._num_begun += 1
        if self._form.parameters is None:
            self._arguments = ArgumentsReader()
            self._read = self._in_arguments
        else:
            self._parameters = _ParameterReader(
                self._form.parameters,
                (self._form.end.strip(), self._section_end or self._section),
                self._types.get(name, {}),
            )
            self._read = self._in_parameters

    def _in_arguments(self, text: str, parts: Parts) -> str:
        string, rest = self._arguments.push(text)
        self._add(string, parts)
        return self._end_call(rest) if self._arguments.is_done else ""

    def _in_parameters(self, text: str, parts: Parts) -> str:
        assert self._parameters is not None
        rest = self._parameters.push(text)
        self._add(self._parameters.take(), parts)
        return self._end_call(rest) if self._parameters.is_done else ""

    def _end_call(self, rest: str) -> str:
        self.num_done += 1
        self._read = self._in_section
        return rest

    def _add(self, arguments: str, parts: Parts) -> None:
        if arguments:
            parts.add_call(CallDelta(self._num_begun - 1, "", arguments))


class _ParameterReader(ArgumentPieces):
    """Reads arguments that are written one by one, and writes them as a JSON object."""

    def __init__(
        self, marks: Parameters, ends: tuple[str, str], types: Mapping[str, Types]
    ) -> None:
        super().__init__(self._between)
        self._marks = marks
        self._ends = tuple(filter(None, ends))
        self._types = types
        self._key_end, self._value_begin = marks.name_marks
        self._value_ends = (marks.margin + marks.end, marks.end) if marks.margin else (marks.end,)
        self._written: list[str] = []
        """Value that has no end yet."""
        self._num_begun = 0
        self._type = ANY

    def _between(self, text: str) -> str:
        """Reads up to the next argument, or to the end of the call."""
        _, marker, rest = split_at(text, (self._marks.begin, *self._ends))
        if not marker:
            return self._wait(rest)
        if marker == self._marks.begin:
            self._read = self._in_key
            return rest
        self._json.append("}" if self._num_begun else "{}")
        self.is_done = True
        # The end of a section ends its last call, and is read again.
        return rest if marker == self._ends[0] else marker + rest

    def _in_key(self, text: str) -> str:
        end = text.find(self._key_end)
        if end < 0 and len(text) < _MAX_NAME + _LONGEST_MARK:
            return self._wait(text)
        if not 0 <= end <= _MAX_NAME:
            self._read = self._between
            return text
        self._begin_value(text[:end])
        return text[end + len(self._key_end) :]

    def _begin_value(self, key: str) -> None:
        marks = self._marks
        sign = next(
            (sign for sign in (marks.text_sign, marks.json_sign) if sign and key.endswith(sign)), ""
        )
        key = key.removesuffix(sign).strip()
        self._type = self._types.get(key, ANY)
        if sign:
            self._type = TEXT if sign == marks.text_sign else self._type - TEXT
        self._json.append(
            f"{', ' if self._num_begun else '{'}{json.dumps(key, ensure_ascii=False)}: "
        )
        self._num_begun += 1
        self._read = self._before_value if not self._value_begin else self._at_value

    def _at_value(self, text: str) -> str:
        """Reads up to the mark before the value."""
        _, marker, rest = split_at(text, (self._value_begin,))
        if not marker:
            return self._wait(rest)
        self._read = self._before_value
        return rest

    def _before_value(self, text: str) -> str:
        self._read = self._in_text if self._type == TEXT else self._in_value
        if self._type == TEXT:
            self._json.append('"')
        return text.removeprefix(self._marks.margin)

    def _in_text(self, text: str) -> str:
        """Passes a string on as it comes."""
        string, marker, rest = split_at(text, self._value_ends)
        self._json.append(json.dumps(string, ensure_ascii=False)[1:-1])
        if not marker:
            return self._wait(rest)
        self._json.append('"')
        self._read = self._between
        return rest

    def _in_value(self, text: str) -> str:
        """Waits for the end of a value of another type."""
        written, marker, rest = split_at(text, self._value_ends)
        self._written.append(written)
        if not marker:
            return self._wait(rest)
        self._json.append(value_as_json("".join(self._written), self._type))
        self._written = []
        self._read = self._between
        return rest
