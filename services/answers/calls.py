"""The calls of one answer that are JSON objects, numbered as they come."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from .call_reader import CallReader
from .parts import CallDelta, Parts


class Calls:
    """The calls of one answer, numbered; with `names`, only calls of these."""

    def __init__(
        self, names: Collection[str] | None = None, *, has_name_as_key: bool = False
    ) -> None:
        self.num_begun = 0
        self._new_reader = partial(CallReader, names, has_name_as_key=has_name_as_key)
        self._reader = self._new_reader()
        self._is_named = False

    def read(self, text: str, parts: Parts) -> str:
        """Reads the characters of the next call, until `reader` is done; returns the text behind
        it."""
        rest = self._reader.push(text)
        if self._reader.name:
            if not self._is_named:
                self._is_named = True
                self.begin(self._reader.name, parts)
            self.add(self._reader.take_arguments(), parts)
        return rest

    @property
    def reader(self) -> CallReader:
        return self._reader

    @property
    def is_open(self) -> bool:
        """Whether the call that `reader` reads has a name, and arguments that have not ended."""
        return self._is_named and not self._reader.has_whole_arguments

    def next(self) -> None:
        self._reader = self._new_reader()
        self._is_named = False

    def begin(self, name: str, parts: Parts) -> None:
        self.num_begun += 1
        parts.add_call(CallDelta(self.num_begun - 1, name))

    def add(self, arguments: str, parts: Parts) -> None:
        if arguments:
            parts.add_call(CallDelta(self.num_begun - 1, "", arguments))
