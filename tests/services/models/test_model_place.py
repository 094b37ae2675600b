"""Values of --model: places, names for them, and what two of them may not share."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.models.model_place import ModelPlace, read_places
from headwater.services.runtime.settings import SettingError


def test_a_value_is_a_place_or_a_name_and_a_place(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    given = ("Qwen/Qwen3-0.6B", "embedder=./here", "my/judge=Qwen/Qwen3-Reranker-0.6B", str(odd))
    assert read_places(given) == (
        ModelPlace("Qwen/Qwen3-0.6B", None),
        ModelPlace("./here", "embedder"),
        ModelPlace("Qwen/Qwen3-Reranker-0.6B", "my/judge"),
        ModelPlace(str(odd), None),
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((), "--model is missing; allowed: at least one"),
        (("a", "a"), "--model is 'a'; allowed: models with names of their own"),
        (("n=a", "n=b"), "--model is 'n=b'; allowed: models with names of their own"),
        (("n=",), "--model is 'n='; allowed: a model, or NAME=MODEL"),
        (("../n=a",), "--model is '../n'"),
    ],
)
def test_values_that_name_no_model_are_refused(given: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        read_places(given)
