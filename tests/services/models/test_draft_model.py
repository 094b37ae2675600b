"""A model drafts for another only where both mean the same tokens by the same ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.services.models.draft_model import check_draft_model
from headwater.services.models.manifest import LAYOUT, ModelFolderError, ModelManifest
from headwater.services.runtime.settings import SettingError
from tests.services.text.small_tokenizers import byte_level, sentencepiece

MANIFEST = ModelManifest(
    name="served",
    revision="1",
    dtype="float32",
    layout=LAYOUT,
    architecture="LlamaForCausalLM",
    vocab_size=512,
    max_model_len=1024,
    eos_token_ids=(2,),
    bos_token_id=1,
    source="nowhere",
)


def folder_of(
    path: Path, change: Callable[[dict[str, Any]], object] = lambda tokenizer: None
) -> Path:
    """A folder whose tokenizer is changed."""
    path.mkdir()
    tokenizer = json.loads(byte_level().to_str())
    change(tokenizer)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    MANIFEST.write(path)
    return path


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "served")


def test_the_same_tokens_written_otherwise_fit(served: Path, tmp_path: Path) -> None:
    draft = folder_of(
        tmp_path / "draft", lambda tokenizer: tokenizer.update(normalizer={"type": "NFC"})
    )
    check_draft_model(served, draft)


def swap(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["hello"], vocabulary["Ġhello"] = vocabulary["Ġhello"], vocabulary["hello"]


def cut(tokenizer: dict[str, Any]) -> None:
    del tokenizer["model"]["vocab"][tokenizer["added_tokens"].pop()["content"]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (swap, "its token 259 is 'Ġhello', there 'hello'"),
        (cut, "its token 266 is None, there '<think>'"),
        (
            lambda tokenizer: tokenizer["added_tokens"][0].update(content="<|go|>"),
            "'<|go|>', there '<|im_start|>'",
        ),
    ],
    ids=[
        "two tokens in each other's place",
        "an added token that is missing",
        "an added token of another name",
    ],
)
def test_other_tokens_are_refused_by_the_first_that_differs(
    served: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    draft = folder_of(tmp_path / "draft", change)
    with pytest.raises(
        SettingError, match=r"--draft-model is '.*'; allowed: a model of the tokens of served; "
    ) as refusal:
        check_draft_model(served, draft)
    assert sentence in str(refusal.value)


def test_tokenizers_of_other_kinds_are_compared_by_their_tokens(
    served: Path, tmp_path: Path
) -> None:
    draft = folder_of(tmp_path / "draft")
    (draft / "tokenizer.json").write_text(sentencepiece().to_str())
    with pytest.raises(SettingError, match="its token 0 is '<unk>', there '!'"):
        check_draft_model(served, draft)


def test_another_number_of_token_ids_is_refused_before_tokens_are_compared(
    served: Path, tmp_path: Path
) -> None:
    draft = folder_of(tmp_path / "draft")
    replace(MANIFEST, vocab_size=640).write(draft)
    with pytest.raises(
        SettingError, match="a model of the tokens of served; it has 640 token ids, served 512"
    ):
        check_draft_model(served, draft)


def test_a_folder_without_a_manifest_or_a_tokenizer_is_named(served: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelFolderError, match=r"empty is not a converted model: model\.json is missing"
    ):
        check_draft_model(served, tmp_path / "empty")
    draft = folder_of(tmp_path / "draft")
    (draft / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(
        ModelFolderError, match=r"draft is not a converted model: tokenizer.json: 'vocab'"
    ):
        check_draft_model(served, draft)
    (draft / "tokenizer.json").unlink()
    with pytest.raises(
        ModelFolderError, match=r"draft is not a converted model: tokenizer\.json is missing"
    ):
        check_draft_model(served, draft)
