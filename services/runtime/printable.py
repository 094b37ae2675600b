"""Makes foreign text safe for a terminal: names of models and members come from the network."""

from __future__ import annotations

from rich.markup import escape

LAYOUT = "\n\t"


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with characters that steer a terminal, or turn the direction of writing, escaped as
    in `\x1b`; characters of `keep` stay."""
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def shown(text: str) -> str:
    """The text with Rich's markup escaped as well, which has no meaning in a name."""
    return escape(printable(text))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
