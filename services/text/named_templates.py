"""Chat templates of a model by name, as `tokenizer_config.json` has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .tokenizer_files_error import TokenizerFilesError

DEFAULT = "default"
"""The template for chats; a model with one template has this one."""
TOOL_USE = "tool_use"
"""The template for chats with tools."""
MAX_TEMPLATES = 32


def templates_of(found: object, folder: Path) -> Mapping[str, str]:
    """Sources of a model's templates by name, from the field `chat_template` of a folder's
    configuration: a text, or a list of objects. Raises `TokenizerFilesError` for a list of anything
    else."""
    if isinstance(found, str):
        return {DEFAULT: found}
    if not isinstance(found, list):
        return {}
    try:
        named = {entry["name"]: entry["template"] for entry in found}
    except (TypeError, KeyError):
        named = None
    texts = () if named is None else (*named, *named.values())
    if named is None or not all(isinstance(text, str) for text in texts):
        reason = "its chat_template is a list of other things than objects of a name and a template"
        raise TokenizerFilesError(folder / "tokenizer_config.json", reason)
    if len(named) > MAX_TEMPLATES:
        reason = f"its chat_template has {len(named)} templates; allowed: {MAX_TEMPLATES}"
        raise TokenizerFilesError(folder / "tokenizer_config.json", reason)
    return named


def listed(templates: Mapping[str, str]) -> list[dict[str, str]]:
    """Templates as `templates_of` reads them."""
    return [{"name": name, "template": source} for name, source in templates.items()]
