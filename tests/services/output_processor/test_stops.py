from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.services.output_processor.stops import StopMatcher, Stops

letters = st.text(alphabet="ab\n", max_size=30)
stop_strings = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, strings: list[str], *, include: bool) -> tuple[str, str | None]:
    """Character by character: the first end of any stop string ends the text, the longest of those
    that end there."""
    for end in range(1, len(text) + 1):
        hits = [string for string in strings if text[:end].endswith(string)]
        if hits:
            hit = max(hits, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def matched(pieces: list[str], matcher: StopMatcher, longest: int) -> str:
    delivered = ""
    pushed = ""
    for piece in pieces:
        pushed += piece
        delivered += matcher.push(piece)
        if matcher.hit is not None:
            return delivered
        assert len(pushed) - len(delivered) < longest, "held back more than could be a stop string"
        assert pushed.startswith(delivered)
    return delivered + matcher.flush()


@settings(deadline=None)
@given(letters, stop_strings, st.lists(st.integers(0, 100), max_size=12), st.booleans())
def test_any_split_of_a_text_ends_where_the_whole_does(
    text: str, strings: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(Stops.compile(strings, include_in_output=include))
    delivered = matched(cut(text, cuts), matcher, max(map(len, strings)))
    assert (delivered, matcher.hit) == expected(text, strings, include=include)


@pytest.mark.parametrize(
    ("strings", "pieces", "delivered", "hit"),
    [
        (["END"], ["hello E", "N", "D more"], ["hello ", "", ""], "END"),
        (["END"], ["E", "NE", "NOT"], ["", "EN", "ENOT"], None),
        (["bc", "abcd"], ["a", "b", "cd"], ["", "", "a"], "bc"),
        (["cd", "abcd"], ["ab", "cd"], ["", ""], "abcd"),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
    ],
    ids=["across pieces", "almost", "first to end", "longest of two", "newlines"],
)
def test_text_is_held_back_only_while_it_may_be_a_stop_string(
    strings: list[str], pieces: list[str], delivered: list[str], hit: str | None
) -> None:
    matcher = StopMatcher(Stops.compile(strings))
    assert [matcher.push(piece) for piece in pieces] == delivered
    assert matcher.hit == hit


def test_a_stop_string_that_is_included_is_delivered_with_the_text_before_it() -> None:
    matcher = StopMatcher(Stops.compile(["###"], include_in_output=True))
    assert [matcher.push("one #"), matcher.push("## two")] == ["one ", "###"]
