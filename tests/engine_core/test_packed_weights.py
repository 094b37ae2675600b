"""Matrices packed once a machine, beside the weights that they were packed from."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.layers.linear.packed import pack_linears
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights import model_file
from headwater.kernels.cpu.packed_linear import can_pack
from tests.engine_core.small_models import convert, random_checkpoint

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="not on this CPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_checkpoint("smollm2", tmp_path / "hf")
    return convert(tmp_path / "hf", tmp_path / "ours")


def loaded(folder: Path) -> Weights:
    config = registry.read_config(folder)
    layout = model_class(config).layout(config)
    return load_weights(layout, model_file.load(folder, torch.device("cpu")), torch.float32)


def packed_files(folder: Path) -> list[Path]:
    return list(folder.glob("packed-*"))


def ignore(done: int, total: int) -> None:
    """Progress that nobody watches."""


def test_packed_matrices_multiply_as_the_plain_ones(folder: Path) -> None:
    plain = loaded(folder)
    packed = pack_linears(plain, folder, ignore)
    assert packed.linears.keys() == plain.linears.keys()
    for name, linear in plain.linears.items():
        x = torch.randn(5, linear.in_features)
        torch.testing.assert_close(
            packed.linears[name].product(x), linear.product(x), rtol=1e-4, atol=1e-4
        )


def test_a_second_replica_maps_the_file_of_the_first(folder: Path) -> None:
    pack_linears(loaded(folder), folder, ignore)
    (file,) = packed_files(folder)
    written = file.stat().st_mtime_ns
    second = pack_linears(loaded(folder), folder, ignore)
    assert packed_files(folder) == [file]
    assert file.stat().st_mtime_ns == written
    assert second.linears["lm_head"].kind == "packed"
    assert str(file) in Path("/proc/self/maps").read_text()


def test_other_weights_in_the_same_folder_are_packed_anew(folder: Path) -> None:
    first = pack_linears(loaded(folder), folder, ignore)
    random_checkpoint("smollm2", folder.parent / "hf")
    convert(folder.parent / "hf", folder)
    pack_linears(loaded(folder), folder, ignore)
    assert len(packed_files(folder)) == 2
    assert first.linears["lm_head"].kind == "packed"


def test_weights_from_nowhere_are_packed_into_memory(folder: Path) -> None:
    packed = pack_linears(loaded(folder), None, ignore)
    assert packed.linears["lm_head"].kind == "packed"
    assert packed_files(folder) == []


def test_a_matrix_alone_keeps_its_memory(folder: Path) -> None:
    matrix = pack_linears(loaded(folder), None, ignore).linears["lm_head"]
    x = torch.randn(3, 64)
    expected = loaded(folder).linears["lm_head"].product(x)
    torch.testing.assert_close(matrix.product(x), expected, rtol=1e-4, atol=1e-4)


def test_packed_matrices_are_on_the_disk_before_their_file_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[bool] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: named.append(bool(list(folder.glob("packed-*.bin"))))
    )
    pack_linears(loaded(folder), folder, ignore)
    assert named == [False]


def test_matrices_are_packed_into_memory_where_the_disk_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    packed = pack_linears(loaded(folder), folder, ignore)
    assert packed.linears["lm_head"].kind == "packed"
    assert sum(path.stat().st_size for path in packed_files(folder)) == 0


def test_what_a_killed_process_left_is_written_over(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack_linears(loaded(folder), folder, interrupt)
    (left,) = packed_files(folder)
    pack_linears(loaded(folder), folder, ignore)
    assert packed_files(folder) == [left.with_suffix(".bin")]


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_progress_counts_matrices(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    pack_linears(loaded(folder), folder, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (13, 13)
