"""Compiles grammars for one model's tokens by llguidance, within limits that are the same in every
process."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..models.manifest import MANIFEST_NAME, ModelFolderError, ModelManifest
from .compiler_errors import NOTHING_MATCHES, in_our_words
from .unspelled_tokens import without_spellings

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    # About 20 ms of building expressions; then at most 14 and 3 ms a mask.
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    # 1 to 2 kB each, of every answer that is being written.
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    # Errors are about the client's grammar, not about the parser's internals.
    verbose_errors=False,
)
TOKENIZER_NAME = "tokenizer.json"
_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_TEXT}{{1,{most}}}" for most in (6, 10, 15, 30)),
    f"{_TEXT}+",
]
"""Subsets of the vocabulary that a mask includes as a whole where the grammar allows all of it:
white space, and text of JSON strings by length. A string near its `maxLength` allows short tokens
only; 6 and 15 in addition to llguidance's own make the mean mask of such schemas a fifth faster
(2026-11-22)."""
Int32Array = npt.NDArray[np.int32]


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed, with the reason in our words."""


class Grammars:
    """Thread-safe; compiling releases the interpreter lock."""

    def __init__(self, folder: Path) -> None:
        """Reads the folder's tokenizer, which takes a part of a second. Raises `ModelFolderError`,
        `OSError`."""
        manifest = ModelManifest.read(folder)
        try:
            text = without_spellings((folder / TOKENIZER_NAME).read_bytes())
        except (AttributeError, LookupError, RecursionError, TypeError) as fault:
            raise ModelFolderError(folder, f"{TOKENIZER_NAME} is no tokenizer") from fault
        eos_ids = list(manifest.eos_token_ids) or None
        self._tokenizer = LLTokenizer(
            text, n_vocab=manifest.vocab_size, eos_token=eos_ids, slices=SLICES
        )
        self.num_words = words_of(manifest.vocab_size)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the grammar's start. Raises `GrammarError`."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        check(matcher)
        return matcher


def grammars_of(folder: Path) -> Grammars:
    """Grammars for the folder's tokens, which this process, or the one that forked it, reads once
    while the files stay as they are. Raises as `Grammars`."""
    files = (folder / MANIFEST_NAME, folder / TOKENIZER_NAME)
    return _read(folder, *(path.stat().st_mtime_ns for path in files if path.is_file()))


@functools.cache
def _read(folder: Path, *_written_at: int) -> Grammars:
    return Grammars(folder)


def prepare(folder: str) -> None:
    """Reads a folder's tokenizer for `grammars_of`. A folder that cannot be read is a fault of the
    stage that needs it."""
    with contextlib.suppress(OSError, ValueError, ModelFolderError):
        grammars_of(Path(folder))


def words_of(vocab_size: int) -> int:
    """Number of 32-bit words in a mask; bit i of word w stands for token 32·w + i."""
    return -(-vocab_size // 32)


def check(matcher: LLMatcher) -> None:
    """Raises `GrammarError` when the matcher has gone wrong, for good."""
    if matcher.is_error():
        raise GrammarError(in_our_words(matcher.get_error()))


def fill(matcher: LLMatcher, mask: Int32Array) -> None:
    """Writes the mask of the tokens that may come next. Raises `GrammarError` when there are none,
    or finding them costs too much."""
    assert mask.flags.c_contiguous
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    check(matcher)
    if not mask.any():
        raise GrammarError(NOTHING_MATCHES)
