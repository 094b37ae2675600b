"""A vocabulary of the library mistral-common (`tekken.json`), by the keys that GGUF has for one.
Source: `Tekkenizer` of that library."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .gguf_tokenizer import GgufTokenizerError, PreTokenizer, TokenType

FILE_NAME = "tekken.json"
OLDEST_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of files that list none."""
UNNAMED = "<SPECIAL_{}>"
"""Special tokens after those that have a name."""
IDS = {"unknown": "<unk>", "bos": "<s>", "eos": "</s>", "padding": "<pad>"}
MAX_TOKENS = 1 << 22
_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_SPELLED = dict(zip(_BYTES, map(chr, _BYTES), strict=True))
_SPELLED |= {
    byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _SPELLED)
}
"""The character by which byte-level merges spell each byte, as GPT-2 chose them."""


def read_tekken(path: Path) -> tuple[dict[str, Any], PreTokenizer]:
    """Values by their names behind `tokenizer.ggml.`, and how text is cut into words. Raises
    `GgufTokenizerError`."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GgufTokenizerError(FILE_NAME, path.name, f"a file of tekken ({error})") from None
    special = _special_tokens(file)
    num_words = file.config.default_vocab_size - len(special)
    if not 0 < num_words <= min(len(file.vocab), MAX_TOKENS):
        allowed = f"{len(special)} special tokens and 1…{len(file.vocab)} others"
        raise GgufTokenizerError("default_vocab_size", file.config.default_vocab_size, allowed)
    words = [_bytes_of(each.token_bytes) for each in file.vocab[:num_words]]
    ranks = {word: rank for rank, word in enumerate(words)}
    values: dict[str, Any] = {
        "model": "gpt2",
        "tokens": [*special, *map(_spelled, words)],
        "token_type": [TokenType.CONTROL] * len(special) + [TokenType.NORMAL] * num_words,
        "merges": _merges(ranks),
    }
    for name, token in IDS.items():
        if token in special:
            values[f"{name}_token_id"] = special.index(token)
    return values, PreTokenizer(file.config.pattern, ignore_merges=True, add_bos=True)


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Word(msgspec.Struct):
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Word]
    special_tokens: list[_Special] | None = None


def _special_tokens(file: _File) -> list[str]:
    """Texts of special tokens by their ids, which are the first ones."""
    listed = file.special_tokens
    named = list(OLDEST_SPECIAL_TOKENS)
    if listed is not None:
        listed.sort(key=lambda each: each.rank)
        named = [each.token_str for each in listed]
        ranks = [each.rank for each in listed]
        if ranks != list(range(len(ranks))):
            raise GgufTokenizerError("special_tokens", ranks, "each rank from 0 on")
    count = file.config.default_num_special_tokens
    if not len(named) <= count <= MAX_TOKENS:
        allowed = f"{len(named)}…{MAX_TOKENS}"
        raise GgufTokenizerError("default_num_special_tokens", count, allowed)
    return named + [UNNAMED.format(i) for i in range(len(named), count)]


def _bytes_of(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise GgufTokenizerError("token_bytes", text, "bytes in base64") from None


def _spelled(word: bytes) -> str:
    return "".join(_SPELLED[byte] for byte in word)


def _merges(ranks: Mapping[bytes, int]) -> list[str]:
    """Merges into words, in the order of their ranks; into one word, those of lower ranks first."""
    merges = []
    for word in ranks:
        cuts = ((word[:i], word[i:]) for i in range(1, len(word)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [f"{_spelled(left)} {_spelled(right)}" for left, right in pairs]
    return merges
