"""Matrices packed once a machine, beside the weights that they were packed from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.weights import checkpoint
from headwater.engine_core.weights.packed import with_packed_matrices
from headwater.kernels.packed_linear import can_pack, linear
from tests.engine_core.small_models import convert, random_checkpoint

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="not on this CPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_checkpoint("smollm2", tmp_path / "hf")
    return convert(tmp_path / "hf", tmp_path / "ours")


def loaded(folder: Path) -> checkpoint.Weights:
    return checkpoint.load(folder, ModelConfig.read(folder), torch.device("cpu"))


def packed_files(folder: Path) -> list[Path]:
    return list(folder.glob("packed-*"))


def ignore(done: int, total: int) -> None:
    """Progress that nobody watches."""


def test_packed_matrices_multiply_as_the_plain_ones(folder: Path) -> None:
    plain = loaded(folder)
    packed = with_packed_matrices(plain, folder, ignore)
    assert torch.equal(packed["embed"], plain["embed"])
    for name, matrix in plain.items():
        if matrix.dim() == 2 and name != "embed":
            x = torch.randn(5, matrix.shape[1])
            torch.testing.assert_close(linear(x, packed[name]), linear(x, matrix), rtol=1e-4, atol=1e-4)


def test_a_second_replica_maps_the_file_of_the_first(folder: Path) -> None:
    with_packed_matrices(loaded(folder), folder, ignore)
    (file,) = packed_files(folder)
    written = file.stat().st_mtime_ns
    with_packed_matrices(loaded(folder), folder, ignore)
    assert packed_files(folder) == [file]
    assert file.stat().st_mtime_ns == written
    assert str(file) in Path("/proc/self/maps").read_text()


def test_other_weights_in_the_same_folder_are_packed_anew(folder: Path) -> None:
    first = with_packed_matrices(loaded(folder), folder, ignore)
    random_checkpoint("smollm2", folder.parent / "hf")
    convert(folder.parent / "hf", folder)
    with_packed_matrices(loaded(folder), folder, ignore)
    assert len(packed_files(folder)) == 2
    assert first["lm_head"].is_mkldnn


def test_weights_from_nowhere_are_packed_into_memory(folder: Path) -> None:
    packed = with_packed_matrices(loaded(folder), None, ignore)
    assert packed["lm_head"].is_mkldnn
    assert packed_files(folder) == []


def test_a_matrix_alone_keeps_its_memory(folder: Path) -> None:
    matrix, x = with_packed_matrices(loaded(folder), None, ignore)["lm_head"], torch.randn(3, 64)
    expected = linear(x, loaded(folder)["lm_head"])
    torch.testing.assert_close(linear(x, matrix), expected, rtol=1e-4, atol=1e-4)


def test_progress_counts_matrices(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    with_packed_matrices(loaded(folder), folder, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (13, 13)
