"""JSON of clients: read in pieces as at once, and in native calls that others need not wait for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.bench.hostile.posts import cut_history
from headwater.services.runtime.client_json import WHOLE_BYTES, read_in_pieces, read_json
from headwater.services.runtime.errors import BadRequest

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=40,
)


@settings(max_examples=40)
@given(JSON, st.integers(1, 40) | st.integers(40, 400), st.sampled_from([None, 1]), st.booleans())
def test_pieces_of_any_length_make_the_same_value(
    value: Any, piece_bytes: int, indent: int | None, ascii: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode()
    assert read_in_pieces(text, piece_bytes) == msgspec.json.decode(text)


def test_a_long_history_costs_a_small_multiple_of_a_native_decoder() -> None:
    """Each bracket and string was a step of the interpreter: 38 times a native decoder."""
    text = cut_history("m", 0).body

    def seconds_of(read: Callable[[bytes], object]) -> float:
        began = time.thread_time()
        read(text)
        return time.thread_time() - began

    ratios = (seconds_of(read_in_pieces) / seconds_of(msgspec.json.decode) for _ in range(30))
    assert any(ratio < 15 for ratio in ratios)


def test_the_last_of_two_entries_with_one_name_counts() -> None:
    text = b'{"a": [1, 2, 3, 4], "b": 2, "a": 5}'
    assert read_in_pieces(text, 4) == {"a": 5, "b": 2}


@pytest.mark.parametrize("end", [b"", b"]", b",]", b"}", b"1 1]", b'"]', b"] ]"])
def test_long_text_that_is_no_json_is_refused(end: bytes) -> None:
    text = b"[" + b"12345," * (WHOLE_BYTES // 6 + 1) + end
    with pytest.raises(msgspec.DecodeError):
        read_json(text)


def test_a_field_that_holds_json_is_named() -> None:
    with pytest.raises(BadRequest) as refused:
        read_json(f"[{'1e308,' * 300}1]", "chat_template_kwargs")
    assert refused.value.message == (
        "chat_template_kwargs has more than 256 numbers with an exponent; allowed: 256"
    )
