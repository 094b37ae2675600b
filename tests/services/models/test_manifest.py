from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headwater.services.models.manifest import ModelFolderError, ModelManifest

DEMO = ModelManifest(
    name="demo",
    revision="abc",
    dtype="float32",
    layout="v1",
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    max_model_len=8192,
    eos_token_ids=(2, 0),
    bos_token_id=None,
    source="a test",
)


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    DEMO.write(tmp_path)
    assert ModelManifest.read(tmp_path) == DEMO


def test_a_folder_of_a_later_version_is_refused_by_its_layout(tmp_path: Path) -> None:
    replace(DEMO, layout="v99").write(tmp_path)
    with pytest.raises(
        ModelFolderError,
        match=r"its layout is 'v99'; this version reads v1, v2, v3 \(make one with",
    ):
        ModelManifest.read(tmp_path)


def test_a_folder_without_a_manifest_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"model\.json is missing"):
        ModelManifest.read(tmp_path)


def test_a_field_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"name": "x", "revision": 1}')
    with pytest.raises(ModelFolderError, match=r"revision"):
        ModelManifest.read(tmp_path)
