from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from headwater.services.output_processor.detokenizer import Detokenizer
from headwater.services.text.token_table import TokenTable, UnknownDecoder
from headwater.services.text.tokenizer import Tokenizer
from tests.services.text.small_tokenizers import byte_level, sentencepiece

BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
BYTE_TABLE = TokenTable(BYTE_LEVEL, BYTE_LEVEL.get_vocab_size())
PIECE_TABLE = TokenTable(SENTENCEPIECE, SENTENCEPIECE.get_vocab_size())


def pieces_of(
    table: TokenTable, token_ids: list[int], *, skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = Detokenizer(table, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.lists(st.integers(0, len(BYTE_TABLE) - 1), max_size=24))
def test_pieces_of_any_byte_level_tokens_join_to_the_whole_decode(token_ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces_of(BYTE_TABLE, token_ids)) == whole


@settings(deadline=None)
@given(st.lists(st.integers(0, len(BYTE_TABLE) - 1), max_size=24))
def test_with_special_tokens_too(token_ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(token_ids, skip_special_tokens=False)
    assert "".join(pieces_of(BYTE_TABLE, token_ids, skip_special_tokens=False)) == whole


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_piece_of_a_real_text_holds_half_a_character(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    text = BYTE_LEVEL.decode(token_ids)
    pieces = pieces_of(BYTE_TABLE, token_ids)
    assert ("\ufffd" in "".join(pieces)) == ("\ufffd" in text)
    assert "".join(pieces) == text


@settings(deadline=None)
@given(
    st.text(
        alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁\ufffd"), max_size=40
    )
)
def test_byte_fallback_spells_what_no_piece_does(text: str) -> None:
    token_ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(PIECE_TABLE, token_ids)
    # The tokenizer opens a text with a space; an answer's first space is its own.
    assert "".join(pieces) == (" " + text if text else "")


def test_user_defined_pieces_are_spelled_as_others_are() -> None:
    """Gemma's tokenizer has such a piece for each length of an indentation."""
    tokenizer = sentencepiece(user_defined=["  ", "    ", "\n\n", "<b>"], add_space_prefix=False)
    token_ids = tokenizer.encode("a:\n\n    the  <b>of", add_special_tokens=False).ids
    table = TokenTable(tokenizer, tokenizer.get_vocab_size())
    assert (
        "".join(pieces_of(table, token_ids))
        == tokenizer.decode(token_ids)
        == "a:\n\n    the  <b>of"
    )


def test_special_tokens_that_a_mark_consists_of_are_shown() -> None:
    """`｜DSML｜` of DeepSeek V3.2 is a token of its own within each mark of its calls."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["｜DSML｜", "<other>"])
    ids = tokenizer.encode('<｜DSML｜invoke name="f"><other>', add_special_tokens=False).ids
    table = TokenTable(tokenizer, tokenizer.get_vocab_size())
    shown = Detokenizer(table, skip_special_tokens=True, shown=('<｜DSML｜invoke name="',))
    text = "".join([*map(shown.push, ids), shown.flush()])
    assert text == '<｜DSML｜invoke name="f">'


def test_an_unfinished_character_is_replaced_only_at_the_end() -> None:
    first_of_euro = BYTE_LEVEL.encode("€", add_special_tokens=False).ids[:2]
    assert pieces_of(BYTE_TABLE, first_of_euro) == ["", "", "\ufffd"]


def test_a_byte_that_begins_nothing_is_replaced_as_soon_as_that_is_certain() -> None:
    stray = BYTE_TABLE.bytes_of.index(b"\xe2")
    a = BYTE_TABLE.bytes_of.index(b"a")
    assert pieces_of(BYTE_TABLE, [stray, a]) == ["", "\ufffda", ""]


def test_ids_that_only_pad_the_embedding_spell_nothing() -> None:
    table = TokenTable(BYTE_LEVEL, len(BYTE_TABLE) + 7)
    assert pieces_of(table, [len(BYTE_TABLE) + 6]) == ["", ""]


def test_an_id_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        Detokenizer(BYTE_TABLE).push(len(BYTE_TABLE))


def test_the_demo_models_emoji_come_whole(demo_tokenizer: Tokenizer) -> None:
    token_ids = demo_tokenizer.encode("a 🙂 b", add_special_tokens=False)
    pieces = pieces_of(demo_tokenizer.table, token_ids)
    assert [piece for piece in pieces if piece][-2:] == [" 🙂", " b"]


def test_special_tokens_show_only_when_asked_for(demo_tokenizer: Tokenizer) -> None:
    token_ids = demo_tokenizer.encode("hi<|im_end|>", add_special_tokens=False)
    table = demo_tokenizer.table
    assert "".join(pieces_of(table, token_ids)) == "hi"
    assert "".join(pieces_of(table, token_ids, skip_special_tokens=False)) == "hi<|im_end|>"


def test_a_tokenizer_whose_tokens_spell_no_bytes_is_refused() -> None:
    word_level = Backend.from_str(
        '{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'
    )
    with pytest.raises(UnknownDecoder, match="missing"):
        TokenTable(word_level, 1)
