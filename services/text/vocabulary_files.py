"""Makes `tokenizer.json` for a model's folder that has a vocabulary of another library instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import sentencepiece_file, tekken_file
from .gguf_tokenizer import (
    GgufTokenizerError,
    Metadata,
    PreTokenizer,
    TokenType,
    build_tokenizer,
    tokenizer_config,
)
from .tokenizer import read_json
from .tokenizer_files_error import TokenizerFilesError

FILES = (sentencepiece_file.FILE_NAME, tekken_file.FILE_NAME)
"""Vocabularies that are read, in the order in which they are looked for."""
MAX_ADDED = 1 << 16
"""Most ids after a vocabulary that a folder may add."""
UNNAMED = "[PAD{}]"


def write_from_vocabulary(source: Path, folder: Path) -> None:
    """Writes `tokenizer.json`, and into `tokenizer_config.json` what the vocabulary says of special
    tokens. Raises `TokenizerFilesError`, or `GgufTokenizerError` naming what is not served."""
    config = read_json(source / "tokenizer_config.json")
    if (path := source / sentencepiece_file.FILE_NAME).is_file():
        metadata = _sentencepiece(path, config, read_json(source / "added_tokens.json"))
    elif (path := source / tekken_file.FILE_NAME).is_file():
        values, pre_tokenizer = tekken_file.read_tekken(path)
        metadata = _metadata(values, pre_tokenizer)
    else:
        reason = f"it is missing, and there is none of {', '.join(FILES)}"
        raise TokenizerFilesError(source / "tokenizer.json", reason)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"), pretty=False)
    whole = tokenizer_config(metadata) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(whole, ensure_ascii=False, indent=2))


def _sentencepiece(path: Path, config: Mapping[str, Any], added: Mapping[str, Any]) -> Metadata:
    values = sentencepiece_file.read_sentencepiece(path)
    # As transformers reads these files: where a config does not ask for the old ways, only the
    # beginning of a text has a prefix.
    values["only_first_prefix"] = not config.get("legacy", False)
    if config.get("add_prefix_space") is False:
        values["add_space_prefix"] = False
    for name in ("add_bos_token", "add_eos_token"):
        if isinstance(config.get(name), bool):
            values[name] = config[name]
    for token_id, (token, is_special) in sorted(_added_tokens(config, added).items()):
        _put(values, token_id, token, TokenType.CONTROL if is_special else TokenType.USER_DEFINED)
    return _metadata(values)


def _added_tokens(
    config: Mapping[str, Any], added: Mapping[str, Any]
) -> dict[int, tuple[str, bool]]:
    """Tokens that a folder names by their ids, and whether they are special."""
    found: dict[int, tuple[str, bool]] = {}
    try:
        for token, token_id in added.items():
            found[int(token_id)] = str(token), True
        for key, each in (config.get("added_tokens_decoder") or {}).items():
            found[int(key)] = str(each["content"]), bool(each.get("special", False))
    except (TypeError, ValueError, KeyError, AttributeError):
        raise GgufTokenizerError("added tokens", "other values", "texts by their ids") from None
    return found


def _put(values: dict[str, Any], token_id: int, token: str, kind: TokenType) -> None:
    """Gives a token its id, behind the vocabulary or in it."""
    tokens = values["tokens"]
    most = len(tokens) + MAX_ADDED
    if not 0 <= token_id < most:
        raise GgufTokenizerError("id of an added token", token_id, f"0…{most - 1}")
    while len(tokens) <= token_id:
        tokens.append(UNNAMED.format(len(tokens)))
        values["token_type"].append(int(TokenType.UNUSED))
        values["scores"].append(0.0)
    tokens[token_id] = token
    values["token_type"][token_id] = int(kind)


def _metadata(values: Mapping[str, Any], pre_tokenizer: PreTokenizer | None = None) -> Metadata:
    named = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return Metadata(named, pre_tokenizer)
