"""Tokens by which a Qwen3-Reranker scores whose files do not name them: its first revisions have no
`modules.json` and can be recognized by name only."""

from __future__ import annotations

from pathlib import Path

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import registry
from headwater.engine_core.weights.encoders.sentence_files import MODULES
from headwater.engine_core.weights.json_object import read_object

from ...text.tokenizer import Tokenizer

NAMED = "reranker"
ARCHITECTURE = "Qwen3ForCausalLM"
YES_AND_NO = ("yes", "no")


def judging_tokens(name: str, source: Path, folder: Path) -> tuple[int, int] | None:
    """Ids of the tokens yes and no; None: it is another model, or its files name the tokens.
    `folder` has its tokenizer. Raises `ConfigError` for a tokenizer without these tokens."""
    if NAMED not in name.lower() or not source.is_dir() or (source / MODULES).is_file():
        return None
    if registry.architecture_of(read_object(source / "config.json")) != ARCHITECTURE:
        return None
    tokenizer = Tokenizer.from_folder(folder, vocab_size=0)
    yes, no = map(tokenizer.id_of, YES_AND_NO)
    if yes is None or no is None:
        raise ConfigError("tokenizer of a reranker", "without yes or no", "one with both tokens")
    return yes, no
