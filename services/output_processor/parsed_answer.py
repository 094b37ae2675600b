"""The text of one choice as content, reasoning and calls, up to a stop string. Knows nothing about
tokens."""

from __future__ import annotations

from headwater.proto.common_pb2 import AnswerFormat

from ..answers.parser import AnswerParser
from ..answers.parts import CallDelta, Parts
from .argument_strings import ArgumentStrings
from .stops import StopMatcher, Stops


class ParsedAnswer:
    """Reader of an answer that has a format. With `stops`, it looks for stop strings in content and
    in the arguments of calls, not in reasoning nor in the marks of the format."""

    __slots__ = ("_parser", "_search")

    def __init__(self, answer_format: AnswerFormat, stops: Stops | None) -> None:
        self._parser = AnswerParser(answer_format)
        self._search = _PartsSearch(stops) if stops is not None else None

    @property
    def hit(self) -> str | None:
        """The stop string that ended the answer."""
        return self._search.hit if self._search is not None else None

    @property
    def is_over(self) -> bool:
        """Whether a stop string is complete, or the one call that was allowed."""
        return self.hit is not None or self._parser.is_over

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    @property
    def has_called(self) -> bool:
        """Whether there are calls."""
        return self._parser.has_called

    @property
    def has_cut_call(self) -> bool:
        """Whether the last call is not whole: the answer or a stop string ended inside it."""
        return self._parser.is_call_open or (self._search is not None and self._search.has_cut_call)

    def push(self, text: str, *, is_searched: bool = True) -> Parts:
        """Parts that the text makes certain; with `is_searched`, up to a stop string."""
        if self._search is None or not is_searched:
            return self._parser.push(text)
        parts = Parts()
        for char in text:
            # Parts of one character have an order: content, then calls.
            if self.is_over:
                break
            parts.add(self._search.push(self._parser.push(char)))
        return parts

    def flush(self) -> Parts:
        """Parts that are certain once the answer has ended; nothing may be pushed after it."""
        if self.hit is not None:
            return Parts()
        parts = self._parser.flush()
        if self._search is None:
            return parts
        found = self._search.push(parts)
        found.add(self._search.flush())
        return found


class _PartsSearch:
    """Search for stop strings in the parts of one answer.

    A stop string lies within one stretch of text: content between two calls, one string value of a
    call's arguments, or the text of a custom tool.
    """

    __slots__ = ("_call", "_is_in_text", "_matcher", "_stops", "_strings")

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self._matcher = StopMatcher(stops)
        self._call: CallDelta | None = None
        """The latest part of the call that is searched; None: content is."""
        self._strings = ArgumentStrings()
        self._is_in_text = False
        """Whether the last character of the arguments is text."""

    @property
    def hit(self) -> str | None:
        return self._matcher.hit

    @property
    def has_cut_call(self) -> bool:
        return self.hit is not None and self._call is not None

    def push(self, parts: Parts) -> Parts:
        """The parts up to a stop string, without text that may begin one."""
        found = Parts(reasoning=parts.reasoning)
        if parts.content:
            self._enter(None, found)
            found.content += self._matcher.push(parts.content)
        for call in parts.calls:
            if self.hit is not None:
                break
            self._enter(call, found)
            found.add_call(_part_of(call, call.name, ""))
            self._push_arguments(call, found)
        return found

    def flush(self) -> Parts:
        """Text that was held back."""
        held = self._matcher.flush()
        if self._call is None:
            return Parts(held)
        return Parts(calls=[_part_of(self._call, "", held)] if held else [])

    def _enter(self, call: CallDelta | None, found: Parts) -> None:
        """Searches this call from now on, or content."""
        if (call and call.index) != (self._call and self._call.index):
            self._begin_stretch(found)
            self._strings = ArgumentStrings()
            self._is_in_text = False
        self._call = call

    def _begin_stretch(self, found: Parts) -> None:
        found.add(self.flush())
        self._matcher = StopMatcher(self._stops)

    def _push_arguments(self, call: CallDelta, found: Parts) -> None:
        if call.is_text:
            found.add_call(_part_of(call, "", self._matcher.push(call.arguments)))
            return
        for char in call.arguments:
            is_text = self._strings.is_text(char)
            if self._is_in_text and not is_text:
                self._begin_stretch(found)
            self._is_in_text = is_text
            found.add_call(_part_of(call, "", self._matcher.push(char) if is_text else char))
            if self.hit is not None:
                break


def _part_of(call: CallDelta, name: str, arguments: str) -> CallDelta:
    return CallDelta(call.index, name, arguments, is_text=call.is_text)
