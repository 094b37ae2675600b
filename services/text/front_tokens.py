"""Tokens of the system messages that several tenants share, remembered by their text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

MOST_FRONTS = 64
"""Number of texts that are remembered. Only messages that an operator declared are."""


class FrontTokens:
    """Called by several threads: what two of them add at once is the same."""

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, list[int]] = OrderedDict()

    def of(self, text: str, kind: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Tokens of a text, by `encode` where they are not remembered. `kind`: how it encodes."""
        key = blake2b(f"{kind} {text}".encode(), digest_size=16).digest()
        if (ids := self._ids.get(key)) is None:
            ids = self._ids[key] = encode(text)
            if len(self._ids) > MOST_FRONTS:
                self._ids.popitem(last=False)
        return ids
