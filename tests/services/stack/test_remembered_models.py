"""Problems with the file of loaded models are reported."""

from __future__ import annotations

from pathlib import Path

from headwater.services.stack.model_request import ModelRequest
from headwater.services.stack.remembered_models import MODELS_FILE, RememberedModels


def test_a_file_that_cannot_be_read_costs_the_models_in_it_and_is_named(tmp_path: Path) -> None:
    (tmp_path / MODELS_FILE).write_text("{")
    remembered = RememberedModels(tmp_path)
    assert list(remembered) == []
    assert str(tmp_path / MODELS_FILE) in remembered.problem


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    reported: list[str] = []
    remembered = RememberedModels(tmp_path, reported.append)
    remembered.add("m", ModelRequest(do="load", model="m"))
    assert reported == []
    (tmp_path / MODELS_FILE).unlink()
    (tmp_path / MODELS_FILE).mkdir()
    remembered.add("n", ModelRequest(do="load", model="n"))
    (what,) = reported
    assert what.startswith("the next start will not load what is loaded now: ")
