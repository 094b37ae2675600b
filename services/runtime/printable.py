"""Text that somebody else wrote, as a terminal may show it: names of models and members come from the network."""

from __future__ import annotations

from rich.markup import escape

LAYOUT = "\n\t"


def printable(text: str, *, keep: str = "") -> str:
    r"""Characters that steer a terminal, or turn the direction of writing, as `\x1b`; those of `keep` as they are."""
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def shown(text: str) -> str:
    """For Rich's markup, which a name has no part in either."""
    return escape(printable(text))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
