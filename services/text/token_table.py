"""The text of each token id, as bytes and, where these are whole characters, as text. Built once
per tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from tokenizers import Tokenizer


class UnknownDecoder(Exception):
    """The tokenizer has tokens that do not spell fixed bytes."""

    def __init__(self, decoder: str) -> None:
        super().__init__(
            f"the tokenizer's decoder is {decoder}; allowed: ByteLevel, WordPiece, or Replace "
            "with ByteFallback"
        )
        self.decoder = decoder


class TokenTable:
    """`bytes_of[id]` and `text_of[id]` for every id of the model's vocabulary.

    `text_of[id]` is None where the bytes are not whole characters by themselves; ids that the
    tokenizer does not know (padding of the embedding) have no bytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocab = tokenizer.get_vocab()
        self.bytes_of = [b""] * max(vocab_size, max(vocab.values()) + 1)
        spell = _speller(tokenizer)
        # Added tokens of SentencePiece are pieces too, as Gemma's runs of spaces are; byte-level
        # ones are plain text.
        verbatim = self.special_ids if isinstance(spell, _SentencePiece) else added
        for token, token_id in vocab.items():
            self.bytes_of[token_id] = token.encode() if token_id in verbatim else spell(token)
        self.text_of = [_whole(spelled) for spelled in self.bytes_of]
        self.visible_bytes_of, self.visible_text_of = list(self.bytes_of), list(self.text_of)
        """The same, with special tokens empty."""
        for token_id in self.special_ids:
            self.visible_bytes_of[token_id] = b""
            self.visible_text_of[token_id] = ""
        self._shown: dict[tuple[str, ...], tuple[list[str | None], list[bytes]]] = {}

    def __len__(self) -> int:
        return len(self.bytes_of)

    def visible(self, shown: tuple[str, ...] = ()) -> tuple[list[str | None], list[bytes]]:
        """Text and bytes by id; special tokens are empty, except those that are texts of `shown` or
        part of one: a mark may be several tokens."""
        if not shown:
            return self.visible_text_of, self.visible_bytes_of
        if shown not in self._shown:
            texts = list(self.visible_text_of)
            spelled = list(self.visible_bytes_of)
            for token_id in self.special_ids:
                text = self.text_of[token_id]
                if text and any(text in mark for mark in shown):
                    texts[token_id] = text
                    spelled[token_id] = self.bytes_of[token_id]
            self._shown[shown] = texts, spelled
        return self._shown[shown]


def _whole(spelled: bytes) -> str | None:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


def _speller(tokenizer: Tokenizer) -> Any:
    """The function from a token to its bytes, by the steps that `tokenizer.decoder` names."""
    steps = list(
        _steps(msgspec.json.decode(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {})
    )
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if "ByteFallback" in kinds and set(kinds) <= {
        "Replace",
        "ByteFallback",
        "Fuse",
        "Strip",
        "Metaspace",
    }:
        marks = [step["pattern"]["String"] for step in steps if step["type"] == "Replace"]
        return _SentencePiece(marks[0] if marks else "▁")
    if kinds == ["Metaspace"]:
        return _SentencePiece(steps[0]["replacement"])
    if kinds == ["WordPiece"]:
        return _WordPiece(steps[0]["prefix"])
    raise UnknownDecoder(" + ".join(kinds) or "missing")


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    elif decoder:
        yield decoder


def printable_bytes() -> dict[str, int]:
    """Bytes by GPT-2's printable characters: a byte stands for itself where it is printable,
    otherwise for the next free character past 255."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = printable_bytes()
_LATIN_OF = dict.fromkeys(range(256), "\uffff") | {
    ord(char): chr(byte) for char, byte in _BYTE_OF.items()
}
"""Characters whose Latin-1 codes are a token's bytes, by the codes of GPT-2's; U+FFFF, which
Latin-1 does not have, for those that GPT-2 does not use."""


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_LATIN_OF).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


class _SentencePiece:
    """Bytes of a SentencePiece token. `▁` stands for a space and `<0xE2>` for a byte. A space that
    opens a whole text is an answer's own: it stays."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __call__(self, token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(self._mark, " ").encode()


class _WordPiece:
    """Bytes of a WordPiece token: one with the prefix goes on with a word, any other begins one
    behind a space."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, token: str) -> bytes:
        if token.startswith(self._prefix):
            return token.removeprefix(self._prefix).encode()
        return b" " + token.encode()
