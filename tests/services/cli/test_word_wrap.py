"""Text of an answer in the lines of a terminal, while it comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.services.cli.word_wrap import WordWrap


def wrapped(text: str, width: int, column: int = 0, *, size: int = 1) -> str:
    wrap = WordWrap(width, column)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return "".join(map(wrap.push, pieces)) + wrap.flush()


def test_lines_end_between_words() -> None:
    text = "A headwater is where a river begins.\n\nIt is small."
    assert wrapped(text, 16) == "A headwater is\nwhere a river\nbegins.\n\nIt is small."
    assert wrapped("one two", 8, column=4) == "one\ntwo"


def test_code_and_long_words_stay_whole() -> None:
    code = "```python\nprint('a longer line than that')\n```\nand a text behind it"
    assert wrapped(code, 12) == (
        "```python\nprint('a longer line than that')\n```\nand a text\nbehind it"
    )
    assert wrapped("see https://example.com/a/long/address now", 12) == (
        "see\nhttps://example.com/a/long/address\nnow"
    )


@given(text=st.text(alphabet="ab \n`", max_size=60), size=st.integers(1, 9))
def test_words_are_those_of_the_text_however_it_comes(text: str, size: int) -> None:
    assert wrapped(text, 7, size=size).split() == text.split()
