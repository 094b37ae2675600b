"""Checks that a model may draft tokens for another: both must have the same tokens under the same
ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..runtime.settings import SettingError
from .manifest import ModelFolderError, ModelManifest

TOKENIZER_NAME = "tokenizer.json"


def check_draft_model(folder: Path, draft_folder: Path) -> None:
    """Compares two converted models: the sizes of their vocabularies in the manifests, then the
    tokens of `tokenizer.json`, added ones too. How text becomes tokens may differ, since a draft
    model never sees text. Raises `SettingError` naming the first difference, or
    `ModelFolderError`."""
    served = ModelManifest.read(folder)
    draft = ModelManifest.read(draft_folder)
    if draft.vocab_size != served.vocab_size:
        what = f"it has {draft.vocab_size} token ids, {served.name} {served.vocab_size}"
        raise SettingError(
            "draft_model", str(draft_folder), f"a model of the tokens of {served.name}; {what}"
        )
    if _content(folder) == _content(draft_folder):
        return
    ours = _tokens(folder)
    theirs = _tokens(draft_folder)
    differing = [
        token_id
        for token_id in ours.keys() | theirs.keys()
        if ours.get(token_id) != theirs.get(token_id)
    ]
    if differing:
        first = min(differing)
        what = f"its token {first} is {theirs.get(first)!r}, there {ours.get(first)!r}"
        raise SettingError(
            "draft_model", str(draft_folder), f"a model of the tokens of {served.name}; {what}"
        )


def _content(folder: Path) -> bytes:
    try:
        return (folder / TOKENIZER_NAME).read_bytes()
    except FileNotFoundError:
        raise ModelFolderError(folder, f"{TOKENIZER_NAME} is missing") from None


def _tokens(folder: Path) -> dict[int, str]:
    """Tokens of a model by their ids."""
    try:
        tokenizer: dict[str, Any] = msgspec.json.decode(_content(folder))
        vocabulary = tokenizer["model"]["vocab"]
        added = tokenizer.get("added_tokens") or []
        # Unigram models list their tokens with a score each, others map tokens to ids.
        listed = isinstance(vocabulary, list)
        tokens = (
            {i: token for i, (token, _) in enumerate(vocabulary)}
            if listed
            else _inverse(vocabulary)
        )
        return tokens | {token["id"]: token["content"] for token in added}
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(folder, f"{TOKENIZER_NAME}: {error}") from None


def _inverse(vocabulary: dict[str, int]) -> dict[int, str]:
    return {token_id: token for token, token_id in vocabulary.items()}
