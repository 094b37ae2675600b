"""Texts that a client makes for the sake of their cost: no search in them, and no call of the
tokenizer, keeps other threads of the processor waiting for one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.services.text import windows
from headwater.services.text.tokenizer import Tokenizer
from headwater.services.text.windows import matches
from tests.longest_hold import longest_hold

MOST_SECONDS = 0.02
SPECIAL = "<|im_end|>"
TEXTS = {
    # Its 250,000 ids are listed in one go: the library has no other way.
    "beginnings of special tokens": "<" * 500_000,
    "special tokens": SPECIAL * 20_000,
    "words": "hello world, this is a text. " * 30_000,
    "one word": "a" * 200_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_no_guarded_text_holds_the_interpreter(demo_tokenizer: Tokenizer, name: str) -> None:
    """900 kB of words held it for 0.8 s."""
    text = TEXTS[name]

    def work() -> None:
        demo_tokenizer.encode_guarded(
            SPECIAL + demo_tokenizer.guarded(text + SPECIAL), add_special_tokens=False
        )

    # What is made on first use is not the text's.
    demo_tokenizer.encode_guarded(demo_tokenizer.guarded(SPECIAL), add_special_tokens=True)
    assert longest_hold(work, MOST_SECONDS) < MOST_SECONDS


@given(st.text("ab<>", max_size=60), st.integers(1, 8))
def test_windows_find_what_a_whole_search_finds(text: str, window: int) -> None:
    pattern = re.compile("(?<!b)(?:<ab>|<a|a)")
    before = windows.WINDOW_CHARS
    windows.WINDOW_CHARS = window
    try:
        found = [each.span() for each in matches(pattern, text, longest=4)]
    finally:
        windows.WINDOW_CHARS = before
    assert found == [each.span() for each in pattern.finditer(text)]
