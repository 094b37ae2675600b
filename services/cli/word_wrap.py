"""Wraps streamed text between words. Lines of code between fences stay as they are."""

from __future__ import annotations

FENCE = "```"


class WordWrap:
    """The text of one answer, of which a word is passed on when its end has come."""

    def __init__(self, width: int, column: int = 0) -> None:
        """`column` is where the text begins on its first line."""
        self._width = width
        self._column = column
        self._gap = ""
        """White space before the word."""
        self._word = ""
        self._is_line_begun = False
        self._is_code = False

    def push(self, text: str) -> str:
        """Text that may be shown now."""
        shown = ""
        for char in text:
            if not char.isspace():
                self._word += char
                continue
            shown += self._place()
            if char == "\n":
                shown += self._gap + char
                self._gap = ""
                self._column = 0
                self._is_line_begun = False
            else:
                self._gap += char
        # A word that is longer than a line is shown as it comes.
        return shown + (self._place() if len(self._word) >= self._width else "")

    def flush(self) -> str:
        """Returns the last word."""
        return self._place()

    def _place(self) -> str:
        """The word behind its gap, or on the next line where it does not fit."""
        if not self._word:
            return ""
        if not self._is_line_begun and self._word.startswith(FENCE):
            self._is_code = not self._is_code
        gap = self._gap
        fits = self._column + len(gap) + len(self._word) <= self._width
        if not fits and self._is_line_begun and gap and not self._is_code:
            gap = "\n"
            self._column = len(self._word)
        else:
            self._column += len(gap) + len(self._word)
        placed = gap + self._word
        self._gap = ""
        self._word = ""
        self._is_line_begun = True
        return placed
