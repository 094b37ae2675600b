"""Vocabularies of the libraries SentencePiece and mistral-common. The files of `vocabularies` were
made by SentencePiece 0.2.1 and by byte-pair training, and these libraries' ids are the expected
ones; those beside special tokens are of transformers 5.23."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from headwater.services.text.gguf_tokenizer import GgufTokenizerError
from headwater.services.text.tokenizer_files_error import TokenizerFilesError
from headwater.services.text.vocabulary_files import write_from_vocabulary

VOCABULARIES = Path(__file__).parent / "vocabularies"
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ADDED = {
    "added_tokens_decoder": {
        "1": {"content": "<s>", "special": True},
        "700": {"content": "<|im_start|>", "special": True},
        "701": {"content": "<|im_end|>", "special": True},
        "702": {"content": "<pad>", "special": False},
    }
}


def written(folder: Path, vocabulary: str, config: dict[str, Any] | None = None) -> Tokenizer:
    source = folder / "source"
    source.mkdir()
    name = "tekken.json" if vocabulary.endswith(".json") else "tokenizer.model"
    shutil.copyfile(VOCABULARIES / vocabulary, source / name)
    if config is not None:
        (source / "tokenizer_config.json").write_text(json.dumps(config))
    write_from_vocabulary(source, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("vocabulary", "text", "ids"),
    [
        ("llama.model", "Hello world", [461, 603, 613, 292, 275, 278, 613, 612]),
        ("llama.model", "a    b", [260, 284, 628]),
        ("llama.model", " ", [262]),
        ("llama.model", "", []),
        (
            "llama.model",
            "12345 and 6.78",
            [602, 631, 632, 636, 638, 648, 291, 602, 639, 622, 655, 640],
        ),
        (
            "llama.model",
            "Größe 🙂\x00",
            [360, 609, 198, 185, 198, 162, 603, 602, 243, 162, 156, 133, 3],
        ),
        ("gemma.model", "Hello world", [669, 603, 613, 297, 281, 282, 613, 612]),
        ("gemma.model", "  two spaces", [602, 264, 559, 278, 617, 299, 271]),
        ("gemma.model", "tabs\tand\n\n\n\nend", [604, 606, 628, 605, 17, 432, 6, 6, 276, 612]),
        ("gemma.model", "<start_of_turn>user\nhi<end_of_turn>", [4, 363, 270, 18, 611, 610, 5]),
        ("tekken.json", "Hello world", [102, 131, 138, 320, 303, 304, 138, 130]),
        ("tekken.json", "  two  and ", [62, 286, 149, 141, 62, 319, 62]),
        (
            "tekken.json",
            "HTTPServer fooBar",
            [102, 114, 114, 110, 113, 291, 396, 305, 141, 141, 96, 335],
        ),
        ("tekken.json", "12345", [79, 80, 81, 82, 83]),
        ("tekken.json", "你 \x00", [258, 219, 190, 62, 30]),
        ("tekken.json", "", []),
    ],
)
def test_ids_are_those_of_the_library_that_owns_the_file(
    vocabulary: str, text: str, ids: list[int], tmp_path: Path
) -> None:
    tokenizer = written(tmp_path, vocabulary, {"legacy": True})
    assert ids_of(tokenizer, text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [461, 603, 613, 292, 275, 278, 613, 612]),
        (
            "<|im_start|>user\nhi there<|im_end|>\nx",
            [700, 362, 266, 13, 611, 610, 270, 269, 701, 13, 642],
        ),
        ("<s> hi</s>", [1, 317, 610, 2]),
        ("a <pad> b", [260, 602, 702, 286]),
    ],
)
def test_tokens_that_a_config_adds_have_their_ids_and_no_prefix_behind_them(
    text: str, ids: list[int], tmp_path: Path
) -> None:
    tokenizer = written(tmp_path, "llama.model", NAMED | ADDED | {"legacy": False})
    assert ids_of(tokenizer, text) == ids
    assert tokenizer.id_to_token(701) == "<|im_end|>"


def test_the_old_ways_put_a_prefix_behind_special_tokens(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, "llama.model", ADDED | {"legacy": True})
    assert ids_of(tokenizer, "<|im_start|>user") == [700, 602, 362, 266][:1] + ids_of(
        tokenizer, "user"
    )
    assert ids_of(tokenizer, "user")[0] == 602


@pytest.mark.parametrize(
    ("vocabulary", "config", "begins"),
    [
        ("llama.model", {}, [1]),
        ("llama.model", {"add_bos_token": False}, []),
        ("gemma.model", {}, [2]),
        ("tekken.json", {}, [1]),
    ],
)
def test_a_text_begins_as_the_model_was_trained(
    vocabulary: str, config: dict[str, Any], begins: list[int], tmp_path: Path
) -> None:
    tokenizer = written(tmp_path, vocabulary, config)
    ids = tokenizer.encode("hi").ids
    assert ids == begins + ids_of(tokenizer, "hi")
    kept = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert kept["bos_token"] == "<s>"
    assert kept["eos_token"] == "</s>"


def test_a_tekken_file_that_lists_no_special_tokens_has_the_oldest_ones(tmp_path: Path) -> None:
    file = json.loads((VOCABULARIES / "tekken.json").read_text())
    del file["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    write_from_vocabulary(tmp_path, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ids_of(tokenizer, "Hello world") == [102, 131, 138, 320, 303, 304, 138, 130]
    named = [tokenizer.id_to_token(i) for i in (0, 3, 11, 19, 20, 29)]
    assert named == ["<unk>", "[INST]", "<pad>", "[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_29>"]


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        (
            "tokenizer.model",
            b"\x0a\xff\xff",
            "tokenizer.model is 'tokenizer.model'; known: a file of",
        ),
        ("tokenizer.model", b"", "pieces is 0; known: one and more"),
        (
            "tokenizer.model",
            b"+\x12\x02\x18\x01",
            "trainer_spec.model_type is 1; known: 2, byte-pair",
        ),
        (
            "tokenizer.model",
            b"+\x1a\x02\x20\x01",
            "normalizer_spec is 'a change of text'; known: the",
        ),
        ("tekken.json", b"{}", "tekken.json is 'tekken.json'; known: a file of tekken"),
        (
            "tekken.json",
            b'["special_tokens", 0, "rank", 7]',
            "special_tokens is .*; known: each rank",
        ),
        ("tekken.json", b'["vocab", 3, "token_bytes", "!"]', "token_bytes is '!'; known: bytes in"),
        (
            "tekken.json",
            b'["config", "default_vocab_size", 9]',
            "default_vocab_size is 9; known: 30",
        ),
        (
            "tekken.json",
            b'["config", "default_num_special_tokens", 2]',
            "default_num_special_tokens",
        ),
        ("added_tokens.json", b'{"<x>": 99999999}', "id of an added token is 99999999; known: 0"),
        ("added_tokens.json", b'{"<x>": "y"}', "added tokens is 'other values'; known: texts by"),
    ],
)
def test_a_file_that_is_not_served_is_refused_by_the_field(
    name: str, content: bytes, refused: str, tmp_path: Path
) -> None:
    """Content that begins with + comes behind a whole file; a list is a path in one, and a
    value."""
    whole = (VOCABULARIES / "llama.model").read_bytes()
    if name == "added_tokens.json":
        (tmp_path / "tokenizer.model").write_bytes(whole)
    elif content.startswith(b"+"):
        content = whole + content[1:]
    elif content.startswith(b"["):
        file = json.loads((VOCABULARIES / "tekken.json").read_text())
        *path, last, value = json.loads(content)
        changed = file
        for step in path:
            changed = changed[step]
        changed[last] = value
        content = json.dumps(file).encode()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GgufTokenizerError, match=refused):
        write_from_vocabulary(tmp_path, tmp_path)


def test_a_folder_without_any_vocabulary_is_refused_by_what_is_read(tmp_path: Path) -> None:
    refused = "it is missing, and there is none of tokenizer.model, tekken.json"
    with pytest.raises(TokenizerFilesError, match=refused):
        write_from_vocabulary(tmp_path, tmp_path)
