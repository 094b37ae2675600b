"""Tokenizers whose special tokens have no spelling: everything else of them stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from headwater.services.grammars.unspelled_tokens import without_spellings

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXT = "a</s>b<tag>"


def bpe() -> Tokenizer:
    pieces = ["<unk>", "</s>", *BYTE_PIECES, "a", "b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))


def unigram() -> Tokenizer:
    scores = [(piece, -1.0) for piece in ["<unk>", "</s>", *BYTE_PIECES, "a", "b"]]
    return Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))


@pytest.mark.parametrize("make", [bpe, unigram])
def test_ids_stay_and_texts_of_special_tokens_are_text(make: type[Tokenizer]) -> None:
    tokenizer = make()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tag>"), AddedToken("plain")])
    hidden = without_spellings(tokenizer.to_str().encode())
    after = Tokenizer.from_str(hidden)
    assert after.get_vocab_size() == tokenizer.get_vocab_size()
    assert after.encode("abplain").ids == tokenizer.encode("abplain").ids
    assert tokenizer.encode(TEXT).ids[1] == tokenizer.token_to_id("</s>")
    assert tokenizer.token_to_id("</s>") not in after.encode(TEXT).ids
    assert after.id_to_token(1) != "</s>"
    assert after.decode([1], skip_special_tokens=True) == ""
    assert spelled(LLTokenizer(hidden, eos_token=[1]), TEXT) == TEXT.encode()


def test_the_demo_models_ids_stay(demo_folder: Path) -> None:
    text = (demo_folder / "tokenizer.json").read_bytes()
    before = Tokenizer.from_buffer(text)
    after = Tokenizer.from_str(without_spellings(text))
    plain = "Plain text, and 日本 😀."
    assert after.encode(plain).ids == before.encode(plain).ids
    assert before.encode("<|im_end|>").ids == [2]
    assert after.encode("<|im_end|>").ids != [2]


def spelled(tokenizer: LLTokenizer, text: str) -> bytes:
    """Text that a grammar of the text alone makes of its masks."""
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps(text)}"}]})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    written = list[int]()
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        written.append(int(np.flatnonzero(bits)[0]))
        matcher.consume_token(written[-1])
        assert not matcher.is_error(), matcher.get_error()
    return bytes(tokenizer.decode_bytes(written[:-1] if written[-1] == 1 else written))
