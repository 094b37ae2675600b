"""Reads the text that a custom tool takes out of the JSON in which models write it, `{"input":
"…"}`, piece by piece.

Where a model writes anything else in its place, all of it is the text.
"""

from __future__ import annotations

import json
import re

KEY = "input"
"""Name of the argument that stands for the text."""
_HEAD = re.compile(rf'\s*\{{\s*"{KEY}"\s*:\s*"')
_BARE_HEAD = f'{{"{KEY}":"'
_RUN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[\"\\/bfnrt]",
    re.ASCII,
)
_BEGUN = re.compile(
    r"\\(u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?)?", re.ASCII
)
"""Beginning of an escape, or one half of a character that takes two."""


class TextInputReader:
    """Reads the text of one custom tool call. Passes characters on once they are certainly text;
    drops held ones when the call is cut off."""

    __slots__ = ("_held", "_read")

    def __init__(self) -> None:
        self._held = ""
        self._read = self._before

    def push(self, arguments: str) -> str:
        text = self._held + arguments
        self._held = ""
        return self._read(text)

    def _before(self, text: str) -> str:
        found = _HEAD.match(text)
        if found is not None:
            self._read = self._inside
            return self._inside(text[found.end() :])
        bare = "".join(text.split())
        if _BARE_HEAD.startswith(bare):
            self._held = text
            return ""
        self._read = self._behind if bare == "{}" else self._verbatim
        return self._read(text)

    def _inside(self, text: str) -> str:
        pieces = []
        at = 0
        while at < len(text):
            if (run := _RUN.match(text, at)) is not None:
                pieces.append(run.group())
                at = run.end()
            elif text[at] == '"':
                self._read = self._behind
                break
            elif _BEGUN.fullmatch(text, at) is not None:
                self._held = text[at:]
                break
            else:
                escape = _ESCAPE.match(text, at)
                # A backslash that begins no escape stands for itself.
                pieces.append(_spelled(escape.group()) if escape is not None else "\\")
                at = escape.end() if escape is not None else at + 1
        return "".join(pieces)

    def _verbatim(self, text: str) -> str:
        return text

    def _behind(self, text: str) -> str:
        return ""


def _spelled(escape: str) -> str:
    """Text of an escape. Half a character without its other half is no text."""
    spelled: str = json.loads(f'"{escape}"')
    return "\ufffd" if "\ud800" <= spelled <= "\udfff" else spelled
