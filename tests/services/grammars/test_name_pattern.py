"""Expressions of names against Python's own, and what they match beyond the declared names."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.services.grammars.name_pattern import Names, name_pattern

PIECES = st.sampled_from(
    ["a", "b", "[ab]", "[a-b]", "(a|b)", "(?:ab|b)", "a?", "b*", "(a|)", "{0,2}", "{2}", "+", "^",
     "$", ".", "|", "[^a]", r"\x62", r"\u0061", r"\w", r"\D", r"\."]
)  # fmt: skip
NAMES = ["".join(chars) for length in range(4) for chars in itertools.product("ab.", repeat=length)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pieces=st.lists(PIECES, max_size=5), declared=st.sets(st.sampled_from(NAMES), max_size=4))
def test_an_expression_matches_what_pythons_does(pieces: list[str], declared: set[str]) -> None:
    expression = "".join(pieces)
    try:
        python = re.compile(expression, re.ASCII)
    except re.error:
        return
    pattern = name_pattern(expression)
    if pattern is None:
        return
    matched = {name for name in NAMES if python.search(name)}
    assert {name for name in NAMES if pattern.matches(name)} == matched
    only = pattern.only_names(Names(declared))
    if matched - declared:
        assert only is None
    if only is not None:
        assert set(only) == matched


@pytest.mark.parametrize(
    ("expression", "names", "has_others"),
    [
        ("^a$", ["a"], False),
        ("^a$", ["b"], True),
        ("^(a|b)$", ["a", "c"], True),
        ("^(a|b)$", ["b", "a"], False),
        ("^[ab]{1,2}$", ["a", "b", "aa", "ab", "ba", "bb"], False),
        ("^[ab]{1,2}$", ["a", "b", "aa", "ab", "ba"], True),
        ("^[^a]$", ["b"], True),
        ("^a*$", ["", "a", "aa"], True),
        ("a", ["a"], True),
        ("^$", [""], False),
    ],
)
def test_an_expression_matches_others_than(
    expression: str, names: list[str], has_others: bool
) -> None:
    pattern = name_pattern(expression)
    assert pattern is not None
    assert (pattern.only_names(Names(names)) is None) == has_others


@pytest.mark.parametrize(
    "expression",
    ["(?i)a", r"\p{L}", r"\bx", "[[:alpha:]]", "[a&&b]", "(", "a)", "*", "a{2000}", "[]a]", "[b-a]",
     "(" * 500, "((a{99}){99})", "a" * 600, r"\s", "a**"],
)  # fmt: skip
def test_uncommon_syntax_is_not_read(expression: str) -> None:
    assert name_pattern(expression) is None


def test_long_names_take_linear_time() -> None:
    names = [f"{'a' * 5_000}{i}" for i in range(5)]
    pattern = name_pattern("^(a|aa)*$")
    assert pattern is not None
    began = time.thread_time()
    assert not any(map(pattern.matches, names))
    assert pattern.only_names(Names(names)) is None
    assert time.thread_time() - began < 2
