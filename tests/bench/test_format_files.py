"""A folder with a model in several formats: what is measured of it, and against which
perplexities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from headwater.bench.format_files import read_format_files


def test_each_noted_format_is_measured_beside_its_oracles_and_bf16_rounded_to_each_kind(
    tmp_path: Path,
) -> None:
    files = {
        "bf16": {"transformers": 30.0},
        "awq-4": {"plain": 33.5},
        "gptq-4": {"transformers": 32.5, "plain": 32.6},
        "fp8-blocks": {"transformers": None, "why": "no GPU", "plain": 30.5},
        "gguf-Q4_0": {"transformers": 34.0},
    }
    for name in files:
        (tmp_path / name).mkdir()
    (tmp_path / "gguf-Q4_0" / "gguf-Q4_0.gguf").touch()
    (tmp_path / "oracle.json").write_text(json.dumps({"num_tokens": 2048, "files": files}))
    found = read_format_files(tmp_path, ("fp8", "int8"))
    assert (found.against, found.num_tokens) == (str(tmp_path / "bf16"), 2048)
    assert [
        (each.source, each.quantization, each.by_transformers, each.by_reading)
        for each in found.files
    ] == [
        (str(tmp_path / "awq-4"), "auto", None, 33.5),
        (str(tmp_path / "gptq-4"), "auto", 32.5, 32.6),
        (str(tmp_path / "fp8-blocks"), "auto", None, 30.5),
        (str(tmp_path / "gguf-Q4_0" / "gguf-Q4_0.gguf"), "auto", 34.0, None),
        (str(tmp_path / "bf16"), "fp8", None, None),
        (str(tmp_path / "bf16"), "int8", None, None),
    ]


def test_a_folder_without_its_oracle_or_a_format_that_it_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        typer.BadParameter, match=r"--formats is '.*'; allowed: a folder with oracle\.json"
    ):
        read_format_files(tmp_path, ())
    (tmp_path / "oracle.json").write_text(
        json.dumps({"num_tokens": 2, "files": {"awq-4": {"plain": 33.5}}})
    )
    with pytest.raises(
        typer.BadParameter,
        match=r"--formats is '.*'; allowed: a folder with awq-4, which its oracle\.json names",
    ):
        read_format_files(tmp_path, ())
