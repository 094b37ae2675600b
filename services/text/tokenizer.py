"""A model's tokenizer, read from its folder: text to ids and back. Knows nothing about chats or
sampling."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from headwater.engine_core.system.usable_cores import usable_cores

from ..runtime.yielding_thread import in_yielding_thread, lower_own_priority
from .gguf_tokenizer import PRE_TOKENIZERS
from .token_table import TokenTable
from .tokenizer_files_error import TokenizerFilesError
from .windows import matches

PIECE_LEN = 4096
"""Number of characters in the pieces of a long text, so that all cores share it."""
PIECES_PER_CORE = 4
"""Number of pieces of a text, for each core, that are encoded before other texts get a turn."""
IDS_AT_ONCE = 64 * 1024
"""Number of token ids that are joined before other threads get a turn."""

GUARD = "\ufdd0"
"""Mark before a special token's text that is text; Unicode reserves the character for such uses,
and no text may have it."""

_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_PUBLISHED_PATTERNS = {pre.pattern for pre in PRE_TOKENIZERS.values() if pre.pattern is not None}
_QUOTED = re.compile(r"""["`'].*["`']""", re.DOTALL)


class Tokenizer:
    """Text to token ids and back. Thread-safe; encoding and decoding release the interpreter
    lock."""

    def __init__(self, backend: Backend, config: dict[str, Any], vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._cuts_anywhere = _may_cut_between_words(backend)
        self.config = config
        """Contents of `tokenizer_config.json`."""

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> Tokenizer:
        """Tokenizer of a folder. Raises `TokenizerFilesError`."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerFilesError(path, "it is missing")
        try:
            backend = Backend.from_buffer(path.read_bytes())
        except ValueError as error:
            # The library quotes values of the file, which may be a link to one of another kind.
            raise TokenizerFilesError(path, _QUOTED.sub("…", str(error))) from None
        backend.no_truncation()
        backend.no_padding()
        tokenizer = cls(backend, read_json(folder / "tokenizer_config.json"), vocab_size)
        tokenizer._end_texts()
        return tokenizer

    def _end_texts(self) -> None:
        """Adds the token behind every text that `add_eos_token` asks for, where the tokenizer's own
        file does not: embedders such as E5-Mistral read its state."""
        end = self.special_token("eos_token")
        token_id = None if end is None else self.id_of(end)
        if self.config.get("add_eos_token") is not True or token_id is None:
            return
        if token_id in _ids(self._backend.encode("a"))[-1:]:
            return
        ended = processors.TemplateProcessing(single=["$A", end], special_tokens=[(end, token_id)])
        own = self._backend.post_processor
        self._backend.post_processor = ended if own is None else processors.Sequence([ended, own])

    @property
    def largest_id(self) -> int:
        """The largest token id; -1: there are no tokens."""
        return max(self._backend.get_vocab().values(), default=-1)

    @functools.cached_property
    def table(self) -> TokenTable:
        """Table of the tokens' text. Made on first use: a caller that only encodes does not wait
        for it."""
        return TokenTable(self._backend, self._vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text; `add_special_tokens` adds the special tokens of the model's own template
        of sequences."""
        if len(text) < 2 * PIECE_LEN or not self._cuts_anywhere:
            return _ids(_encodings(self._backend, [text], add_special_tokens=add_special_tokens)[0])
        token_ids = self._ids_of_text(self._backend, text)
        if not add_special_tokens:
            return token_ids
        before, after = self.around
        return [*before, *token_ids, *after]

    def _ids_of_text(self, backend: Backend, text: str) -> list[int]:
        """Ids of a text without the model's own template. NOTE: of the backend's calls, those for
        one text hold the interpreter lock (tokenizers 0.23), for 0.9 s of 1 MB."""
        token_ids: list[int] = []
        for pieces in _rounds(_pieces(text) if self._cuts_anywhere else [text]):
            for part in _id_parts(backend, pieces):
                token_ids += part
        return token_ids

    def guarded(self, text: str) -> str:
        """The text with a mark before each special token that it contains: `encode_guarded` takes
        it for text."""
        text = text.replace(GUARD, "\ufffd")
        parts: list[str] = []
        start = 0
        for found in matches(self._special_pattern, text, longest=self._longest_special):
            parts += (text[start : found.start()], GUARD)
            start = found.start()
        return "".join((*parts, text[start:]))

    def encode_guarded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text with guarded parts, as `encode`: special tokens there are spelled with
        other tokens."""
        if GUARD not in text:
            return self.encode(text, add_special_tokens=add_special_tokens)
        token_ids: list[int] = []
        start = 0
        for found in matches(self._own_special_pattern, text, longest=self._longest_special):
            token_id = self.id_of(found.group())
            assert token_id is not None
            token_ids += self._plain_ids(text[start : found.start()])
            token_ids.append(token_id)
            start = found.end()
        token_ids += self._plain_ids(text[start:])
        before, after = self.around if add_special_tokens else ([], [])
        return [*before, *token_ids, *after]

    def _plain_ids(self, guarded: str) -> list[int]:
        """Ids of guarded text, in which special tokens are text."""
        text = guarded.replace(GUARD, "")
        return self._ids_of_text(self._without_special, text) if text else []

    @functools.cached_property
    def _special(self) -> list[str]:
        """Special tokens, the longest first, as the tokenizer takes them."""
        added = self._backend.get_added_tokens_decoder().values()
        return sorted((token.content for token in added if token.special), key=len, reverse=True)

    @property
    def _longest_special(self) -> int:
        return len(self._special[0]) if self._special else 1

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special)) or r"(?!)")

    @functools.cached_property
    def _own_special_pattern(self) -> re.Pattern[str]:
        return re.compile(f"(?<!{GUARD})(?:{self._special_pattern.pattern})")

    @functools.cached_property
    def _without_special(self) -> Backend:
        """A second tokenizer, which sees no special tokens in a text."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @functools.cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Special ids that open and close a text."""
        bare = self.encode("a", add_special_tokens=False)
        full = self.encode("a", add_special_tokens=True)
        start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return full[:start], full[start + len(bare) :]

    @functools.cached_property
    def around_pair(self) -> tuple[list[int], list[int], list[int]]:
        """Special ids before, between and behind the two texts of a pair."""
        bare = self.encode("a", add_special_tokens=False)
        full = _ids(self._backend.encode("a", "a"))
        size = len(bare)
        first = next(i for i in range(len(full)) if full[i : i + size] == bare)
        second = next(i for i in range(first + size, len(full)) if full[i : i + size] == bare)
        return full[:first], full[first + size : second], full[second + size :]

    @functools.cached_property
    def types_pairs(self) -> bool:
        """Whether tokens of a pair's second text have a token type of their own."""
        return 1 in self._backend.encode("a", "a").type_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    @functools.cached_property
    def special_texts(self) -> dict[str, int]:
        """Tokens that are no text to a grammar: special tokens, and added tokens that are written
        as a tag.

        The grammar compiler takes tags for special tokens, whether or not the tokenizer calls them
        so.
        """
        added = self._backend.get_added_tokens_decoder().items()
        return {
            token.content: i
            for i, token in added
            if token.special or re.fullmatch("<.*>", token.content)
        }

    @functools.cached_property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes that occur in the text of no token."""
        return frozenset(range(256)).difference(*self.table.visible_bytes_of)

    def id_of(self, text: str) -> int | None:
        """Id of the single token with this text, if there is one."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def special_token(self, name: str) -> str | None:
        """Text of `bos_token`, `eos_token`, … as `tokenizer_config.json` names it."""
        token = self.config.get(name)
        return token.get("content") if isinstance(token, dict) else token


def read_json(path: Path) -> dict[str, Any]:
    """JSON object in a file; empty where the file is missing. Raises `TokenizerFilesError`."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise TokenizerFilesError(path, str(error)) from None


def lower_encoding_threads() -> None:
    """Starts the threads of the tokenizer's library, for the life of the process, with a lowered
    priority. They encode long texts alone; the threads of callers encode short ones."""

    def start() -> None:
        lower_own_priority()
        Backend(models.BPE()).encode_batch_fast(["", ""])

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()


def _encodings(backend: Backend, texts: list[str], *, add_special_tokens: bool) -> Sequence[Any]:
    """Encodings of texts. A long text that could not be cut yields to others, as the library's
    threads do with the pieces of one."""
    encode = functools.partial(
        backend.encode_batch_fast, texts, add_special_tokens=add_special_tokens
    )
    return in_yielding_thread(encode) if len(texts[0]) > 2 * PIECE_LEN else encode()


def _ids(encoding: Any) -> list[int]:
    token_ids: list[int] = encoding.ids
    return token_ids


def _id_parts(backend: Backend, pieces: list[str]) -> Iterator[list[int]]:
    """Ids of pieces of a text, `IDS_AT_ONCE` of them at most. To list, join and free those of 1 MB
    in one go held the interpreter for 17 to 33 ms; other threads run between parts."""
    for encoding in _encodings(backend, pieces, add_special_tokens=False):
        token_ids = _ids(encoding)
        for start in range(0, len(token_ids), IDS_AT_ONCE):
            yield token_ids[start : start + IDS_AT_ONCE]


def _may_cut_between_words(backend: Backend) -> bool:
    """Whether ids of `a b` are always those of `a` and of ` b`, as in byte-level models whose words
    end at a space.

    This is certain for the published expressions only, so any other tokenizer gets its text whole.
    """
    state = (
        msgspec.json.decode(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {}
    )
    steps = state.get("pretokenizers", [state])
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
                pass
            case {"type": "Split", "pattern": {"Regex": pattern}, "invert": False} if (
                pattern in _PUBLISHED_PATTERNS
            ):
                pass
            case _:
                return False
    normalizer = (
        msgspec.json.decode(backend.normalizer.__getstate__())
        if backend.normalizer
        else {"type": "NFC"}
    )
    added = backend.get_added_tokens_decoder().values()
    return normalizer["type"] == "NFC" and not any(
        token.rstrip or " " in token.content for token in added
    )


def _rounds(pieces: Sequence[str]) -> Iterator[list[str]]:
    """The pieces, a few for each core at a time. Threads of the tokenizer's library that work on
    one text take no other text before its end: a text of 20 kB waited for 10 s behind two of 3.5 MB
    that came again and again (2026-11-29). A piece that could not be cut comes alone, which its
    caller's own thread encodes."""
    most = PIECES_PER_CORE * usable_cores()
    waiting: list[str] = []
    for piece in pieces:
        is_whole = len(piece) > 2 * PIECE_LEN
        if waiting and (is_whole or len(waiting) == most):
            yield waiting
            waiting = []
        if is_whole:
            yield [piece]
        else:
            waiting.append(piece)
    if waiting:
        yield waiting


def _pieces(text: str) -> list[str]:
    pieces = []
    start = 0
    while (cut := _cut_behind(text, start + PIECE_LEN)) is not None:
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def _cut_behind(text: str, start: int) -> int | None:
    """Position of the next space between two words; None: there is none."""
    # The letter behind a space is looked at too.
    found = next(matches(_BETWEEN_WORDS, text, longest=2, start=start), None)
    return found.start() if found is not None else None
