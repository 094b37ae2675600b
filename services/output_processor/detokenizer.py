"""Tokens to text as they come: never half a character. Knows nothing about stop strings or
sessions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ..text.token_table import TokenTable

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one stream. Constant work a token; holds back at most the three bytes of an
    unfinished character.

    Bytes that are no character become U+FFFD, as Python and Rust replace them, once that is
    certain.
    """

    __slots__ = ("_bytes_of", "_decoder", "_is_open", "_text_of")

    def __init__(
        self, table: TokenTable, *, skip_special_tokens: bool = True, shown: tuple[str, ...] = ()
    ) -> None:
        """`shown` are special tokens that become text although others are skipped."""
        visible = table.visible(shown) if skip_special_tokens else (table.text_of, table.bytes_of)
        self._text_of, self._bytes_of = visible
        self._decoder = _new_decoder("replace")
        self._is_open = False
        """Whether a character is unfinished."""

    def push(self, token_id: int) -> str:
        """The text that is certain now. Raises IndexError for an id outside the vocabulary."""
        text = self._text_of[token_id]
        if text is not None and not self._is_open:
            return text
        text = self._decoder.decode(self._bytes_of[token_id])
        self._is_open = bool(self._decoder.getstate()[0])
        return text

    def shows(self, token_id: int) -> bool:
        """Whether the token is part of the text."""
        return bool(self._bytes_of[token_id])

    def push_all(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Text that the end of the stream makes certain: U+FFFD for a character that stays
        unfinished."""
        self._is_open = False
        return self._decoder.decode(b"", final=True)
