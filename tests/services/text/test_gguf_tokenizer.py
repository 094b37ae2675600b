from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwater.services.text.gguf_tokenizer import (
    GgufTokenizerError,
    Metadata,
    build_tokenizer,
    generation_config,
    tokenizer_config,
    write_tokenizer,
)
from headwater.services.text.tokenizer import Tokenizer
from tests.services.text.small_tokenizers import byte_level, sentencepiece


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    table = tokenizer.table
    return [
        table.bytes_of[i].decode(errors="replace")
        for i in tokenizer.encode(text, add_special_tokens=False)
    ]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello world", ["Hello", " world"]),
        ("in 2025", ["in", " ", "2", "0", "2", "5"]),
        ("it's", ["it", "'s"]),
        ("a  b", ["a", " ", " b"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "\n"]),
        ("x<|im_end|>y", ["x", "<|im_end|>", "y"]),
    ],
)
def test_the_demo_model_cuts_text_as_its_authors_do(
    demo_tokenizer: Tokenizer, text: str, tokens: list[str]
) -> None:
    assert tokens_of(demo_tokenizer, text) == tokens


@pytest.mark.parametrize(
    "text", ["", " ", "héllo\n\twörld  ", "日本語 🙂👩‍👩‍👧", "1+1=2;\r\n", "<|endoftext|>"]
)
def test_the_demo_models_ids_spell_the_text_again(demo_tokenizer: Tokenizer, text: str) -> None:
    assert demo_tokenizer.decode(demo_tokenizer.encode(text, add_special_tokens=True)) == text


def test_special_tokens_keep_their_ids(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("<|endoftext|><|im_start|><|im_end|>", add_special_tokens=False)
    assert ids == [0, 1, 2]
    assert set(range(17)) <= demo_tokenizer.table.special_ids


def test_the_configuration_names_special_tokens_template_and_ends(demo_folder: Path) -> None:
    config = json.loads((demo_folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["add_bos_token"] is False
    assert config["chat_template"].startswith("{% for message in messages %}")
    assert json.loads((demo_folder / "generation_config.json").read_text())["eos_token_id"] == [
        2,
        0,
    ]


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["a", "Ġ", "1", "2", "3", "4", "5"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "5"]),
    ],
)
def test_each_family_of_byte_level_models_is_known(pre: str, tokens: list[str]) -> None:
    assert byte_level(pre).encode("a 12345", add_special_tokens=False).tokens == tokens


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["a", "Ġ12345", "Ġit", "'s"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "5", "Ġit", "'s"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "5", "Ġit", "'s"]),
        ("llama-bpe", ["a", "Ġ", "123", "45", "Ġit", "'s"]),
        ("tekken", ["a", "Ġ", "1", "2", "3", "4", "5", "Ġit", "'s"]),
        ("glm4", ["a", "Ġ", "123", "45", "Ġit", "'s"]),
        ("olmo", ["a", "Ġ12345", "Ġit", "'s"]),
        ("minimax-m2", ["a", "Ġ", "123", "45", "Ġit's"]),
        ("exaone4", ["a", "Ġ12345", "Ġit", "'s"]),
        ("seed-coder", ["a", "Ġ", "1", "2", "3", "4", "5", "Ġit", "'s"]),
    ],
)
def test_words_are_cut_as_each_family_does(pre: str, words: list[str]) -> None:
    pre_tokenizer = byte_level(pre).pre_tokenizer
    assert pre_tokenizer is not None
    assert [word for word, _ in pre_tokenizer.pre_tokenize_str("a 12345 it's")] == words


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("qwen35", ["Hello我们", " Don", "'t", " naïve", " ", "3", "天", " के"]),
        ("lfm2", ["Hello我们", " Don", "'t", " naïve", " ", "3", "天", " क", "\u0947"]),
        ("deepseek-v3", ["Hello", "我们", " Don", "'t", " naïve", " ", "3", "天", " के"]),
        # Signs of these models have small letters among them.
        (
            "deepseek-llm",
            ["Hello", "我们", " Don", "'", "t", " na", "ï", "ve", " ", "3", "天", " ", "के"],
        ),
        ("kimi-k2", ["Hello", "我们", " Don't", " naïve", " ", "3", "天", " के"]),
    ],
)
def test_words_of_other_scripts_are_cut_as_each_family_does(pre: str, words: list[str]) -> None:
    pre_tokenizer = byte_level(pre).pre_tokenizer
    assert pre_tokenizer is not None
    text = "".join(words)
    spans = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in spans] == words


def test_signs_of_seed_models_end_before_a_new_line() -> None:
    for pre, words in (("qwen2", ["a", "Ġ=Ċ", "b"]), ("seed-coder", ["a", "Ġ=", "Ċ", "b"])):
        pre_tokenizer = byte_level(pre).pre_tokenizer
        assert pre_tokenizer is not None
        assert [word for word, _ in pre_tokenizer.pre_tokenize_str("a =\nb")] == words


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    encoding = sentencepiece().encode("hello ü", add_special_tokens=True)
    assert encoding.tokens == ["<s>", "▁hello", "▁", "<0xC3>", "<0xBC>"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a  the", ["a", "▁▁", "th", "e"]),
        ("a ▁ the", ["a", "▁▁▁", "th", "e"]),
        ("▁▁", ["▁▁"]),
        (" the", ["▁the"]),
        ("<b>the</b>", ["<b>", "th", "e", "</b>"]),
    ],
)
def test_user_defined_pieces_of_sentencepiece_go_before_all_others(
    text: str, tokens: list[str]
) -> None:
    """As in Gemma's files: pieces of spaces are spelled with spaces there, and stand for as many
    ▁."""
    tokenizer = sentencepiece(user_defined=["  ", "   ", "<b>", "</b>"], add_space_prefix=False)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert encoding.tokens == tokens
    assert tokenizer.decode(encoding.ids) == text.replace("▁", " ")


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    metadata = Metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "klingon",
            "tokenizer.ggml.tokens": [],
        }
    )
    with pytest.raises(
        GgufTokenizerError, match=r"tokenizer\.ggml\.pre is 'klingon'; known: gpt-2"
    ):
        build_tokenizer(metadata)


def test_an_unknown_model_is_refused_by_name() -> None:
    values: dict[str, Any] = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": []}
    with pytest.raises(
        GgufTokenizerError, match=r"tokenizer\.ggml\.model is 'bert'; known: gpt2, llama"
    ):
        build_tokenizer(Metadata(values))


BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "tokens": ["a", "b", "ab", "<s>"],
    "token_type": [1, 1, 1, 3],
    "merges": ["a b"],
    "bos_token_id": 3,
}
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "a"],
    "token_type": [2, 3, 1],
    "scores": [0.0, 0.0, -1.0],
    "unknown_token_id": 0,
}


@pytest.mark.parametrize(
    ("family", "changed", "reported"),
    [
        (BYTE_LEVEL, {"tokens": [1, 2]}, "tokens is '2 items'; known: a list of str"),
        (BYTE_LEVEL, {"tokens": "abc"}, "tokens is 'abc'; known: a list of str"),
        (BYTE_LEVEL, {"token_type": [1, 1, 1, 9]}, "token_type is 9; known: 1…6"),
        (BYTE_LEVEL, {"token_type": [1]}, "token_type is '1 items'; known: 4, as tokens"),
        (
            BYTE_LEVEL,
            {"merges": ["ab"]},
            "merges is 'ab '; known: two tokens that make a third one",
        ),
        (
            BYTE_LEVEL,
            {"merges": ["a b", "b a"]},
            "merges is 'b a'; known: two tokens that make a third one",
        ),
        (BYTE_LEVEL, {"bos_token_id": 4}, "bos_token_id is 4; known: token ids 0…3"),
        (BYTE_LEVEL, {"bos_token_id": -1}, "bos_token_id is -1; known: token ids 0…3"),
        (BYTE_LEVEL, {"eos_token_id": "<s>"}, "eos_token_id is '<s>'; known: token ids 0…3"),
        (BYTE_LEVEL, {"eot_token_id": 4}, "eot_token_id is 4; known: token ids 0…3"),
        (SENTENCEPIECE, {"scores": [0.0]}, "scores is '1 items'; known: 3, as tokens"),
        (SENTENCEPIECE, {"scores": ["0", "0", "0"]}, "scores is '3 items'; known: a list of float"),
        (SENTENCEPIECE, {"unknown_token_id": 3}, "unknown_token_id is 3; known: token ids 0…2"),
    ],
)
def test_metadata_that_do_not_fit_one_another_are_refused_by_their_key(
    family: dict[str, Any], changed: dict[str, Any], reported: str
) -> None:
    def build(values: dict[str, Any]) -> None:
        metadata = Metadata({f"tokenizer.ggml.{name}": value for name, value in values.items()})
        build_tokenizer(metadata)
        tokenizer_config(metadata)
        generation_config(metadata)

    build(family)
    with pytest.raises(GgufTokenizerError, match=f"tokenizer.ggml.{reported}"):
        build(family | changed)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model, but long enough to be looked at as if it were one")
    with pytest.raises(
        GgufTokenizerError, match=r"checkpoint file is 'model\.gguf'; known: .*GGUF magic"
    ):
        write_tokenizer(path, tmp_path)


def test_templates_of_other_names_stand_beside_the_one_for_chats() -> None:
    values = {f"tokenizer.ggml.{name}": value for name, value in BYTE_LEVEL.items()}
    values |= {
        "tokenizer.chat_template": "chat",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "calls",
    }
    assert tokenizer_config(Metadata(values))["chat_template"] == [
        {"name": "default", "template": "chat"},
        {"name": "tool_use", "template": "calls"},
    ]


def test_tokens_that_end_a_call_end_an_answer_too() -> None:
    """gpt-oss and GLM-4: a file names one token that ends answers."""
    tokens = [*BYTE_LEVEL["tokens"], "<|return|>", "<|call|>", "<|observation|>"]
    values = BYTE_LEVEL | {
        "tokens": tokens,
        "token_type": [*BYTE_LEVEL["token_type"], 3, 3, 3],
        "eos_token_id": 4,
    }
    metadata = Metadata({f"tokenizer.ggml.{name}": value for name, value in values.items()})
    assert generation_config(metadata)["eos_token_id"] == [4, 5, 6]
