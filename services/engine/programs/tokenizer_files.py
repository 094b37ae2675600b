"""Files of a model's tokenizer, from a folder in Hugging Face's layout to one that stages read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from headwater.engine_core.config import ConfigError
from headwater.engine_core.weights.json_object import read_object
from headwater.engine_core.weights.model_config import MAX_SIZES

from ...text.model import SPECIAL_TOKENS
from ...text.named_templates import listed, templates_of
from ...text.tokenizer import Tokenizer
from ...text.vocabulary_files import write_from_vocabulary

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TEMPLATE_FOLDER = "additional_chat_templates"


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Chat templates, and special tokens that are named in a file of their own, join
    `tokenizer_config.json`, so that stages look in one place. Raises `ConfigError`,
    `TokenizerFilesError`."""
    is_fast = (source / "tokenizer.json").is_file()
    if not is_fast:
        write_from_vocabulary(source, folder)
    # They are read again when weights have been converted, which takes minutes.
    largest = Tokenizer.from_folder(source if is_fast else folder, vocab_size=0).largest_id
    most = MAX_SIZES["vocab_size"]
    if not 0 <= largest < most:
        # Stages make lists of as many items.
        raise ConfigError("largest token id of tokenizer.json", largest, f"0…{most - 1}")
    read_json(source / "generation_config.json")
    for name in TOKENIZER_FILES:
        # One that was made of a vocabulary has the source's fields too.
        if (source / name).is_file() and not (folder / name).is_file():
            shutil.copyfile(source / name, folder / name)
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        # Older tools name special tokens in a file of their own, which counts until they write this
        # list.
        named = read_json(source / "special_tokens_map.json")
        config |= {name: named[name] for name in SPECIAL_TOKENS if name in named}
    if (source / "chat_template.jinja").is_file():
        config["chat_template"] = _read_text(source / "chat_template.jinja")
    elif (template := read_json(source / "chat_template.json").get("chat_template")) is not None:
        config["chat_template"] = template
    if others := _additional_templates(source):
        templates = {**templates_of(config.get("chat_template"), source), **others}
        config["chat_template"] = listed(templates)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2))


def _additional_templates(source: Path) -> dict[str, str]:
    """Sources of chat templates in files of their own, by name."""
    files = sorted((source / TEMPLATE_FOLDER).glob("*.jinja"))
    return {file.stem: _read_text(file) for file in files}


def _read_text(path: Path) -> str:
    """Raises `ConfigError` for a file that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(path.name, f"byte {error.start} of it", "text in UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file. Raises `ConfigError`."""
    return read_object(path) if path.is_file() else {}
