"""Log probabilities of completions: where tokens begin in the text, and the names of tokens that
share a text."""

from __future__ import annotations

from headwater.gateway.openai.logprobs import TextCounter, completion_logprobs
from headwater.proto.common_pb2 import TokenLogprob, TopLogprob

ROBOT = "🤖".encode()


def entry(token_id: int, spelled: bytes, logprob: float = -1.0) -> TopLogprob:
    return TopLogprob(
        token_id=token_id,
        token=spelled.decode(errors="replace"),
        token_bytes=spelled,
        logprob=logprob,
    )


def tokens(*spelled: bytes) -> list[TokenLogprob]:
    return [TokenLogprob(chosen=entry(i, each)) for i, each in enumerate(spelled)]


def test_offsets_count_characters_of_the_text_and_not_those_of_its_tokens() -> None:
    text = tokens(b"a", ROBOT[:1], ROBOT[1:3], ROBOT[3:], b" b", ROBOT[:2], ROBOT[2:] + b"!", b"c")
    assert TextCounter().offsets(text) == [0, 1, 1, 1, 2, 4, 4, 6]
    counter = TextCounter()
    # As a stream has them, token by token.
    assert [counter.offsets([token])[0] for token in text] == [0, 1, 1, 1, 2, 4, 4, 6]


def test_bytes_that_are_no_character_count_as_they_are_shown() -> None:
    text = b"a" + ROBOT[:2] + b"b" + ROBOT[2:] + b"c"
    counter = TextCounter()
    counter.offsets(tokens(b"a", ROBOT[:2], b"b", ROBOT[2:], b"c"))
    assert counter.offsets(tokens(b"d")) == [len(text.decode(errors="replace"))]


def test_a_token_that_is_hidden_takes_no_room() -> None:
    a, special, b, end = tokens(b"a", b"<|im_start|>", b"b", b"<|im_end|>")
    special.hidden = end.hidden = True
    counter = TextCounter()
    assert counter.offsets([a, special, b, end]) == [0, 1, 1, 2]
    assert counter.offsets(tokens(b"c")) == [2]


def test_a_prompt_has_neither_the_token_nor_the_space_that_a_tokenizer_puts_before_it() -> None:
    for spelled, text, offsets in (
        ((b"Once", b" upon"), "Once upon", [0, 4]),
        ((b"<s>", b"Once", b" upon"), "Once upon", [0, 0, 4]),
        ((b"<s>", b" Once", b" upon"), "Once upon", [0, 0, 4]),
        ((b"<s>", b"<s>", b"a"), "<s>a", [0, 0, 3]),
        ((ROBOT[:3], ROBOT[3:], b" b"), "🤖 b", [0, 0, 1]),
    ):
        counter = TextCounter()
        assert counter.prompt_offsets(tokens(*spelled), text) == offsets
        assert counter.offsets(tokens(b"!")) == [len(text)]


def columns_of(token: TokenLogprob, *, as_ids: bool = False) -> tuple[str, dict[str, float]]:
    columns = completion_logprobs([token], [0], as_ids=as_ids)
    return columns["tokens"][0], columns["top_logprobs"][0]


def test_halves_of_characters_are_named_by_their_bytes() -> None:
    top = [entry(7, ROBOT[:1], -1.0), entry(8, ROBOT[:3], -2.0), entry(9, "\ufffd".encode(), -3.0)]
    name, likeliest = columns_of(TokenLogprob(chosen=top[1], top=top))
    assert name == r"bytes:\xf0\x9f\xa4"
    assert likeliest == {r"bytes:\xf0": -1.0, r"bytes:\xf0\x9f\xa4": -2.0, "\ufffd": -3.0}


def test_no_token_is_lost_to_another_one_of_the_same_text() -> None:
    top = [entry(7, b"a", -1.0), entry(8, b"a", -2.0), entry(9, b"a", -3.0)]
    # The name of the token that was chosen is the one under which it is listed.
    assert columns_of(TokenLogprob(chosen=top[1], top=top)) == (
        "a",
        {r"bytes:\x61": -1.0, "a": -2.0, "token_id:9": -3.0},
    )
    chosen = entry(4, b"b", -9.0)
    assert columns_of(TokenLogprob(chosen=chosen, top=top[:1]), as_ids=True) == (
        "token_id:4",
        {"token_id:7": -1.0, "token_id:4": -9.0},
    )
