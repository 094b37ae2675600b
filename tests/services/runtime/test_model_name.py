"""Names of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.models.store import ModelNotFound, find_source, name_of
from headwater.services.runtime.model_name import is_model_name, is_model_place
from headwater.services.runtime.progress import silent
from headwater.services.runtime.settings import SettingError


@pytest.mark.parametrize(
    "name", ["m", "owner/name-1.5_b", "Llama 3", "..a", "a..b", "模型", "x" * 256]
)
def test_a_model_may_be_served_under_a_printable_name(name: str) -> None:
    assert is_model_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 257,
        "a\nb",
        "a\tb",
        "a\x00",
        "a\x1b[2J",
        "a\u202eb",
        ".",
        "..",
        "../a",
        "a/../b",
        "a/./b",
        "a/..",
    ],
)
def test_a_name_that_would_forge_a_line_or_leave_a_folder_is_no_models(name: str) -> None:
    assert not is_model_name(name)
    assert is_model_place(name) == (name == "x" * 257)


@pytest.mark.parametrize("name", ["a/..", "own\ner/name"])
def test_an_id_of_the_hub_is_a_models_name(name: str) -> None:
    with pytest.raises(ModelNotFound):
        name_of(name)


def test_a_file_does_not_give_a_model_a_name_that_leads_out_of_the_cache(
    tmp_path: Path,
) -> None:
    for stem in ("..", "a\nb"):
        file = tmp_path / f"{stem}.gguf"
        file.write_bytes(b"GGUF")
        with pytest.raises(SettingError, match="printable characters"):
            name_of(str(file))
        with pytest.raises(SettingError, match="printable characters"):
            find_source(str(file), revision=None, cache_dir=tmp_path, progress=silent)
