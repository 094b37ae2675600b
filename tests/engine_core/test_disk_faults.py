"""Disks that are full, broken or slow: what is given up, and what goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headwater.engine_core.kv.disk.block_files import BlockFiles
from tests.engine_core.driven_disk import NUM_SLOTS, Blocks, FailingFiles, chain_of


def test_a_full_disk_is_used_again_after_a_restart_with_less_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 8)
    blocks.compute(chain)
    blocks.settle()
    blocks.loads.close()
    num_before = blocks.disk.use.num_blocks
    measure = FailingFiles.measure

    def measured(files: FailingFiles, block_bytes: int) -> float:
        if len(list(files.folder.glob("*/*"))) > num_before:
            raise OSError(errno.ENOSPC, "No space left on device")
        return measure(files, block_bytes)

    monkeypatch.setattr(FailingFiles, "measure", measured)
    again = Blocks(tmp_path, max_files=2)
    again.settle()
    assert (again.disk.use.failure, again.disk.use.num_blocks) == ("", 2)


def test_a_disk_that_is_full_before_a_folder_is_made_is_given_up_and_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(
        path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False
    ) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", is_full)
        blocks = Blocks(tmp_path / "kv")
        chain = chain_of(0, 2)
    blocks.compute(chain)
    blocks.settle()
    assert blocks.disk.use.failure == "it is full ([Errno 28] No space left on device)"
    assert blocks.disk.find(chain.hashes) == 0
    assert not (tmp_path / "kv").exists()
    blocks.check_idle()


@pytest.mark.parametrize("damage", ["truncated", "changed", "gone"])
def test_a_damaged_file_is_reported_lost_and_the_blocks_before_it_are_used(
    tmp_path: Path, damage: str
) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 3)
    blocks.compute(chain)
    blocks.settle()
    blocks.flood()
    path = blocks.files._path(chain.namespace, chain.hashes[1])
    match damage:
        case "truncated":
            os.truncate(path, 50)
        case "changed":
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        case _:
            path.unlink()
    blocks.load(chain)
    blocks.settle()
    assert blocks.found(chain) == 1
    assert blocks.disk.use.num_damaged == 1
    assert chain.hashes[1] not in blocks.reported
    assert not path.exists()
    blocks.check_idle()
    # It is computed, and written again.
    blocks.compute(chain)
    blocks.settle()
    assert blocks.disk.find(chain.hashes) == 3


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "it is full ([Errno 28] No space left on device)",
        ),
        (
            OSError(errno.EIO, "Input/output error"),
            "it cannot be written to ([Errno 5] Input/output error)",
        ),
    ],
)
def test_a_disk_that_cannot_be_written_to_is_given_up_with_the_reason(
    tmp_path: Path, error: OSError, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = Blocks(tmp_path)
    kept = chain_of(0, 2)
    lost = chain_of(900, 2)
    blocks.compute(kept)
    blocks.settle()
    blocks.flood()
    blocks.files.error = error
    blocks.compute(lost)
    blocks.settle()
    assert blocks.disk.use.failure == says
    assert says in caplog.text
    assert caplog.text.count("the disk is not used") == 1
    assert (blocks.disk.find(kept.hashes), blocks.reported) == (0, set(lost.hashes))
    blocks.compute(chain_of(1800, 2))
    blocks.settle()
    blocks.check_idle()


def test_a_read_error_ends_loads_and_the_use_of_the_disk(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 3)
    blocks.compute(chain)
    blocks.settle()
    blocks.flood()
    blocks.files.error = OSError(errno.EIO, "Input/output error")
    blocks.load(chain)
    blocks.settle()
    assert blocks.found(chain) == 0
    assert "cannot be read" in blocks.disk.use.failure
    assert blocks.reported == set()
    blocks.check_idle()


def test_a_load_that_is_given_up_ends_at_once_and_what_the_disk_says_later_touches_nothing(
    tmp_path: Path,
) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 3)
    blocks.compute(chain)
    blocks.settle()
    blocks.flood()
    blocks.load(chain)
    blocks.step()
    blocks.now = 1000.0
    blocks.step()
    blocks.step()
    assert (blocks.pool.num_used, len(blocks.disk._free_slots)) == (0, NUM_SLOTS - 3)
    blocks.kv[:] = 7
    blocks.settle()
    assert (blocks.kv == 7).all()
    blocks.check_idle()


def test_a_slow_disk_costs_more_and_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockFiles, "measure", lambda files, block_bytes: 0.02)
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 2)
    blocks.compute(chain)
    blocks.settle()
    assert (measured := blocks.disk.cost(1)) == 0.02
    blocks.flood()
    blocks.load(chain)
    blocks.step()
    blocks.now += 20.0
    blocks.settle()
    assert blocks.disk.cost(1) == pytest.approx(2.5, abs=0.1), "a quarter of ten seconds a block"
    assert blocks.disk.cost(2) == 2 * blocks.disk.cost(1)
    blocks.now += 300.0
    assert blocks.disk.cost(1) == pytest.approx(measured, abs=0.01)


def test_a_disk_that_hangs_keeps_only_the_requests_that_wait_already(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, compute_seconds=1.0)
    chain = chain_of(0, 3)
    others = [chain_of(1000, 1), chain_of(2000, 1)]
    for each in (chain, *others):
        blocks.compute(each)
        blocks.settle()
    blocks.flood()
    for each in (*others, chain):
        blocks.load(each)
    blocks.step()
    blocks.now += 30.0
    blocks.step()
    blocks.step()
    assert blocks.loads.find(chain, 0, 3) is None, "it is computed at once"
    blocks.now += 300.0
    assert blocks.loads.find(chain, 0, 3) is not None, "and the disk is tried again"
