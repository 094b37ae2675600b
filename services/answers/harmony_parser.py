"""Reads answers in gpt-oss's format, harmony: messages with a header each, which says whether a
message is a thought, a call or content.

All of an answer is in such messages, so that this parser reads thoughts too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from .json_arguments import ArgumentsReader
from .parts import CallDelta, Parts, PartsParser, split_at

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
CONSTRAIN = "<|constrain|>"
THOUGHTS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
NEXT = f"{START}assistant"
"""Text between two messages of an answer, behind the end of the first."""
_ENDS = (END, CALL, RETURN, START, CHANNEL)
"""Marks that end a message; the last two begin the next one."""
_OPENINGS = (START, CHANNEL, MESSAGE, "to=")
"""Texts with which a header may begin: the prompt has written its first part."""
_MAX_HEADER = 1024
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_ANALYSIS = re.compile(rf"{re.escape(CHANNEL)}\s*analysis\b")


class _Messages:
    """Texts of messages of one kind, on lines of their own."""

    def __init__(self) -> None:
        self._gap = ""
        self._has_text = False

    def add(self, text: str) -> str:
        """Returns a message's text as a part of the whole content: a line break goes before the
        text of a later message."""
        if not text:
            return ""
        gap = self._gap
        self._gap = ""
        self._has_text = True
        return gap + text

    def end(self) -> None:
        """Ends a message."""
        self._gap = "\n" if self._has_text else ""


class HarmonyParser(PartsParser):
    """Reads messages to functions as calls, those of the channel `analysis` as thoughts, and all
    others as content. Without `tool_names` no message is a call."""

    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(self._before)
        self._may_call = bool(tool_names)
        self._num_begun = 0
        self._arguments = ArgumentsReader()
        self._is_begun = False
        """Whether a header was read."""
        self._content = _Messages()
        self._thoughts = _Messages()
        self.num_done = 0
        """Number of calls that are complete."""

    @property
    def is_reasoning(self) -> bool:
        return self._read == self._in_thoughts

    @property
    def is_call_open(self) -> bool:
        return self._num_begun > self.num_done

    def flush(self) -> Parts:
        if self._read == self._in_thoughts:
            return Parts(reasoning=self._thoughts.add(self._held))
        is_content = self._read == self._in_final
        if is_content or (self._read == self._before and not self._is_begun):
            return Parts(content=self._content.add(self._held))
        return Parts()

    def _before(self, text: str, parts: Parts) -> str:
        """Reads up to a header. An answer that begins with none is content."""
        body = text.lstrip()
        if any(body.startswith(opening) for opening in _OPENINGS):
            self._read = self._in_header
            return body
        if any(opening.startswith(body) for opening in _OPENINGS):
            return self._wait(text)
        self._read = self._behind_message if self._is_begun else self._in_final
        return text

    def _behind_message(self, text: str, parts: Parts) -> str:
        """Skips text after a message, which is part of none, up to the next header."""
        _, marker, rest = split_at(text, (START, CHANNEL))
        if not marker:
            return self._wait(rest)
        self._read = self._before
        return marker + rest

    def _in_header(self, text: str, parts: Parts) -> str:
        header, marker, rest = split_at(text, (MESSAGE,))
        if not marker and len(text) < _MAX_HEADER:
            return self._wait(text)
        self._is_begun = True
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._may_call:
            self._begin_call(recipient.group(1), parts)
        elif _ANALYSIS.search(header):
            self._read = self._in_thoughts
        else:
            self._read = self._in_final
        return rest

    def _in_thoughts(self, text: str, parts: Parts) -> str:
        written, marker, rest = split_at(text, _ENDS)
        parts.reasoning += self._thoughts.add(written)
        if not marker:
            return self._wait(rest)
        self._thoughts.end()
        return self._end_message(marker, rest)

    def _in_final(self, text: str, parts: Parts) -> str:
        written, marker, rest = split_at(text, _ENDS)
        parts.content += self._content.add(written)
        if not marker:
            return self._wait(rest)
        self._content.end()
        return self._end_message(marker, rest)

    def _end_message(self, marker: str, rest: str) -> str:
        self._is_begun = True
        self._read = self._before
        return marker + rest if marker in (START, CHANNEL) else rest

    def _begin_call(self, name: str, parts: Parts) -> None:
        parts.add_call(CallDelta(self._num_begun, name))
        self._num_begun += 1
        self._arguments = ArgumentsReader()
        self._read = self._in_arguments

    def _in_arguments(self, text: str, parts: Parts) -> str:
        written, rest = self._arguments.push(text)
        parts.add_call(CallDelta(self._num_begun - 1, "", written))
        return self._end_call(rest) if self._arguments.is_done else ""

    def _end_call(self, rest: str) -> str:
        self.num_done += 1
        self._read = self._behind_call
        return rest

    def _behind_call(self, text: str, parts: Parts) -> str:
        _, marker, rest = split_at(text, _ENDS)
        return self._end_message(marker, rest) if marker else self._wait(rest)
